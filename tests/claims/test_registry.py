"""Claims: all are in the registry, values are read as declared, and no verdict is better than its evidence."""

import functools
import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from claims_made_up import TIMED, bad, claim, made, named, occasions, ok, pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro import paths
from repro.claims import document
from repro.claims import registry as claims
from repro.claims import sample as selection
from repro.claims.filters import accepts
from repro.claims.reading import Reading
from repro.experiments import stored
from repro.plan import config
from repro.plan import jobs as plan
from repro.plan.models import Job
from repro.records import provenance
from repro.records.record import Metric, Provenance, Record

ROWS = {
    "ZT-1", "ZT-2", "ZT-3", "ZT-4", "ZT-5", "ZP-1", "ZP-2", "EX-F2", "EX-ILP", "EX-F8", "EX-T1", "EX-E2E", "EX-F12",
    "FL-F4a", "FL-F4c", "FL-PROG", "FL-F7", "FL-F8", "FL-MS", "FL-TP", "FL-TRT", "SA-1", "SA-2", "SA-3", "SA-4",
}  # fmt: skip
REGISTRY = claims.load()


@functools.cache
def jobs_of(tier: str, platform: str | None = None) -> list[Job]:
    return plan.make(tier, platform).jobs


_GPU = "EX-F12.c", "EX-F12.d", "FL-F4a.k", "FL-F4a.t", "FL-F4a.u", "FL-PROG.e", "FL-MS.e"
ON_GPU = dict.fromkeys(_GPU, ("gpu", "laptop"))
ELSEWHERE = ON_GPU | {"FL-TP.c": ("cluster", "a100"), "ZT-2.c": ("cluster", "frontier")}
NOBODY = {"FL-TP.c", "ZT-2.c"}  # has run these
OWN = claim().model_dump(mode="json", exclude={"id", "paper", "version", "published"})
OWN["value"] |= {"where": {"plan": "old", "n": 1}}


def written(folder: Path, parts: dict[str, dict], **shared) -> Path:
    """A `claims.yaml` of one group."""
    papers = {
        "ZT": {"title": "t", "id": "2501.04266", "version": "v2"},
        "FL": {"title": "t", "id": "2305.13484", "version": "v1"},
    }
    scopes = {"here": {"outside": "too small"}, "far": {"outside": "too far"}}
    path = folder / "claims.yaml"
    whole = {"papers": papers, "scopes": scopes, "groups": {"all": shared | {"claims": parts}}}
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    return path


def verdict(records: dict[Path, Record], problems=(), **changes) -> claims.Verdict:
    return claims.evaluate([claim(**changes)], records, problems)[0]


# --- the registry ---


def test_every_row_is_in_the_registry_and_in_the_table():
    assert {one.base for one in REGISTRY} == ROWS
    table = claims.evaluate(REGISTRY, {})
    assert [row.id for row in table] == [one.id for one in REGISTRY]
    assert {row.agreement for row in table} == {"not run"} and all(row.reason for row in table)


def test_a_row_of_the_table_has_exactly_the_promised_keys():
    row = json.loads(verdict(named(*pair(1.0))).model_dump_json())
    keys = "id title kind primary paper claim paper_value value interval values occasions repeats unit evidence"
    keys += " tolerance agreement scope reason records older_code"
    assert sorted(row) == sorted(keys.split())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"comparison": "about"}, "comparison.*found 'about'.*'relative', 'absolute', 'ordering', 'trend'"),
        ({"tolerence": 1}, "tolerence.*known keys: .*tolerance"),
        ({"tolerance": "small"}, "tolerance.*found 'small'.*allowed: float"),
        ({"tag": "X"}, "tag.*found 'X'.*'R2'"),
        ({"tolerance": -1}, "tolerance.*greater than or equal to 0.*found -1"),
        ({"value": {"experiment": "e", "metric": "m", "where": {"a": {"above": 1}}}}, "where.*'a'.*must be a value"),
        ({"value": {"experiment": "e", "metric": "m", "sequence": [{}, {}]}}, "sequence and expect"),
        ({"experiments": ["timing"]}, "experiments.*known keys: "),
        ({"paper": "2501.04266"}, "found paper; allowed: any other key"),
        ({"paper_value": None}, "paper_value is a number for relative"),
        ({"scope": None}, "scope is missing"),
        ({"value": None}, "says in `needs` what would read it"),
        ({"value": None, "needs": "x", "kind": "self-check", "primary": True}, "primary: found a self-check"),
        ({"scope": "everywhere"}, "scope: found 'everywhere'; allowed: here, far"),
        ({"scope": {"evidence": ["measured"], "outside": ""}}, "scope.outside.*at least 1 character"),
        ({"scope": {"kinds": ["measured"], "outside": "x"}}, "scope.kinds.*known keys: evidence, where, outside"),
    ],
)
def test_a_mistake_in_the_yaml_names_file_claim_key_and_what_is_allowed(tmp_path, change, expected):
    path = written(tmp_path, {"ZT-1.a": OWN | change})
    with pytest.raises(config.ConfigError, match=expected) as caught:
        document.read(path)
    assert f"{path}: ZT-1.a" in str(caught.value)
    path = written(tmp_path, {"ZT-1.a": {k: v for k, v in OWN.items() if k not in change}}, **change)
    with pytest.raises(config.ConfigError, match=expected):  # the same where the group says it
        document.read(path)


@pytest.mark.parametrize("claim_id", ["ZT1", "XX-1", "ZT-1.aa", "ZT-1.", "zt-1"])
def test_an_id_of_no_claim_is_refused_with_the_allowed_form_in_words(tmp_path, claim_id):
    with pytest.raises(config.ConfigError) as caught:
        document.read(written(tmp_path, {claim_id: OWN}))
    assert f"groups.all.claims: found {claim_id!r}; allowed: the prefix of a paper (ZT, FL), a dash" in str(
        caught.value
    )


def test_a_paper_in_short_names_claims_that_exist(tmp_path):
    path = written(tmp_path, {"ZT-1.a": OWN})
    whole = yaml.safe_load(path.read_text())
    whole["papers"]["ZT"]["in_short"] = "It is {ZT-1.a} times as fast, and {ZT-1.b} times."
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(config.ConfigError, match=r"papers\.ZT\.in_short: found ZT-1\.b; allowed: ids of claims"):
        claims.load(path)


def test_doubled_ids_are_refused_within_a_group_and_between_groups(tmp_path):
    path = written(tmp_path, {"ZT-1.a": OWN})
    whole = yaml.safe_load(path.read_text())
    whole["groups"]["more"] = whole["groups"]["all"]
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(config.ConfigError, match=r"groups\.more\.claims: ZT-1\.a is given twice"):
        document.read(path)
    path.write_text("groups: {all: {claims: {ZT-2: {}, ZT-2: {}}}}")
    with pytest.raises(config.ConfigError, match="given twice: ZT-2"):
        document.read(path)


def test_a_claim_comes_before_its_group_and_that_before_the_paper(tmp_path):
    own = {key: OWN[key] for key in ("title", "where", "claim", "paper_value", "unit", "tag", "direction")}
    shared = {key: value for key, value in OWN.items() if key not in own} | {"tolerance": 0.1}
    near = {"tolerance": 0.2, "version": "v9", "value": {"where": {"plan": "new"}, "over": {"plan": "old"}}}
    path = written(tmp_path, {"ZT-1.b": own | near, "ZT-2": own, "ZT-1.a": own}, **shared | {"scope": "far"})
    first, second, third = document.read(path)
    assert [first.id, second.id, third.id] == ["ZT-1.a", "ZT-1.b", "ZT-2"], "rows as in the file, then by letter"
    assert (first.paper, first.version, first.tolerance, first.scope.outside) == ("2501.04266", "v2", 0.1, "too far")
    assert (second.version, second.tolerance, second.value.over) == ("v9", 0.2, {"plan": "old"})
    assert second.value.where == {"plan": "new", "n": 1} and first.value.where == {"plan": "old", "n": 1}


def test_published_numbers_are_checked(project):
    path = project / "data/published/flover.csv"
    (project / "data").unlink()
    path.parent.mkdir(parents=True)
    text = (paths.root() / "config/claims.yaml").read_text()
    (project / "config/claims.yaml").write_text(re.sub(r"\n +published: data/published/(?!flover).*", "", text))
    head = "claim,label,over,x,value,unit,tag\n"
    for row, expected in [
        ("FL-F4a.a,GPT-J,requests,1,5.6,s,IMAGE", "FL-F4a.a.*GPT-J.*tag.*found 'IMAGE'; allowed: 'R', 'R2'"),
        ("FL-F4a.a,GPT-J,requests,1,many,s,IMG", "value.*found 'many'; allowed: float"),
        ("FL-F4a.a,GPT-J,,1,5.6,s,IMG", "x and over"),
        ("FL-F9,GPT-J,requests,1,5.6,s,IMG", "claim: found FL-F9; allowed: ids of"),
    ]:
        path.write_text(head + row + "\n")
        with pytest.raises(config.ConfigError, match=rf"flover\.csv: .*{expected}"):
            claims.load()
    path.write_bytes(head.encode() + b"FL-F4a.a,\xff,requests,1,5.6,s,IMG\n")
    with pytest.raises(config.ConfigError, match=r"flover\.csv: found no UTF-8: .*0xff"):
        claims.load()
    path.write_text(head + f"FL-F4a.a,{'x' * 200_000},requests,1,5.6,s,IMG\n")
    with pytest.raises(config.ConfigError, match=r"flover\.csv: found no CSV: field larger"):
        claims.load()
    path.unlink()
    with pytest.raises(config.ConfigError, match=r"flover\.csv: cannot be read: No such file"):
        claims.load()


def test_published_numbers_for_figures():
    ratios = claims.published("ZT-1")
    assert [(p.label, p.value, p.tag) for p in ratios] == [
        ("ZeRO-3", 1, "R2"),
        ("ZeRO++", 1.405, "R2"),
        ("hierarchical", 2.398, "D"),
    ]
    fig8 = [p for p in claims.published("FL-F8") if p.label == "iterations"]
    assert (fig8[0].x, fig8[0].value, fig8[-1].x, fig8[-1].value, fig8[0].over) == (20, 557, 5000, 10694, "interval_ms")
    fused = {p.x: p.value for p in claims.published("FL-F4a.a") if p.label == "LLaMA-65B, Flover"}
    assert fused == {1: 10.8, 2: 11.4, 4: 12.5, 8: 14.4, 16: 18.7, 32: 27.2}
    assert [p.value for p in claims.published("ZT-1.d")] == [1.405]  # lists nothing: its own value
    assert {p.value for p in claims.published("EX-F8")} == {-40, -25}
    with pytest.raises(ValueError, match=r"no claim 'ZT-9', known: EX-E2E, EX-E2E\.a"):
        claims.published("ZT-9")


# --- from records to values ---


def test_ratios_are_paired_and_averaged_by_occasion():
    """Means of occasions, of logarithms, which nearly agree; the interval is of what the pairs inside them let expect."""
    row = verdict(named(*occasions([[2.0, 2.0], [1.98, 2.02], [2.02, 1.98], [2.0, 2.0]])), value=TIMED)
    assert row.value == pytest.approx((4.0 * 3.9996) ** (1 / 4))
    assert row.interval == pytest.approx((1.978, 2.023), abs=1e-3)
    assert row.agreement == "reproduced" and row.scope == "paper's setting" and len(row.records) == 16
    assert row.repeats == "8 of 8 interleaved pairs, on 4 occasions" and row.occasions == [0, 0, 1, 1, 2, 2, 3, 3]
    assert row.values == pytest.approx([2.0, 2.0, 1.98, 2.02, 2.02, 1.98, 2.0, 2.0])


@pytest.mark.parametrize("ratios", [[[2.0]], [[2.0, 2.0]], [[2.0] * 8], [[2.0] * 4, [2.0] * 4], [[2.0] * 2] * 3])
def test_fewer_pairs_or_occasions_than_a_claim_asks_for_are_inconclusive(ratios):
    row = verdict(named(*occasions(ratios)), value=TIMED)
    assert row.agreement == "inconclusive" and row.value == pytest.approx(2.0) and row.interval is None
    assert row.reason.startswith(f"too few runs ({row.repeats})")


def test_runs_beyond_those_that_were_asked_for_are_not_read():
    """Else one could run until the verdict comes."""
    row = verdict(named(*occasions([[2.0, 2.0]] * 4 + [[9.0, 9.0]])), value=TIMED)
    assert row.value == pytest.approx(2.0) and row.agreement == "reproduced"


def test_runs_without_a_partner_of_their_repeat_and_occasion_are_left_out_and_told():
    alone = ok(plan="old", ranks=4, repeat=1, metrics={"seconds": 99.0})
    row = verdict(named(*pair(1.0), alone), value=TIMED)
    assert row.value == 2.0 and len(row.records) == 2
    assert "1 runs have no partner of the same repeat and occasion; delete their records to run both" in row.reason
    seeds = TIMED | {"sampled": "seeds"}
    row = verdict(named(*pair(1.0), ok(plan="old", ranks=4, seed=1, metrics={"seconds": 2.0})), value=seeds)
    assert row.value == 2.0 and row.reason.endswith("1 runs have no partner of the same repeat and seed")
    old, new = pair(1.0)
    later = pair(1.0, hour=5)[1].provenance
    row = verdict(named(old, new.model_copy(update={"provenance": later})), value=TIMED)
    assert row.agreement == "not run"


@pytest.mark.parametrize(
    "kind, one, another",
    [("gpu", ["one"], ["another"]), ("cpu", "one", "another"), ("cpu_kind", "AVX2", "AVX-512"), ("cores", 2, 4)],
)
def test_runs_on_two_kinds_of_machine_are_no_pair(kind, one, another):
    runs = occasions([[2.0, 2.0]] * 4)
    on = made(runs, **{kind: one})
    (other,) = made(on[:1], **{kind: another})
    assert len(verdict(named(*on), value=TIMED).values) == 8
    row = verdict(named(other, *on[1:]), value=TIMED)
    assert len(row.values) == 7 and row.reason.endswith("2 runs have a partner on another kind of machine")


def test_an_occasion_whose_processor_says_more_joins_those_that_tell_its_name_alone():
    """Records of before 2026-11-29 do; where all say more, they must be of one kind."""
    runs = occasions([[2.0, 2.0]] * 4)
    assert len(verdict(named(*runs[:12], *made(runs[12:], cpu_kind="AVX2")), value=TIMED).values) == 8


def test_a_processor_that_tells_its_name_alone_does_not_join_two_kinds():
    runs = occasions([[2.0, 2.0]] * 4)
    on = [*runs[:4], *made(runs[4:8], cpu_kind="AVX2"), *made(runs[8:], cpu_kind="AVX-512")]
    row = verdict(named(*on), value=TIMED)
    assert len(row.values) == 4 and row.agreement == "inconclusive"


def test_pairs_of_two_kinds_of_machine_are_not_put_together():
    runs = occasions([[2.0, 2.0]] * 2 + [[1.0, 1.0]] * 2)
    row = verdict(named(*runs[:8], *made(runs[8:], cpu="another")), value=TIMED)
    assert row.value == pytest.approx(2.0) and row.agreement == "inconclusive" and len(row.values) == 4
    assert row.reason.endswith("8 runs ran on another kind of machine than the rest")


def test_runs_of_two_versions_of_the_code_are_told():
    runs = occasions([[2.0, 2.0]] * 4)
    row = verdict(named(*made(runs[:2], source_hash="another"), *runs[2:]), value=TIMED)
    assert len(row.values) == 8 and row.reason.endswith("the runs are of 2 versions of the code")
    assert "versions" not in verdict(named(*runs), value=TIMED).reason


def test_runs_by_two_versions_of_the_code_are_no_pair():
    runs = occasions([[2.0, 2.0]] * 4)
    row = verdict(named(*made(runs[:1], source_hash="another"), *runs[1:]), value=TIMED)
    assert len(row.values) == 7 and row.reason.endswith("2 runs have a partner by other code")


def test_what_has_all_its_runs_is_read_before_what_has_few():
    """Else a verdict would go when a single pair of a stronger kind is added, and come back when it is lost."""
    whole = occasions([[2.0, 2.0]] * 4, ranks=2, evidence="emulated")
    row = verdict(named(*whole, *pair(1.9, ranks=2)), value=TIMED)
    assert (row.agreement, row.evidence) == ("reproduced", "emulated") and "1 other configurations" in row.reason


def test_jobs_of_one_call_are_of_one_occasion_and_see_different_shares_of_a_nodes_gpus():
    """A queue starts them when it will; one uses both GPUs of a node, the other one of each of two."""
    shares = {"old": ["A"], "new": ["A"] * 4}
    runs = []
    for run in occasions([[2.0, 2.0]] * 4):
        plan = run.point["plan"]
        of_job = run.provenance.model_copy(update={"slurm": {"job": "1"}, "gpu": shares[plan]})
        later = timedelta(hours=3 * (plan == "new"))
        runs.append(run.model_copy(update={"provenance": moved(of_job, later)}))
    row = verdict(named(*runs), value=TIMED)
    assert len(row.values) == 8 and len(set(row.occasions)) == 4
    emulated = [run.model_copy(update={"evidence": "emulated"}) for run in runs]  # on nodes that are one machine
    scope = {"evidence": ["emulated"], "where": {}, "outside": "too small"}
    assert verdict(named(*emulated), value=TIMED, scope=scope).agreement == "not run"


def test_what_no_paper_states_is_no_claim():
    assert not [one.id for one in REGISTRY if one.kind == "claim" and one.tag == "INF"]


def moved(made: Provenance, by: timedelta) -> Provenance:
    return made.model_copy(update={"start": made.start + by, "end": made.end + by})


def test_what_a_claim_may_read_is_told_from_the_point():
    reading = Reading.model_validate(TIMED | {"where": {"plan": "old", "fabric": {"not": "unshaped*"}}})
    told = [reading.may_read({"plan": plan, "ranks": 4}) for plan in ("old", "new", "another")]
    assert told == [True, True, False]


def test_runs_without_a_finite_ratio_are_left_out_and_told():
    row = verdict(named(*pair(1.0), *pair(0.0, repeat=1)), value=TIMED)
    assert len(row.values) == 1 and row.reason.endswith("2 runs give no finite ratio")


def test_repeats_that_one_call_makes_are_of_one_occasion_however_long_it_takes():
    """Else a slow machine would have more occasions, and a narrower interval, from the same runs."""
    slow = [run for repeat in range(8) for run in pair(1.0, 2.0, repeat=repeat, hour=2 * repeat)]
    assert verdict(named(*slow), value=TIMED).occasions == [0, 0, 1, 1, 2, 2, 3, 3]
    # A pair of the second call within an hour of one of the first: all four are of one.
    hours = [0, 3, 2.5, 6, 20, 20, 30, 30]
    mixed = [run for repeat, hour in enumerate(hours) for run in pair(1.0, 2.0, repeat=repeat, hour=hour)]
    row = verdict(named(*mixed), value=TIMED)
    assert row.occasions == [0, 0, 0, 0, 1, 1, 2, 2] and row.agreement == "inconclusive"


def test_a_record_whose_series_does_not_serve_costs_the_claims_that_read_it_alone():
    run = ok(plan="old", ranks=4, metrics={"seconds": 2.0})
    value = {"experiment": "timing", "metric": "seconds", "sampled": "sequences", "columns": ["a", "b"]}
    row = verdict(named(run), value=value)
    assert row.agreement == "not run" and "000.json" in row.reason
    assert claims.evaluate([claim(value=value), claim()], named(*pair(1.0)))[1].value == 2.0


def test_seeds_are_averaged():
    runs = [run for seed in range(3) for run in pair(1.0, 2.0 + seed / 100, seed=seed, hour=seed)]
    value = TIMED | {"sampled": "seeds"}
    row = verdict(named(*runs), value=value)
    assert row.value == pytest.approx(2.01, abs=1e-4) and row.interval == pytest.approx((1.985, 2.035), abs=1e-3)
    assert row.repeats == "3 of 3 seeds" and row.agreement == "reproduced"
    assert verdict(named(*runs[:4]), value=value).agreement == "inconclusive"


def test_outside_the_scope_fields_that_no_filter_names_have_their_defaults():
    def found(**changes):
        return selection.read(
            claim().value, named(*pair(1.0, **changes)), lambda run: run.point["ranks"] > 4, False, {"size": 1}
        )

    assert isinstance(found(size=1), selection.Sample) and isinstance(found(size=2, ranks=8), selection.Sample)
    assert found(size=2).reason == "only runs with other settings than the claim's: size=2"


def test_a_scope_that_names_no_settings_leaves_them_at_their_defaults(monkeypatch):
    """Else whoever adds a run with another setting, and a name that comes first, would be asked for the verdict."""
    monkeypatch.setattr(claims.experiments, "names", lambda: ["timing"])
    monkeypatch.setattr(claims.experiments, "get", lambda name: SimpleNamespace(defaults={"size": 1}))
    runs, evidence_alone = named(*pair(1.0, size=2), *pair(1.5, size=1)), {"evidence": ["measured"], "outside": "-"}
    assert verdict(runs).value == 2.0
    assert verdict(runs, scope=evidence_alone).value == pytest.approx(2 / 1.5)


def test_evidence_kinds_and_configurations_are_never_mixed():
    only_across = named(pair(1.0, evidence="emulated")[0], pair(1.0)[1])
    assert verdict(only_across).agreement == "not run"
    across_sizes = named(pair(1.0, ranks=4)[0], pair(1.0, ranks=8)[1])
    assert "differ only in what is compared" in verdict(across_sizes).reason
    both = named(*pair(1.9, evidence="emulated"), *pair(1.0), *pair(1.7, evidence="modelled"))
    row = verdict(both)
    assert (row.value, row.evidence) == (2.0, "measured") and "2 other configurations" in row.reason


def test_a_configuration_in_scope_is_read_before_others():
    row = verdict(named(*pair(1.9, ranks=2), *pair(1.0, ranks=8)))
    assert row.value == 2.0 and (row.agreement, row.scope) == ("reproduced", "paper's setting")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"value": TIMED | {"factor": 100}}, "factor cancels in a ratio"),
        ({"direction": "lower"}, "found lower, which leads from paper_value towards no_effect"),
        ({"direction": "higher", "no_effect": 3.0}, "found higher, which leads from paper_value towards no_effect"),
    ],
)
def test_what_would_be_judged_the_wrong_way_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        claim(**changes)


def test_negative_numbers_are_no_steps_of_a_ratio():
    """A step from -1 to -2 is no increase by a factor of 2."""
    reading = claim().value.model_copy(update={"over": None, "sequence": [{}, {}], "expect": "increasing"})
    assert [reading.combine(pair, True) for pair in ([1.0, 2.0], [-1.0, -2.0], [-1.0, 2.0])] == [2, None, None]


@pytest.mark.parametrize(
    ("ranks", "evidence", "scope"),
    [(2, "measured", "scaled down"), (8, "emulated", "scaled down"), (8, "modelled", "modelled")],
)
def test_agreement_and_scope_are_two_things(ranks, evidence, scope):
    row = verdict(named(*pair(1.0, ranks=ranks, evidence=evidence)))
    assert row.value == 2.0 and (row.agreement, row.scope, row.evidence) == ("reproduced", scope, evidence)
    assert f"{scope}: too small" in row.reason


def test_skipped_and_failed_runs():
    skipped = bad("skipped", "missing_hardware", "needs root", plan="new", ranks=4)
    row = verdict(named(pair(1.0)[0], skipped))
    assert row.agreement == "skipped" and "missing_hardware (1): needs root" in row.reason and len(row.records) == 1
    failed = bad("failed", "timeout", "…\nTimeoutError: no result after 5 s", plan="new", ranks=4, repeat=1)
    row = verdict(named(pair(1.0)[0], skipped, failed))
    assert row.agreement == "not run" and row.reason.startswith("failed: timeout (1): TimeoutError: no result")
    assert "1 of 2 runs" in row.reason
    row = verdict(named(*pair(1.0), failed))
    assert row.agreement == "reproduced" and "failed: timeout (1 of 3 runs)" in row.reason


def test_a_condition_keeps_runs_out_and_the_reason_says_what_they_had():
    value = {"experiment": "timing", "metric": "seconds", "where": {"fabric": {"not": "unshaped*"}}}
    unshaped = ok(ranks=4, metrics={"seconds": 2.0}, conditions={"fabric": "unshaped: no root"})
    row = verdict(named(unshaped), value=value, no_effect=None)
    assert row.agreement == "not run" and "only with fabric unshaped: no root" in row.reason
    shaped = ok(ranks=4, metrics={"seconds": 2.0}, conditions={"fabric": "shaped"})
    assert verdict(named(unshaped, shaped), value=value, no_effect=None).agreement == "reproduced"


def test_forms_of_a_reading():
    runs = named(
        *(ok(n=n, ranks=4, metrics={"t": t, "m": 4.0, "zero": 0.0}) for n, t in ((1, 8.0), (2, 4.0), (3, 3.0)))
    )

    def value(**reading):
        found = selection.read(Reading(experiment="timing", **reading), runs, lambda run: True, ordering=True)
        return found.values if isinstance(found, selection.Sample) else found.reason

    assert value(metric="t", where={"n": 2}, per="m") == [1.0]
    assert value(metric="t", where={"n": 2}, per="n", factor=0.5) == [1.0]
    assert value(metric="t", where={"n": 3}, per="m", complement=True) == [0.25]
    assert value(metric="t", where={"n": 2}, over={"n": 1}) == [0.5]
    assert value(metric="t", where={"n": 3}, over={"n": 2}, form="reduction") == [0.25]
    falling = [{"n": 1}, {"n": 2}, {"n": 3}]
    assert value(metric="t", sequence=falling, expect="decreasing") == [pytest.approx(4 / 3)]
    assert value(metric="t", sequence=falling, expect="increasing") == [0.5]
    assert value(metric="t", where={"n": 1}, per="m", over={"n": {"min": 3}}) == [pytest.approx(8 / 3)]
    assert "give no t per zero" in value(metric="t", per="zero")
    assert "give no speed" in value(metric="speed")
    assert "their ratio is no finite number" in value(metric="zero", where={"n": 1}, over={"n": 2})
    assert "(only with n 1, 2, 3)" in value(metric="t", where={"n": 7})


def test_a_prediction_is_judged_on_its_own_band():
    """One run, no repeats: its low and high are the interval; complemented, they change places."""
    bounds = {"gain": 2.0, "gain_low": 1.9, "gain_high": 2.6, "share": 0.3, "share_low": 0.2, "share_high": 0.5}
    runs = named(ok(ranks=4, evidence="modelled", metrics=bounds))
    value = {"experiment": "timing", "metric": "gain", "banded": True}
    row = verdict(runs, value=value, tolerance=0.4)
    assert row.interval == (1.9, 2.6) and row.scope == "modelled" and row.agreement == "reproduced"
    assert "a prediction with its band" in row.reason
    assert verdict(runs, value=value, paper_value=1.0, no_effect=0.5).agreement == "same direction"
    assert verdict(runs, value=value, no_effect=1.95).agreement == "inconclusive", "the band reaches over no effect"
    saved = verdict(runs, value=value | {"metric": "share", "complement": True}, paper_value=0.67, no_effect=0)
    assert saved.value == pytest.approx(0.7) and saved.interval == pytest.approx((0.5, 0.8))
    with pytest.raises(ValueError, match="no over, sequence or per"):
        Reading(experiment="timing", metric="gain", banded=True, per="m")


@pytest.mark.parametrize(
    ("wanted", "found", "expected"),
    [
        (5.6, 5.6000000001, True), (5, 5.0, True), ("a", "b", False), ([1, 2], 2, True), ([], 2, False), ({}, None, True),
        ({"min": 2}, 2, True), ({"min": 2, "max": 3}, 4, False), ({"min": 2}, "x", False), ({"not": "un*"}, "unshaped", False),
        ({"not": "un*"}, "shaped", True), ([{"max": 1}, 7], 7, True),
    ],
)  # fmt: skip
def test_filters(wanted, found, expected):
    assert accepts(wanted, found) is expected


def test_damaged_files_of_the_experiment_are_mentioned():
    """Those in its folder, whatever the folders above are called."""
    cut, other = "results/x/records/timing/cut.json: not a run record", "/home/timing/records/other/b.json: …"
    row = verdict(named(*pair(1.0)), problems=[cut, other])
    assert row.reason.endswith("1 file among the records not used") and row.agreement == "reproduced"


def test_records_are_named_relative_to_the_root():
    path = paths.root() / "results/reference/some/records/timing/a.json"
    row = verdict({path: pair(1.0)[0], path.with_name("b.json"): pair(1.0)[1]})
    assert row.records == [f"results/reference/some/records/timing/{name}.json" for name in "ab"]


def test_numbers_as_text():
    changes = {"interval": (2, 2.4), "value": 2.2, "older_code": False}
    row = verdict(named(*pair(1.0))).model_copy(update=changes)
    assert claims.numbers(row) == ("2 ×", "2.2 × [2, 2.4]") and claims.numbers(row, interval=False) == ("2 ×", "2.2 ×")
    changes = {"paper_value": 10694.0, "value": None, "interval": None, "unit": "1"}
    assert claims.numbers(row.model_copy(update=changes)) == ("10,694", "–")


def test_what_rests_on_a_run_by_older_code_is_marked(monkeypatch):
    monkeypatch.setattr(provenance, "exists", lambda module: True)
    monkeypatch.setattr(provenance, "source_hash", lambda module: "now")

    def by(*hashes: str) -> claims.Verdict:
        runs = [made([run], source_hash=each)[0] for run, each in zip(pair(1.0), hashes, strict=True)]
        return verdict(named(*runs))

    assert [by(*hashes).older_code for hashes in (("now", "now"), ("now", "then"), ("", ""))] == [False, True, True]
    ours = claims.numbers(by("then", "now"))[1]
    assert ours.endswith("×†") and claims.older_code(["1 ×", ours]).startswith("† rests on runs by older code")
    assert claims.older_code(["1 ×"]) == ""
    nothing = verdict({})
    assert not nothing.older_code and claims.numbers(nothing)[1] == "–"


@given(data=st.data())
def test_no_claim_is_reproduced_without_a_good_run(data):
    """Random failed and skipped runs on every point that the registry asks for never give a verdict on a number."""
    one = data.draw(st.sampled_from([one for one in REGISTRY if one.value is not None]))
    groups = one.value.groups
    scalars = [{k: v for k, v in group.items() if not isinstance(v, dict | list)} for group in groups]
    runs = {}
    for number in range(data.draw(st.integers(0, 5))):
        status = data.draw(st.sampled_from(["failed", "skipped"]))
        run = bad(status, data.draw(st.sampled_from(["oom", "timeout", "missing_hardware"])), repeat=number,
                  **data.draw(st.sampled_from(scalars)))  # fmt: skip
        numbers = {name: Metric(value=1.0, unit="1") for name in one.value.metrics}  # that were told before it failed
        about = {"experiment": one.value.experiment, "evidence": "measured", "metrics": numbers}
        runs[Path(f"{number}.json")] = run.model_copy(update=about)
    row = claims.evaluate([one], runs)[0]
    assert row.agreement in {"not run", "skipped"} and row.value is None and row.interval is None
    if row.agreement == "skipped":
        assert {run.status for run in runs.values()} == {"skipped"} or len(groups) > 1


@pytest.mark.parametrize("claim_id", [claim.id for claim in REGISTRY if claim.value is not None])
def test_a_tier_runs_every_group_that_a_claim_compares(claim_id):
    """The grids of config.yaml and the filters of claims.yaml meet, on the full tier or where there are GPUs.

    Else a claim reads *not run* for ever.
    """
    reading = next(claim.value for claim in REGISTRY if claim.id == claim_id)
    jobs = jobs_of(*ELSEWHERE.get(claim_id, ("full",)))
    points = [job.point.model_dump() for job in jobs if job.experiment == reading.experiment]
    cells = []
    for filters in reading.groups:
        planned = [
            ok(reading.experiment, metrics={reading.metric: 1.0}, **point)
            for point in points
            if all(accepts(wanted, point[name]) for name, wanted in filters.items() if name in point)
        ]
        cells.append({reading.configuration(run) for run in planned})
    assert set.intersection(*cells), "no configuration has a point in every group"


SHIPPED = paths.root() / "results/reference" / config.load()[0].reference / "records"


@pytest.fixture(scope="module")
def shipped():
    return stored.collect(SHIPPED)


@pytest.fixture(scope="module")
def judged(shipped):
    """Of a claim the records of its experiment, and the verdict by all of them; once each."""

    @functools.cache
    def judge(name):
        one = claims.claim(name)
        mine = {path: run for path, run in shipped.records.items() if run.experiment == one.value.experiment}
        return mine, claims.evaluate([one], mine)[0]

    return judge


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_removing_records_moves_a_verdict_only_towards_inconclusive_or_not_run(judged, data):
    one = data.draw(st.sampled_from([one for one in REGISTRY if one.value is not None]))
    mine, whole = judged(one.id)
    read = [paths.root() / name for name in whole.records]
    gone = set(data.draw(st.lists(st.sampled_from(read or [Path()]), min_size=1, max_size=4)))
    gone |= set(data.draw(st.lists(st.sampled_from(sorted(mine) or [Path()]), max_size=len(mine) // 2)))
    row = claims.evaluate([one], {path: run for path, run in mine.items() if path not in gone})[0]
    assert row.agreement in {whole.agreement, "inconclusive", "not run", "skipped"}


def test_the_shipped_records_answer_every_claim_that_an_experiment_reads(shipped):
    verdicts = claims.evaluate(REGISTRY, shipped.records, shipped.problems)
    readable = {claim.id for claim in REGISTRY if claim.value is not None} - NOBODY
    judged = {verdict.id for verdict in verdicts if verdict.agreement != "not run"}
    assert judged == readable


def test_without_root_no_clock_of_emulated_runs_is_believed(shipped):
    """The same runs over links that were not shaped: their bytes are judged, their times are not."""
    unshaped = {"fabric": "unshaped: no root"}
    runs = {
        path: run.model_copy(update={"conditions": run.conditions | unshaped, "evidence": "measured"})
        for path, run in shipped.records.items()
        if run.evidence == "emulated"
    }
    judged = {row.id for row in claims.evaluate(REGISTRY, runs) if row.agreement != "not run"}
    of_clocks = {claim.id for claim in REGISTRY if claim.value and claim.value.sampled == "occasions"}
    assert not judged & (of_clocks | {claim.id for claim in REGISTRY if claim.needs_shaped_links})
    assert {"ZP-1.a", "ZP-1.c", "EX-T1.a"} <= judged, "bytes are counted on any links"


READING_MISTAKES = {
    "experiment": ({"experiment": "zero_trian"}, {}, "value.experiment: found 'zero_trian'; allowed: .*zero_train"),
    "metric": ({"metric": "step_secnds"}, {}, "value.metric: found step_secnds; allowed: .*step_seconds"),
    "field": ({"where": {"plann": "zero3"}}, {}, "value.where, over or sequence: found plann; allowed: .*plan"),
    "value": ({"where": {"plan": "zerop"}}, {}, "value: plan.*'zerop'.*'zeropp'"),
    "other side": ({"over": {"plan": "hierarchicall"}}, {}, "value: plan.*'hierarchicall'.*'hierarchical'"),
    "scope": ({}, {"nodess": 3}, "scope.where: found nodess; allowed: .*nodes"),
}


@pytest.mark.parametrize("name", READING_MISTAKES)
def test_a_claim_that_asks_for_what_no_experiment_has_is_refused(tmp_path, name):
    change, where, words = READING_MISTAKES[name]
    value = {"experiment": "zero_train", "metric": "step_seconds", "where": {"plan": "zero3"}}
    own = OWN | {"value": value | change, "scope": {"where": where, "outside": "too small"}}
    with pytest.raises(config.ConfigError, match=rf"(?s)claims\.yaml: ZT-1\.a: {words}"):
        claims.load(written(tmp_path, {"ZT-1.a": own}))


@pytest.mark.parametrize(("metric", "unit"), [("step_seconds", "s"), ("tflops_per_rank", "TFLOP/s")])
def test_what_a_clock_measures_is_not_read_from_one_run(tmp_path, metric, unit):
    value = {"experiment": "zero_train", "metric": metric, "where": {"plan": "zero3"}}
    own = OWN | {"unit": unit, "value": value, "scope": {"outside": "too small"}}
    said = rf"value.sampled: found once, of {metric} in {unit}; allowed: occasions"
    with pytest.raises(config.ConfigError, match=said):
        claims.load(written(tmp_path, {"ZT-1.a": own}))


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ({"metric": "step_seconds"}, "s"),
        ({"metric": "step_seconds", "over": {"plan": "zeropp"}}, "1, ×"),
        ({"metric": "state_bytes_per_rank", "per": "predicted_state_bytes_per_rank"}, "1, ×"),
        ({"metric": "state_bytes_per_rank", "per": "predicted_state_bytes_per_rank", "factor": 100}, "%"),
        ({"metric": "state_bytes_per_rank", "per": "steps"}, None),
        ({"metric": "step_seconds", "factor": 1000}, None),
    ],
)
def test_the_unit_of_a_claim_is_that_of_what_it_reads(tmp_path, value, units):
    own = OWN | {
        "unit": "apples",
        "value": {"experiment": "zero_train", "sampled": "occasions"} | value,
        "scope": {"outside": "too small"},
    }
    path = written(tmp_path, {"ZT-1.a": own})
    if units is None:  # only the claim knows it
        assert claims.load(path)[0].unit == "apples"
        return
    with pytest.raises(config.ConfigError, match=rf"ZT-1\.a: unit: found 'apples'; allowed: {units}$"):
        claims.load(path)


def test_loading_the_claims_loads_nothing_that_only_evaluation_needs():
    heavy = {"numpy", "torch", "scipy", "numba", "pandas", "matplotlib"}
    code = f"import sys\nfrom repro.claims import registry\nregistry.load()\nprint({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
