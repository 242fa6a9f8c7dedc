"""The memory shuffle: fewest moves; and in every layout a cache that holds afterwards exactly what it held before."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.flover.buffers import LAYOUTS
from repro.flover.buffers.baseline_layouts import FixedBuffers, LastBuffers, ShiftBuffers
from repro.flover.buffers.paged import PagedBuffers
from repro.flover.buffers.window import WindowBuffers, plan_moves

CACHE_BYTES = 2 * 2 * 2 * 8 * 4  # of one position of the model below: keys and values, 2 layers, 2 KV heads of 8, fp32


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


def filled(layout, model, lengths, slots=8, capacity=12):
    """Buffers that hold so many positions each."""
    buffers = layout(model, slots, capacity)
    for length in lengths:
        buffers.store(buffers.allocate(capacity), token=1, length=length)
    return buffers


def test_leaving_at_an_edge_moves_nothing(model):
    buffers = filled(WindowBuffers, model, [4] * 5)
    assert buffers.evict([0]) == [] and buffers.window == slice(1, 5)
    assert buffers.evict([4, 3]) == [] and buffers.window == slice(1, 3)
    assert buffers.slot_moves == buffers.moved_bytes == 0


def test_freed_slots_are_used_again_below_the_window(model):
    buffers = filled(WindowBuffers, model, [1] * 3, slots=3)
    buffers.evict([0, 1])
    assert [buffers.allocate(1), buffers.allocate(1)] == [1, 0]
    with pytest.raises(AssertionError):
        buffers.allocate(1)


@pytest.mark.parametrize(
    ("layout", "moves", "moved", "window"),
    [
        (WindowBuffers, [(3, 2)], 7, (0, 3)),  # the lowest of the windows with one move
        (FixedBuffers, [], 0, (0, 4)),
        (ShiftBuffers, [(3, 2)], 7, (0, 3)),
        (LastBuffers, [(3, 2)], 7, (0, 3)),
        (PagedBuffers, [(3, 2)], 0, (0, 3)),  # a row of the table
    ],
)
def test_what_a_hole_costs(model, layout, moves, moved, window):
    """Slots of 4, 5, 6 and 7 positions; the third leaves."""
    buffers = filled(layout, model, [4, 5, 6, 7], slots=4)
    assert buffers.evict([2]) == moves
    assert (buffers.moved_bytes, buffers.window) == (moved * CACHE_BYTES, slice(*window))
    assert buffers.slot_moves == len(moves)


def test_shifting_keeps_the_order_and_the_last_fills_the_first_hole(model):
    shift, last = (filled(layout, model, [3] * 6) for layout in (ShiftBuffers, LastBuffers))
    assert shift.evict([1, 3]) == [(2, 1), (4, 2), (5, 3)]
    assert last.evict([1, 3]) == [(4, 1), (5, 3)]


def test_dead_rows_stay_until_they_are_at_an_edge(model):
    buffers = filled(FixedBuffers, model, [3] * 4, slots=5)
    buffers.evict([1, 2])
    assert buffers.window == slice(0, 4) and buffers.fits([1] * 9) == 3
    assert buffers.allocate(1) == 4  # the edge first
    assert buffers.allocate(1) == 1  # then the hole
    buffers.evict([0, 1])
    assert buffers.window == slice(3, 5)
    buffers.evict([3, 4])
    assert buffers.window == slice(0, 0) and buffers.allocate(1) == 0


@pytest.mark.parametrize("sizes", [{"block": 0}, {"blocks": 0}])
def test_blocks_have_positions(model, sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        PagedBuffers(model, 2, 16, **sizes)


def test_blocks_limit_what_fits_and_come_back(model):
    buffers = PagedBuffers(model, slots=8, capacity=12, blocks=4, block=4)
    assert buffers.most == 12 and buffers.fits([5, 8, 1]) == 2  # 2 and 2 blocks
    for needed in (5, 8):
        buffers.allocate(needed)
    assert buffers.fits([1]) == 0
    buffers.evict([0])
    assert buffers.fits([1, 4, 1]) == 2
    assert PagedBuffers(model, slots=8, capacity=12, blocks=2, block=4).most == 8


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
@given(events=st.lists(st.tuples(st.booleans(), st.integers(0, 100)), min_size=1, max_size=60))
def test_slots_keep_their_content_through_any_admissions_and_evictions(layout, model, events):
    buffers = layout(model, 8, 12)
    owner: dict[int, int] = {}  # slot: serial number of what lies there
    for number, (arrives, choice) in enumerate(events, 1):
        if arrives and buffers.fits([choice % 12 + 1]):
            length = choice % 12 + 1
            slot = buffers.allocate(length)
            assert slot not in owner
            buffers.store(slot, number, length)
            content = (number + torch.arange(length) / 100)[:, None, None].expand(length, 2, 8)
            for layer in range(2):
                where = torch.full((length,), slot), torch.arange(length)
                buffers.cache.write(layer, *where, content + layer, -content)
            owner[slot] = number
        elif owner:
            leaving = [slot for i, slot in enumerate(sorted(owner)) if choice >> (i % 7) & 1]
            for slot in leaving:
                del owner[slot]
            for source, destination in buffers.evict(leaving):
                owner[destination] = owner.pop(source)
        window = range(8)[buffers.window]
        assert set(owner) <= set(window) and buffers.fits([1] * 20) == 8 - len(owner)
        assert layout is FixedBuffers or len(owner) == len(window)
        for slot, number in owner.items():
            length = int(buffers.lengths[slot])
            expected = (number + torch.arange(length) / 100)[:, None].expand(1, 2, length, 8)
            assert int(buffers.tokens[slot]) == number and length <= buffers.longest(buffers.window)
            for layer in range(2):
                keys, values = buffers.cache.read(layer, slice(slot, slot + 1), length)
                assert torch.equal(keys, expected + layer) and torch.equal(values, -expected)
