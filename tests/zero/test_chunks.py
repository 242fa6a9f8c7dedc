"""The worked example of `own_chunk` against the definition of the collectives, played with lists of chunks."""

import re

from repro.topology import frontier
from repro.zero import plan as plans
from repro.zero.chunks import own_chunk, splits

TOPOLOGY = frontier(2, 2, 2)
PLAN = plans.hierarchical(TOPOLOGY)


def group(rank: int, levels: tuple[str, ...]) -> list[int]:
    """Ranks that differ from `rank` in `levels` only, in rank order."""
    fixed = [place for name, place in zip(TOPOLOGY.names, TOPOLOGY.place(rank), strict=True) if name not in levels]
    found = []
    for other in range(TOPOLOGY.world_size):
        theirs = [
            place for name, place in zip(TOPOLOGY.names, TOPOLOGY.place(other), strict=True) if name not in levels
        ]
        if theirs == fixed:
            found.append(other)
    return found


def reduce_scatter(held: list[list[int]], levels: tuple[str, ...]) -> list[list[int]]:
    """Which chunks every rank has left: the j-th rank of a group keeps the j-th part."""
    kept = []
    for rank, chunks in enumerate(held):
        ranks = group(rank, levels)
        part = len(chunks) // len(ranks)
        kept.append(chunks[part * ranks.index(rank) :][:part])
    return kept


def all_gather(held: list[list[int]], levels: tuple[str, ...]) -> list[list[int]]:
    return [[chunk for peer in group(rank, levels) for chunk in held[peer]] for rank in range(len(held))]


def test_the_worked_example_is_what_the_collectives_do():
    rows = re.findall(r"^ +\d   .*$", own_chunk.__doc__, re.MULTILINE)
    told = [[list(map(int, re.findall(r"\d", column))) for column in re.split(r" {3,}", row.strip())] for row in rows]
    rank, place, weights, after_package, after_node, after_cluster, arrive = map(list, zip(*told, strict=True))
    assert [row[0] for row in rank] == list(range(8))
    assert place == [list(reversed(TOPOLOGY.place(row))) for row in range(8)]

    whole = [list(range(8))] * 8
    assert after_package == reduce_scatter(whole, ("package",)) == weights
    assert after_node == reduce_scatter(after_package, ("node",))
    assert after_cluster == reduce_scatter(after_node, ("cluster",))
    assert arrive == all_gather(after_cluster, ("node", "cluster"))


def test_the_chunk_of_a_rank_is_that_of_the_worked_example():
    gradient_parts, optimizer_parts = splits(PLAN)
    assert (gradient_parts, optimizer_parts) == (2, 2)
    assert [own_chunk(PLAN, rank) for rank in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    arrive = [0, 2, 1, 3]  # and sorted as `_publishing` does it
    assert [arrive[o * gradient_parts + g] for g in range(gradient_parts) for o in range(optimizer_parts)] == [
        0,
        1,
        2,
        3,
    ]


def test_every_chunk_has_one_owner_per_replica_in_every_plan():
    for name in plans.NAMED:
        plan = plans.named(name, TOPOLOGY)
        weights, optimizer = plan.degree(plan.weights), plan.degree(plan.optimizer)
        owned = [(rank % weights, own_chunk(plan, rank)) for rank in range(optimizer)]
        assert len(set(owned)) == optimizer == weights * splits(plan)[0] * splits(plan)[1], name
