"""What reaches a shell, sbatch or srun from platform files, names and folders: one argument, unchanged, or nothing.

sbatch and srun are fakes here, which write down their arguments. A hostile value asks for a file P; none may appear.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from attack.promises import refuses
from attack.yaml_files import CLAIMS, CONFIG, PLATFORM
from conftest import copied_project
from slurm_box import SNAKEMAKE

from repro.jobs import queue, srun
from repro.plan import config
from repro.plan import jobs as plan
from repro.plan.config import ConfigError

utils = pytest.importorskip("snakemake_executor_plugin_slurm.utils")
submit_string = pytest.importorskip("snakemake_executor_plugin_slurm.submit_string")
validation = pytest.importorskip("snakemake_executor_plugin_slurm.validation")

FAKE = """#!{python} -IS
import json, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
print(1001)
"""
# Endings that a shell would act on.
HOSTILE = {
    "a semicolon": "x; touch P",
    "an ampersand": "a&b",
    "two ampersands": "x && touch P",
    "a pipe": "x | touch P",
    "a command": "$(touch P)",
    "backticks": "`touch P`",
    "a variable": "$HOME",
    "a variable in braces": "${HOME}",
    "quotes": "'; touch P; '",
    "double quotes": '"; touch P; "',
    "a backslash": "x\\",
    "two words": "two words",
    "many spaces": "  two   words  ",
    "a star": "*",
    "a question mark": "?",
    "brackets": "[rack1*2&rack2*4]",
    "a parenthesis": "(a|b)",
    "a redirection": "x > P",
    "a comment": "x #y",
    "an exclamation mark": "!!",
    "a tilde": "~",
    "braces of a shell": "{a,b}",
    "braces of Snakemake": "{wildcards.run}",
    "braces of Snakemake's names": "{run}",
    "braces of Python": "{0.__class__}",
    "doubled braces": "{{run}}",
    "an open brace": "{",
    "a percent sign": "%j",
    "letters beyond ASCII": "é×",
    "nothing": "",
}
exhaustive = pytest.mark.exhaustive
hostile = pytest.mark.parametrize("value", [pytest.param(value, id=what) for what, value in HOSTILE.items()])


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """sbatch and srun that write down what they are called with: `tools(call, cwd)` makes a call and gives that."""
    folder = tmp_path_factory.mktemp("tools")
    log = folder / "log"
    for name in ("sbatch", "srun"):
        (folder / name).write_text(FAKE.format(python=sys.executable, log=str(log)))
        (folder / name).chmod(0o755)

    def run(call: str | list[str], cwd: Path) -> list[str]:
        log.unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(call, shell=isinstance(call, str), cwd=cwd, env=environment, check=True, capture_output=True)
        (said,) = map(json.loads, log.read_text().splitlines())
        return said

    return run


def platform(**changes) -> config.Platform:
    """A cluster with other settings of Slurm, as its file says them."""
    document = yaml.safe_load(PLATFORM)
    document["slurm"] |= changes
    return config.Platform.model_validate(document)


def sbatch(tools, slurm: config.Slurm, folder: Path) -> list[str]:
    """Arguments of sbatch in the call that Snakemake's plugin would make for a job of this platform."""
    resources = slurm.submission | {"mpi": "srun", "nodes": 2, "tasks_per_node": 8, "runtime": 10, "cpus_per_task": 7}
    job = SimpleNamespace(resources=_Resources(resources), threads=1)
    validation.validate_slurm_extra(job)
    words = {"run_uuid": "uuid", "slurm_logfile": "%j.log", "comment_str": "c", "workdir": str(folder)}
    account = f"-A {shlex.quote(str(resources.get('slurm_account', '')))}"
    words |= {"account": account, "partition": f"-p {shlex.quote(str(resources.get('slurm_partition', '')))}"}
    return tools(submit_string.get_submit_command(job, words), folder)


class _Resources(dict):
    """As the plugin reads them: by key and by name."""

    __getattr__ = dict.__getitem__


@hostile
def test_an_option_reaches_sbatch_unchanged(value, tools, tmp_path):
    options = [f"--mail-user={value}", "--exclusive", f"--reservation={value}"]
    said = sbatch(tools, platform(options=options).slurm, tmp_path)
    assert [word for word in said if word in options] == options and not (tmp_path / "P").exists()


@hostile
def test_a_constraint_reaches_sbatch_unchanged_or_is_refused(value, tools, tmp_path):
    if not value or " " in value:
        refuses(lambda: platform(constraint=value), ValueError, "should be one word")
        return
    said = sbatch(tools, platform(constraint=value).slurm, tmp_path)
    assert said[said.index("-C") + 1] == value and not (tmp_path / "P").exists()


@hostile
@pytest.mark.parametrize("tasks", [8, 2], ids=["whole nodes", "parts of nodes"])
def test_an_option_reaches_srun_unchanged(value, tasks, tools, tmp_path):
    options = [f"--comment={value}", "--gpu-bind=map_gpu:{gpus}"]
    settings = {"rank_options": options} if tasks == 8 else {"part_options": options}
    if tasks == 2 and (odd := re.search(r"{\w*}", value)):
        refuses(lambda: platform(**settings), ValueError, "part_options", odd.group(), "only {gpus}")
        return
    found = platform(**settings)
    job = SimpleNamespace(nodes=2, tasks_per_node=tasks, packages=1)
    said = tools(srun.command(job, found.slurm, found.node), tmp_path)
    gpus = "{gpus}" if tasks == 8 else "0,1"
    assert said[-2:] == [f"--comment={value}", f"--gpu-bind=map_gpu:{gpus}"] and not (tmp_path / "P").exists()


def test_every_step_has_the_sites_options_and_parts_of_nodes_their_gpus(tools, tmp_path):
    found = platform(step_options=["--mpi=pmix"], gpus=[4, 5, 2, 3, 6, 7, 0, 1])
    for tasks, gpus in ((8, None), (4, "4,5,2,3"), (2, "4,5"), (1, None)):
        job = SimpleNamespace(nodes=2, tasks_per_node=tasks, packages=2 if tasks == 4 else 1)
        said = tools(srun.command(job, found.slurm, found.node), tmp_path)
        assert "--mpi=pmix" in said and "--distribution=block:block" in said
        assert (f"--gpu-bind=map_gpu:{gpus}" in said) == (gpus is not None)


def test_gpus_may_be_counted_by_gres(tools, tmp_path):
    said = sbatch(tools, platform(gres="gpu:a100:8", options=["--exclusive"]).slurm, tmp_path)
    assert {"--ntasks-per-node=8", "--cpus-per-task=7"} <= set(said)
    resources = _Resources(platform(gres="gpu:a100:8").slurm.submission)
    assert utils.set_gres_string(SimpleNamespace(resources=resources)) == " --gres=gpu:a100:8"
    assert platform(options=["--gpus-per-node=a100:8"]).slurm.options == ["--gpus-per-node=a100:8"]


@pytest.mark.parametrize(
    "name",
    [
        *("environment.sh", "a b.sh", "a;touch P;.sh", "$(touch P).sh", "`touch P`.sh", "it's.sh", '"; touch P; ".sh'),
        *("-x.sh", "{run}.sh", "{wildcards.run}.sh", "a\\b.sh", "a&b.sh", "*.sh", "~.sh", "é.sh", "a\nb.sh", "#.sh"),
    ],
)
def test_a_job_sources_its_environment(name, tmp_path):
    (tmp_path / name).write_text("FOUND=$UNSET$((6 * 7))")
    beginning = platform(environment=name).slurm.beginning
    done = subprocess.run(["bash", "-euc", f'{beginning} echo "$FOUND"'], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "42\n" and not (tmp_path / "P").exists(), done.stderr


@pytest.mark.parametrize("line", ["false", "echo $UNSET_NAME; module load nothing", "nothing_of_this_name"])
def test_a_job_ends_with_its_environment(line, tmp_path):
    (tmp_path / "site.sh").write_text(line)
    beginning = platform(environment="site.sh").slurm.beginning
    done = subprocess.run(["bash", "-euc", f"{beginning} echo went on"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "went on" not in done.stdout


def refused(what: str, key: str, value: object, *words):
    return pytest.param(key, value, words, id=f"{key}: {what}")


REFUSED = [
    *(
        refused(what, key, value, f"slurm.{key}", "should be one word", repr(value))
        for key in ("account", "partition", "qos", "constraint")
        for what, value in {
            **{"nothing": "", "a space": " ", "two words": "a b", "a tab": "a\tb", "a line": "a\nb", "a NUL": "a\0b"},
            **{"an option": "--wrap=touch P", "a dash": "-x", "an escape sequence": "\x1b[31m"},
        }.items()
    ),
    *(
        refused(what, key, [value], f"slurm.{key}.0", "should be one argument", repr(value))
        for key in ("options", "step_options", "rank_options", "part_options")
        for what, value in {
            **{"nothing": "", "a word": "gpu", "a command": "; touch P", "two in one": "--a --b", "short": "-C gpu"},
            **{"short and joined": "-Cgpu", "a dash": "-", "two dashes": "--", "no name": "--=x", "capitals": "--GPUS"},
            **{"a script": "job.sh", "a line": "--x=a\nb", "a NUL": "--x=\0", "an escape sequence": "--x=\x1b[31m"},
            **{"a space before =": "--x =a", "a space for =": "--nice 5"},
        }.items()
    ),
    *(
        refused(option.strip("-"), "options", [option], "slurm.options", option, "Snakemake says it itself")
        for option in (
            *("--comment=two words", "--constraint=a&b", "--account=x", "--wrap=touch P", "--job-name=x", "--mem=1"),
            *("--output=/dev/null", "--export=NONE", "--array=1-9", "--nodes=4", "--time=1", "--chdir=/", "--parsable"),
        )
    ),
    refused("two", "account", "a,b", "slurm.account", "one account", "'a,b'"),
    refused("a text", "options", "--exclusive", "slurm.options", "'--exclusive'", "list"),
    refused("a number", "options", [5], "slurm.options.0", "found 5", "str"),
    refused("a mapping", "options", [{"a": 1}], "slurm.options.0", "found a mapping"),
    refused("a misspelt field", "part_options", ["--x={gpu}"], "slurm.part_options", "{gpu}", "only {gpus}"),
    refused("an empty field", "part_options", ["--x={}"], "slurm.part_options", "{}", "only {gpus}"),
    refused("a field by number", "part_options", ["--x={0}"], "slurm.part_options", "{0}", "only {gpus}"),
]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with small files."""
    (tmp_path / "config/platforms").mkdir(parents=True)
    (tmp_path / "slurm/box").mkdir(parents=True)
    (tmp_path / "slurm/box/environment.sh").touch()
    (tmp_path / "config/config.yaml").write_text(CONFIG)
    (tmp_path / "config/claims.yaml").write_text(CLAIMS)
    (tmp_path / "config/platforms/cluster.yaml").write_text(PLATFORM)
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key, value, words", REFUSED)
def test_what_a_platform_file_may_not_say(key, value, words, root):
    path = root / "config/platforms/cluster.yaml"
    document = yaml.safe_load(path.read_text())
    document["slurm"][key] = value
    path.write_text(yaml.safe_dump(document))
    refuses(lambda: config.load(platform="cluster"), ConfigError, path, *words)


def test_what_the_plugin_does_not_take_is_refused_by_us():
    """Its list may grow with its version."""
    for pattern in validation.get_forbidden_slurm_options():
        option = pattern.partition("|")[0].removesuffix(r"[=\s]")
        refuses(lambda option=option: platform(options=[f"{option}=1"]), ValueError, "slurm.options", option)


NAMES = {
    **{
        "shipped records": "reference",
        "the shipped figures": "replot",
        "the plans": "plans",
        "pages of a bundle": "rendered",
        "capitals": "Reference",
    },
    **{"a dot": ".", "two dots": "..", "hidden": ".laptop", "a dash": "-laptop", "an underscore": "laptop_2"},
    **{"a space": "a b", "a command": "a b;touch P;", "an expression": "a+b", "a star": "*", "a tab": "a\tb"},
    **{"a wildcard": "{run}", "a variable": "$HOME", "a quote": "it's", "a line": "a\nb", "beyond ASCII": "é"},
    **{"a comma": "a,b", "a colon": "a:b", "a percent sign": "a%j", "another's tier": "cluster-smoke"},
}


@pytest.mark.parametrize("name", [pytest.param(name, id=what) for what, name in NAMES.items()])
def test_names_that_no_platform_has(name, root):
    (root / f"config/platforms/{name}.yaml").write_text("description: x\ntier: laptop\n")
    words = f"--platform: found {name!r}; allowed: cluster. ", "letters, digits, dashes and dots"
    refuses(lambda: config.load(platform=name), ConfigError, *words)
    assert config.platforms() == ["cluster"]


@pytest.mark.parametrize("name", ["a.b", "A100", "2nodes", "my-cluster", "dgx-gpu", "reference2", "x" * 100])
def test_names_that_a_platform_may_have(name, root):
    (root / f"config/platforms/{name}.yaml").write_text("description: x\ntier: laptop\n")
    found, settings = config.load("smoke", name)
    assert config.results_folder(found, settings) == f"results/{name}-smoke"


@pytest.mark.parametrize(
    "label",
    [
        *(
            "../../P",
            "/P",
            "a/b",
            "a b;touch P;",
            "a+b",
            "{run}",
            "$(touch P)",
            "a\nb",
            "a\0b",
            "é",
            "x" * 1000,
            "",
            ".",
        ),
        *("-rf", "~", "a\\b", "*"),
    ],
)
def test_a_record_has_a_plain_name(label):
    """Some parameters are texts; a label shows them."""
    name = plan.job_id("x", SimpleNamespace(label=label, model_dump=dict), 0)
    assert re.fullmatch(r"[A-Za-z0-9._+-]{0,150}-r0-[0-9a-f]{8}", name), name


def test_names_of_records_are_what_they_were():
    """Of our points, nothing is replaced or cut."""
    found, _ = config.load()
    for name, experiment in found.experiments.items():
        for grid in itertools.chain(*experiment.tiers.values()):
            for point in config.points(name, grid, "here"):
                assert plan.job_id(name, point, 0).startswith(f"{point.label}-r0-")


QUEUE = [
    pytest.param("7|{root}|rule_x_box_a", ["7"], id="ours"),
    pytest.param("7|{root}|rule_x_box-smoke_a", [], id="another run's"),
    pytest.param("7|/elsewhere|rule_x_box_a", [], id="another folder's"),
    pytest.param("7|{root}|two\nlines|of|a comment\nrule_x_box_a", [], id="a comment of several lines"),
    pytest.param("7|{root}|a|b", [], id="a comment with a bar"),
    pytest.param("7|{root}|", [], id="no comment"),
    pytest.param("7", [], id="one word"),
    pytest.param("", [], id="nothing"),
    pytest.param("7|/a|b/c|rule_x_box_a", [], id="a folder with a bar"),
]


@pytest.mark.parametrize("line, found", QUEUE)
def test_other_jobs_in_the_queue(line, found, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "_said", lambda *command: line.format(root=tmp_path) + "\n")
    assert queue.jobs_of(tmp_path, "rule_x_box_") == found


@pytest.mark.parametrize("job_id", ["", "abc", "../../P", "7 8", "-7", "7;touch P", "7.0"])
def test_a_job_has_a_number(job_id, root, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    found = plan.make("smoke", "cluster")
    _, settings = config.load("smoke", "cluster")
    refuses(lambda: srun.JobSteps(found, found.allocations[0], settings), ValueError, "SLURM_JOB_ID", repr(job_id))


def test_an_allocation_runs_inside_a_job(root, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = plan.make("smoke", "cluster")
    _, settings = config.load("smoke", "cluster")
    refuses(lambda: srun.JobSteps(found, found.allocations[0], settings), ValueError, "SLURM_JOB_ID", "not set")


# --- through Snakemake: a few seconds each ----------------------------------------------------------------------------

POINT = {"flover_queue": {"tiers": {"smoke": [{"grid": {"requests": 2, "seeds": 2}, "minutes": 1}]}}}
# As sbatch, but the job runs at once; the other tools say that every job has ended well.
AT_ONCE = """#!{python} -IS
import json, os, subprocess, sys
from pathlib import Path
tool, arguments = Path(sys.argv[0]).name, sys.argv[1:]
if tool == "sbatch":
    (wrapped,) = [word.removeprefix("--wrap=") for word in arguments if word.startswith("--wrap=")]
    with open("calls", "a") as file:
        file.write(json.dumps(arguments) + "\\n")
    with open("job.log", "a") as log:
        code = subprocess.run(["sh", "-c", wrapped], stdout=log, stderr=log).returncode
    Path("state").write_text("FAILED" if code else "COMPLETED")
    print(1001)
elif tool in ("squeue", "sacct") and any("name" in word for word in arguments):
    print("1001|" + Path("state").read_text())
"""
# What a job would run: the words that it is given, and its output.
SITE = """
repro() {
    printf '%s\\n' "$@" >> said
    while [ $# -gt 0 ]; do if [ "$1" = --out ]; then touch "$2"; fi; shift; done
}
"""


SMOKE = ("--config", "tier=smoke", "--")


@contextlib.contextmanager
def checkout(folder: Path):
    """A copy of the project that runs one point, its tools of Slurm fakes."""
    folder.mkdir()
    with copied_project(folder):
        path = folder / "config/config.yaml"
        document = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(document | {"experiments": POINT}))
        tools = folder / "tools"
        tools.mkdir()
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sacctmgr", "sshare", "sinfo"):
            (tools / name).write_text(AT_ONCE.format(python=sys.executable))
            (tools / name).chmod(0o755)
        yield folder


def snakemake(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}"}
    command = [sys.executable, SNAKEMAKE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def submit(folder: Path, **settings: object) -> subprocess.CompletedProcess:
    """One job of the box's profile, with other settings of Slurm."""
    path = folder / "config/platforms/box.yaml"
    document = yaml.safe_load(path.read_text())
    document["slurm"] |= settings
    path.write_text(yaml.safe_dump(document))
    options = ["--slurm-init-seconds-before-status-checks", "1", "--retries", "0", "--latency-wait", "1"]
    arguments = ["--profile", "workflows/profiles/box", *options, "--config", "tier=smoke", "--", "points"]
    return snakemake(*arguments, folder=folder)


@exhaustive
def test_a_job_through_snakemake(tmp_path):
    with checkout(tmp_path / "it's a & b; #c") as folder:
        name = "slurm/a b;touch P;{run}.sh"
        (folder / name).write_text(SITE)
        options = [f"--mail-user={value}" for value in ("a&b", "; touch P", "two words", "{run}", "{{", "$(touch P)")]
        done = submit(folder, environment=name, options=options, constraint="a&b|{c}")
        log = (folder / "job.log").read_text() if (folder / "job.log").exists() else ""
        assert done.returncode == 0, done.stdout + done.stderr + log
        (call,) = map(json.loads, (folder / "calls").read_text().splitlines())
        assert [word for word in call if word.startswith("--mail")] == options
        assert call[call.index("-C") + 1] == "a&b|{c}"
        said = (folder / "said").read_text().splitlines()
        assert said[0] == "allocation" and said[-1].startswith("results/box-smoke/done/flover_queue-1n-")
        assert not list(tmp_path.rglob("P"))


@exhaustive
def test_a_job_ends_where_its_environment_fails(tmp_path):
    with checkout(tmp_path / "plain") as folder:
        (folder / "site.sh").write_text(f"{SITE}\nfalse\n")
        assert submit(folder, environment="site.sh").returncode
        assert (folder / "calls").exists() and not (folder / "said").exists()


@exhaustive
@pytest.mark.parametrize("where", ['$(touch P) "q" `touch P` & b; #c'])
def test_points_in_a_folder_of_any_name(where, tmp_path):
    with checkout(tmp_path / where) as folder:
        done = snakemake(*SMOKE, "points", folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(folder.glob("results/laptop-smoke/records/*/*.json")) and not list(tmp_path.rglob("P"))


@pytest.mark.parametrize(
    "arguments, words",
    [
        pytest.param(["--config", "platform=a b;touch P;"], ["--platform: found 'a b;touch P;'"], id="a command"),
        pytest.param(
            [*SMOKE, "results/laptop-smoke/done/x.json"],
            ["No rule to produce results/"],
            id="no allocation",
            marks=exhaustive,
        ),
        pytest.param(
            [*SMOKE, "results/laptop-smoke/records/flover_queue/x.json"],
            ["No rule to"],
            id="no record",
            marks=exhaustive,
        ),
        pytest.param(
            [*SMOKE, "results/laptopxsmoke/report.html"], ["No rule to produce results/"], id="no run", marks=exhaustive
        ),
    ],
)
def test_snakemake_is_told_plainly(arguments, words, tmp_path):
    with checkout(tmp_path / "plain") as folder:
        (folder / "config/platforms/a b;touch P;.yaml").write_text("description: x\ntier: laptop\n")
        done = snakemake("-n", *arguments, folder=folder)
        said = done.stdout + done.stderr
        assert done.returncode and "Traceback" not in said and not (folder / "P").exists(), said
        assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    "where, arguments, odd",
    [
        pytest.param("{a}", [], "{ }", id="braces", marks=exhaustive),
        pytest.param("a $(touch P)", ["--profile", "workflows/profiles/box"], "$", id="a command, for jobs"),
    ],
)
def test_folders_that_snakemake_takes_apart(where, arguments, odd, tmp_path):
    with checkout(tmp_path / where) as folder:
        done = snakemake(*arguments, *SMOKE, "points", folder=folder)
        said = done.stdout + done.stderr
        assert done.returncode and f"found {odd}; allowed: a path without" in said and "Traceback" not in said, said
        assert not list(tmp_path.rglob("P")) and not (folder / "calls").exists()
