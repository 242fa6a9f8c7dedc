"""Ranks of a job sit where the topology says, or the run ends before it starts."""

import pytest

from repro.launch.errors import PlacementError
from repro.launch.seats import Seat, compare, seat
from repro.topology import frontier

TWO_NODES = frontier(2, 2, 2)


def seats(devices, hosts=("a", "b")):
    return [Seat(host, device) for host in hosts for device in devices]


def test_as_the_topology_says():
    compare(TWO_NODES, seats([0, 1, 2, 3]), 2)
    compare(TWO_NODES, seats([4, 5, 2, 3]), 2)  # the order that --gpu-bind=closest gives on Frontier
    compare(TWO_NODES, seats([None] * 4), 2)  # no GPUs, or nobody says which
    compare(frontier(1, 1, 4), seats([0, 1, 2, 3], ["a"]), 4)
    compare(frontier(1, 2, 1), seats([0, 2], ["a"]), 2)


@pytest.mark.parametrize(
    ("found", "gcds", "message"),
    [
        (seats([0, 1, 2, 3], ["a", "a"]), 2, r"rank 4 should be on another node than rank 0, but both are on host a"),
        (
            [*seats([0, 1, 2, 3])[:3], *seats([0, 1, 2, 3])[4:], Seat("a", 3)],
            2,
            r"rank 3 should share a node with rank 0",
        ),
        (seats([0, 2, 1, 3]), 2, r"rank 1 should share a package with rank 0, but is on another package: .*device=2"),
    ],
)
def test_elsewhere(found, gcds, message):
    with pytest.raises(PlacementError, match=message):
        compare(TWO_NODES, found, gcds)


def test_two_packages_of_the_topology_on_one_of_the_hardware():
    with pytest.raises(PlacementError, match="rank 1 should be on another package than rank 0"):
        compare(frontier(1, 2, 1), seats([0, 1], ["a"]), 2)


@pytest.mark.parametrize(
    ("shown", "local_rank", "device"),
    [({}, "0", None), ({"ROCR_VISIBLE_DEVICES": "5"}, "3", 5), ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2", 2)],
)
def test_which_gpu_a_rank_has(monkeypatch, shown, local_rank, device):
    for name in ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert seat().device == device
