"""Rank numbering on any machine, and Frontier's layout by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.topology import FRONTIER_BYTES_PER_S, Level, Topology, frontier, scaled


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rates = draw(st.lists(st.floats(1e3, 1e12), min_size=len(sizes), max_size=len(sizes)))
    return Topology(tuple(Level(f"l{i}", size, rate) for i, (size, rate) in enumerate(zip(sizes, rates, strict=True))))


@st.composite
def topologies_with_ranks(draw: st.DrawFn) -> tuple[Topology, int, int]:
    topology = draw(topologies())
    ranks = st.integers(0, topology.world_size - 1)
    return topology, draw(ranks), draw(ranks)


@given(topologies())
def test_places_differ_and_are_on_the_machine(topology):
    places = [topology.place(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    for place in places:
        assert all(0 <= inside < level.size for inside, level in zip(place, topology.levels, strict=True))


@given(topologies())
def test_mesh_is_row_major_over_our_ranks(topology):
    assert math.prod(topology.mesh_shape) == topology.world_size
    strides = [math.prod(topology.mesh_shape[i + 1 :]) for i in range(len(topology.mesh_shape))]
    for rank in range(topology.world_size):
        coordinates = reversed(topology.place(rank))
        assert sum(c * stride for c, stride in zip(coordinates, strides, strict=True)) == rank


@given(topologies_with_ranks())
def test_level_between_is_the_smallest_unit_that_holds_both(case):
    topology, a, b = case
    shared = [name for name in topology.names if a // topology.span(name) == b // topology.span(name)]
    assert topology.level_between(a, b) == topology.level_between(b, a) == (None if a == b else shared[0])


@given(topologies())
def test_spans_multiply_up_to_the_world(topology):
    spans = [topology.span(name) for name in topology.names]
    assert spans[-1] == topology.world_size
    assert all(outer % inner == 0 for inner, outer in itertools.pairwise(spans))
    assert [topology.index(name) for name in topology.names] == list(range(len(spans)))


@given(topologies(), st.floats(1e3, 1e9))
def test_scaling_keeps_shape_and_ratios(topology, rate):
    result = scaled(topology, rate)
    assert result.levels[-1].bytes_per_s == pytest.approx(rate)
    assert (result.mesh_shape, result.names) == (topology.mesh_shape, topology.names)
    for before, after in zip(topology.levels, result.levels, strict=True):
        ratio = before.bytes_per_s / topology.levels[-1].bytes_per_s
        assert after.bytes_per_s / result.levels[-1].bytes_per_s == pytest.approx(ratio)


def test_frontier():
    topology = frontier(nodes=3)
    assert topology.world_size == 24 and topology.mesh_shape == (3, 4, 2)
    assert topology.names == ("package", "node", "cluster")
    assert [topology.span(name) for name in topology.names] == [2, 8, 24]
    assert topology.place(13) == (1, 2, 1)
    assert [topology.level_between(0, other) for other in (0, 1, 2, 7, 8)] == [
        None,
        "package",
        "node",
        "node",
        "cluster",
    ]
    assert tuple(level.bytes_per_s for level in topology.levels) == FRONTIER_BYTES_PER_S


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Level("node", 0), "size is 0"),
        (lambda: Level("node", 1, bytes_per_s=0), "bandwidth must be positive"),
        (lambda: Level("node", 1, latency_s=-1), "latency not negative, found inf and -1"),
        (lambda: Topology(()), "at least one"),
        (lambda: Topology((Level("node", 2), Level("node", 2))), "distinct names"),
        (lambda: frontier(1).place(8), "rank 8 is outside a world of 8"),
        (lambda: frontier(1).place(-1), "rank -1"),
        (lambda: frontier(1).index("rack"), "allowed: package, node, cluster"),
        (lambda: frontier(1).span("rack"), "'rack' is not in the topology"),
        (lambda: scaled(Topology((Level("node", 2, 1e9), Level("rack", 2))), 1e6), "level 'rack': inf bytes/s"),
        (lambda: scaled(frontier(1), math.inf), "level 'cluster': .* to become inf; both must be finite"),
    ],
)
def test_what_a_user_got_wrong_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
