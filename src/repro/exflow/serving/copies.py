"""Experts, copies and shares of traffic in one search: few hops, and no GPU above a limit of load.

    trace = exflow.load_trace("routing.npz", top_k=1)
    placed = exflow.place_copies(trace, gpus=8, extra_slots=1, max_load=1.1)
    print(exflow.evaluate_replicas(placed, trace))

Step 1  a placement without copies that keeps the limit where it can (`placement.place`)
Step 2  annealing of all layers' copies and shares on transition counts (`search/joint.py`)
Step 3  shares dealt anew, layer by layer, to the tokens that really arrive (only of a trace, not of counts)
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.exflow.evaluate import check_counts, check_shapes, loads
from repro.exflow.levels import Levels, make_levels
from repro.exflow.placement import Placement, place
from repro.exflow.search import balance, joint
from repro.exflow.search.portfolio import Budget, Clock, Progress, check_effort
from repro.exflow.serving import eplb
from repro.exflow.serving.export import check_even
from repro.exflow.serving.replicas import dealt, nearest_copies
from repro.exflow.serving.slots import DISPATCHES, Replicas, filled
from repro.exflow.trace import Trace, by_layer, transitions
from repro.topology import Topology

ROUNDS = 4  # when neither rounds nor a time limit is given
SWEEPS = 200  # of a round, there and back over all layers
PROPOSALS = 5  # changes offered per slot of a layer in each direction of a sweep
HOT, COLD = 0.1, 0.005  # temperatures, in hops of an expert's tokens
DESCENT = 0.2  # share of a round's sweeps without heat
MOST_SHARES = 2**27  # numbers, layers · E · GPUs²: a gigabyte, of which the search takes a few
PRICE = 4.0  # of a token above the limit, in hops at the highest cost
START_SHARE, START_ROUNDS = 0.3, 5  # of step 1: its share of the time limit; its rounds for each round of step 2


@dataclass(frozen=True)
class _Job:
    """Tokens `visits` [L, E] and `follow` [L-1, E, E] as in `search/joint.py`, the machine, and what must hold."""

    visits: np.ndarray
    follow: np.ndarray
    distance: np.ndarray
    room: np.ndarray
    rules: joint.Rules
    before: np.ndarray  # bool [L, E, G]: copies to begin with

    def state(self, hosted: np.ndarray, share: np.ndarray) -> joint.State:
        """Of these copies and shares. Tokens come into the first layer evenly from all GPUs."""
        arriving, onward = np.zeros(hosted.shape), np.zeros(hosted.shape)
        arriving[0] = self.visits[0][:, None] / hosted.shape[2]
        moved = np.array([(hosted & ~self.before).sum()])
        state = joint.State(hosted.copy(), share.copy(), arriving, onward, self.before, moved)
        joint.refresh(state, self.follow, self.distance)
        return state

    def cost(self, state: joint.State) -> float:
        hops, load = joint.value(state, self.distance)
        return hops + self.rules.price * float(np.maximum(load - self.room[:, None], 0.0).sum())


def place_copies(
    routing: Trace | np.ndarray,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    extra_slots: int = 0,
    *,
    max_load: float | None = None,
    dispatch: str = "shares",
    seed: int = 0,
    time_limit_s: float | None = None,
    rounds: int | None = None,
    costs: Sequence[float] | None = None,
    start: Placement | Replicas | None = None,
    moves: int | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Replicas:
    """Place the experts of top-1 `routing` (a trace, or transition counts [layers-1, E, E]) on P GPUs, with `extra_slots`
    slots per GPU and layer beside its E/P for copies of any expert.

    `max_load`: tokens of a layer's busiest GPU over the even share that are aimed at, or what EPLB reaches there with
    as many slots, where that is more; each token above it costs PRICE hops. `dispatch`: which copy takes a token on
    the server, one of `slots.DISPATCHES`; with `shares` the result says so in `share`. `start`: a placement to begin
    with, instead of searching one; of one with copies the slots of a GPU stay as many, and `extra_slots` come on top.
    `moves`: most experts that may come to a GPU which does not hold them in `start`, all layers together. Machine,
    costs, seed, progress and clock as in `placement.place`. `seed` and `rounds` (default: ROUNDS, where no time limit
    is given) fix the result, unless a time limit cuts it short. Copies of one expert never share a GPU; slots without a
    use repeat an expert of their GPU.

    Raises ValueError as `place` does, when k > 1, for a `start` without copies that has unequal numbers of experts on
    its GPUs, or when an argument is out of range.
    """
    levels = make_levels(gpus, gpus_per_node, costs)
    counts = _counts(routing)
    _check(len(counts) + 1, extra_slots, counts.shape[1], levels.gpus, max_load, dispatch, moves, start)
    check_effort(time_limit_s, rounds)
    compile_kernels()
    begun = time.perf_counter()
    if rounds is None and time_limit_s is None:
        rounds = ROUNDS
    if start is None:
        options: dict[str, Any] = {
            "max_load": max_load,
            "where_possible": True,
            "costs": costs,
            "seed": seed,
            "progress": progress,
        }
        share = None if time_limit_s is None else time_limit_s * START_SHARE
        many = None if rounds is None else rounds * START_ROUNDS
        start = place(counts, gpus, gpus_per_node, time_limit_s=share, rounds=many, clock=clock, **options)
    hosted = start.hosted if isinstance(start, Replicas) else np.eye(levels.gpus, dtype=bool)[start.gpu]
    check_shapes(hosted.shape[:2], (len(counts) + 1, counts.shape[1]))
    slots = extra_slots + (start.slots_per_gpu if isinstance(start, Replicas) else counts.shape[1] // levels.gpus)
    rules = joint.Rules(
        DISPATCHES.index(dispatch),
        levels.spans[levels.node_level],
        slots,
        PRICE * levels.distances().max(),
        hosted.size if moves is None else moves,
    )
    job = _job(counts, levels, max_load, rules, hosted)
    state = job.state(hosted, _start_shares(hosted, rules))
    deadline = math.inf if time_limit_s is None else begun + time_limit_s
    state = _anneal(job, state, Budget(rounds, deadline, progress, "placing copies", clock=clock), seed)
    if isinstance(routing, Trace) and dispatch == "shares":
        _settle(job, state, routing)
    return _replicas(state, levels, slots, dispatch)


def _check(
    layers: int,
    extra: int,
    experts: int,
    gpus: int,
    max_load: float | None,
    dispatch: str,
    moves: int | None,
    start: Placement | Replicas | None,
) -> None:
    held = start.slots_per_gpu if isinstance(start, Replicas) else experts // gpus
    if start is not None and start.gpus != gpus:
        raise ValueError(f"start is a placement on {start.gpus} GPUs, found {gpus} GPUs now")
    if isinstance(start, Placement):
        check_even(start.gpu, gpus)
    if not 0 <= extra <= max(experts - held, 0):
        raise ValueError(f"extra_slots is {extra}, allowed: 0 to {experts - held}, where every GPU holds all experts")
    if (numbers := layers * experts * gpus**2) > MOST_SHARES:
        raise ValueError(
            f"{layers} layers of {experts} experts on {gpus} GPUs have {numbers:,} shares, allowed: {MOST_SHARES:,}"
        )
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch is {dispatch!r}, allowed: {', '.join(DISPATCHES)}")
    balance.check_max_load(max_load)
    if moves is not None and (moves < 0 or start is None):
        raise ValueError(f"moves is {moves}, must be 0 or more, and counts from a placement to start with")


def _counts(routing: Trace | np.ndarray) -> np.ndarray:
    if isinstance(routing, Trace) and routing.k != 1:
        raise ValueError(f"{routing.source}: top-{routing.k} routing, copies are for top-1: take `trace.top(1)`")
    counts = transitions(routing) if isinstance(routing, Trace) else np.ascontiguousarray(routing, np.float64)
    check_counts(counts)
    return counts


def _job(counts: np.ndarray, levels: Levels, max_load: float | None, rules: joint.Rules, before: np.ndarray) -> _Job:
    visits = loads(counts)
    follow = np.divide(counts, visits[:-1, :, None], out=np.zeros_like(counts), where=visits[:-1, :, None] > 0)
    return _Job(visits, follow, levels.distances(), _room(visits, levels.gpus, max_load, rules.slots), rules, before)


def _room(visits: np.ndarray, gpus: int, max_load: float | None, slots: int) -> np.ndarray:
    """float64 [layers]: tokens that a GPU may get. Where one expert alone is too much, the price would drive all others
    apart for nothing."""
    if max_load is None:
        return np.full(len(visits), math.inf)
    *_, reached = eplb.slots_and_tokens(visits, slots * gpus, 1, 1, gpus)
    return np.maximum(max_load * visits.sum(axis=1) / gpus, reached)


def _start_shares(hosted: np.ndarray, rules: joint.Rules) -> np.ndarray:
    """float64 [L, E, G, G]: as the server deals tokens to copies; evenly where the shares are still to be found. Else the
    search would compare with a start that no server has, since it deals anew only what does not get worse by it."""
    gpus = hosted.shape[2]
    if rules.dispatch == joint.NEAREST:
        return np.eye(gpus)[nearest_copies(hosted, rules.per_node)]
    return np.repeat((hosted / hosted.sum(axis=2, keepdims=True))[:, :, None], gpus, axis=2)


def _anneal(job: _Job, start: joint.State, budget: Budget, seed: int) -> joint.State:
    """The best state of the budget's rounds, each of which begins with the best so far: at first `start`, whose tokens
    are dealt anew."""
    rng, still = np.random.default_rng(seed), np.ones(1, np.uint64)
    joint.sweep(job.rules, start, job.follow, job.distance, job.room, 0.0, 0, still)
    best, least = start, job.cost(start)
    layers, experts, gpus = start.hosted.shape
    unit = float(job.visits.sum() / layers / experts * job.distance.max())
    proposals = PROPOSALS * job.rules.slots * gpus
    total, done = max(budget.left(), 1e-3), 0
    while budget.rounds is None or done < budget.rounds:
        state = job.state(best.hosted, best.share)
        random = rng.integers(1, 2**63, 1, dtype=np.uint64)
        for number in range(SWEEPS):
            cooling = number / SWEEPS / (1 - DESCENT)
            late = budget.expired()
            heat = unit * HOT * (COLD / HOT) ** cooling if cooling < 1 and not late else 0.0
            joint.sweep(job.rules, state, job.follow, job.distance, job.room, heat, proposals, random)
            share = (done + number / SWEEPS) / budget.rounds if budget.rounds else 1 - budget.left() / total
            budget.report(share)
            if late:
                break
        if (cost := job.cost(state)) < least:
            best, least = state, cost
        done += 1
        if budget.expired():
            break
    return best


def _settle(job: _Job, state: joint.State, trace: Trace) -> None:
    """Deal anew, with the tokens that arrive in each layer when the layers before are as they will be."""
    random = np.ones(1, np.uint64)
    at = np.arange(trace.tokens) % state.hosted.shape[2]
    for layer, expert in enumerate(by_layer(trace.experts)[:, :, 0]):
        state.arriving[layer] = 0.0
        np.add.at(state.arriving[layer], (expert, at), 1.0)
        joint.improve_layer(job.rules, state, layer, job.distance, job.room[layer], 0.0, 0, random)
        at = dealt(state.share[layer], (expert, at), layer)


def _replicas(state: joint.State, levels: Levels, slots: int, dispatch: str) -> Replicas:
    share = state.share if dispatch == "shares" else None
    return Replicas(filled(state.hosted, slots), levels.gpus, levels.spans[levels.node_level], share)


def compile_kernels() -> None:
    """Compile, or load from numba's cache, before a clock starts."""
    hosted = np.eye(2, dtype=bool)[np.zeros((2, 2), np.int64)]
    job = _job(np.ones((1, 2, 2)), make_levels(2), 1.0, joint.Rules(0, 2, 2, 1.0, 8), hosted)
    state = job.state(hosted, np.repeat(hosted[:, :, None], 2, axis=2).astype(float))
    joint.sweep(job.rules, state, job.follow, job.distance, job.room, 0.0, 1, np.ones(1, np.uint64))
    job.cost(state)
