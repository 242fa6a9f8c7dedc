"""The memory shuffle: fewest moves, and a cache that holds afterwards exactly what it held before."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.flover.buffers import SlotBuffers, plan_moves


def fewest_moves(live: list[bool]) -> int:
    """Over every window, the live slots that lie outside."""
    width = sum(live)
    return min(width - sum(live[at : at + width]) for at in range(len(live) - width + 1))


@pytest.mark.parametrize("slots", range(1, 11))
def test_moves_are_fewest_and_close_every_hole(slots):
    for flags in itertools.product([False, True], repeat=slots):
        start, moves = plan_moves(flags)
        assert len(moves) == fewest_moves(list(flags))
        after = list(flags)
        for source, destination in moves:
            assert after[source] and not after[destination]
            after[source], after[destination] = False, True
        assert after == [start <= slot < start + sum(flags) for slot in range(slots)]


def test_moves_of_many_slots():
    live = [True] * 300
    for slot in range(50, 250, 2):
        live[slot] = False
    assert len(plan_moves(live)[1]) == fewest_moves(live)


def test_leaving_at_an_edge_moves_nothing(model):
    buffers = SlotBuffers(model, slots=6, capacity=4)
    for _ in range(5):
        buffers.allocate()
    assert buffers.evict([0]) == [] and buffers.window == slice(1, 5)
    assert buffers.evict([4, 3]) == [] and buffers.window == slice(1, 3)
    assert buffers.slot_moves == buffers.moved_bytes == 0


def test_freed_slots_are_used_again_below_the_window(model):
    buffers = SlotBuffers(model, slots=3, capacity=4)
    for _ in range(3):
        buffers.allocate()
    buffers.evict([0, 1])
    assert [buffers.allocate(), buffers.allocate()] == [1, 0]
    with pytest.raises(AssertionError):
        buffers.allocate()


def test_bytes_moved_are_those_of_the_stored_tokens(model):
    buffers = SlotBuffers(model, slots=3, capacity=10)
    for length in (4, 5, 6):
        buffers.store(buffers.allocate(), token=1, length=length)
    assert buffers.evict([1]) == [(2, 1)]
    layers, kv_heads, dim, fp32 = 2, 2, 8, 4
    assert buffers.moved_bytes == 2 * layers * kv_heads * 6 * dim * fp32  # keys and values of 6 tokens


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), min_size=1, max_size=60))
def test_slots_keep_their_content_through_any_admissions_and_evictions(model, events):
    buffers = SlotBuffers(model, slots=8, capacity=12)
    owner: dict[int, int] = {}  # slot: serial number of what lies there
    for number, (arrives, choice) in enumerate(events, 1):
        if arrives and len(owner) < 8:
            slot, length = buffers.allocate(), choice % 12 + 1
            buffers.store(slot, number, length)
            for sign, cache in ((1, buffers.keys), (-1, buffers.values)):
                cache[:, slot, :, :length] = sign * (number + torch.arange(length) / 100)[:, None]
            owner[slot] = number
        elif owner:
            leaving = [slot for i, slot in enumerate(sorted(owner)) if choice >> (i % 7) & 1]
            for slot in leaving:
                del owner[slot]
            for source, destination in buffers.evict(leaving):
                owner[destination] = owner.pop(source)
        assert sorted(owner) == list(range(buffers.low, buffers.high))
        for slot, number in owner.items():
            length = int(buffers.lengths[slot])
            expected = (number + torch.arange(length) / 100)[:, None].expand(2, 2, length, 8)
            assert int(buffers.tokens[slot]) == number
            assert torch.equal(buffers.keys[:, slot, :, :length], expected)
            assert torch.equal(buffers.values[:, slot, :, :length], -expected)
