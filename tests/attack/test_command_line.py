"""The command line: whatever is typed, it ends with what was found and what is allowed, exit code 2 (or 3 where records
could not be read), and no traceback. `--json` prints strict JSON. Most rows run in this process, a few as real commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from attack.promises import command_refuses
from attack.record_files import SHIPPED, copies, shipped
from typer.testing import CliRunner

from repro.cli import app

ROOT = os.geteuid() == 0
LONG = "x" * 5000


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Messages of the option parser are not wrapped."""
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 10000)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with some records, a file, an empty folder, and files that are odd."""
    folder = tmp_path_factory.mktemp("cli")
    copies(folder / "results/records", shipped("flover_queue", 2))
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "cut.json").write_text('{"made": ')
    (folder / "list.json").write_text("[1]")
    (folder / "deep.json").write_text("[" * 5000)
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "closed").mkdir(mode=0)
    copies(folder / "damaged/records", shipped("flover_queue", 2))
    (folder / "damaged/records/flover_queue/cut.json").write_text("{")
    return folder


def called(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process; what gets out of it fails the test."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert "Traceback" not in found.output
    return found.exit_code, found.stdout, found.stderr


COMMANDS = [
    "reproduce",
    "doctor",
    "plan",
    "run",
    "claims",
    "compare",
    "place",
    "figure",
    "notebook",
    "report",
    "schema",
]
COMMANDS += ["allocation", "driver", "box", "box up", "box down", "box status", "box env"]
COMMANDS += ["explain", "docs", "bundle", "unbundle"]


def test_no_command_is_left_out():
    assert {*typer.main.get_command(app).commands} == {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    code, said, _ = called(*name.split(), "--help")
    assert code == 0 and "Usage" in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_option(name):
    code, _, said = called(*name.split(), "--nonsense")
    assert code == 2 and "--nonsense" in said


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("claims", "box")])
def test_every_command_refuses_a_word_too_many(name):
    code, _, said = called(*name.split(), *["word"] * 4)
    assert code == 2 and said


# Words, exit code, what stderr says. HERE is the folder of the fixture.
REFUSED = [
    pytest.param("nonsense", 2, "No such command 'nonsense'", id="an unknown command"),
    pytest.param("plann", 2, "Did you mean", id="a command misspelt"),
    pytest.param("--nonsense", 2, "No such option", id="an unknown option"),
    pytest.param([""], 2, "No such command ''", id="an empty command"),
    pytest.param(["pl\nan"], 2, "No such command", id="a command with a line break"),
    pytest.param("run", 2, "Missing argument", id="run: no experiment"),
    pytest.param("figure", 2, "Missing argument", id="figure: no name"),
    pytest.param("notebook", 2, "Missing argument", id="notebook: no name"),
    pytest.param("notebook zero", 2, "Missing option '--out'", id="notebook: no folder"),
    pytest.param("allocation", 2, "Missing argument", id="allocation: no plan"),
    pytest.param("driver", 2, "Missing argument", id="driver: no results"),
    pytest.param("plan --tier", 2, "requires an argument", id="plan: option without value"),
    pytest.param("plan --json=yes", 2, "does not take a value", id="plan: a switch with a value"),
    *(pytest.param(["plan", "--tier", tier], 2, f"--tier: found {tier!r}; allowed: smoke, laptop", id=f"plan: tier {tier[:9]!r}") for tier in ("huge", "", "Smoke", " smoke", "smoke\n", "smo\0ke", "../smoke", "1")),
    *(pytest.param(["plan", "--platform", name], 2, "allowed: a100, box, frontier, laptop", id=f"plan: platform {name[:12]!r}") for name in ("lapptop", "../laptop", "laptop.yaml", "lap\ntop", "lap\0top", "/etc/passwd", LONG, ".")),
    pytest.param("reproduce --tier huge", 2, "--tier: found 'huge'", id="reproduce: tier"),
    pytest.param("reproduce --platform laptpo", 2, "allowed: a100", id="reproduce: platform"),
    # run
    pytest.param("run zero_trian", 2, "closest: zero_train", id="run: experiment misspelt"),
    *(pytest.param(["run", name], 2, "known: exflow_affinity", id=f"run: experiment {name[:14]!r}") for name in ("", "../zero_train", "common", "base", "stored", "zero_train.run", "zero\ntrain", "zero\0train", "zero_train ", LONG, "é", "__init__")),
    pytest.param("run flover_queue --set size=4", 2, "known keys: seed", id="run: an unknown key"),
    *(pytest.param(["run", "flover_queue", "--set", f"requests={text}"], 2, "requests", id=f"run: requests={text[:20]!r}") for text in ("-1", "0", "2.5", "'", "1e400", "\x07", "0x", "1_0:70")),
    pytest.param(["run", "flover_queue", "--set", "policy=best"], 2, "allowed: ", id="run: a word that is none"),
    pytest.param("run flover_queue --set window_s=3", 2, "only the policies", id="run: a contradiction"),
    pytest.param("run flover_queue --repeat -1", 2, "--repeat", id="run: a repeat below 0"),
    pytest.param("run flover_queue --repeat x", 2, "--repeat", id="run: a repeat that is no number"),
    pytest.param(["run", "flover_queue", "--repeat", "9" * 400], 2, "--repeat", id="run: a repeat of 400 digits"),
    pytest.param("run flover_queue --attempt 0", 2, "--attempt", id="run: attempt 0"),
    pytest.param(["run", "flover_queue", "--attempt", "9" * 400], 2, "--attempt", id="run: an attempt of 400 digits"),
    pytest.param("run flover_queue --out HERE/r.txt", 2, "must end in .json", id="run: --out of another kind"),
    pytest.param("run flover_queue --out HERE/file/r.json", 2, "Not a directory", id="run: --out below a file"),
    pytest.param(["run", "flover_queue", "--out", f"HERE/{'x' * 300}.json"], 2, "File name too long", id="run: --out with a long name"),
    # claims
    pytest.param("claims ZX", 2, "no claim 'ZX'; allowed: the beginning of an id (ZT-1", id="claims: unknown"),
    pytest.param("claims ZT-11", 2, "closest: ZT-1", id="claims: misspelt"),
    *(pytest.param(["claims", word], 2, "no claim", id=f"claims: {word[:9]!r}") for word in ("", "zt-1", "ZT-1 ", "ZT-1\n", "ZT\0", "../ZT-1", "*", LONG, "2501.0426")),
    pytest.param("claims --agreement green", 2, "'reproduced', 'further'", id="claims: agreement"),
    pytest.param("claims --experiment zero_trian", 2, "closest: zero_train", id="claims: experiment"),
    pytest.param(["claims", "--experiment", ""], 2, "allowed: ", id="claims: empty experiment"),
    pytest.param("claims --results /nowhere", 2, "--results /nowhere: cannot be read: no such folder", id="claims: no such folder"),
    pytest.param("claims --results HERE/file", 2, "Not a directory", id="claims: results that are a file"),
    pytest.param("claims --results HERE/pipe", 2, "Not a directory", id="claims: results that are a pipe"),
    pytest.param("claims --results HERE/zero", 2, "Not a directory", id="claims: results that are a device"),
    pytest.param(["claims", "--results", "a\0b"], 2, "null", id="claims: results with NUL"),
    pytest.param(["claims", "--results", LONG], 2, "File name too long", id="claims: results with a long name"),
    pytest.param("claims --results HERE/closed", 2, "Permission denied", id="claims: results that are closed", marks=pytest.mark.skipif(ROOT, reason="root may read everything")),
    pytest.param("claims --results HERE/empty", 3, "no records", id="claims: no records"),
    pytest.param("claims --results HERE/damaged", 3, "not used: ", id="claims: a damaged record"),
    pytest.param("claims --results HERE/damaged --json", 3, "not used: ", id="claims: a damaged record, as JSON"),
    pytest.param("compare HERE/nowhere", 2, "nowhere, which is no folder; allowed: a folder of records, as results/", id="compare: no such folder"),
    pytest.param("compare HERE/results HERE/file", 2, "file: cannot be read: Not a directory", id="compare: a file"),
    pytest.param("compare HERE/empty HERE/results", 2, "no records in ", id="compare: no records"),
    pytest.param(["compare", "a\0b"], 2, "no folder", id="compare: NUL"),
    pytest.param(["compare", LONG], 2, "File name too long", id="compare: a long name"),
    # figure, notebook, report
    pytest.param("figure zero_byte", 2, "closest: zero_bytes", id="figure: misspelt"),
    *(pytest.param(["figure", name], 2, "known: claims_overview", id=f"figure: {name[:14]!r}") for name in ("", "../zero_bytes", "zero_bytes.png", "base", "zero\nbytes", "zero\0bytes", LONG)),
    pytest.param("figure zero_bytes --set plan=zero3", 2, "known: accumulation, plans", id="figure: an unknown option"),
    pytest.param("figure zero_bytes --set plans=[zero4]", 2, "plans: found ['zero4']", id="figure: an unknown value"),
    pytest.param("figure zero_bytes --set accumulation=four", 2, "accumulation: found 'four'", id="figure: a value of another type"),
    pytest.param("figure zero_bytes --set accumulation", 2, "expected key=value", id="figure: an option without value"),
    pytest.param("figure zero_bytes --set data=1", 2, "known: accumulation", id="figure: what is no option"),
    pytest.param("figure zero_bytes --results HERE/file", 2, "Not a directory", id="figure: results that are a file"),
    pytest.param("figure zero_bytes --results HERE/results --out HERE/file", 2, "Not a directory", id="figure: --out that is a file"),
    pytest.param("notebook zer --out HERE/nb", 2, "closest: zero; known: claims", id="notebook: misspelt"),
    *(pytest.param(["notebook", name, "--out", "HERE/nb"], 2, "known: claims", id=f"notebook: {name[:18]!r}") for name in ("", "../notebooks/zero", "zero.ipynb", "ze\0ro", "zero\n", LONG)),
    pytest.param("notebook zero --out HERE/nb -p recrods=x", 2, "unknown parameter recrods; known: output, records", id="notebook: an unknown parameter"),
    pytest.param("notebook zero --out HERE/nb -p records", 2, "-p records: expected key=value", id="notebook: a parameter without value"),
    pytest.param("notebook zero --out HERE/file", 2, "Not a directory", id="notebook: --out that is a file"),
    pytest.param("report --results HERE/file", 2, "Not a directory", id="report: results that are a file"),
    pytest.param("report --results HERE/results --out HERE/empty", 2, "is a folder", id="report: --out that is a folder"),
    # schema, and what workflows call
    pytest.param("schema records", 2, "'claims'", id="schema: unknown"),
    pytest.param("allocation HERE/nowhere x", 2, "No such file", id="allocation: no such plan"),
    pytest.param("allocation HERE/empty x", 2, "Is a directory", id="allocation: a folder"),
    pytest.param("allocation HERE/zero x", 2, "is a device", id="allocation: a device"),
    pytest.param("allocation HERE/pipe x", 2, "is a pipe", id="allocation: a pipe"),
    pytest.param("allocation HERE/cut.json x", 2, "Invalid JSON", id="allocation: a plan that was cut"),
    pytest.param("allocation HERE/list.json x", 2, "Plan", id="allocation: no plan"),
    pytest.param("allocation HERE/deep.json x", 2, "Invalid JSON", id="allocation: 5000 deep"),
    pytest.param("allocation HERE/cut.json x --trial 0", 2, "--trial", id="allocation: trial 0"),
    pytest.param("box up --nodes many", 2, "--nodes", id="box: nodes that are no number"),
    pytest.param("box nonsense", 2, "No such command", id="box: an unknown command"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "says"), REFUSED)
def test_what_is_wrong_is_said(here, words, code, says):
    words = words.split() if isinstance(words, str) else words
    found, out, error = called(*(word.replace("HERE", str(here)) for word in words))
    assert found == code, out + error
    assert says in error, error
    if "--json" in words:
        json.loads(out)


OUTPUTS = {
    "run": ["run", "flover_queue", "--out", "OUT.json"],
    "claims": ["claims", "--results", "HERE/results", "--out", "OUT.json"],
    "report": ["report", "--results", "HERE/results", "--out", "OUT.json"],
    "figure": ["figure", "flover_model", "--results", "HERE/results", "--out", "OUT"],
    "notebook": ["notebook", "flover", "--out", "OUT"],
    "place": ["place", "HERE/trace.npy", "--gpus", "2", "--out", "OUT.json"],
}
# The file that each writes, put in OUT's place.
FILES = {"figure": "flover_model.svg", "notebook": "flover.ipynb"}
OBSTACLES = {
    "a folder": (Path.mkdir, "is a folder"),
    "a link to a device": (lambda path: path.symlink_to("/dev/null"), "is a device"),
    "a pipe": (os.mkfifo, "is a pipe"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_is_refused_before_the_work(here, tmp_path, monkeypatch, name, obstacle):
    def work(*_, **__):
        raise AssertionError("the work has begun")

    for place in (
        "jobs.runner.run",
        "claims.registry.evaluate",
        "report.html.write",
        "report.figures.base.draw",
        "exflow.load_trace",
    ):
        monkeypatch.setattr(f"repro.{place}", work)
    monkeypatch.setattr("papermill.execute_notebook", work)
    path = tmp_path / FILES.get(name, "out.json")
    make, says = OBSTACLES[obstacle]
    make(path)
    before = path.lstat()
    out = str(tmp_path if name in FILES else tmp_path / "out")
    code, _, said = called(*(word.replace("HERE", str(here)).replace("OUT", out) for word in OUTPUTS[name]))
    assert code == 2 and says in said and path.name in said, said
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


FRONTIER = pytest.param("plan --platform frontier", marks=pytest.mark.exhaustive, id="plan for Frontier")
JSON = ["plan", FRONTIER, "plan --platform box --tier smoke"]
JSON += [
    "claims --results HERE/results",
    "claims ZT --results HERE/results",
    "claims --agreement deviates --results HERE/results",
]
JSON += ["compare HERE/results HERE/results"]


@pytest.mark.parametrize("words", JSON)
def test_json_is_strict(here, words):
    def no(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON")

    code, out, _ = called(*words.replace("HERE", str(here)).split(), "--json")
    assert code == 0
    json.loads(out, parse_constant=no)


ACCEPTED = [
    pytest.param("claims ZT-1.a --results HERE/results", "1 claim (", id="claims: one"),
    pytest.param("claims --results HERE/results/records", "claims", id="claims: the folder of records itself"),
    pytest.param("claims --results HERE/results --out HERE/new/claims.json", "claims", id="claims: --out in a new folder"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), ACCEPTED)
def test_what_is_right_is_done(here, words, says):
    code, out, error = called(*words.replace("HERE", str(here)).split())
    assert code == 0 and says in out, out + error


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(["nonsense"], "No such command", id="an unknown command"),
        pytest.param(["run", "zero_trian"], "closest: zero_train", id="an unknown experiment"),
        pytest.param(["run", "flover_queue", "--out", "/dev/null/r.json"], "Not a directory", id="below a device"),
        pytest.param(["claims", "--results", os.fsdecode(b"/nowhere\xff")], "no such folder", id="a name that is not UTF-8"),
        pytest.param(["claims", "--out", "/dev/null"], "is a device", id="/dev/null, which stays"),
        pytest.param(["claims", "--out", "/dev/full"], "is a device", id="/dev/full"),
    ],
)  # fmt: skip
def test_real_commands_refuse(tmp_path, words, says):
    command_refuses(words, tmp_path, says, env={"COLUMNS": "1000"})
    assert Path("/dev/null").is_char_device() and Path("/dev/full").is_char_device()


def test_a_command_runs_where_standard_output_was_closed():
    command = [sys.executable, "-m", "repro", "schema", "claims"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0 and not ended.stderr


def test_where_only_the_engines_are_installed_the_command_says_what_it_needs():
    program = "import sys; sys.modules['typer'] = None; from repro.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2 and "needs typer: pip install 'repro-papers[workflow]'" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words.split(), id=words, marks=() if words == "claims" else pytest.mark.exhaustive)
        for words in ("claims --json", "claims", "schema", "plan --tier smoke")
    ],
)
def test_a_full_disk_behind_stdout(tmp_path, words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "repro", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2 and "No space left" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


def test_a_reader_that_goes(tmp_path):
    shell = f"{sys.executable} -m repro claims --json --results {SHIPPED} | head -c 10"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert len(ended.stdout) == 10 and "Traceback" not in ended.stderr and "Exception" not in ended.stderr, ended.stderr
