"""Explanations: checked when they are loaded, with numbers of records alone, for whatever is open in the shipped records."""

import re
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from typer.testing import CliRunner

from repro import cli, experiments, paths
from repro.claims import registry, verdict
from repro.cli.explain import _show
from repro.experiments import stored
from repro.plan import config, jobs
from repro.records import record, statistics
from repro.report import explanations

SHIPPED = paths.root() / config.load()[0].shipped
CLAIMS = registry.load()
DECLARED = explanations.load(CLAIMS)
DRAWN = {"figure": "zero_loss", "experiment": "zero_train", "tier": "full"}
GOOD = {"claims": ["ZT-1.a"], "why": "so", "decides": {"says": "this", "hardware": "any"}}


@pytest.fixture(scope="module")
def records():
    return stored.collect(SHIPPED / "records").records


def test_what_deviates_or_is_no_answer_yet_has_an_explanation(records):
    rows = registry.evaluate(CLAIMS, records)
    open_rows = [row.id for row in rows if row.kind == "claim" and row.agreement in explanations.OPEN]
    assert not set(open_rows) - DECLARED.keys()


def test_whatever_is_open_has_a_command_that_decides_or_says_that_there_is_none(records, capsys):
    claims = {claim.id: claim for claim in CLAIMS}
    rows = registry.evaluate(CLAIMS, records)
    commands = set()
    for row in [row for row in rows if row.id in DECLARED and row.agreement in explanations.OPEN]:
        told = explanations.tell(claims[row.id], DECLARED[row.id], {}, verdict=row)
        _show(told)
        end = capsys.readouterr().out.split("What would decide it")[1]
        assert (told.command or explanations.NO_COMMAND) in end, row.id
        assert bool(told.command) != (explanations.NO_COMMAND in end), row.id
        commands.add(told.command)
    assert "" in commands and len(commands) > 1, "some of each"


@pytest.mark.parametrize(
    "claim", [claim for claim in CLAIMS if claim.primary and claim.id in DECLARED], ids=lambda c: c.id
)
def test_an_explanation_is_told_with_and_without_records(records, claim):
    (row,) = registry.evaluate([claim], records)
    told = explanations.tell(claim, DECLARED[claim.id], records, row)
    assert told.why and told.decides is not None and len(told.rungs) == len(DECLARED[claim.id].ladder)
    bare = explanations.tell(claim, DECLARED[claim.id], {}, row)
    assert {word for _, _, word in bare.rungs} <= {"not run"} and not any(rows for _, _, rows in bare.tables)


def test_every_command_has_points_in_the_plan():
    told = {one.decides.says: one.decides for one in DECLARED.values() if one.decides.figure}
    costs = {says: explanations.cost(decides) for says, decides in told.items()}
    assert costs and all(points > 0 and minutes > 0 for points, minutes in costs.values()), costs


DECIDING = {one.decides.judges[0]: one.decides for one in DECLARED.values() if one.decides.judges}


@pytest.mark.parametrize("decides", DECIDING.values(), ids=DECIDING.keys())
def test_the_points_that_would_decide_claims_judge_them(decides, make_record, tmp_path):
    """As an allocation would have run them, on every occasion that a verdict takes."""
    kind, found = experiments.get(decides.experiment), {}
    planned = [job for job in jobs.make(decides.tier, decides.platform).jobs if job.experiment == decides.experiment]
    for number, job in enumerate(planned):
        sizes = {"parameters": job.point.gpt.parameters} if decides.experiment == "zero_train" else {}
        metrics = {
            name: record.Metric(value=sizes.get(name, 1.5), unit=unit) for name, unit in kind.metrics.units().items()
        }
        for occasion in range(statistics.OCCASIONS):
            start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=10 * occasion, seconds=number)
            found[tmp_path / f"{number}-{occasion}.json"] = make_record(
                experiment=decides.experiment,
                point=job.point.model_dump(),
                repeat=2 * occasion + job.repeat,
                seed=job.point.seed,
                evidence="measured",
                metrics=metrics,
                conditions={"fabric": "the machine's own"},
                provenance=record.Provenance(start=start, end=start),
            )
    judged = [claim for claim in CLAIMS if claim.id in decides.judges]
    for claim, row in zip(judged, registry.evaluate(judged, found), strict=True):
        assert row.agreement in set(verdict.AGREEMENT) - {"inconclusive"} and len(row.values) >= claim.value.needed, row
        assert row.scope == ("scaled down" if decides.tier == "gpu" else "paper's setting"), row


@pytest.mark.parametrize("command", sorted({explanations.command(one.decides) for one in DECLARED.values()} - {""}))
def test_the_commands_are_those_of_their_platforms(command):
    """Snakemake's with a profile where points are Slurm jobs, which `repro reproduce` refuses."""
    if profile := re.fullmatch(r"snakemake --profile (\S+) (\w+)", command):
        run = yaml.safe_load((paths.root() / profile[1] / "run.yaml").read_text())
        assert config.load(platform=run["platform"])[1].slurm is not None
    else:
        named = re.fullmatch(r"repro reproduce \w+ --tier \w+ --platform (\w+)( --occasion \d)?", command)
        assert named and config.load(platform=named[1])[1].slurm is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"claims": ["ZT-9"]}, "claims: found 'ZT-9'; allowed: an id of"),
        ({"claims": ["ZT-1.a", "ZT-1.a"]}, "found 'ZT-1.a'; allowed: one explanation a claim"),
        ({"ladder": [{"says": "x", "value": {"metric": "speed"}}]}, "ladder: ZT-1.a.*found speed; allowed: "),
        ({"ladder": [{"says": "x", "value": {"where": {"plam": "x"}}}]}, "found plam; allowed: "),
        ({"ladder": [{"says": "x", "value": {"wher": {}}}]}, "wher.*known keys"),
        ({"tables": [{"says": "x", "experiment": "zero", "columns": ["a"]}]}, "found 'zero'; allowed: exflow_affinity"),
        ({"decides": {**GOOD["decides"], "figure": "zero"}}, "decides.figure: found 'zero'; allowed: claims_overview"),
        ({"decides": {**GOOD["decides"], "judges": ["ZT-9"]}}, "decides.judges: found 'ZT-9'; allowed: ZT-1.a"),
        ({"decides": {**GOOD["decides"], **DRAWN, "tier": "ful"}}, "decides.tier: found 'ful'; allowed: smoke"),
        (
            {"decides": {**GOOD["decides"], **DRAWN, "platform": "fronteir"}},
            "platform: found 'fronteir'; allowed: .*frontier",
        ),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_mistake_names_file_key_and_what_is_allowed(tmp_path, change, words):
    path = tmp_path / "explanations.yaml"
    path.write_text(yaml.safe_dump({"explanations": [GOOD | change]}))
    with pytest.raises(config.ConfigError, match=words) as caught:
        explanations.load(CLAIMS, path)
    assert str(path) in str(caught.value)


def test_from_the_command_line():
    def call(*words: str, code: int = 0) -> str:
        found = CliRunner().invoke(cli.app, ["explain", *words, "--results", str(SHIPPED)])
        assert found.exit_code == code, found.output
        return found.output

    assert "one of them: repro explain ID" in call()
    one = call("ZT-1.a")
    assert "What would decide it" in one and "workflows/profiles/frontier --config claim=ZT-1.a" in one
    assert "they judge this claim" in one and "they inform but do not judge this claim" in call("EX-E2E.a")
    assert "allowed: ZT-1.a" in call("ZT-9", code=2)
