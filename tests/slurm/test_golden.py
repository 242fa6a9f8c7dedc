"""What each profile submits, to the letter: a change of a profile, a rule, Snakemake or its plugin shows as a difference here.

To accept a change, run this file with REPRO_GOLDEN=write and read the difference in git.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import smoke_points
from slurm_box import SNAKEMAKE

from repro import paths
from repro.jobs import runner, srun
from repro.plan import config
from repro.plan import jobs as plan

GOLDEN = Path(__file__).parent / "golden"
PROFILES = {"box": "box", "frontier": "frontier", "nvidia": "a100"}
# Points of every shape that the platforms know; and what stands for a user's own entries.
POINTS = {
    "box": {
        "zero_train": [{"plan": "zero3", "nodes": [1, 2]}, {"nodes": 1, "packages": 4}],
        "moe_decode": [{"keys_values": "shared"}],
        "flover_parallel": [{"nodes": 1, "packages": 2, "gcds": 1}],
        "exflow_affinity": [{}],
    },
    "frontier": {
        "zero_train": [{"nodes": [1, 48], "packages": 4}],
        "flover_parallel": [{"nodes": 1, "packages": 2, "gcds": 1}],
    },
    "nvidia": {
        "zero_train": [{"nodes": [1, 4], "packages": 1, "gcds": 4}],
        "moe_decode": [{"nodes": 2, "packages": 1, "gcds": 4}],
        "flover_parallel": [{"nodes": 1, "packages": 1, "gcds": 2}],
    },
}
OWN = {"frontier": {"account": "abc123"}, "nvidia": {"account": "abc123", "partition": "gpu", "qos": "normal"}}

# The tools of Slurm, as far as Snakemake's plugin and the driver ask them. Every job ends at once, as failed.
FAKE = """#!{python}
import json, os, sys
from pathlib import Path
log = Path(os.environ["FAKE_SLURM"])
tool, arguments = Path(sys.argv[0]).name, sys.argv[1:]
jobs = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
if tool == "sbatch":
    with log.open("a") as file:
        file.write(json.dumps(arguments) + "\\n")
    print(1001 + len(jobs))
elif tool in ("squeue", "sacct") and any("name" in word for word in arguments):
    for number in range(len(jobs)):
        print(f"{{1001 + number}}|FAILED")
"""


@pytest.fixture
def fake_slurm(project, monkeypatch):
    """Returns the arguments of every sbatch, when asked."""
    folder = project / "fake"
    folder.mkdir()
    for tool in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sacctmgr", "sshare", "sinfo"):
        (folder / tool).write_text(FAKE.format(python=sys.executable))
        (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder / "log"))
    return lambda: [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def fill_in(project, profile):
    """Points of the test alone, and a user's account."""
    grids = POINTS[profile].items()
    smoke_points(project, {name: [{"grid": grid, "minutes": 1} for grid in each] for name, each in grids})
    path = project / f"config/platforms/{PROFILES[profile]}.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["slurm"] |= OWN.get(profile, {})
    path.write_text(yaml.safe_dump(settings))


def unpredicted(project, profile):
    """Without what predicts minutes and memory: it takes seconds to load."""
    path = project / f"config/platforms/{PROFILES[profile]}.yaml"
    path.write_text(re.sub("^(hardware|memory_gb):.*\n", "", path.read_text(), flags=re.MULTILINE))


def submit(profile, *arguments):
    command = [sys.executable, SNAKEMAKE, "--profile", f"workflows/profiles/{profile}", "--config", "tier=smoke"]
    command += ["--slurm-init-seconds-before-status-checks", "1", "--retries", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def scrubbed(text, project):
    """Without what differs between machines and runs."""
    for place, name in ((str(project), "ROOT"), (sys.executable, "PYTHON"), (str(paths.root()), "SOURCE")):
        text = text.replace(place, name)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UUID", text)
    text = re.sub(r"base64//\S+", "BASE64", text)
    return re.sub(r"-[0-9a-f]{8}\b", "-HASH", text)


def lines(found, project):
    """One sbatch after the other, an option a line; then how each point's ranks are started."""
    said = []
    for call in sorted(found, key=lambda call: next(word for word in call if "allocation_" in word or "rule_" in word)):
        options = [word for word in call if not word.startswith("--wrap")]
        (wrapped,) = [word for word in call if word.startswith("--wrap")]
        said += ["sbatch", *(f"    {option}" for option in options), "    --wrap", *_wrapped(wrapped)]
    made = plan.make("smoke", os.environ["GOLDEN_PLATFORM"])
    _, platform = config.load("smoke", os.environ["GOLDEN_PLATFORM"])
    for job in made.jobs:
        needs = f"{runner.NEEDS_GPU}=1 " if srun.has_gpus(job, platform.slurm, platform.node) else ""
        said += [Path(job.record).stem, f"    {needs}{' '.join(srun.command(job, platform.slurm, platform.node))}"]
    return [scrubbed(line, project) for line in said]


def _wrapped(text):
    """Snakemake's own command line; its long tail of defaults is left out."""
    words = text.removeprefix("--wrap=").split()
    wanted = ("--executor", "--allowed-rules", "--target-jobs", "--mode", "--set-resources", "--profile", "--config")
    return [
        f"        {word} {following}" for word, following in zip(words, [*words[1:], ""], strict=True) if word in wanted
    ]


NVIDIA = pytest.param("nvidia", marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["box", pytest.param("frontier", marks=pytest.mark.exhaustive), NVIDIA])
def test_what_is_submitted(profile, project, fake_slurm, monkeypatch):
    monkeypatch.setenv("GOLDEN_PLATFORM", PROFILES[profile])
    fill_in(project, profile)
    # On the box, notebooks and verdicts are jobs as well; those of shipped records need no point.
    done = submit(profile, *(["all", "replot"] if profile == "box" else ["points"]))
    text = "\n".join(lines(fake_slurm(), project)) + "\n"
    golden = GOLDEN / f"{profile}.txt"
    if os.environ.get("REPRO_GOLDEN") == "write":
        golden.write_text(text)
    assert golden.exists() and text == golden.read_text(), done.stdout + done.stderr


@pytest.mark.parametrize("profile", ["frontier", NVIDIA])
def test_nothing_is_submitted_without_an_account(profile, project, fake_slurm):
    unpredicted(project, profile)
    done = submit(profile)
    assert done.returncode and not (project / "fake/log").exists()
    said = done.stdout + done.stderr
    assert f"config/platforms/{PROFILES[profile]}.yaml: slurm.account: not set" in said


@pytest.mark.parametrize(
    "asked", [{}, {"gres": "gpu:4", "options": []}, {"rank_options": ["--gres=gpu:4"], "options": []}]
)
def test_a_point_for_gpus_is_to_find_one_however_its_cluster_asks_for_them(asked):
    _, platform = config.load("smoke", "a100")
    own = platform.slurm.model_copy(update={"rank_options": [], "part_options": []} | asked)

    def needs(experiment, node=platform.node, slurm=own, **grid):
        (job,) = plan._jobs(experiment, config.Grid(grid=grid), "results/x", {}, "t")
        return srun.has_gpus(job, slurm, node)

    full = {"nodes": 1, "packages": 1, "gcds": 4}
    assert needs("zero_train", **full) and needs("flover_serving", device="cuda")
    assert not needs("flover_serving") and not needs("flover_queue")
    assert not needs("zero_train", node=platform.node.model_copy(update={"emulated": True}), **full)
    nothing = own.model_copy(update={"gres": None, "options": [], "rank_options": []})
    assert not needs("zero_train", slurm=nothing, **full)


@pytest.mark.parametrize("profile", PROFILES)
def test_no_more_jobs_than_the_queue_takes(profile):
    settings = yaml.safe_load((paths.root() / f"workflows/profiles/{profile}/config.yaml").read_text())
    platform = config.load_yaml(paths.root() / f"config/platforms/{PROFILES[profile]}.yaml", config.Platform)
    assert settings["jobs"] <= platform.slurm.queued_jobs
    assert yaml.safe_load((paths.root() / settings["configfile"]).read_text()) == {"platform": PROFILES[profile]}
    assert (paths.root() / platform.slurm.environment).exists()


def test_more_jobs_than_the_queue_takes_are_an_error(project, fake_slurm):
    fill_in(project, "frontier")
    unpredicted(project, "frontier")
    done = submit("frontier", "-n", "--jobs", "200")
    said = done.stdout + done.stderr
    assert done.returncode and "frontier.yaml: slurm.queued_jobs: found 90" in said and "`jobs` (--jobs) is 200" in said
