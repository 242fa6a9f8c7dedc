"""Each switch of the step model: its direction and its size, on a network whose times can be added up by hand."""

import numpy as np
import pytest

from repro import paths, scaling
from repro.experiments.zero_train import ZeroTrain
from repro.models.gpt import GPTConfig
from repro.scaling import hops, network, step
from repro.scaling.assumptions import PRIORS, SECONDARY, Assumptions, drawn
from repro.scaling.machines import Machine
from repro.zero import plan, traffic

CONFIG = GPTConfig(4, 512, 8, 128, 1024, checkpointing=True)
TOPOLOGY = ZeroTrain().topology  # 2 x 2 x 2
COMPUTE_S = 1e6


def machine(latency=0.0, rate=np.inf, **options):
    """Links of one latency and rate, a link for every rank; nothing else takes time."""
    links = tuple(network.Links(8, (network.Protocol(latency, rate),)) for _ in TOPOLOGY.levels)
    bare = {"flops_per_s": np.inf, "hbm_bytes_per_s": np.inf, "launch_s": 0.0, "overlap": 0.0}
    return Machine(network.Network(TOPOLOGY, links), **bare | {"quantize_values_per_s": np.inf} | options)


def seconds(name, on, accumulation=1, **assumed):
    """Of the messages, level after level."""
    chosen = plan.named(name, TOPOLOGY)
    assumptions = Assumptions(**{"side_by_side": 0.0} | assumed)
    found = scaling.predict_step(chosen, CONFIG, on, 1, accumulation, COMPUTE_S, assumptions)
    return found.seconds - COMPUTE_S


def test_the_end_of_a_step_is_exposed_or_hides():
    on = machine(rate=1e6, overlap=1.0)
    chosen = plan.hierarchical(TOPOLOGY)
    exposed, hidden = (
        scaling.predict_step(chosen, CONFIG, on, 1, 1, COMPUTE_S, Assumptions(e, 0.0)) for e in (0.0, 1.0)
    )
    last = (chosen.moves.reduce_to_optimizer, chosen.moves.gather_updated)
    took = sum(
        collective.times * sum(hops.hop_seconds(hop, on, Assumptions())[:3])
        for collective in traffic.collectives(chosen, step.layout_of(CONFIG))
        if any(collective.route is route for route in last)
        for hop in traffic.hops(collective, TOPOLOGY)
    )
    assert exposed.exposed_s == pytest.approx(took) and took > 1
    assert hidden.exposed_s == pytest.approx(0)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_levels_run_side_by_side_as_far_as_assumed(share):
    """Of a plan with messages on three levels: all of them one after the other, or no longer than the slowest takes."""
    found = scaling.predict_step(plan.hierarchical(TOPOLOGY), CONFIG, machine(rate=1e6), assumed=Assumptions(0, share))
    each = found.level_s.values()
    assert len(each) == 3 and found.exposed_s == pytest.approx(sum(each) - share * (sum(each) - max(each)))


@pytest.mark.parametrize("room", [0.5, 2, 3.9, 4.1])
def test_the_end_hides_behind_one_micro_batch_of_four(room):
    """DDP sends all that it sends at the end: in the last backward, while the three micro-batches before it send nothing."""
    ddp = plan.ddp(TOPOLOGY)
    took = scaling.predict_step(ddp, CONFIG, machine(rate=1e6), 1, 4, 0.0).exposed_s
    exposed = scaling.predict_step(ddp, CONFIG, machine(rate=1e6, overlap=1.0), 1, 4, room * took).exposed_s
    assert exposed == pytest.approx(max(0.0, took - room * took / 4))


@pytest.mark.parametrize(("secondary", "wide"), [("step", 1), ("micro_batch", 3), ("never", 6)])
def test_hpzs_copy_is_refilled_as_often_as_assumed(secondary, wide):
    """Of the 6 gathers of 3 micro-batches so many are of all 8 ranks, in 7 rounds; the others of 4, in 3."""
    on = machine(latency=1.0)  # rings over equal links: a second a round, whatever its bytes
    buckets = CONFIG.layers + 1
    gathers = buckets * (7 * wide + 3 * (6 - wide))
    reductions = buckets * 3 * (1 + 1)  # two all-to-alls
    assert seconds("zeropp", on, 3, secondary=secondary) == pytest.approx(gathers + reductions)
    assert seconds("zero3", on, 3, secondary=secondary) == pytest.approx(buckets * 9 * 7), "nothing to refill"


def test_messages_cost_latencies_and_no_bytes():
    on = machine(latency=1.0)
    buckets = CONFIG.layers + 1
    assert seconds("zero3", on, messages=4.0) == pytest.approx(4 * buckets * 3 * 7)
    assert seconds("zero3", on, scales_apart=1.0) == pytest.approx(buckets * 3 * 7), "16 bits have no scales"
    assert seconds("zeropp", on, scales_apart=1.0) == pytest.approx(2 * buckets * (7 + 3 + 1 + 1))
    rates = machine(rate=1e6)
    assert seconds("zeropp", rates, messages=4.0, scales_apart=1.0) == pytest.approx(seconds("zeropp", rates))


def test_an_all_to_all_at_half_the_bandwidth_takes_twice_as_long():
    """Only quantised gradients travel so: on qgZ, whose gathers are rings of 16 bits."""
    on = machine(rate=1e6)
    gathers = seconds("zero3", on) * 2 / 3  # two gathers and a reduction of as many bytes
    whole, half = (seconds("qgz", on, all_to_all=share) - gathers for share in (1.0, 0.5))
    assert half == pytest.approx(2 * whole, rel=1e-3) and whole > 0
    assert seconds("zero3", on, all_to_all=0.5) == seconds("zero3", on)
    both = machine(latency=1.0, rate=1e6)
    slower = seconds("qgz", both, all_to_all=0.5) - seconds("qgz", both)
    assert slower == pytest.approx(whole, rel=1e-3), "latencies stay"


def test_slow_quantisers_take_the_factor_longer():
    for options in ({"quantize_values_per_s": 1e6}, {"quantize_values_per_s": None, "hbm_bytes_per_s": 1e6}):
        on = machine(**options)
        one, three = (
            scaling.predict_step(
                plan.zeropp(TOPOLOGY), CONFIG, on, compute_s=0.0, assumed=Assumptions(side_by_side=0.0, **assumed)
            )
            for assumed in ({}, {"quantize_slowdown": 3.0})
        )
        assert three.quantize_s == pytest.approx(3 * one.quantize_s) and one.quantize_s > 0
        assert three.seconds - one.seconds == pytest.approx(2 * one.quantize_s)
    launched = machine(quantize_values_per_s=None, launch_s=1.0)
    # Per bucket two gathers and two all-to-alls, a kernel on each side.
    assert seconds("zeropp", launched) == pytest.approx((CONFIG.layers + 1) * 4 * 2)


def test_draws_of_all_switches_are_those_of_each():
    on = machine(latency=1e-3, rate=1e6, overlap=0.4)
    some = Assumptions.drawn(5, seed=3)
    together = seconds("zeropp", on, 4, **vars(some))
    for number in range(5):
        one = {name: values[number].item() for name, values in vars(some).items()}
        assert together[number] == pytest.approx(seconds("zeropp", on, 4, **one))


def test_priors_are_distributions_over_what_is_allowed():
    found = drawn(PRIORS, 4000)
    Assumptions(**found)  # checks the ranges
    for name, prior in PRIORS.items():
        if hasattr(prior, "shares"):
            assert sum(prior.shares) == pytest.approx(1)
            shares = [np.mean(found[name] == value) for value in prior.values]
            assert shares == pytest.approx(list(prior.shares), abs=0.04)
        else:
            assert (
                prior.low <= found[name].min() < prior.low * 1.2 and prior.high / 1.2 < found[name].max() <= prior.high
            )
            assert prior.likely == getattr(Assumptions(), name)
    fewer = drawn({"messages": PRIORS["messages"]}, 4000)
    assert np.array_equal(fewer["messages"], found["messages"]), "leaving one out does not move the others"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"secondary": "layer"}, r"'layer', allowed: step, micro_batch, never"),
        ({"secondary": np.array(["step", "layer"])}, "'layer'"),
        ({"messages": 0.5}, r"messages: found 0.5 to 0.5, allowed: 1"),
        ({"all_to_all": np.array([0.5, 2.0])}, r"all_to_all: found 0.5 to 2"),
    ],
)
def test_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Assumptions(**wrong)


def test_the_documentation_prints_the_priors():
    text = (paths.root() / "docs/scaling.md").read_text()
    for name, prior in PRIORS.items():
        assert f"| `{name}` | {prior} |" in text
    assert set(SECONDARY) == set(PRIORS["secondary"].values)
