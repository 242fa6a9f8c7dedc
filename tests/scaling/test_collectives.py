"""Stages of every algorithm against a count of the messages that it really sends, and times against closed forms."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import scaling
from repro.scaling import algorithms, network
from repro.scaling.network import network_of
from repro.topology import Level, Topology, frontier

MACHINE = Topology((Level("package", 2), Level("node", 4), Level("cluster", 4)))
COUNTS = (1, 1, 4)  # a GCD's own links, a package's, four NICs a node


def _group(sizes=(2, 4, 4), counts=COUNTS, below=1, channels=4):
    return algorithms.Group(sizes, counts, below, channels)


def _one_level(ranks, protocols, **rates):
    """Ranks that are alike to each other, each with a link of its own."""
    return network.Network(Topology((Level("cluster", ranks),)), (network.Links(1, tuple(protocols)),), **rates)


def _leaving(pairs, sizes):
    """Messages out of the busiest unit of every level, counted one by one."""
    topology = Topology(tuple(Level(f"l{i}", size) for i, size in enumerate(sizes)))
    units = [math.prod(sizes[:level]) for level in range(len(sizes))]
    count = Counter()
    for source, target in pairs:
        level = topology.index(topology.level_between(source, target))
        # A message between two units of a level leaves the sender's unit at that level, and at no other.
        count[level, source // units[level]] += 1
    return [max((n for (at, _), n in count.items() if at == level), default=0) for level in range(len(sizes))]


def _loads(pairs, message, sizes, counts):
    return [message * n / min(counts[level], n) if n else 0.0 for level, n in enumerate(_leaving(pairs, sizes))]


@pytest.mark.parametrize("sizes", [(2, 4, 4), (2, 2, 2), (4, 8), (8,), (1, 4, 2)])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_doubling_against_the_messages_that_it_sends(kind, sizes):
    p, counts = math.prod(sizes), COUNTS[: len(sizes)]
    stages = algorithms.stages(kind, "recursive_doubling", _group(sizes, counts))
    assert len(stages) == math.log2(p)
    for k, stage in enumerate(stages):
        pairs = [(rank, rank ^ 2**k) for rank in range(p)]
        assert stage.loads == pytest.approx(_loads(pairs, 2**k / p, sizes, counts))
    assert sum(stage.sent for stage in stages) == pytest.approx((p - 1) / p)


@pytest.mark.parametrize("sizes", [(2, 4, 4), (2, 4, 3), (3, 5), (7,), (1, 6)])
def test_brucks_all_gather_against_the_messages_that_it_sends(sizes):
    p, counts = math.prod(sizes), COUNTS[: len(sizes)]
    stages = algorithms.stages("all_gather", "bruck", _group(sizes, counts))
    for k, stage in enumerate(stages):
        blocks = min(2**k, p - 2**k)
        pairs = [(rank, (rank + 2**k) % p) for rank in range(p)]
        found = _loads(pairs, blocks / p, sizes, counts)
        # Messages of a long shift may wrap around at a unit's edge. The busiest link is never underestimated.
        assert all(mine >= counted - 1e-12 for mine, counted in zip(stage.loads, found, strict=True))
        assert max(stage.loads) <= 2 * max(found)
    assert sum(stage.sent for stage in stages) == pytest.approx((p - 1) / p)


@pytest.mark.parametrize("p", range(2, 20))
def test_brucks_all_to_all_sends_every_block_as_often_as_its_distance_has_bits(p):
    stages = algorithms.stages("all_to_all", "bruck", _group((p,), (1,), channels=1))
    assert sum(stage.sent for stage in stages) * p == pytest.approx(sum(d.bit_count() for d in range(p)))


@pytest.mark.parametrize("sizes", [(2, 4, 4), (2, 2, 2), (4, 3), (8,)])
def test_pairwise_and_direct_against_all_pairs(sizes):
    p, counts = math.prod(sizes), (1,) * len(sizes)
    pairs = [(a, b) for a in range(p) for b in range(p) if a != b]
    everything = _leaving(pairs, sizes)
    (direct,) = algorithms.stages("all_to_all", "direct", _group(sizes, counts, channels=1))
    assert direct.loads == pytest.approx([n / p for n in everything])
    pairwise = algorithms.stages("all_to_all", "pairwise", _group(sizes, counts, channels=1))
    assert sum(stage.rounds for stage in pairwise) == p - 1
    per_level = np.sum([np.multiply(stage.rounds, stage.loads) for stage in pairwise], axis=0)
    assert per_level == pytest.approx([n / p for n in everything])


@pytest.mark.parametrize("sizes", [(2, 4, 4), (2, 4, 3), (4, 2), (5,)])
def test_one_ring_sends_one_message_out_of_every_unit(sizes):
    p = math.prod(sizes)
    (ring,) = algorithms.stages("all_gather", "ring", _group(sizes, (1,) * len(sizes), channels=1))
    pairs = [(rank, (rank + 1) % p) for rank in range(p)]
    assert ring.loads == pytest.approx([1 / p if n else 0 for n in _leaving(pairs, sizes)])
    topology = Topology(tuple(Level(f"l{i}", size) for i, size in enumerate(sizes)))
    edges = Counter(topology.index(topology.level_between(*pair)) for pair in pairs)
    assert ring.hops == pytest.approx([(p - 1) / p * edges[level] for level in range(len(sizes))])


def test_rings_side_by_side_share_the_nics():
    """One ring out of a node keeps three of four NICs idle."""
    net = network_of(frontier(4), {"cluster": 4})
    one = scaling.seconds("all_gather", 2**30, net, "ring", channels=1)
    four = scaling.seconds("all_gather", 2**30, net, "ring", channels=4)
    assert one / four == pytest.approx(4, rel=0.01)


def test_ring_of_one_level_is_the_textbook_formula():
    alpha, beta, n, p = 5e-6, 25e9, 1e8, 16
    net = _one_level(p, [network.Protocol(alpha, beta)])
    expected = (p - 1) * alpha + (p - 1) / p * n / beta
    assert scaling.seconds("all_gather", n, net, "ring") == pytest.approx(expected)
    assert scaling.seconds("reduce_scatter", n, net, "ring") == pytest.approx(expected)
    assert scaling.seconds("all_reduce", n, net, "ring") == pytest.approx(2 * expected)
    assert scaling.seconds("all_to_all", n, net, "pairwise") == pytest.approx(expected)
    doubled = scaling.seconds("all_gather", n, net, "recursive_doubling")
    assert doubled == pytest.approx(4 * alpha + (p - 1) / p * n / beta)


def test_rabenseifner_adds_up_every_value_once():
    net = _one_level(8, [network.Protocol(0.0, math.inf)], reduce_bytes_per_s=1e9)
    assert scaling.seconds("all_reduce", 1e9, net, "rabenseifner") == pytest.approx(7 / 8)
    assert scaling.seconds("all_reduce", 1e9, net, "recursive_doubling") == pytest.approx(3)


@pytest.mark.parametrize("sizes", [(8, 2), (2, 4, 4), (8,)])
def test_rabenseifner_sends_half_of_the_tensor_to_the_nearest_rank(sizes):
    """MPICH's: 1/2, 1/4 … of the tensor to partners at 1, 2 … and back, so that slow levels carry least."""
    p, counts = math.prod(sizes), COUNTS[: len(sizes)]
    stages = algorithms.stages("all_reduce", "rabenseifner", _group(sizes, counts))
    rounds = int(math.log2(p))
    assert len(stages) == 2 * rounds
    for stage, k in zip(stages, 2 * [*range(rounds)], strict=True):
        pairs = [(rank, rank ^ 2**k) for rank in range(p)]
        assert stage.loads == pytest.approx(_loads(pairs, 2.0 ** -(k + 1), sizes, counts))
    assert sum(stage.sent for stage in stages) == pytest.approx(2 * (p - 1) / p)


def test_odd_ranks_are_folded_into_their_neighbours_first():
    """100 ranks: a round of whole tensors, six among 64, and the result back."""
    stages = algorithms.stages("reduce_scatter", "recursive_doubling", _group((100,), (1,), channels=1))
    assert [stage.message for stage in stages] == pytest.approx([1, *(2**k / 64 for k in range(6)), 0.01])
    with pytest.raises(ValueError, match="power of two, found 100"):
        algorithms.stages("all_gather", "recursive_doubling", _group((100,), (1,), channels=1))


def test_hierarchical_gather_brings_every_byte_to_a_node_once():
    slow = Topology((Level("package", 2), Level("node", 4), Level("cluster", 4, 1e9)))
    found = scaling.seconds("all_gather", 32e9, network_of(slow), "hierarchical")
    # A rank brings 1/8 of the tensor to its node, of which its own node has a quarter; 1 GB/s each.
    assert found == pytest.approx(32 / 8 * 3 / 4)


def test_a_group_across_nodes_shares_the_nics_with_its_like():
    """Gradients of the same shard meet across nodes: 8 rings at once over 4 NICs."""
    net = network_of(frontier(4), {"cluster": 4})
    across = scaling.seconds("reduce_scatter", 1e9, net, "ring", levels=["cluster"])
    assert across == pytest.approx(3 / 4 * 1e9 / 12.5e9 + 3 * 5e-6)
    inside = scaling.seconds("all_gather", 1e9, net, "ring", levels=["package"])
    assert inside == pytest.approx(0.5e9 / 200e9 + 2e-6)


def test_the_protocol_follows_the_size_of_a_message():
    protocols = [network.Protocol(1e-6, 1e9), network.Protocol(1e-5, 1e10, from_bytes=1e6)]
    net = _one_level(2, protocols)
    assert scaling.seconds("send_recv", 1e5, net) == pytest.approx(1e-6 + 1e-4)
    assert scaling.seconds("send_recv", 1e7, net) == pytest.approx(1e-5 + 1e-3)


def test_draws_are_elementwise():
    rates = np.array([1e9, 2e9, 4e9])
    net = _one_level(4, [network.Protocol(0.0, rates)])
    assert scaling.seconds("all_gather", 4e9, net, "ring") == pytest.approx(3e9 / rates)


def test_links_that_queue_drain_while_the_processors_work():
    """4 ranks with links of 1 GB/s, and processors that move 2 GB/s for all: 3 s of links, 6 s of work, 3 s of sums."""
    topology = Topology((Level("cluster", 4, 1e9),))
    links, sums = network_of(topology).links, {"reduce_bytes_per_s": 1e9}
    emulated = network.Network(topology, links, host_bytes_per_s=2e9, **sums)
    real = network.Network(topology, links, **sums)
    assert scaling.seconds("all_gather", 4e9, emulated, "ring") == pytest.approx(6)
    assert scaling.seconds("reduce_scatter", 4e9, emulated, "ring") == pytest.approx(6 + 3)
    assert scaling.seconds("all_gather", 4e9, real, "ring") == pytest.approx(3)
    assert scaling.seconds("reduce_scatter", 4e9, real, "ring") == pytest.approx(3 + 3)


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="'allreduce' is not known, allowed: all_gather"):
        scaling.seconds("allreduce", 4e9, network_of(Topology((Level("cluster", 4, 1e9),))))


def _switched(sizes, sharp=False):
    """Nodes of NVLink at 300 GB/s, whose switches add up at 250 GB/s after 25 us; eight NICs of 50 GB/s a node."""
    node = network.Links(1, (network.Protocol(4e-6, 300e9),), network.Protocol(25e-6, 250e9))
    switch = network.Protocol(18e-6, 40e9) if sharp else None
    cluster = network.Links(8, (network.Protocol(10e-6, 50e9),), switch)
    levels = tuple(map(Level, ("node", "cluster"), sizes))
    return network.Network(Topology(levels), (node, cluster)[: len(levels)])


def test_a_switch_that_adds_up_carries_a_tensor_once():
    """A rank's link carries its tensor to the switch, or the result from it; an owner's shard of the result besides."""
    net, n = _switched((8,)), 1e9
    assert scaling.seconds("reduce_scatter", n, net, "in_network") == pytest.approx(25e-6 + n / 250e9)
    assert scaling.seconds("all_gather", n, net, "in_network") == pytest.approx(25e-6 + n / 250e9)
    assert scaling.seconds("all_reduce", n, net, "in_network") == pytest.approx(25e-6 + n * (1 + 1 / 8) / 250e9)
    assert scaling.seconds("all_reduce", n, net) == scaling.seconds("all_reduce", n, net, "in_network")


def test_in_network_reduction_is_chosen_from_a_size_on_and_only_where_switches_have_it():
    """One long latency against several short ones."""
    ring, switch = (
        [scaling.seconds("all_reduce", n, _switched((4,)), name) for n in (1e3, 1e9)] for name in ("tree", "in_network")
    )
    assert ring[0] < switch[0] and switch[1] < ring[1]
    without = network_of(Topology((Level("node", 8, 300e9, 4e-6),)))
    with pytest.raises(ValueError, match="all_reduce by in_network needs switches that add up"):
        scaling.seconds("all_reduce", 1e9, without, "in_network")


@pytest.mark.parametrize("nodes, crossings", [(2, 1), (16, 2)])
def test_between_nodes_a_tree_of_shards_or_a_switch_goes_on(nodes, crossings):
    """Each GPU sends its eighth over its own NIC. A tree sends it up and to two children, or between two nodes once."""
    n, hops = 8e9, 2 * math.log2(nodes)
    tree = scaling.seconds("all_reduce", n, _switched((8, nodes)), "in_network")
    inside = n * 9 / 8 / 250e9  # slower than the NICs, with which it takes turns
    waits = hops * (10e-6 + 2**19 / 50e9)  # at every hop of the tree for a chunk
    assert tree == pytest.approx(25e-6 + waits + max(inside, crossings * (n / 8 - 2**19) / 50e9))
    sharp = scaling.seconds("all_reduce", n, _switched((8, nodes), sharp=True), "in_network")
    assert sharp == pytest.approx(25e-6 + 18e-6 + inside)
    assert scaling.seconds("reduce_scatter", n, _switched((8, nodes), sharp=True), "in_network") < sharp
    with pytest.raises(ValueError, match="reduce_scatter by in_network needs switches"):
        scaling.seconds("reduce_scatter", n, _switched((8, nodes)), "in_network")


def test_a_machine_tells_what_a_message_to_a_further_rank_costs():
    kind, times = scaling.hardware("frontier"), {}
    for cost in (1e-6, 1.0):
        machine = kind.at(peer_s=cost).machine(2)
        for what, algorithm in (("all_to_all", "direct"), ("all_gather", "direct"), ("all_gather", "ring")):
            times.setdefault((what, algorithm), []).append(scaling.seconds(what, 1e6, machine.network, algorithm))
    more = {way: slow - fast for way, (fast, slow) in times.items()}
    expected = {("all_to_all", "direct"): 14.0, ("all_gather", "direct"): 14.0, ("all_gather", "ring"): 0.0}
    assert more == pytest.approx(expected, rel=1e-4)
    assert np.ptp(kind.machine(2, draws=9).network.peer_s) > 0


def test_machines_say_whether_their_switches_add_up():
    found = {name: [bool(each.in_network) for each in hardware.machine(4).network.links]
             for name, hardware in scaling.CATALOGUE.items()}  # fmt: skip
    assert found["dgx-h100"] == found["gb200-nvl72"] == [True, False]
    assert not any(any(flags) for name, flags in found.items() if name not in ("dgx-h100", "gb200-nvl72"))


def test_a_tree_of_two_nodes_sends_half_a_tensor_each_way():
    """Each node is the root of one tree and the leaf of the other, as in NCCL; with more nodes one has two children."""
    loads = [algorithms.stages("all_reduce", "tree", _group((8, n), (8, 8), channels=8))[0].loads[1] for n in (2, 4)]
    assert loads == pytest.approx([1 / 8, 2 / 8])


@pytest.mark.parametrize("chunks", [0.01, 1, 2, 7])
def test_a_tree_sends_chunks_on_as_they_come(chunks):
    """Between two ranks: a chunk goes up when the one before has left, comes down when it has arrived and that one has."""
    protocol = network.Protocol(10e-6, 1e10, chunk_bytes=1e5)
    sizes = [1e5] * int(chunks) or [chunks * 1e5]
    up = down = 0.0  # when each direction of the link is free again
    for size in sizes:
        up += size / 1e10
        down = max(down, up + 10e-6) + size / 1e10
    net = _one_level(2, [protocol])
    assert scaling.seconds("all_reduce", sum(sizes), net, "tree") == pytest.approx(down + 10e-6)


def test_a_deep_tree_waits_for_a_chunk_at_every_hop():
    """16 nodes: four levels up and four down. Of a long message most follow the first chunk; a link carries two tensors."""
    net = _one_level(16, [network.Protocol(10e-6, 1e10, chunk_bytes=1e5)])
    assert scaling.seconds("all_reduce", 1e4, net, "tree") == pytest.approx(8 * (10e-6 + 1e-6))
    long = 8 * (10e-6 + 1e-5) + 2 * (1e9 - 1e5) / 1e10
    assert scaling.seconds("all_reduce", 1e9, net, "tree") == pytest.approx(long)


def test_an_exchange_with_every_rank_begins_a_message_to_each():
    """The first at the latency of a hop; of two ranks there is no further one."""
    for ranks in (2, 16):
        quiet, busy = (_one_level(ranks, [network.Protocol(10e-6, 1e10)], peer_s=each) for each in (0.0, 2e-6))
        more = scaling.seconds("all_to_all", 1e6, busy, "direct") - scaling.seconds("all_to_all", 1e6, quiet, "direct")
        assert more == pytest.approx((ranks - 2) * 2e-6)
    assert scaling.seconds("all_to_all", 1e6, busy, "pairwise") == scaling.seconds("all_to_all", 1e6, quiet, "pairwise")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(k, a) for k, many in algorithms.ALGORITHMS.items() for a in many]),
    st.tuples(*[st.sampled_from([1, 2, 4])] * 3),
    st.floats(1e3, 1e9),
)
def test_more_bytes_never_take_less_time_and_one_rank_none(pair, sizes, nbytes):
    kind, algorithm = pair
    net = network_of(Topology(tuple(Level(f"l{i}", s, 1e9 / 4**i, 1e-6) for i, s in enumerate(sizes))))
    net = replace(net, links=tuple(replace(links, in_network=links.protocols[0]) for links in net.links))
    less, more = (scaling.seconds(kind, n, net, algorithm) for n in (nbytes, 2 * nbytes))
    assert less <= more <= 2 * less + 1e-12
    assert (more == 0) == (math.prod(sizes) == 1)


def test_wrong_requests_are_refused():
    net = network_of(frontier(2))
    with pytest.raises(ValueError, match=r"all_to_all by 'ring'.*pairwise"):
        scaling.seconds("all_to_all", 1, net, "ring")
    with pytest.raises(ValueError, match="not consecutive"):
        scaling.seconds("all_gather", 1, net, "ring", levels=["package", "cluster"])
    with pytest.raises(ValueError, match="rack"):
        scaling.seconds("all_gather", 1, net, "ring", levels=["rack"])
    for nbytes in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"nbytes is {nbytes}, allowed: 0 and more"):
            scaling.seconds("all_gather", nbytes, net)
    with pytest.raises(ValueError, match="begin at 0"):
        network.Links(1, (network.Protocol(0.0, 1.0, 5),))
