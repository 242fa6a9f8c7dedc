"""Which assumptions give the paper's four numbers: the ladder says what it changed, and draws are what they say."""

import pandas as pd
import pytest

from repro.claims import registry
from repro.experiments.scaling_ladder import MICRO_BATCHES, NUMBERS
from repro.scaling import ladder
from repro.scaling.assumptions import PRIORS, Assumptions

CLAIMS = {"hierarchical_over_zeropp": "ZT-1.e", "zeropp_over_zero3": "ZT-1.f", "efficiency": "ZT-2.b"}


@pytest.fixture(scope="module")
def rungs():
    return ladder.explain()


@pytest.fixture(scope="module")
def sampled():
    return ladder.sample(200)


def test_targets_are_those_of_the_claims():
    claims = {claim.id: claim for claim in registry.load()}
    assert tuple(ladder.TARGETS) == NUMBERS and ladder.RUNS["accumulation"] == MICRO_BATCHES
    for name, target in ladder.TARGETS.items():
        if name == "hierarchical_over_zero3":  # the product of the first two, and so no claim of its own
            ends = [claims[one].paper_value for one in ("ZT-1.e", "ZT-1.f")]
            assert target.value == pytest.approx(ends[0] * ends[1], abs=0.005) and target.relative
            continue
        claim = claims[CLAIMS[name]]
        assert (target.value, target.tolerance) == (claim.paper_value, claim.tolerance)
        assert target.relative == (claim.comparison == "relative")


def test_a_number_is_reached_within_its_tolerance():
    table = pd.DataFrame({name: [target.value, 0.5] for name, target in ladder.TARGETS.items()})
    table.loc[0, "hierarchical_over_zeropp"] = 1.71 * 1.149
    found = ladder.judged(table)
    assert found.reached.tolist() == [True, False]
    table.loc[0, ["hierarchical_over_zeropp", "efficiency"]] = 1.71 * 1.151, 0.94 + 0.049
    found = ladder.judged(table)
    assert not found.reached_hierarchical_over_zeropp[0] and found.reached_efficiency[0] and not found.reached[0]


def test_every_change_is_tried_alone_and_the_path_one_after_the_other(rungs):
    single, path = (rungs[rungs.kind == kind].set_index("change") for kind in ("single", "cumulative"))
    assert list(single.index) == list(ladder.CHANGES) and list(path.index) == [ladder.START, *ladder.PATH]
    start = path.loc[ladder.START]
    for name, found in ladder.Setting().numbers().items():
        assert start[name] == found
    assert path.loc[ladder.PATH[0], "efficiency"] == single.loc[ladder.PATH[0], "efficiency"]
    name = "hierarchical_over_zeropp"
    assert single.loc["no hpZ", name] > start[name], "ZeRO++ profits from hpZ, the hierarchical plan has none"
    assert single.loc["hpZ's copy refilled per micro-batch", name] == start[name], "one micro-batch refills once anyway"
    assert single.loc["all compute overlaps", "zeropp_over_zero3"] < start.zeropp_over_zero3


def test_the_path_reaches_all_four_numbers_and_no_change_alone_does(rungs):
    assert rungs.reached.iloc[-1] and not rungs[rungs.kind == "single"].reached.any()
    assert not rungs.reached_hierarchical_over_zeropp[rungs.kind == "single"].any(), "1.71 needs several changes"


def test_a_draw_is_what_the_step_model_says_of_it(sampled):
    for _, row in sampled.iloc[[0, 777, -1]].iterrows():
        engine = Assumptions(**{name: row[name] for name in PRIORS})
        run = {name: row[name] for name in ladder.RUNS}
        alone = ladder.Setting(assumed=engine, fixed={name: row[name] for name in ladder.MACHINE_PRIORS}, **run)
        assert alone.numbers() == pytest.approx({name: row[name] for name in ladder.TARGETS})


def test_few_draws_give_all_four_numbers_and_fewer_with_one_micro_batch(sampled):
    shares = ladder.shares(sampled)
    assert len(sampled) == 200 * 24
    assert 0.005 < shares["all"] < 0.035 and shares["all"] < min(shares[name] for name in ladder.TARGETS)
    assert shares["all_1"] < 0.5 * min(shares["all_4"], shares["all_16"])
    by_value = ladder.sets(sampled).set_index(["choice", "value"])
    assert by_value.share["accumulation", "4"] == pytest.approx(shares["all_4"])
    assert by_value.of_reached.groupby("choice").sum().to_numpy() == pytest.approx(1)
    assert all(name in ladder.priors() for name in [*PRIORS, *ladder.MACHINE_PRIORS, *ladder.RUNS])


def test_combinations_of_choices_stand_by_the_share_of_their_draws(sampled):
    names = list(ladder.JOINT)
    found, every = ladder.joint(sampled, most=5), ladder.joint(sampled, most=len(sampled))
    assert len(found) == 5 and found.share.is_monotonic_decreasing
    assert len(every) == len(sampled[names].drop_duplicates()) and every.of_reached.sum() == pytest.approx(1)
    best = found.iloc[0]
    same = sampled.merge(found[names].head(1))
    assert best.share == pytest.approx(same.reached.mean())
    assert best.of_reached == pytest.approx(same.reached.sum() / sampled.reached.sum())
    alone = ladder.sets(sampled)
    assert best.share > alone[alone.choice.isin(names)].share.max(), "together they decide more than each alone"


@pytest.mark.parametrize("tokens", [0, 3000])
def test_tokens_that_are_no_whole_sequences_are_refused(tokens):
    """Of 3000 tokens 2048 would have been predicted."""
    with pytest.raises(ValueError, match=f"tokens is {tokens}, allowed: 1 to 2048, and multiples"):
        ladder.Setting(tokens=tokens)
