"""How long iterations and prompts take on this machine: the engine serves equal requests, every step is timed."""

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from repro.flover.engine import Engine
from repro.flover.queueing.times import MeasuredTimes
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models.decoder import Decoder


def spread(most: int, least: int = 1) -> list[int]:
    """`least`, its doubles below `most`, and `most`."""
    doubled = itertools.takewhile(lambda value: value < most, (least * 2**i for i in itertools.count()))
    return [*doubled, most]


def measure(
    model: Decoder,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    starts: Sequence[int] = (0,),
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredTimes:
    """Median seconds of `repeats` iterations over each of `batches` rows at each of `contexts` stored tokens (the
    repeats are iterations around it, or the last ones that the model has positions for), and of `repeats` prompts of
    each length of `prompts` behind each of `starts` tokens. All ascending; `batches` from 1 on. A prompt that would go
    beyond the model's positions behind its start is cut there. Times are of whole steps. ValueError, before anything is
    timed, for axes that are not so, for `repeats` below 1, for a prompt that alone is longer than that, and for a context
    or a start that leaves no position for a token.
    """
    longest = model.config.longest
    for name, axis, first, most in (
        ("batches", batches, 1, math.inf),
        ("contexts", contexts, 0, longest - 1),
        ("prompts", prompts, 1, longest),
        ("starts", starts, 0, longest - 1),
    ):
        if not len(axis) or axis[0] < first or axis[-1] > most or any(a >= b for a, b in itertools.pairwise(axis)):
            end = f" to {most}, for the model's {longest} positions" if most < math.inf else " on"
            raise ValueError(f"{name} is {list(axis)}, must be at least one number, ascending, from {first}{end}")
    if batches[0] != 1 or repeats < 1:
        raise ValueError(f"batches begins with {batches[0]}, repeats is {repeats}: must begin with 1, and be 1 or more")
    wanted = max(max(contexts) + repeats + 2, max(prompts) + max(starts))
    scheduler = Scheduler(max(batches), queue_limit=max(batches), token_gap_s=0)
    engine = Engine(model, scheduler, min(wanted, longest), clock)
    engine.prepare()
    _prefill(engine, clock, max(prompts), 0, 1)  # warm-up, thrown away
    decode_s = [[_decode(engine, clock, batch, context, repeats) for context in contexts] for batch in batches]
    prefill_s = [[_prefill(engine, clock, tokens, start, repeats) for start in starts] for tokens in prompts]
    axes = [np.array(axis, dtype=np.int64) for axis in (batches, contexts, prompts, starts)]
    return MeasuredTimes(axes[0], axes[1], np.array(decode_s), axes[2], axes[3], np.array(prefill_s))


def _decode(engine: Engine, clock: Callable[[], float], batch: int, context: int, repeats: int) -> float:
    """Seconds of an iteration over `batch` rows of about `context` stored tokens."""
    # Positions: the prompt, and one for each iteration.
    prompt = max(1, min(context - repeats // 2, engine.buffers.capacity - repeats - 1))
    for number in range(batch):
        engine.submit(Request(number, (number % 2,) * prompt, repeats + 2))
    engine.step()  # the prompts
    seconds = [_step(engine, clock) for _ in range(repeats)]
    for number in range(batch):
        engine.cancel(number)
    engine.step()
    assert not engine.ready
    return float(np.median(seconds))


def _prefill(engine: Engine, clock: Callable[[], float], tokens: int, start: int, repeats: int) -> float:
    """Seconds of the chunk of a prompt behind `start` tokens, of a request that decodes nothing."""
    seconds = []
    for _ in range(repeats):
        engine.submit(Request(0, (1,) * min(start + tokens, engine.buffers.capacity), 1))
        if start:
            engine.scheduler.prefill_tokens = start
            engine.step()
        engine.scheduler.prefill_tokens = 0
        seconds.append(_step(engine, clock))
        assert not engine.ready
    return float(np.median(seconds))


def _step(engine: Engine, clock: Callable[[], float]) -> float:
    before = clock()
    engine.step()
    return clock() - before
