"""Bytes that a step moves per level, against closed formulas: 3 M for ZeRO-3, 0.75 M for the quantised plans."""

import pytest
import torch
from ddp_reference import batch

from repro import comm
from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.quantize import payload_bytes
from repro.topology import Level, Topology, frontier
from repro.zero import ZeroOptimizer, memory, traffic
from repro.zero import plan as plans
from repro.zero.layout import BucketLayout, Layout, layout

NODES, RANKS = 2, 8
TOPOLOGY = frontier(NODES, 2, 2)
SHAPE = GPTConfig(layers=2, hidden=64, heads=2, seq_len=8)  # 8 divides every tensor: no padding anywhere
M = 2 * SHAPE.parameters
BUCKETS = [12 * 64 * 64 + 13 * 64] * 2 + [SHAPE.parameters - 2 * (12 * 64 * 64 + 13 * 64)]
MICRO_BATCHES = (1, 3)
IN_CLOSED_FORM = ("ddp", "zero3", "zeropp", "hierarchical", "hierarchical_fp")


def _sent(rank: int, world: int) -> dict:
    found, shared = {}, {"communicator": comm.Communicator(TOPOLOGY), "broadcast": False}
    for name in IN_CLOSED_FORM:
        model = GPT(SHAPE)
        optimizer = ZeroOptimizer(model, plans.named(name, TOPOLOGY), lr=1e-3, **shared)
        for micro_batches in MICRO_BATCHES:
            for micro_batch in range(micro_batches):
                model(*batch(0, rank, micro_batch)).backward()
            optimizer.step()
            found[name, micro_batches] = optimizer.ledger.take()
        optimizer.synchronize()  # what was under way counts where it was started
    return found


@pytest.fixture(scope="module")
def sent():
    ranks = launch(_sent, RANKS, timeout_s=100)
    return {key: {level: sum(rank[key][level] for rank in ranks) for level in TOPOLOGY.names} for key in ranks[0]}


def _payloads(share: int, bits: int) -> int:
    """Bytes of 1/share of every bucket."""
    return sum(payload_bytes(numel // share, bits, plans.BLOCK) for numel in BUCKETS)


def ring(nbytes: int) -> dict[str, int]:
    """A gather or a reduction of a tensor of `nbytes` by a ring: (N - 1) / N of it over each of 4 + 2 + 2 links."""
    per_link = nbytes * (RANKS - 1) // RANKS
    return {"package": 4 * per_link, "node": 2 * per_link, "cluster": NODES * per_link}


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    return {level: sum(part[level] for part in parts) for level in TOPOLOGY.names}


@pytest.mark.parametrize("g", MICRO_BATCHES)
def test_ddp_sends_2_m(sent, g):
    assert sent["ddp", g] == _sum(ring(M), ring(M))  # once per step: gradients add up where they are


@pytest.mark.parametrize("g", MICRO_BATCHES)
def test_zero3_sends_3_m_per_micro_batch(sent, g):
    assert sent["zero3", g] == _sum(*[ring(M)] * (3 * g))
    assert sent["zero3", g]["cluster"] / NODES == 3 * g * M * (RANKS - 1) / RANKS  # what a node injects


@pytest.mark.parametrize("g", MICRO_BATCHES)
def test_zeropp_sends_half_m_per_step_and_a_quarter_m_per_micro_batch(sent, g):
    gather = RANKS * _payloads(RANKS, 8)  # INT8, scales included
    forward = ring(gather)["cluster"]  # once per step: later gathers read the secondary shards in the node
    backward = g * (NODES - 1) * RANKS * _payloads(RANKS, 4)
    assert sent["zeropp", g]["cluster"] == forward + backward
    ideal = 0.5 * M * NODES * (RANKS - 1) / RANKS + g * 0.25 * M * (NODES - 1)
    assert ideal < sent["zeropp", g]["cluster"] < 1.05 * ideal  # the scales


@pytest.mark.parametrize("g", MICRO_BATCHES)
def test_hierarchical_sends_three_quarters_of_m_per_step_whatever_the_micro_batches(sent, g):
    found = sent["hierarchical", g]
    update, gradient = RANKS * _payloads(RANKS, 8), RANKS * _payloads(RANKS, 4)
    assert found["cluster"] == (NODES - 1) * (update + gradient)
    assert 0.75 * M * (NODES - 1) < found["cluster"] < 0.775 * M * (NODES - 1)
    # the pair: from each rank half of the weights twice and half of the gradient, per micro-batch
    assert found["package"] == g * RANKS * (2 * _payloads(2, 8) + _payloads(2, 4))
    # between packages: INT4 quarters per micro-batch, then INT8 shards of both nodes, once
    assert found["node"] == g * RANKS * _payloads(4, 4) + 2 * RANKS * _payloads(RANKS, 8)


@pytest.mark.parametrize("g", MICRO_BATCHES)
def test_hierarchical_without_quantisation_sends_2_m_per_step(sent, g):
    assert sent["hierarchical_fp", g]["cluster"] == 2 * M * (NODES - 1)
    assert sent["hierarchical_fp", g]["package"] == g * 3 * RANKS * M // 2


def test_order_of_the_papers_plans_on_the_slow_link(sent):
    across = [sent[name, 1]["cluster"] for name in ("zero3", "hierarchical_fp", "zeropp", "hierarchical")]
    assert across == sorted(across, reverse=True)


# 36 and 12 rows over 8 ranks, 108 over 8, 33 words, a frozen bucket and a frozen matrix: padding everywhere
ODD = GPTConfig(layers=2, hidden=36, heads=3, seq_len=8, vocab=33)
NAMED = [plans.named(name, TOPOLOGY) for name in plans.NAMED]
CORNERS = [
    plans.qgz(TOPOLOGY, hops=1),
    plans.mics(TOPOLOGY, "package"),
    plans.hierarchical(TOPOLOGY, reduce_across="micro_batch"),
    plans.hierarchical(TOPOLOGY, weights="node", secondary="package", weight_bits=(8, 16, 16), block=64),
    plans.hierarchical(TOPOLOGY, weights="package", gradients="package", optimizer="node", gradient_bits=(16, 8, 4)),
    plans.unquantised(plans.zeropp(TOPOLOGY)),
]


def _odd_model() -> GPT:
    model = GPT(ODD)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return model


def _sent_by(rank: int, world: int, chosen: list[plans.Plan], native: bool) -> list[dict]:
    if native:
        comm.Hop.native = property(lambda hop: True)
    found, shared = [], {"communicator": comm.Communicator(TOPOLOGY), "broadcast": False}
    for plan in chosen:
        model = _odd_model()
        optimizer = ZeroOptimizer(model, plan, lr=1e-3, **shared)
        for micro_batch in range(2):
            model(*batch(0, rank, micro_batch)).backward()
        optimizer.step()
        optimizer.synchronize()
        found.append(optimizer.ledger.take())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "native"),
    [
        pytest.param(CORNERS, False, id="corners"),
        pytest.param(NAMED, False, id="named", marks=pytest.mark.exhaustive),
        pytest.param([*NAMED, *CORNERS], True, id="native", marks=pytest.mark.exhaustive),
    ],
)
def test_predicted_traffic_is_what_the_ledgers_counted(chosen, native):
    ranks, model = launch(_sent_by, RANKS, chosen, native, timeout_s=100), layout(_odd_model())
    for index, plan in enumerate(chosen):
        counted = {level: sum(rank[index][level] for rank in ranks) for level in TOPOLOGY.names}
        assert traffic.step_bytes(plan, model, micro_batches=2, native=native) == counted, plan.name


def _sent_on(rank: int, world: int, topology: Topology) -> list[dict]:
    found, shared = [], {"communicator": comm.Communicator(topology), "broadcast": False}
    for name in plans.NAMED:
        model = _odd_model()
        optimizer = ZeroOptimizer(model, plans.named(name, topology), lr=1e-3, **shared)
        model(*batch(0, rank)).backward()
        optimizer.step()
        optimizer.synchronize()
        found.append(optimizer.ledger.take())
    return found


FOUR_LEVELS = ("package", "node", "rack", "cluster")


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 1, 1, 2),
        *(pytest.param(sizes, marks=pytest.mark.exhaustive) for sizes in ((1, 2, 2, 1), (2, 3, 1, 1), (1, 1, 1, 3))),
        pytest.param((2, 2, 2, 2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_predicted_traffic_on_machines_with_levels_of_one_and_three(sizes):
    topology = Topology(tuple(map(Level, FOUR_LEVELS, sizes)))
    ranks, model = launch(_sent_on, topology.world_size, topology, timeout_s=300), layout(_odd_model())
    for index, name in enumerate(plans.NAMED):
        counted = {level: sum(rank[index][level] for rank in ranks) for level in topology.names}
        assert traffic.step_bytes(plans.named(name, topology), model) == counted, name


def test_twenty_billion_parameters_on_48_nodes():
    """The formulas of the papers at their scale, per node and step: M = 40 GB."""
    topology, m = frontier(48), 2 * 20e9
    model = Layout((BucketLayout(((384 * 8, 6510417),)),))  # one bucket of 2e10 values that 384 ranks divide
    out = {name: traffic.step_bytes(plans.named(name, topology), model)["cluster"] / 48 for name in plans.NAMED}
    assert out["zero3"] == pytest.approx(3 * m, rel=0.01)
    assert out["zeropp"] == pytest.approx(0.75 * m, rel=0.035)  # scales: 1.6 % of INT8, 3.1 % of INT4
    assert out["hierarchical"] == pytest.approx(0.75 * m, rel=0.035)
    assert out["ddp"] == out["zero1"] == out["hpz"] == pytest.approx(2 * m, rel=0.01)
    assert out["hfsdp"] == out["hsdp"] == out["mics"] == pytest.approx(2 * m * 47 / 48, rel=1e-6)  # once a step
    assert out["qgz"] == pytest.approx(2.25 * m, rel=0.03)
    one_hop = traffic.step_bytes(plans.qgz(topology, hops=1), model)["cluster"] / 48
    assert one_hop - 2 * m == pytest.approx(8 * (out["qgz"] - 2 * m), rel=0.03)  # P = 8 times as much


@pytest.mark.parametrize("name", plans.NAMED)
def test_a_level_of_one_unit_costs_nothing(name):
    model, three = layout(_odd_model()), plans.named(name, TOPOLOGY)
    for sizes in ((2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2)):
        kept = [level for level, size in zip(FOUR_LEVELS, sizes, strict=True) if size > 1]
        four = plans.named(name, Topology(tuple(map(Level, FOUR_LEVELS, sizes))))
        if name.startswith("hier"):  # whose defaults are levels: the same partition
            weights, gradients = kept[:2]
            four = plans.hierarchical(four.topology, weights, gradients)
            four = plans.unquantised(four, 16) if name.endswith("fp") else four
        found = traffic.step_bytes(four, model, micro_batches=3)
        expected = traffic.step_bytes(three, model, micro_batches=3)
        assert [found.pop(level) for level in kept] == list(expected.values())
        assert set(found.values()) == {0}
        assert memory.predict(four, model) == memory.predict(three, model)


def _float_route(rank: int, world: int) -> dict:
    plan = plans.unquantised(plans.zero3(TOPOLOGY), 32)
    model = GPT(SHAPE)
    optimizer = ZeroOptimizer(model, plan, weight_dtype=torch.float32, lr=1e-3, broadcast=False)
    model(*batch(0, rank)).backward()
    optimizer.step()
    return optimizer.ledger.take()


def test_fp32_doubles_zero3(sent):
    found = launch(_float_route, RANKS, timeout_s=100)
    assert sum(rank["cluster"] for rank in found) == 2 * sent["zero3", 1]["cluster"]
