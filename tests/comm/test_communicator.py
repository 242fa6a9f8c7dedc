"""Collectives over levels: the right sums on every route, and a ledger that agrees with closed formulas."""

import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from repro import comm
from repro.comm import Communicator, Ledger, Pending, Route, flat, hierarchical
from repro.comm.route import ring_orders
from repro.launch import launch
from repro.quantize import payload_bytes
from repro.topology import Level, Topology, frontier

TOPOLOGY = frontier(2, 2, 2)
TWO_HOPS = (("package", "node"), ("cluster",))
SIZES = (1, 5, 1000)


def _routes(topology: Topology, bits: int) -> dict[str, Route]:
    inner, outer = topology.names[:-1], topology.names[-1:]
    return {
        "flat": flat(topology, bits),
        "hierarchical": hierarchical(topology, bits),
        "two hops": Route((inner, outer), (bits, bits)),
    }


def _inputs(topology: Topology, numel: int) -> torch.Tensor:
    """Row r: what rank r puts in. The same on every rank, so that each can compute the answer alone."""
    return torch.randn(topology.world_size, numel, generator=torch.Generator().manual_seed(numel))


def _collect(rank: int, world: int, topology: Topology, bits: int, native: bool) -> dict:
    """Results and bytes of every collective on every route, for one rank."""
    if native:
        comm.Hop.native = property(lambda hop: True)
    communicator, found = Communicator(topology), {}
    sizes = SIZES if bits < 16 else (0, *SIZES)
    for (name, route), numel in itertools.product(_routes(topology, bits).items(), sizes):
        shards, fulls = _inputs(topology, numel), _inputs(topology, world * numel)
        gathered = communicator.all_gather(shards[rank], route)
        gather_bytes = communicator.ledger.take()
        reduced = communicator.reduce_scatter(fulls[rank], route)
        reduce_bytes = communicator.ledger.take()
        everywhere = Pending(communicator.all_reducing(_inputs(topology, numel)[rank], route)).wait()
        communicator.ledger.take()
        found[name, numel] = gathered, gather_bytes, reduced, reduce_bytes, everywhere
    return found


@pytest.mark.parametrize("native", [False, True], ids=["point-to-point", "native"])
def test_unquantised_collectives_are_exact(native):
    results = launch(_collect, 8, TOPOLOGY, 32, native, timeout_s=60)
    for rank, result in enumerate(results):
        for (name, numel), (gathered, _, reduced, _, everywhere) in result.items():
            assert torch.equal(gathered, _inputs(TOPOLOGY, numel).view(-1))
            chunk = _inputs(TOPOLOGY, 8 * numel).sum(0).view(8, numel)[rank]
            torch.testing.assert_close(reduced, chunk, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(everywhere, _inputs(TOPOLOGY, numel).sum(0), rtol=1e-5, atol=1e-5)
            assert torch.equal(everywhere, results[0][name, numel][4])  # replicas must agree to the last bit


def _strided(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 0 puts in is every other value of a tensor."""
    communicator, route = Communicator(frontier(1, 1, 2)), flat(frontier(1, 1, 2), 32)
    full = torch.arange(8.0)[::2] if rank == 0 else torch.arange(0.0, 8.0, 2.0)
    return communicator.all_gather(full, route), communicator.reduce_scatter(full, route)


def test_what_a_rank_puts_in_may_be_strided():
    for rank, (gathered, reduced) in enumerate(launch(_strided, 2, timeout_s=60)):
        assert gathered.tolist() == [0, 2, 4, 6, 0, 2, 4, 6]
        assert reduced.tolist() == [[0, 4], [8, 12]][rank]


def _two_of_one_group(rank: int, world: int) -> list[float]:
    """Two communicators gather at once, each in a stream of its own; the ranks begin with another one of the two."""
    route, streams, steps = flat(frontier(1, 1, 2), 32), [], []
    for number in range(2):
        communicator = Communicator(frontier(1, 1, 2))
        streams.append(communicator.stream(route))
        shard = torch.full((3,), 10.0 * number + rank)
        steps.append(communicator.labelled(5, communicator.gathering(shard, route)))
    pendings = {}
    for number in (0, 1) if rank == 0 else (1, 0):
        pendings[number] = streams[number].start(steps[number])
        time.sleep(0.2)
    return [value for number in range(2) for value in pendings[number].wait()[::3].tolist()]


def test_two_communicators_do_not_take_each_others_messages():
    assert launch(_two_of_one_group, 2, timeout_s=60) == [[0, 1, 10, 11]] * 2


def test_levels_of_one_member_and_uneven_machines():
    topology = Topology((Level("package", 3), Level("node", 1), Level("cluster", 2)))
    for rank, result in enumerate(launch(_collect, 6, topology, 32, False, timeout_s=60)):
        for (_, numel), (gathered, _, reduced, _, _) in result.items():
            assert torch.equal(gathered, _inputs(topology, numel).view(-1))
            chunk = _inputs(topology, 6 * numel).sum(0).view(6, numel)[rank]
            torch.testing.assert_close(reduced, chunk, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def quantised():
    return {bits: launch(_collect, 8, TOPOLOGY, bits, False, timeout_s=60) for bits in (8, 4)}


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_collectives_stay_within_the_rounding_of_their_hops(quantised, bits):
    """A gather rounds once. In a reduction over 3 hops of 2, errors add up like the values: half a step of the inputs,
    twice that and half a step of sums of 2, twice that and half a step of sums of 4: 6 steps of the inputs (less on
    other routes)."""
    largest = {8: 127, 4: 7}[bits]
    for rank, result in enumerate(quantised[bits]):
        for (name, numel), (gathered, _, reduced, _, everywhere) in result.items():
            shards, fulls = _inputs(TOPOLOGY, numel), _inputs(TOPOLOGY, 8 * numel)
            assert (gathered - shards.view(-1)).abs().max() <= shards.abs().max() / largest * 0.501
            chunk = fulls.sum(0).view(8, numel)[rank]
            assert (reduced - chunk).abs().max() <= 6.01 * fulls.abs().max() / largest
            assert (reduced - chunk).abs().max() > 0 or numel == 1  # it did quantise
            assert torch.equal(gathered, quantised[bits][0][name, numel][0])
            assert torch.equal(everywhere, quantised[bits][0][name, numel][4])
            total, step = shards.sum(0), 6.01 * shards.abs().max() / largest  # then the sum itself is rounded
            assert (everywhere - total).abs().max() <= step + 0.501 * (total.abs().max() + step) / largest


def _total(results: list[dict], key: tuple, which: int) -> dict[str, int]:
    return {level: sum(result[key][which][level] for result in results) for level in TOPOLOGY.names}


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_ledger_of_quantised_gathers_and_reductions(quantised, bits, numel):
    """All payloads are of one shard, k = 2 nodes, N = 8 ranks."""
    p = payload_bytes(numel, bits, 256)
    # hierarchical gather: 1 piece to 1 peer across nodes, 2 across packages, 4 inside the pair
    assert _total(quantised[bits], ("hierarchical", numel), 1) == {
        "package": 8 * 4 * p,
        "node": 8 * 2 * p,
        "cluster": 8 * p,
    }
    # a ring: every shard crosses every link of the cycle once, N - 1 times in all; 4, 2 and 2 links of a cycle per
    # level
    assert _total(quantised[bits], ("flat", numel), 1) == {
        "package": 4 * 7 * p,
        "node": 2 * 7 * p,
        "cluster": 2 * 7 * p,
    }
    # reduction inside first: 4 chunks to the pair's other rank, then 2, then 1
    wire = {level: payload_bytes(n * numel, bits, 256) for level, n in (("package", 4), ("node", 2), ("cluster", 1))}
    assert _total(quantised[bits], ("hierarchical", numel), 3) == {level: 8 * b for level, b in wire.items()}
    # two hops: 2 chunks to each of 3 peers in the node, then 1 to the peer in the other node
    two = payload_bytes(2 * numel, bits, 256)
    assert _total(quantised[bits], ("two hops", numel), 3) == {"package": 8 * two, "node": 16 * two, "cluster": 8 * p}


def _send_16_bits(rank: int, world: int) -> dict:
    communicator, found = Communicator(TOPOLOGY), {}
    x = _inputs(TOPOLOGY, 800)[rank]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        gathered = communicator.all_gather(x.to(dtype), flat(TOPOLOGY, 16))
        gather_bytes = communicator.ledger.take()
        reduced = communicator.reduce_scatter(x.to(dtype), flat(TOPOLOGY, 16))
        found[name] = gathered, gather_bytes, reduced, communicator.ledger.take()
    return found


def test_16_bits_halve_fp32_and_leave_bf16_alone_and_rings_spread_over_packages():
    results = launch(_send_16_bits, 8, timeout_s=60)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        exact = _inputs(TOPOLOGY, 800).to(torch.bfloat16).to(dtype)
        assert torch.equal(results[3][name][0], exact.view(-1)) and results[3][name][0].dtype == dtype
        total = _inputs(TOPOLOGY, 800).to(dtype).float().sum(0).view(8, 100)[3]
        assert (results[3][name][2] - total).abs().max() < 8 * 8 * 2**-8 and results[3][name][2].dtype == torch.float32
        for which, nbytes in ((1, 7 * 800 * 2), (3, 7 * 100 * 2)):
            assert sum(r[name][which]["cluster"] for r in results) == 2 * nbytes
            # each node leaves through both of its packages, half each: a single ring would leave one NIC idle
            per_package = [sum(results[r][name][which]["cluster"] for r in (a, a + 1)) for a in (0, 2, 4, 6)]
            assert max(per_package) - min(per_package) <= 7 * 2 * 2


@pytest.mark.parametrize("sizes", [[2, 2], [2, 4, 48], [3, 1, 2], [1, 4], [8]])
def test_ring_orders_are_cycles_that_leave_through_different_units(sizes):
    orders = ring_orders(sizes)
    real = [size for size in sizes if size > 1]
    if len(real) < 2:
        assert orders == ()
        return
    ranks = range(torch.tensor(sizes).prod())
    assert len(orders) == real[-2] and all(sorted(order) == list(ranks) for order in orders)
    inside = len(ranks) // real[-1]
    unit = inside // real[-2]
    assert len({order[inside - 1] // unit for order in orders}) == len(orders)
    for order in orders:  # each order leaves an outer unit exactly once
        assert sum(a // inside != b // inside for a, b in zip(order, order[1:] + order[:1], strict=True)) == real[-1]


def test_route_within_levels():
    route = Route(TWO_HOPS, (4, 8), 64)
    assert route.within(("node", "cluster")) == Route((("node",), ("cluster",)), (4, 8), 64)
    assert route.within(("package",)) == Route((("package",),), (4,), 64)
    assert route.within(()) is None
    assert hierarchical(TOPOLOGY, (16, 8, 4)).bits == (16, 8, 4)


def test_ledger_counts_by_the_link_that_joins_two_ranks():
    ledger = Ledger(TOPOLOGY, rank=1)
    for peer, nbytes in ((0, 1), (2, 10), (3, 100), (4, 1000), (1, 10000)):
        ledger.count(peer, nbytes)
    assert ledger.take() == {"package": 1, "node": 110, "cluster": 1000}
    assert ledger.take() == {"package": 0, "node": 0, "cluster": 0}


def _patience(rank: int, world: int) -> list[timedelta]:
    """Time-outs of the default process group, and of those of each run of levels."""
    communicator = Communicator(TOPOLOGY)
    runs = ((), ("package",), ("node",), ("package", "node"), TOPOLOGY.names)
    groups = (dist.group.WORLD, *(communicator.mesh(levels).get_group() for levels in runs))
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_wait_as_long_as_the_default_process_group():
    for asked, *found in launch(_patience, TOPOLOGY.world_size, timeout_s=60):
        assert found == [asked] * 5 and asked < timedelta(minutes=5)


def _refusals(rank: int, world: int) -> list[str]:
    messages = []
    for action in (
        lambda: Communicator(frontier(2, 2, 2)),
        lambda: Communicator(frontier(1, 1, 2)).mesh(("node", "package")),
        lambda: Communicator(frontier(1, 1, 2)).reduce_scatter(torch.ones(3), flat(frontier(1, 1, 2))),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_what_it_refuses():
    with pytest.raises(ValueError, match="bits 5 is not a wire format, allowed: 32, 16, 8, 4"):
        flat(TOPOLOGY, 5)
    with pytest.raises(ValueError, match="bits for each"):
        hierarchical(TOPOLOGY, (16, 8))
    with pytest.raises(ValueError, match="block is 0"):
        flat(TOPOLOGY, 8, 0)
    size, order, divide = launch(_refusals, 2, timeout_s=60)[0]
    assert "topology has 8 ranks, the process group 2" in size
    assert "not consecutive" in order and "2 ranks do not divide a tensor of 3 values" in divide
