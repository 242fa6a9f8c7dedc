"""Two folders of records side by side: claims here, metrics of records in test_metrics.py."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from claims_made_up import TIMED, claim, made, named, occasions, pair
from hypothesis import given
from hypothesis import strategies as st

from repro import paths
from repro.claims import compare, interval, registry
from repro.claims.reading import Reading
from repro.claims.sides import Row, Side, shipped
from repro.experiments.common import sequences
from repro.records import record


def side(name, one, runs):
    found = named(*runs)
    return Side(name, Path(name), found, registry.evaluate([one], found))


def beside(ours, theirs, **changes):
    one = claim(**changes)
    (row,) = compare.of_claims([one], side("A", one, ours), side("B", one, theirs))
    return row


OURS = occasions([[2.0, 2.0], [1.8, 1.9], [2.2, 2.1], [2.0, 2.0]])


@pytest.mark.parametrize(("ratios", "inside"), [([2.1, 1.8], True), ([2.4, 2.3], True), ([3.5, 3.6], False)])
def test_one_occasion_agrees_where_the_other_side_s_occasions_expect_it(ratios, inside):
    found = beside(occasions([ratios]), OURS, value=TIMED)
    assert found.inside is inside and found.said.startswith("inside [" if inside else "outside [")
    assert found.verdicts == (f"inconclusive{registry.OLDER}", f"consistent{registry.OLDER}") and not found.flipped


def test_more_occasions_are_expected_nearer_to_the_mean():
    one = claim(value=TIMED)
    known = registry.evaluate([one], named(*OURS))[0]
    (low, high), (lower, higher) = (compare.expected(one.value, known, many) for many in (3, 1))
    assert lower < low < 2.0 < high < higher


def test_an_occasion_that_the_others_do_not_expect_is_found():
    one = claim(value=TIMED)

    def inside(*pairs):
        return compare.held_out([one], registry.evaluate([one], named(*occasions(pairs))))

    assert inside([2.0, 2.0], [1.8, 1.8], [2.2, 2.2], [2.1, 2.1]) == [True] * 4
    assert inside([2.0, 2.0], [2.01, 2.01], [1.99, 1.99], [4.0, 4.0]) == [True] * 3 + [False]
    assert inside([2.0, 2.0], [1.8, 1.8], [2.2, 2.2]) == []  # a verdict takes more


def test_shipped_intervals_hold_as_often_as_they_say():
    """19 of 20, less what chance does: 80 occasions that are independent fall below 0.85 once in 6,000 times."""
    here = shipped(claims := registry.load())
    held = compare.held_out(claims, here.verdicts)
    assert len(held) > 60 and sum(held) / len(held) >= 0.85


def test_what_cannot_be_compared_says_why():
    def untold(*sides):
        found = beside(*sides, value=TIMED)
        assert found.inside is None and not found.differs and compare.cells(found)["answer"] == "–"
        return found.said

    assert untold([], OURS) == "no value: A not run"
    assert untold(OURS, []) == "no value: B not run"
    few = "too few runs: B has 2 of 8 interleaved pairs, on 1 occasion of 4"
    assert untold(OURS, occasions([[2.0, 2.0]])) == few
    assert untold(occasions([[2.0]], evidence="emulated"), OURS) == "other evidence: A emulated, B measured"
    assert untold(occasions([[2.0]], ranks=8), OURS) == "other settings: ranks 8 (B 4)"


def test_what_no_clock_measures_is_the_same_or_another():
    assert beside(pair(1.0), pair(1.0)).said == "the same value"
    assert beside(pair(1.0), pair(1.1)).inside is False


def test_runs_of_other_code_never_agree_and_their_difference_is_said():
    same, other = (
        beside(made(pair(value), source_hash="new"), made(pair(1.0), source_hash="old")) for value in (1.0, 1.1)
    )
    assert same.inside is None and same.said == "other code: the same value"
    assert other.inside is False and other.said.endswith("by other code")


def test_other_code_for_gpus_is_other_code_where_both_had_one():
    def on(gpu_hash):
        return made(pair(1.0), gpu_hash=gpu_hash)

    said = {(a, b): beside(on(a), on(b)).said for a in ("", "x") for b in ("x", "y")}
    assert said["x", "y"] == "other code: the same value"
    assert said["x", "x"] == said["", "x"] == "the same value"


def test_a_difference_between_processors_is_said_as_one():
    ours = made(pair(1.0), cpu="another")
    same, other = (beside(made(pair(value), cpu="one"), ours) for value in (1.0, 1.1))
    assert same.inside is True and other.inside is False and other.said.endswith("; on another processor")
    both = beside(made(pair(1.1), cpu="one", source_hash="new"), made(ours, source_hash="old"))
    assert both.said.endswith("; by other code, on another processor")


def test_processors_of_one_name_differ_by_their_kind_where_both_are_known():
    def on(kind, value):
        return made(pair(value), cpu="AMD EPYC", cpu_kind=kind)

    kinds = itertools.product(("", "x", "y"), repeat=2)
    said = {(a, b): beside(on(a, 1.1), on(b, 1.0)).said for a, b in kinds}
    apart = {kinds for kinds, words in said.items() if words.endswith("; on another processor")}
    assert apart == {("x", "y"), ("y", "x")}


def test_a_run_that_tells_a_processor_s_name_alone_does_not_hide_that_the_others_differ():
    ours, theirs = (made(pair(new), cpu="AMD EPYC", cpu_kind=kind) for new, kind in ((1.1, "x"), (1.0, "y")))
    assert beside(ours, [*made(theirs[:1], cpu_kind=""), *theirs[1:]]).said.endswith("; on another processor")


def test_another_verdict_is_a_flip_where_both_sides_have_one():
    found = beside(pair(1.0), pair(1.5))
    assert found.flipped and found.verdicts == (f"reproduced{registry.OLDER}", f"same direction{registry.OLDER}")
    assert compare.cells(found)["answer"] == "flipped" and "1 verdict flipped" in compare.sentence([found], "claims")
    assert not beside(pair(1.0), pair(1.5, evidence="emulated")).flipped


@given(*[st.lists(st.floats(0.5, 4), min_size=2, max_size=2)] * 2)
def test_swapping_the_sides_inverts_every_ratio(ours, theirs):
    for changes, sides in (
        ({"value": TIMED}, (occasions([ours]), occasions([theirs]))),
        ({}, (pair(*ours), pair(*theirs))),
    ):
        one, other = (beside(*each, **changes).ratio for each in (sides, sides[::-1]))
        assert one * other == pytest.approx(1)


def test_a_value_of_fewer_seeds_is_not_the_same_value():
    seeds = [run for seed in range(3) for run in pair(1.0 + seed / 10, seed=seed)]
    once = {"value": claim().value.model_dump() | {"where": {"plan": "old", "seed": {}}, "runs": 3}}
    found = beside(seeds[:2], seeds, **once)
    assert found.inside is None and found.said.startswith("other runs: A rests on 2, B on 6")


def test_one_seed_of_what_is_resampled_by_sequences_is_the_same_value_or_another():
    (one,) = (known for known in registry.load() if known.id == "EX-F8.d")
    folder = paths.root() / "results/reference/laptop-2core/records/exflow_placement"
    files = [*folder.glob("gpt_moe_64e-*-4gpus-tokensall-*.json")]
    # Shipped runs may be of several versions of the code.
    runs = dict(zip(files, made(map(record.read, files), source_hash="one"), strict=True))

    def of(runs):
        return Side("A", folder, runs, registry.evaluate([one], runs))

    ours, theirs = of({path: run for path, run in runs.items() if run.seed == 0}), of(runs)
    (found,) = compare.of_claims([one], ours, theirs)
    assert found.inside and found.said == "the same, of 1 of 3 seeds" and not found.flipped
    for value in (1.01 * theirs.verdicts[0].values[0], theirs.verdicts[0].values[1]):  # of no seed, of another
        ours.verdicts[0].values[0] = value
        (found,) = compare.of_claims([one], ours, theirs)
        assert found.inside is False


@pytest.mark.parametrize("name", ["EX-ILP.c", "EX-ILP.h", "EX-ILP.i", "EX-F8.d"])
def test_no_interval_of_sequences_leaves_out_one_of_its_own_seeds(name):
    """A seed draws what experts are placed by: other sequences alone tell nothing of that."""
    (one,) = (known for known in registry.load() if known.id == name)
    folder = paths.root() / "results/reference/laptop-2core/records/exflow_placement"
    (row,) = registry.evaluate([one], {path: record.read(path) for path in folder.glob("*.json")})
    low, high = row.interval
    assert len(row.values) == 3 and low < min(row.values) and max(row.values) < high


@pytest.mark.parametrize("share", [0.35, 1.0, 3.0])
def test_an_interval_of_sequences_and_seeds_covers_what_it_claims(monkeypatch, share):
    """The wider of both intervals would hold the true value 942 times in 1000 at 0.35. Three standard deviations of so
    many draws are allowed. `share`: the error of the mean by seeds ÷ that by sequences."""
    draws, generator = 40_000, np.random.default_rng(0)
    by_seed = generator.normal(1, 0.01, (draws, 1)) + generator.normal(0, 0.01 * share * 3**0.5, (draws, 3))
    told = iter([(mean, mean - 0.0196, mean + 0.0196) for mean in by_seed.mean(axis=1).tolist()])
    monkeypatch.setattr(sequences, "ratio", lambda *_: next(told))
    reading = Reading(experiment="timing", metric="m", sampled="sequences", runs=3, columns=("a", "b"))

    def covered(values):
        _, (low, high) = interval.of(reading, values, [0, 0, 0], [(value, [(Path(), None)]) for value in values])
        return low <= 1 <= high

    assert np.mean([covered(values) for values in by_seed.tolist()]) > 0.95 - 3 * (0.95 * 0.05 / draws) ** 0.5


def test_it_is_said_how_far_apart_times_may_be():
    def row(low, high, inside=True):
        return Row((low, high), inside, "", name="", title="", unit="s", a=1.0, b=1.0, timed=True)

    assert "Half of these may differ by a factor of 3 or more" in compare._room([row(1, 4), row(1, 9), row(1, 100)])
    assert compare._room([row(1, 4, None), row(-1, 4)]) == ""


def test_a_search_that_ran_out_of_seconds_need_not_find_the_same():
    ours, theirs = (pair(new, conditions={"time_limited": "yes"}) for new in (1.0, 1.1))
    assert beside(ours, theirs).said == "time limit: a search stopped when its seconds were up"
    assert not beside(ours, pair(1.5, conditions={"time_limited": "yes"})).flipped
    assert beside(ours, ours).inside is True
