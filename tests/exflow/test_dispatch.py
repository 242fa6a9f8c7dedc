"""What deduplicated dispatch sends: counted as plain Python does, kept within groups' nodes, and made less."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.placement import Placement
from repro.exflow.serving.fanout.dispatch import dispatch, place_for_dispatch
from repro.exflow.serving.slots import Replicas

GROUPS, OF_A_TOKEN = 4, 2  # groups of 4 experts, and how many of them a token may use


def routed(seed, tokens=200, layers=2, k=3):
    """Group-limited top-k routing of 16 experts."""
    rng = np.random.default_rng(seed)
    rows = np.empty((tokens, layers, k), int)
    for place in np.ndindex(tokens, layers):
        groups = rng.choice(GROUPS, OF_A_TOKEN, replace=False)
        rows[place] = rng.choice((groups[:, None] * 4 + np.arange(4)).ravel(), k, replace=False)
    return exflow.Trace(rows, 16)


def counted(placed, trace):
    """(GPUs, nodes, busiest GPU of each layer) by walking every token."""
    gpus = nodes = 0
    load = np.zeros((trace.layers, placed.gpus))
    for number, token in enumerate(trace.experts):
        home = number % placed.gpus
        for layer, experts in enumerate(token):
            to = []
            for expert in experts:
                hosts = np.flatnonzero(placed.hosted[layer, expert]).tolist()
                near = [h for h in hosts if h // placed.gpus_per_node == home // placed.gpus_per_node]
                among = [home] if home in hosts else near or hosts
                to.append(among[home % len(among)])
                load[layer, to[-1]] += 1
            gpus += len(set(to) - {home})
            nodes += len({gpu // placed.gpus_per_node for gpu in to} - {home // placed.gpus_per_node})
    rows = trace.tokens * trace.layers
    return gpus / rows, nodes / rows, load.max(axis=1) * placed.gpus / trace.tokens / trace.k


def contiguous(layers=2, per_node=2):
    return Placement(np.tile(np.repeat(np.arange(4), 4), (layers, 1)), 4, per_node, "contiguous")


@given(st.integers(0, 9999), st.integers(0, 2), st.sampled_from([1, GROUPS]))
@settings(max_examples=10, deadline=None)
def test_counted_as_tokens_go_and_never_more_than_before(seed, extra, groups):
    trace = routed(seed)
    placed = place_for_dispatch(trace, contiguous(), extra, groups=groups, sweeps=2, seed=seed)
    found, (gpus, nodes, most) = dispatch(placed, trace), counted(placed, trace)
    assert (found.gpus, found.nodes) == pytest.approx((gpus, nodes))
    assert (found.max_load, found.max_load_worst_layer) == pytest.approx((most.mean(), most.max()))
    assert placed.slots_per_gpu == 4 + extra and placed.hosted.any(axis=2).all()
    start = Replicas(np.tile(np.arange(16), (2, 1)), 4, 2)
    assert found.cost() <= dispatch(start, trace).cost() + 1e-9


@given(st.integers(0, 9999))
@settings(max_examples=15, deadline=None)
def test_groups_stay_on_their_node(seed):
    """So a token visits no more nodes than groups, whatever copies there are."""
    trace = routed(seed)
    placed = place_for_dispatch(trace, contiguous(per_node=1), 2, groups=GROUPS, sweeps=3, seed=seed)
    by_group = placed.hosted.reshape(2, GROUPS, 4, 4).any(axis=2)
    assert (by_group.sum(axis=2) == 1).all()


def test_copies_and_swaps_send_less(make_trace):
    first = make_trace(3, 16, 4000, 1, alpha=0.2)
    second = (first + 8) % 16  # far from the first in rank order, and always together
    trace = exflow.Trace(np.stack([first, second], axis=2), 16)
    before = dispatch(Replicas(np.tile(np.arange(16), (3, 1)), 4, 2), trace)
    swapped = dispatch(place_for_dispatch(trace, contiguous(3)), trace)
    copied = dispatch(place_for_dispatch(trace, contiguous(3), 4), trace)
    assert swapped.gpus < 0.7 * before.gpus and copied.cost() < 0.8 * swapped.cost()
    limited = dispatch(place_for_dispatch(trace, contiguous(3), 4, max_load=1.02), trace)
    assert limited.max_load < 1.06 < copied.max_load and copied.gpus < limited.gpus


def test_wrong_arguments_are_refused():
    trace = routed(0)
    for message, wrong in {
        "extra_slots is 13, allowed: 0 to 12": {"extra_slots": 13},
        "groups is 5": {"groups": 5},
        "max_load is 0.9": {"max_load": 0.9},
        "sweeps is -1": {"sweeps": -1},
        "time_limit_s nan": {"time_limit_s": float("nan")},
        r"costs are \(2, 1\)": {"costs": (2, 1)},
    }.items():
        with pytest.raises(ValueError, match=message):
            place_for_dispatch(trace, contiguous(), **wrong)
    spread = Placement(np.tile(np.arange(16) % 4, (2, 1)), 4, 2, "round robin")
    with pytest.raises(ValueError, match="start has group 0 of layer 0 on several nodes"):
        place_for_dispatch(trace, spread, groups=GROUPS)
