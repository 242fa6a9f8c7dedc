"""The command line as a user meets it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from repro import paths
from repro.claims import compare, registry, sides
from repro.claims.claim import KIND
from repro.cli import app, console, planned, verdicts
from repro.cli.doctor import JOB_COMMANDS, _lacks
from repro.experiments import stored
from repro.plan import config
from repro.plan import jobs as plan
from repro.records import record

runner = CliRunner()
SHIPPED = paths.root() / config.load()[0].shipped


def call(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_doctor_json():
    report = json.loads(call("doctor", "--json"), parse_constant=pytest.fail)
    assert {
        "python",
        "torch",
        "backends",
        "gpus",
        "cores",
        "memory_gib",
        "slurm",
        "namespaces",
        "disk_free_gib",
        "kernels",
    } <= report.keys()
    assert set(report["lacks"]) == {"replot", "smoke", "laptop", "full", "gpu", "cluster"}
    assert report["lacks"]["gpu"] or report["gpus"]


FINE = {
    "cores": 2,
    "memory_gib": 16,
    "disk_free_gib": 20,
    "model": None,
    "namespaces": None,
    "kernels": None,
    "gpus": ["one"],
}
FINE |= {"slurm": dict.fromkeys(JOB_COMMANDS, "/usr/bin/it"), "missing_servers": {}}
LOCAL = {"smoke", "laptop", "full"}


@pytest.mark.parametrize(
    ("changed", "word", "tiers"),
    [
        ({}, "", set()),
        ({"memory_gib": 4}, "memory: 4 GiB", LOCAL | {"gpu"}),
        ({"memory_gib": 5.7, "cores": 1}, "cores: 1, needs 2", LOCAL | {"gpu"}),
        ({"disk_free_gib": 1}, "free disk: 1 GiB", LOCAL | {"gpu"}),
        ({"model": "no such file"}, "no such file", LOCAL | {"gpu"}),
        ({"namespaces": "needs root"}, "needs root", LOCAL),
        ({"kernels": "no compiler"}, "no compiler", LOCAL),
        ({"missing_servers": {"vllm_eager": "vllm_eager needs `make peers`"}}, "make peers", {"full"}),
        ({"gpus": []}, "GPU", {"gpu"}),
        ({"slurm": FINE["slurm"] | {"srun": None}}, "srun", {"cluster"}),
    ],
)
def test_doctor_says_what_each_tier_lacks(changed, word, tiers):
    lacks = _lacks(FINE | changed)
    assert {tier for tier, words in lacks.items() if words} == tiers
    assert all(word in " ".join(lacks[tier]) for tier in tiers)


def test_doctor_for_people_names_every_tier():
    words = {line.split()[0] for line in call("doctor").splitlines() if line.strip()}
    assert {"replot", "smoke", "laptop", "full", "gpu", "cluster"} <= words


def test_plan_json():
    document = json.loads(call("plan", "--tier", "smoke", "--json"), parse_constant=pytest.fail)
    assert document["tier"] == "smoke" and document["jobs"]
    assert {"experiment", "point", "repeat", "state", "minutes", "ranks"} <= document["jobs"][0].keys()
    assert all({"jobs", "to_run", "minutes"} <= figure.keys() for figure in document["figures"].values())


def test_a_file_that_cannot_be_read_is_not_told_as_a_fault_of_standard_output():
    program = "from repro.cli import app, planned; planned.document = lambda found: open('/nowhere')\n"
    program += "app(['plan', '--tier', 'smoke', '--json'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2 and "error: [Errno 2] No such file or directory: '/nowhere'" in ended.stderr


def test_plan_for_people_names_the_totals():
    text = call("plan", "--tier", "smoke")
    assert text.index("points to run") < text.index("zero_loss") and "repeat" not in text
    assert "repeat" in call("plan", "--tier", "smoke", "--points")


@pytest.mark.parametrize("tier", ["full", pytest.param("cluster", marks=pytest.mark.exhaustive)])
def test_points_of_a_plan_have_labels_that_tell_them_apart(tier):
    jobs = plan.make(tier).jobs
    for name in {job.experiment for job in jobs}:
        mine = [job for job in jobs if job.experiment == name]
        shown = set(zip(planned.labels(mine), (job.repeat for job in mine), strict=True))
        assert len(shown) == len(mine)


def test_run_writes_a_record(tmp_path):
    out = tmp_path / "queue.json"
    call("run", "flover_queue", "--set", "requests=4", "--set", "seeds=2", "--out", str(out))
    found = record.read(out)
    assert found.evidence == "modelled" and found.point["requests"] == 4


def test_run_keeps_a_record_where_readers_find_it(tmp_path):
    call("run", "flover_queue", "--set", "requests=4", "--set", "seeds=2", "--repeat", "3", "--results", str(tmp_path))
    [run] = stored.collect(tmp_path / "records").records.values()
    assert (run.point["requests"], run.repeat) == (4, 3)
    assert "allowed: one of them" in call("run", "flover_queue", "--out", "x.json", "--results", str(tmp_path), code=2)


def test_run_prints_the_record_without_out():
    said = call("run", "flover_queue", "--set", "requests=2", "--set", "seeds=2")
    assert json.loads(said, parse_constant=pytest.fail)["status"] == "ok"


def test_failed_point_exits_1_or_0_when_asked(tmp_path):
    arguments = ["run", "exflow_placement", "--set", "train_tokens=1000000000", "--out", str(tmp_path / "r.json")]
    call(*arguments, code=1)
    assert record.read(tmp_path / "r.json").cause == "bad_input"
    call(*arguments, "--record-failure", code=0)


def test_claims_as_a_table(tmp_path):
    said = call("claims", "--results", str(tmp_path), "--details", code=3)
    assert (
        "ZT-1.a" in said
        and "claims (none in a paper's setting, 58 not run): " in " ".join(said.split())
        and "reproduced" not in said.splitlines()[-2]
    )


def test_a_relative_root_holds_for_programs_that_start_elsewhere(monkeypatch):
    root = paths.root().resolve()
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("REPRO_ROOT", root.name)
    call("plan", "--json")
    assert os.environ["REPRO_ROOT"] == str(root)


def test_a_working_directory_that_was_removed_is_told(tmp_path, monkeypatch):
    """As after a fresh clone to the same place, in a shell that stood in the old one."""
    monkeypatch.delenv("REPRO_ROOT", raising=False)
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path / "old")
    (tmp_path / "old").rmdir()
    with pytest.raises(FileNotFoundError, match="working directory was removed"):
        paths.root()


def test_in_a_checkout_with_code_of_its_own_that_of_another_is_refused(tmp_path, monkeypatch):
    """As by the environment of a first clone in a second: what is edited there would not run."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/claims.yaml").touch()
    (tmp_path / "src/repro").mkdir(parents=True)
    monkeypatch.delenv("REPRO_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    said = call("schema", code=2)
    assert "this is the code of" in said and f"{tmp_path.resolve()} has its own" in said
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    call("schema")


def test_claims_of_a_file_of_ones_own_are_judged(tmp_path):
    """The shipped runs by a claim that this package does not have: its title, its tolerance, its verdict."""
    text = (paths.root() / "config/claims.yaml").read_text()
    group = yaml.safe_load(text)["groups"]["zero_convergence"]
    mine = {"XY-1": group["claims"]["ZT-3.a"] | {"scope": {"outside": "a small model"}, "tolerance": 0.5}}
    papers = {"XY": {"title": "A paper of mine", "id": "2611.00001", "version": "v1"}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"papers": papers, "groups": {"loss": group | {"claims": mine}}}))
    said = call("claims", "--claims", str(path), "--results", str(SHIPPED))
    assert "A paper of mine" in said and "1 claim (" in said
    (row,) = json.loads(call("claims", "--claims", str(path), "--results", str(SHIPPED), "--json"))
    assert row["id"] == "XY-1" and row["agreement"] == "reproduced"
    assert "gone.yaml" in call("claims", "--claims", str(tmp_path / "gone.yaml"), code=2)


def test_every_row_is_shown_where_a_papers_claims_do_not_follow_each_other(monkeypatch):
    rows = registry.evaluate(registry.load(), {})
    monkeypatch.setattr(console.stdout, "width", 200)
    with console.stdout.capture() as said:
        verdicts.show([*rows[1:], rows[0]], registry.papers(), "a folder", grouped=False, reasons=False)
    assert all(re.search(rf"^ *{re.escape(row.id)} ", said.get(), re.M) for row in rows)


def test_claims_fit_a_small_terminal(monkeypatch):
    monkeypatch.setattr(console.stdout, "width", 80)
    lines = call("claims", "--results", str(SHIPPED)).splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 80


def test_a_value_that_lies_where_runs_by_older_code_were_is_marked_so(capsys):
    claims = [registry.claim("ZT-4.a")]
    shipped = sides.read("shipped", SHIPPED, claims)
    [row] = compare.of_claims(claims, shipped, shipped)
    verdicts.show_beside("claim", shipped.verdicts, [replace(row, inside=None, said="other code: the same value")])
    assert f"yes{registry.OLDER}" in capsys.readouterr().out


def test_pictures_of_the_shipped_records_are_no_change_of_the_checkout():
    picture = console.beside_records(SHIPPED) / "figures/zero_bytes.png"
    assert subprocess.run(["git", "check-ignore", "--quiet", picture], cwd=paths.root()).returncode == 0


@pytest.mark.parametrize("width", [80, console.OF_FILES])
def test_titles_are_whole_beside_the_shipped_verdicts(width, monkeypatch, capsys):
    """Folded in a small terminal; on one line in what is written to a file."""
    monkeypatch.setattr(console.stdout, "width", width)
    claims = [claim for claim in registry.load() if claim.primary]
    shipped = sides.read("shipped", SHIPPED, claims)
    verdicts.show_beside("primary claim", shipped.verdicts, compare.of_claims(claims, shipped, shipped))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    assert width == 80 or all(row.title in said for row in shipped.verdicts)


def test_claims_can_be_chosen(monkeypatch):
    found = stored.collect(SHIPPED / "records")
    judged = {row.id: row for row in registry.evaluate(registry.load(), found.records, found.problems)}
    monkeypatch.setattr(stored, "collect", lambda folder: found)  # read and judged once for all calls
    monkeypatch.setattr(registry, "evaluate", lambda known, *rest: [judged[claim.id] for claim in known])

    def ids(*words):
        return {row["id"] for row in json.loads(call("claims", *words, "--results", str(SHIPPED), "--json"))}

    everything = ids()
    assert ids("ZT") == ids("2501.04266") == {name for name in everything if name.startswith("ZT-")}
    assert ids("EX-F8.a", "FL-F8.b") == {"EX-F8.a", "FL-F8.b"}
    for option, words in (("--agreement", registry.WORDS), ("--kind", KIND)):
        parts = [ids(option, word) for word in words]
        assert set().union(*parts) == everything and sum(map(len, parts)) == len(everything)
    assert ids("--primary") == {claim.id for claim in registry.load() if claim.primary}
    assert ids("--experiment", "moe_train") == {f"EX-F12.{part}" for part in "abcd"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Tokens that mostly keep their expert from layer to layer, so that a good placement exists."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 8, size=(400, 1))
    experts = np.where(rng.random((400, 4)) < 0.9, start, rng.integers(0, 8, size=(400, 4)))
    path = tmp_path_factory.mktemp("trace") / "trace.npy"
    np.save(path, experts)
    return path


def test_json_stdout_is_clean_in_a_real_process(trace):
    """Warnings and progress of any library must not reach stdout."""
    command = [sys.executable, "-m", "repro", "place", str(trace), "--gpus", "2", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    json.loads(found.stdout)
