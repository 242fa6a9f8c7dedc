"""Records and what is written: damaged, foreign and odd ones are named and not used, the rest is judged and drawn, and
whatever is written replaces ordinary files alone, whole or not at all."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from attack.promises import make_socket, refuses
from attack.record_files import CLAIMS, copies, judged, shipped
from pydantic import ValidationError

from repro import files
from repro.claims.registry import Verdict
from repro.cli import console
from repro.experiments import stored
from repro.plan import jobs
from repro.records import record
from repro.records.record import RecordError
from repro.report import html
from repro.report.figures import base
from repro.report.figures import data as tables

ROOT = os.geteuid() == 0
EXPERIMENT = "flover_queue"  # with a series for every record


def unless_root(*values, id):
    return pytest.param(*values, id=id, marks=pytest.mark.skipif(ROOT, reason="root may write and read everything"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three good records; the first is what the probes damage."""
    copies(tmp_path, [path for path in shipped(EXPERIMENT) if path.name.startswith("gpt-j")])
    return tmp_path


def first(folder: Path) -> Path:
    return sorted((folder / EXPERIMENT).glob("*.json"))[0]


def not_used(folder: Path, path: Path, *words: str) -> None:
    """The file at `path` is named and not used, by whoever reads records; its point is to be run; the others count."""
    message = refuses(lambda: stored.read(path), RecordError, path.name, *words)
    assert jobs.state(path) == ("to run", 1)
    found = stored.collect(folder)
    assert found.problems == [message]
    assert path not in found.records and len(found.records) >= 2
    good = {file: run for file, run in found.records.items() if run.experiment == EXPERIMENT}
    remarked = "1 file among the records not used" if path.parent.name == EXPERIMENT else ""
    assert all(remarked in row.reason for row in judged(good, found.problems))
    assert len(tables.Data(folder).all_runs(EXPERIMENT)) == len(good) and base.not_run(folder, EXPERIMENT) is None


# --- files that are no record ----------------------------------------------------------------------------------------


def text(change):
    """Replace the contents, given as bytes."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def instead(make):
    """Something else at the record's path."""

    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it takes no space


DAMAGED = [
    pytest.param(text(lambda old: b""), "not a run record", id="empty"),
    *(pytest.param(text(lambda old, n=n: old[:n]), "not a run record", id=f"cut after {n} bytes") for n in (1, 2, 80, 500)),
    pytest.param(text(lambda old: old[:-3]), "not a run record", id="cut before its last bracket"),
    pytest.param(text(lambda old: old[100:]), "not a run record", id="begins in the middle"),
    pytest.param(text(lambda old: old + old), "not a run record", id="twice in one file"),
    pytest.param(text(lambda old: b"\xef\xbb\xbf" + old), "not a run record", id="byte order mark"),
    pytest.param(text(lambda old: old.decode().encode("utf-16")), "not a run record", id="UTF-16"),
    pytest.param(text(lambda old: old.replace(b"modelled", b"modelled\xff")), "not a run record", id="not UTF-8"),
    pytest.param(text(lambda old: b"\0" * len(old)), "not a run record", id="zeros, as after a crash of the machine"),
    pytest.param(text(lambda old: b"[" * 5000 + b"]" * 5000), "not a run record", id="lists, 5000 deep"),
    pytest.param(text(lambda old: b'{"a":' * 5000 + b"1" + b"}" * 5000), "not a run record", id="mappings, 5000 deep"),
    pytest.param(text(lambda old: b"9" * 100_000), "not a run record", id="a number of 100,000 digits"),
    pytest.param(text(lambda old: b"null"), "not a run record", id="null"),
    pytest.param(text(lambda old: b"[]"), "not a run record", id="a list"),
    pytest.param(text(lambda old: b"{}"), "experiment: Field required", id="an empty mapping"),
    pytest.param(text(lambda old: b'"' + b"x" * 1000 + b'"'), "not a run record", id="a text"),
    pytest.param(text(lambda old: b"\x89PNG\r\n\x1a\n" + bytes(1000)), "not a run record", id="a picture"),
    pytest.param(text(lambda old: old.replace(b'"ok"', b'"\\ud800"')), "not a run record", id="half a character"),
    pytest.param(instead(Path.mkdir), "Is a directory", id="a folder"),
    pytest.param(instead(os.mkfifo), "is a pipe", id="a pipe, which nobody writes to"),
    pytest.param(instead(make_socket), "cannot be read", id="a socket"),
    pytest.param(instead(_large), "more than 64 MiB", id="a terabyte of nothing"),
    pytest.param(instead(lambda path: path.symlink_to("/dev/zero")), "is a device", id="a link to /dev/zero"),
    pytest.param(instead(lambda path: path.symlink_to("/dev/full")), "is a device", id="a link to /dev/full"),
    pytest.param(instead(lambda path: path.symlink_to(path.parent)), "Is a directory", id="a link to a folder"),
    pytest.param(instead(lambda path: path.symlink_to("nowhere")), "No such file", id="a link to nothing"),
    pytest.param(instead(lambda path: path.symlink_to(path)), "symbolic links", id="a link to itself"),
    unless_root(lambda path: path.chmod(0), "Permission denied", id="unreadable"),
]  # fmt: skip


# --- records that no run of their point left -------------------------------------------------------------------------


def field(**changes):
    """Other values at places of the document: `point__requests=1`; a function makes the new value of the old."""

    def harm(path: Path) -> None:
        document = json.loads(path.read_text())
        for place, value in changes.items():
            *outer, last = place.split("__")
            inner = document
            for key in outer:
                inner = inner[key]
            inner[last] = value(inner[last]) if callable(value) else value
        if document.get("point") and "repeat" in document:  # a name that fits: another probe has one that does not
            end = record.name_end(document["experiment"], document["point"], document["repeat"])
            path.unlink()
            path = path.with_name(f"{path.stem[:-8]}{end[-8:]}.json")
        path.write_text(json.dumps(document))

    return harm


def without(*keys):
    def harm(path: Path) -> None:
        document = json.loads(path.read_text())
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        path.write_text(json.dumps(document))

    return harm


FOREIGN = [
    pytest.param(field(schema_version=2), "schema_version", id="of another version"),
    pytest.param(field(surprise=1), "surprise", id="an unknown key"),
    *(pytest.param(without(key), key, id=f"without {key}") for key in ("experiment", "point", "repeat", "seed", "status", "provenance")),
    pytest.param(without("metrics"), "at least one metric", id="without metrics"),
    pytest.param(without("evidence"), "an evidence kind", id="without evidence"),
    pytest.param(without("provenance", "start"), "provenance.start", id="without the time of its start"),
    pytest.param(field(provenance__start="2026-01-01T00:00:00"), "provenance.start", id="a time without its zone"),
    pytest.param(field(provenance__start="yesterday"), "provenance.start", id="a time in words"),
    pytest.param(field(experiment="flover_cue"), "found 'flover_cue'; allowed: exflow_affinity", id="an unknown experiment"),
    pytest.param(field(experiment=""), "found ''", id="an experiment without name"),
    pytest.param(field(experiment="../flover_queue"), "'../flover_queue'", id="an experiment that is a path"),
    pytest.param(field(experiment="flover\0queue"), "experiment: found", id="an experiment with NUL"),
    pytest.param(field(experiment="common"), "found 'common'", id="a package that is no experiment"),
    pytest.param(field(experiment="moe_train"), "in the folder of flover_queue", id="an experiment of another folder"),
    pytest.param(field(point__size=1), "point: size: Extra inputs", id="an unknown parameter"),
    pytest.param(field(point__requests="many"), "point: requests", id="a parameter of another type"),
    pytest.param(field(point__requests=-1), "point: requests", id="a parameter out of its range"),
    pytest.param(field(point__requests=None), "point: requests", id="a parameter that is null"),
    pytest.param(field(point__requests=[1]), "point.requests", id="a parameter that is a list"),
    pytest.param(field(point__requests={"n": 1}), "point.requests", id="a parameter that is a mapping"),
    pytest.param(field(point__requests=10**400), "more than 64 bits", id="a parameter of 400 digits"),
    pytest.param(field(point__requests=2**63), "more than 64 bits", id="a parameter of 64 bits"),
    pytest.param(field(point__interval_ms=math.inf), "point.interval_ms", id="an infinite parameter"),
    pytest.param(field(point__interval_ms=math.nan), "point.interval_ms", id="a parameter that is NaN"),
    pytest.param(field(point__policy="best"), "point: policy", id="a parameter that is none of its words"),
    pytest.param(field(point__window_s=3.0), "only the policies", id="parameters that contradict each other"),
    pytest.param(field(repeat=-1), "repeat", id="a repeat below 0"),
    pytest.param(field(repeat=10**400), "repeat", id="a repeat of 400 digits"),
    pytest.param(field(repeat=0.5), "repeat", id="half a repeat"),
    pytest.param(field(seed=10**400), "more than 64 bits", id="a seed of 400 digits"),
    pytest.param(field(attempt=0), "attempt", id="attempt 0"),
    pytest.param(field(attempt=10**400), "attempt", id="an attempt of 400 digits"),
    pytest.param(field(metrics={}), "at least one metric", id="no metrics"),
    pytest.param(field(metrics={"m": {"value": 1, "unit": "s"}}), "metrics: ", id="metrics of another experiment"),
    pytest.param(field(metrics__m={"value": 1, "unit": "s"}), "metrics: m: Extra inputs", id="one metric more"),
    pytest.param(field(metrics__total_seconds__unit="ms"), "metrics.total_seconds.unit: found 'ms'; allowed: 's'", id="another unit"),
    pytest.param(field(metrics__total_seconds__unit=""), "total_seconds.unit: found ''", id="no unit"),
    pytest.param(field(metrics__total_seconds__value=math.nan), "metrics.total_seconds.value", id="a metric that is NaN"),
    pytest.param(field(metrics__total_seconds__value=math.inf), "metrics.total_seconds.value", id="an infinite metric"),
    pytest.param(field(metrics__total_seconds__value=10**400), "metrics.total_seconds.value", id="a metric of 400 digits"),
    pytest.param(without("metrics", "total_seconds", "value"), "metrics.total_seconds.value", id="a metric without value"),
    pytest.param(field(metrics__total_seconds__value="fast"), "metrics.total_seconds.value", id="a metric in words"),
    pytest.param(field(conditions={"weather": "fine"}), "conditions: found weather; allowed: reference", id="an unknown condition"),
    pytest.param(field(evidence="guessed"), "evidence", id="evidence of no kind"),
    pytest.param(field(status="failed"), "status 'failed' with cause None", id="failed without a cause"),
    pytest.param(field(cause="oom"), "status 'ok' with cause", id="a cause without a failure"),
    pytest.param(field(status="failed", cause="tired"), "cause", id="a cause of no kind"),
    pytest.param(field(status="great"), "status", id="an unknown status"),
    pytest.param(lambda path: path.rename(path.with_name("else-r0-01234567.json")), "its name is that of another point", id="another point's name"),
    *(pytest.param(lambda path, name=name: path.rename(path.with_name(name)), "its name: found", id=f"a name that tells no point: {name!r}")
      for name in ("x.json", "x-r0.json", "x-r0-0123456.json", "x-r0-0123456G.json", ".json")),
    pytest.param(lambda path: path.rename(path.with_name(path.name.replace("-r0-", "-r1-"))), "its name is that of another point or repeat", id="another repeat in the name"),
    pytest.param(lambda path: path.write_bytes(sorted(path.parent.glob("*.json"))[1].read_bytes()), "its name is that of another point", id="another point's record"),
    pytest.param(text(lambda old: old.replace(b'"repeat": 0', b'"repeat": 1')), "its name is that of another point or repeat", id="another repeat's record"),
    pytest.param(text(lambda old: old.replace(b"flover_queue", b"moe_train")), "its name is that of another point", id="another experiment's record"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "words"), FOREIGN)
def test_a_record_that_no_run_of_its_point_left(folder, harm, words):
    path = first(folder)
    before = set(folder.rglob("*.json"))
    harm(path)
    path = next(iter(set(folder.rglob("*.json")) - before), path)
    not_used(folder, path, words)


# --- two records of one point and repeat -----------------------------------------------------------------------------


def again(path: Path, name: str = "copy", folder: Path | None = None, **changes) -> Path:
    """A second record of the point of `path`, under a name that is right for it."""
    document = json.loads(path.read_text()) | {"series": None}
    document["point"] = {key: value for key, value in (document["point"] | changes).items() if value is not None}
    end = record.name_end(document["experiment"], document["point"], document["repeat"])
    made = (folder or path.parent) / f"{name}-{end}.json"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps(document))
    return made


TWICE = [
    pytest.param(lambda path: again(path), id="a copy"),
    pytest.param(lambda path: again(path, folder=path.parent / "old"), id="a copy in a folder below"),
    pytest.param(lambda path: again(path, window_s=None), id="without a parameter that has its default"),
    pytest.param(lambda path: again(path, requests="1"), id="a number as text"),
    pytest.param(lambda path: again(path, interval_ms=500), id="a whole number for a fraction"),
    pytest.param(lambda path: again(path, window_s=-0.0), id="-0 for 0"),
]


@pytest.mark.parametrize("double", TWICE)
def test_two_records_of_one_point_and_repeat_are_named_and_not_used(folder, double):
    path = first(folder)
    assert json.loads(path.read_text())["point"].items() >= {"requests": 1, "interval_ms": 500.0, "window_s": 0}.items()
    other = double(path)
    found = stored.collect(folder)
    assert other not in found.records and path not in found.records and len(found.records) == 2
    named = {text.partition(": ")[0]: text for text in found.problems}
    assert named.keys() == {str(path), str(other)}
    assert "of the same point and repeat" in named[str(path)] and str(other) in named[str(path)]
    assert len(tables.Data(folder).all_runs(EXPERIMENT)) == 2
    third = again(path, "third")
    assert third not in stored.collect(folder).records, "a majority decides nothing"
    other.unlink()
    third.unlink()
    assert path in stored.collect(folder).records


def test_a_metric_less_is_named(tmp_path):
    (path,) = copies(tmp_path, shipped("exflow_placement", 1))
    without("metrics", "crossing_fraction")(path)
    refuses(lambda: stored.read(path), RecordError, path.name, "metrics: crossing_fraction: Field required")


def test_another_point_or_repeat_is_no_double(folder):
    path = first(folder)
    again(path, requests=33)
    document = json.loads(path.read_text()) | {"repeat": 1}
    made = path.with_name(f"x-{record.name_end(EXPERIMENT, document['point'], 1)}.json")
    made.write_text(json.dumps(document))
    assert len(stored.collect(folder).records) == 5 and not stored.collect(folder).problems


# --- series ----------------------------------------------------------------------------------------------------------


def series(change):
    """Change the series of a record."""
    return lambda path: change(path.with_suffix(".parquet"))


def _flip(where: float):
    """Another byte at this part of the file."""

    def harm(path: Path) -> None:
        found = bytearray(path.read_bytes())
        found[int(where * len(found))] ^= 0x5A
        path.write_bytes(found)

    return harm


def _checked(where: float):
    """A series as records write it, with checksums, and then another byte in it."""

    def harm(path: Path) -> None:
        record.write(record.read(path), path, pd.DataFrame({"x": np.random.default_rng(0).random(2000)}))
        _flip(where)(path.with_suffix(".parquet"))

    return harm


SERIES = [
    pytest.param(series(Path.unlink), "missing or damaged", id="missing"),
    pytest.param(series(lambda path: path.write_bytes(b"")), "missing or damaged", id="empty"),
    pytest.param(series(lambda path: path.write_bytes(b"PAR1")), "missing or damaged", id="only its mark"),
    pytest.param(series(lambda path: path.write_bytes(b"PAR1" + b"\xff" * 100 + b"PAR1")), "missing or damaged", id="marks around nothing"),
    pytest.param(series(lambda path: path.write_bytes(path.read_bytes()[:100])), "missing or damaged", id="cut"),
    pytest.param(series(lambda path: path.write_bytes(path.read_bytes()[:100] + bytes(len(path.read_bytes()) - 104) + b"PAR1")), "missing or damaged", id="zeros inside"),
    *(pytest.param(_checked(where), "missing or damaged", id=f"a byte of a page's data, at {where}") for where in (0.1, 0.3, 0.5, 0.7, 0.8)),
    pytest.param(series(instead(Path.mkdir)), "Is a directory", id="a folder"),
    pytest.param(series(instead(os.mkfifo)), "is a pipe", id="a pipe"),
    pytest.param(series(instead(lambda path: path.symlink_to("/dev/zero"))), "is a device", id="a link to /dev/zero"),
    pytest.param(series(instead(_large)), "more than 64 MiB", id="a terabyte"),
    pytest.param(series(lambda path: path.write_text("a,b\n1,2\n")), "missing or damaged", id="CSV"),
    pytest.param(field(series="other.parquet"), "'other.parquet' is missing", id="another name"),
    pytest.param(field(series="../flover_queue/x.parquet"), "the name of a file beside", id="a name with a folder"),
    pytest.param(field(series="/dev/zero"), "the name of a file beside", id="a path"),
    pytest.param(field(series=".."), "is missing or damaged", id="the folder above"),
    pytest.param(field(series=""), "is missing or damaged", id="no name"),
    pytest.param(field(series="a\0.parquet"), "is missing or damaged", id="a name with NUL"),
    pytest.param(field(series="x" * 5000), "is missing or damaged", id="a name of 5000 letters"),
    pytest.param(field(series=7), "series", id="a number"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "words"), DAMAGED + SERIES)
def test_a_file_that_is_no_record_or_whose_series_cannot_be_read(folder, harm, words):
    path = first(folder)
    harm(path)
    not_used(folder, path, words)


def test_a_series_that_goes_while_it_is_shown_is_left_out(folder, capsys):
    table = tables.Data(folder).all_runs(EXPERIMENT)
    first(folder).with_suffix(".parquet").unlink()
    assert set(tables.series(table).path) == set(table.path[1:])
    assert f"not used: {first(folder)}" in capsys.readouterr().out


# --- odd numbers -----------------------------------------------------------------------------------------------------

NUMBERS = {"0": 0.0, "smallest": 5e-324, "1e308": 1e308, "-1": -1.0}
READ = sorted({claim.value.experiment for claim in CLAIMS if claim.value})


@pytest.fixture(scope="module")
def runs():
    """A few finished runs of every experiment that claims read, enough for most of them."""
    found = {}
    for name in READ:
        found[name] = {path: stored.read(path) for path in shipped(name)}
    return found


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("experiment", READ)
def test_odd_numbers_are_judged(runs, experiment, number):
    """Every metric of every run, of every second run, and the parameters that are numbers."""
    value, mine = NUMBERS[number], runs[experiment]
    assert mine
    odd = {
        path: run.model_copy(
            update={"metrics": {n: m.model_copy(update={"value": value}) for n, m in run.metrics.items()}}
        )
        for path, run in mine.items()
    }
    judged(odd)
    judged({path: run if index % 2 else odd[path] for index, (path, run) in enumerate(mine.items())})


@pytest.mark.parametrize("experiment", READ)
def test_runs_that_lack_metrics_or_conditions_are_judged(runs, experiment):
    """One of the metrics left out everywhere, in turn: a claim that reads it says what is missing."""
    names = sorted({name for run in runs[experiment].values() for name in run.metrics})
    wanted = {name for claim in CLAIMS if claim.value for name in claim.value.metrics}
    for name in [name for name in names if name in wanted][:12]:
        rest = {
            path: run.model_copy(update={"metrics": {n: m for n, m in run.metrics.items() if n != name}})
            for path, run in runs[experiment].items()
        }
        rows = {row.id: row for row in judged(rest)}
        for claim in CLAIMS:
            if claim.value and claim.value.experiment == experiment and name in claim.value.metrics:
                assert rows[claim.id].value is None and rows[claim.id].agreement in ("not run", "skipped")
    judged({path: run.model_copy(update={"conditions": {}}) for path, run in runs[experiment].items()})


ODD_FIGURES = ["claims_overview", "flover_model", "exflow_load", "zero_bytes"]


@pytest.mark.parametrize("number", ["0", "1e308"])
@pytest.mark.parametrize("figure", ODD_FIGURES)
def test_odd_numbers_end_no_figure(tmp_path, monkeypatch, figure, number):
    """It draws them or says that it cannot."""
    from repro.report import figures

    monkeypatch.setattr(base, "STYLE", base.STYLE | {"savefig.dpi": 30})
    reads = [name for name in figures.entry(figure).reads if name in READ][:3]
    made = copies(tmp_path / "records", [path for name in reads for path in shipped(name, 4)])
    for path in made:
        document = json.loads(path.read_text())
        for metric in document["metrics"].values():
            metric["value"] = NUMBERS[number]
        path.write_text(json.dumps(document))
    assert not stored.collect(tmp_path / "records").problems
    base.draw(figure, tmp_path / "records", tmp_path)
    base.plt.close("all")
    assert (tmp_path / f"{figure}.png").stat().st_size > 500


def test_a_report_of_damaged_and_odd_records(folder):
    """Every kind of damage at once: each is named in it, and the rest is judged."""
    good = sorted((folder / EXPERIMENT).glob("*.json"))[1]
    bad = []
    for index, harm in enumerate([row.values[0] for row in (*DAMAGED, *SERIES, *FOREIGN) if not row.marks]):
        here = folder / f"{index}" / EXPERIMENT
        here.mkdir(parents=True)
        for suffix in (".json", ".parquet"):
            (here / good.name).with_suffix(suffix).write_bytes(good.with_suffix(suffix).read_bytes())
        before = here / good.name
        (here / "z-r0-00000000.json").write_bytes(first(folder).read_bytes())  # what probes copy
        harm(before)
        (here / "z-r0-00000000.json").unlink()
        bad += list(here.glob("*.json"))
    found = stored.collect(folder)
    assert set(found.records) == set((folder / EXPERIMENT).glob("*.json")) and len(found.problems) == len(bad)
    html.write(folder, folder / "figures", folder / "report.html")
    said = (folder / "report.html").read_text()
    assert all(f"{path.parent.parent.name}/{EXPERIMENT}" in said for path in bad)


# --- JSON is strict --------------------------------------------------------------------------------------------------

ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    "document",
    [lambda x: x, lambda x: {"a": x}, lambda x: [1, {"b": (x, 2)}], lambda x: {"a": {"b": {"c": x}}}],
    ids=["alone", "in a mapping", "in lists", "deep"],
)
def test_documents_hold_null_and_say_so(capsys, document, value):
    console.stderr.file = sys.stderr
    try:
        found = console.as_json(document(value))
    finally:
        console.stderr.file = None
    assert json.loads(found) == json.loads(json.dumps(document(None)))
    assert f"is {value}" in capsys.readouterr().err


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_verdict_and_a_record_refuse_what_json_cannot_hold(value, make_record):
    known = {
        "id": "x",
        "title": "x",
        "kind": "claim",
        "primary": False,
        "paper": "x",
        "claim": "x",
        "unit": "1",
        "agreement": "not run",
    }
    known |= {"reason": "x", "records": []}
    for name in ("paper_value", "value", "tolerance"):
        fields = known | {"paper_value": 1.0, "tolerance": 0.1, name: value}
        refuses(lambda fields=fields: Verdict(**fields), ValidationError, "finite")
    refuses(lambda: make_record(point={"x": value}), ValidationError, "finite")
    refuses(lambda: record.Metric(value=value, unit="s"), ValidationError, "finite")


# --- what is written replaces ordinary files alone ---------------------------------------------------------------------


def _other(make):
    def prepare(folder: Path) -> Path:
        make(folder / "out.json")
        return folder / "out.json"

    return prepare


def _below(make):
    def prepare(folder: Path) -> Path:
        made = folder / "inside"
        make(made)
        return made / "out.json"

    return prepare


def _read_only(path: Path) -> None:
    path.mkdir(mode=0o500)


NOT_WRITABLE = [
    pytest.param(lambda folder: Path("/dev/null"), "is a device", id="/dev/null"),
    pytest.param(lambda folder: Path("/dev/full"), "is a device", id="/dev/full"),
    pytest.param(lambda folder: Path("/proc/self/environ"), "cannot be written", id="a file of the kernel"),
    pytest.param(lambda folder: Path("/proc/new.json"), "cannot be written", id="a new file of the kernel"),
    pytest.param(lambda folder: folder, "is a folder", id="a folder"),
    pytest.param(lambda folder: Path("."), "is a folder", id="the working directory"),
    pytest.param(lambda folder: Path("/"), "is a folder", id="the root"),
    pytest.param(_other(Path.mkdir), "is a folder", id="a folder of that name"),
    pytest.param(_other(os.mkfifo), "is a pipe", id="a pipe"),
    pytest.param(_other(make_socket), "is a socket", id="a socket"),
    pytest.param(_other(lambda path: path.symlink_to("/dev/null")), "is a device", id="a link to a device"),
    pytest.param(_other(lambda path: path.symlink_to(path.parent)), "is a folder", id="a link to a folder"),
    pytest.param(_other(lambda path: path.symlink_to(path)), "symbolic links", id="a link to itself"),
    pytest.param(_below(Path.touch), "Not a directory", id="below a file"),
    pytest.param(_below(lambda path: path.symlink_to("/dev/null")), "Not a directory", id="below a device"),
    pytest.param(lambda folder: folder / ("x" * 256), "File name too long", id="a name of 256 letters"),
    pytest.param(lambda folder: folder / ("ä" * 130), "File name too long", id="a name of 260 bytes"),
    pytest.param(lambda folder: folder.joinpath(*["x" * 200] * 30), "File name too long", id="a path of 6000 letters"),
    pytest.param(lambda folder: folder / "a\0b", "null", id="a name with NUL"),
    unless_root(_below(_read_only), "Permission denied", id="in a folder that is read-only"),
]


def kind(path: Path) -> object:
    try:
        found = path.lstat()
        return found.st_mode, found.st_ino, found.st_rdev
    except (OSError, ValueError):
        return None


@pytest.mark.parametrize(("prepare", "words"), NOT_WRITABLE)
def test_what_cannot_be_replaced_is_refused_and_left(tmp_path, prepare, words):
    path = prepare(tmp_path)
    before, names = kind(path), sorted(tmp_path.iterdir())
    refuses(lambda: files.try_writing(path), OSError, "cannot be written", words)
    try:
        with files.replacing(path) as temporary:
            temporary.write_text("new")
        raise AssertionError("replaced")
    except (OSError, ValueError):
        pass
    assert kind(path) == before and sorted(tmp_path.iterdir()) == names


WRITABLE = [
    pytest.param(lambda folder: folder / "out.json", id="a new file"),
    pytest.param(lambda folder: folder / "a/b/c/out.json", id="in new folders"),
    pytest.param(_other(Path.touch), id="an old file"),
    pytest.param(lambda folder: folder / ("x" * 255), id="a name of 255 letters"),
    pytest.param(lambda folder: folder / ("ä" * 127), id="a name of 254 bytes"),
    pytest.param(lambda folder: folder / "a b\n[*]?.json", id="a name with blanks, a line break and patterns"),
    pytest.param(lambda folder: folder / os.fsdecode(b"\xff\xfe"), id="a name that is not UTF-8"),
    pytest.param(_other(lambda path: path.symlink_to(path.parent / "new")), id="a link to nothing yet"),
    pytest.param(_other(lambda path: (path.with_name("old").touch(), path.symlink_to("old"))), id="a link to a file"),
]


@pytest.mark.parametrize("prepare", WRITABLE)
def test_ordinary_files_are_replaced_and_links_followed(tmp_path, prepare):
    path = prepare(tmp_path)
    link = path.is_symlink()
    files.try_writing(path)
    with files.replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and path.is_symlink() == link
    assert not [name for name in path.parent.iterdir() if name.name.endswith(".tmp")]


def test_an_existing_file_stays_when_it_is_only_tried(tmp_path):
    (path := tmp_path / "a.json").write_text("old")
    files.try_writing(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_users_mask_is_kept(tmp_path):
    old = os.umask(0o077)
    try:
        with files.replacing(tmp_path / "a"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.root
@pytest.mark.skipif(not ROOT or sys.platform != "linux", reason="mounts small file systems: needs root on Linux")
@pytest.mark.parametrize(("options", "words"), [("size=4k", "No space left"), ("ro", "Read-only file system")])
def test_a_full_and_a_read_only_disk_say_so_first(tmp_path, options, words):
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        if options != "ro":
            (disk / "full").write_bytes(bytes(4096))
        refuses(lambda: files.try_writing(disk / "out.json"), OSError, str(disk / "out.json"), words)
        assert not [path for path in disk.iterdir() if path.name != "full"]
    finally:
        subprocess.run(["umount", disk], check=True)


# --- what killed runs leave --------------------------------------------------------------------------------------------

KILLED = """
import os, pathlib, signal, sys
from repro.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print(temporary, flush=True)
    sys.stdin.read() if sys.argv[2] == "alive" else os.kill(os.getpid(), signal.SIGKILL)
"""


def writer(path: Path, how: str) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", KILLED, str(path), how], **pipes)


@pytest.mark.parametrize("name", ["run.json", "x[1].json", "x" * 250 + ".json"])
def test_the_next_writer_clears_what_a_killed_one_left(tmp_path, name):
    dead = writer(tmp_path / name, "killed")
    left = Path(dead.communicate()[0].strip())
    assert dead.returncode == -signal.SIGKILL and left.exists()
    with files.replacing(tmp_path / "other.json"):
        assert left.exists(), "another file's writer leaves it alone"
    with files.replacing(tmp_path / name) as temporary:
        assert sorted(tmp_path.iterdir()) == sorted([temporary, tmp_path / "other.json"])


def test_what_a_living_writer_has_begun_stays(tmp_path):
    alive = writer(tmp_path / "run.json", "alive")
    begun = Path(alive.stdout.readline().strip())
    with files.replacing(tmp_path / "run.json") as temporary:
        temporary.write_text("first")
    assert begun.exists()
    alive.communicate("")
    assert alive.returncode == 0 and (tmp_path / "run.json").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


NOT_OURS = [
    ".run.json.tmp",
    ".run.json.short.tmp",
    "run.json.12345678.tmp",
    ".run.json.12345678.txt",
    ".run.json.123456789.tmp",
]


@pytest.mark.parametrize("name", NOT_OURS)
def test_files_of_other_names_stay(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with files.replacing(tmp_path / "run.json"):
        pass
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("target")], ids=["folder", "pipe", "link"]
)
def test_what_is_no_temporary_file_stays_under_such_a_name(tmp_path, make):
    (tmp_path / "target").write_text("kept")
    make(tmp_path / ".run.json.12345678.tmp")
    with files.replacing(tmp_path / "run.json"):
        pass
    assert (tmp_path / "target").read_text() == "kept"
    assert os.path.lexists(tmp_path / ".run.json.12345678.tmp")
