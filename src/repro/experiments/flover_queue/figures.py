"""Every number that a figure of the paper prints, predicted: by T1 of Fig. 4(a) (v1: of Fig. 7) and c of Fig. 4(c).

FasterTransformer's instances have a T1 and a pace of their own, from the same figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import chi2

from repro.flover import paper, queueing
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals
from repro.flover.queueing import cost
from repro.flover.queueing.shared import share

_RUNS = 5  # [IMG] v1 Fig. 10: "numbers are avg. 5 runs"; Fig. 8 does not say
_WINDOW_S = 16.0  # [IMG] of the progress figure: with it all are done within the figure
_SMALLER_S = (8, 4, 2)  # [IMG] with these and with instances they are not: it shows what share of the work is done
_SHOWN_S = 37  # [IMG] until then
_ROWS = (1, 2, 4)  # [IMG] of a request in v1 Fig. 7, which calls them its batch
_FEWER = 16  # [IMG] requests of v1 Fig. 9(b); [INF] they come as those of Fig. 9(a)

Row = dict[str, float | str | bool]


def predicted(figure: str, costs: Mapping[str, float], seeds: int, seed: int) -> pd.DataFrame:
    """A row per printed number. `quantity`, `curve` and its place `x`; `printed`, `predicted` and, over `seeds` draws,
    `sd`; `used`: this number went into the prediction. `costs`: c by model."""
    drawn = np.random.SeedSequence(seed).generate_state(seeds).tolist()
    if figure == "fig8":
        return pd.DataFrame(_fig8(costs["gpt-j-6b"], drawn))
    if figure == "reordering":
        return pd.DataFrame(_reordering(costs, drawn))
    make = {"fig4a": _fig4a, "fig4c": _fig4c, "fig7": _fig7, "progress": _progress}[figure]
    return pd.DataFrame(make(costs)).assign(sd=0.0)


def judged(table: pd.DataFrame) -> dict[str, float]:
    """The fields of `FigureMetrics`, over the rows whose numbers were not used; of fig8, over the iterations."""
    table = table.assign(error=table.predicted / table.printed - 1)
    unused = table[~table.used]
    free = unused[unused.quantity == table.quantity.iloc[0]]
    rms = {each: _errors(rows)["rms_relative_error"] for each, rows in table.groupby("quantity")}
    found = {"points": len(free)} | _errors(free)
    if "baseline" in rms:
        of_baseline = _errors(unused[unused.quantity == "baseline"])
        found |= {f"baseline_{name}": value for name, value in of_baseline.items()}
    if "gain" in rms:
        found["largest_gain"] = float(table[table.quantity == "gain"].predicted.max())
    if "iterations" not in rms:
        return found
    speedup = table[table.quantity == "speedup"].predicted.to_numpy()
    squares = float(np.sum(((free.printed - free.predicted) / free.sd) ** 2)) if (free.sd > 0).all() else np.inf
    return (
        found
        | {
            "chi_square": min(squares, 1e12),  # one draw has no spread
            "p_value": float(chi2.sf(squares, len(free))),
            "p_value_mean_of_5": float(chi2.sf(_RUNS * squares, len(free))),
            "overlap_rms_error": rms["overlap"],
            "speedup_rms_error": rms["speedup"],
            "speedup_smallest_step": float((speedup[:-1] / speedup[1:]).min()),
        }
    )


def _errors(rows: pd.DataFrame) -> dict[str, float]:
    worst = rows.error[rows.error.abs().idxmax()]
    return {"rms_relative_error": float(np.sqrt(np.mean(rows.error**2))), "worst_relative_error": float(worst)}


def _row(quantity: str, curve: str, x: float | None, printed: float, value: float, used: bool = False) -> Row:
    found = {"x": np.nan if x is None else x, "printed": printed, "predicted": value, "used": used}
    return {"quantity": quantity, "curve": curve} | found


def _fig4a(costs: Mapping[str, float]) -> Iterator[Row]:
    """Seconds until all requests are done. One request is T1, which was put in."""
    for key, model in paper.MODELS.items():
        for requests, seconds in paper.printed("FL-F4a", f"{model.name}, Flover").items():
            total = cost.served(key, int(requests), costs[key]).total_seconds
            yield _row("seconds", model.name, requests, seconds, total, used=requests == 1)


def _fig4c(costs: Mapping[str, float]) -> Iterator[Row]:
    """Mean latency ÷ alone. That of the most requests gave c."""
    for key, model in paper.MODELS.items():
        for requests, ratio in paper.printed("FL-F4c", model.name).items():
            value = cost.latency_ratio(key, int(requests), costs[key])
            yield _row("latency ÷ alone", model.name, requests, ratio, value, used=requests == paper.REQUESTS)


def _fig7(costs: Mapping[str, float]) -> Iterator[Row]:
    """Seconds of GPT-J in v1, and of FasterTransformer's instances (`baseline`). A request of several rows has them in
    every iteration, and each adds the c of v2. One request is T1; both T1 were put in, and as the instances' pace the
    slope of their totals at the shortest interval."""
    c, shortest = costs["gpt-j-6b"], paper.V1_INTERVALS_MS[0]
    for rows in _ROWS:
        single_s = paper.v1_single_request_s(rows=rows)
        times = queueing.LinearTimes(single_s / paper.TOKENS, rows * c / (1 + (rows - 1) * c))
        constants = _v1_instances(rows)
        for interval_ms in paper.V1_INTERVALS_MS:
            curve = f"{interval_ms} ms" + (f", batch {rows}" if rows > 1 else "")
            theirs = paper.v1_seconds("FasterTransformer", interval_ms, rows)
            for requests, seconds in paper.v1_seconds("Flover", interval_ms, rows).items():
                shapes, one = _shapes(fixed_arrivals(int(requests), interval_ms / 1000)), requests == 1
                yield _row("seconds", curve, requests, seconds, cost.AUTHORS.run(shapes, times).total_seconds, one)
                used = one or (interval_ms == shortest and requests == 8)
                yield _row("baseline", curve, requests, theirs[requests], _by_instances(shapes, *constants), used)


def _by_instances(shapes: Sequence[RequestShape], alone: float, pace: float) -> float:
    """Seconds until instances have served all. Each takes `alone` seconds for TOKENS, and `running` at once `running`
    times `pace`, if that is more: they give an answer every `pace` seconds."""
    policy = queueing.Instances(slowdown=lambda running: max(1.0, running * pace / alone))
    return policy.run(shapes, queueing.LinearTimes(alone / paper.TOKENS)).total_seconds


def _progress(costs: Mapping[str, float]) -> Iterator[Row]:
    """When all requests of the 13B model are done, fused and by the largest window. By smaller windows and by instances
    (`baseline`): what percentage of the work is done at the end of the figure, if batches, or instances, that run at
    once share the machine evenly."""
    times = queueing.LinearTimes(paper.MODELS["llama-13b"].single_request_s / paper.TOKENS, costs["llama-13b"])
    shapes = _shapes(fixed_arrivals(paper.REQUESTS, paper.INTERVAL_S))
    policies = {"fused": cost.AUTHORS, f"window {_WINDOW_S:g} s": queueing.Batches(window_s=_WINDOW_S)}
    for name, policy in policies.items():
        seconds = paper.printed("FL-PROG", f"{name}, all done")[None]
        yield _row("seconds", name, None, seconds, policy.run(shapes, times).total_seconds)
    beside: dict[str, tuple[str, queueing.Policy]] = {
        f"{each} s": (f"window {each} s", queueing.ConcurrentBatches(window_s=each)) for each in _SMALLER_S
    }
    beside["instances"] = "FasterTransformer", queueing.Instances()
    for curve, (name, policy) in beside.items():
        percent = paper.printed("FL-PROG", f"{name}, done at {_SHOWN_S} s")[None]
        yield _row("baseline", curve, None, percent, 100 * _done(policy.run(shapes, times), times, _SHOWN_S))


def _done(found: queueing.QueueRun, times: queueing.LinearTimes, at_s: float) -> float:
    """The share of all tokens that are there at `at_s`. Requests that were admitted together are one batch, and batches
    that run at once share the machine evenly."""
    starts, rows = np.unique(found.admitted_s, return_counts=True)
    work = np.array([times.decode(int(each), np.zeros(paper.TOKENS, np.int64)).sum() for each in rows])
    shared = share(starts.tolist(), work.tolist())
    attained = np.interp([at_s, *starts], shared.clock, shared.attained)
    return float(np.average(np.clip((attained[0] - attained[1:]) / work, 0, 1), weights=rows))


def _fig8(batch_cost: float, seeds: list[int]) -> list[Row]:
    """GPT-J in v1, Poisson arrivals: iterations, overlap (%) and speedup over FasterTransformer's instances at the pace
    that Fig. 7 shows of them. Means over the draws."""
    times, constants = _v1_times(batch_cost), _v1_instances()
    printed = {name: paper.printed("FL-F8", name) for name in ("iterations", "overlap", "speedup")}
    rows: list[Row] = []
    for interval_ms in printed["iterations"]:
        drawn = []
        for seed in seeds:
            shapes = _shapes(poisson_arrivals(paper.REQUESTS, interval_ms / 1000, seed))
            found = cost.AUTHORS.run(shapes, times)
            speedup = _by_instances(shapes, *constants) / found.total_seconds
            drawn.append((found.iterations, 100 * found.overlap_fraction, speedup))
        means, deviations = np.mean(drawn, axis=0), np.std(drawn, axis=0, ddof=len(drawn) > 1)
        for (name, values), mean, sd in zip(printed.items(), means, deviations, strict=True):
            rows.append(_row(name, name, interval_ms, values[interval_ms], float(mean)) | {"sd": float(sd)})
    return rows


def _reordering(costs: Mapping[str, float], seeds: list[int]) -> Iterator[Row]:
    """Answers of random lengths: seconds without reordering and with it, and their ratio; and what instances take ÷
    with it (`baseline`). Means over the draws."""
    for each in _shuffled(costs):
        printed = {
            name: paper.printed("FL-MS", f"{each.label}Flover {name} reordering") for name in ("without", "with")
        }
        theirs = paper.printed("FL-MS", f"{each.label}FasterTransformer") if each.instances else {}
        for longest, seconds in printed["with"].items():
            drawn = np.array([each.drawn(longest, seed) for seed in seeds])
            values = {name: each.unit_s * found[longest] for name, found in printed.items()}
            values["gain"] = values["without"] / values["with"]
            if each.instances:
                values["baseline"] = theirs[longest] / seconds
            for (name, value), mean, sd in zip(values.items(), drawn.mean(axis=0), drawn.std(axis=0), strict=True):
                quantity = name if name in ("gain", "baseline") else "seconds"
                curve = each.curve if name == "baseline" else f"{each.curve}, {name}"
                yield _row(quantity, curve, longest, value, float(mean)) | {"sd": float(sd)}


@dataclass(frozen=True)
class _Shuffle:
    """Curves of a memory shuffle: their name, how their labels begin, and the unit there; how requests come, and the
    times of the model; T1 and pace of FasterTransformer's instances, where the figure has them."""

    curve: str
    label: str
    times: queueing.LinearTimes
    instances: tuple[float, float] | None
    unit_s: float = 1.0
    interval_s: float = paper.INTERVAL_S
    requests: int = paper.REQUESTS

    def drawn(self, longest: float, seed: int) -> list[float]:
        """Of one draw of lengths up to `longest`: seconds without reordering and with it, their ratio, and instances ÷
        with it."""
        arrivals = fixed_arrivals(self.requests, self.interval_s).tolist()
        tokens = np.random.default_rng(seed).integers(paper.SHORTEST, longest, self.requests, endpoint=True)
        shapes = [RequestShape(at, 1, int(count) + 1) for at, count in zip(arrivals, tokens, strict=True)]
        policies = queueing.FixedSlots(), cost.AUTHORS
        without, moved = (policy.run(shapes, self.times).total_seconds for policy in policies)
        found = [without, moved, without / moved]
        return found + ([_by_instances(shapes, *self.instances) / moved] if self.instances else [])


def _shuffled(costs: Mapping[str, float]) -> Iterator[_Shuffle]:
    """Those of v2's figure and of v1 Fig. 9."""
    for key in ("llama-13b", "llama-65b"):
        model = paper.MODELS[key]
        times = queueing.LinearTimes(model.single_request_s / paper.TOKENS, costs[key])
        yield _Shuffle(model.name, f"{model.name}, ", times, _v2_instances(model.name))
    times, interval_s = _v1_times(costs["gpt-j-6b"]), paper.V1_SHUFFLE_INTERVAL_S
    yield _Shuffle("GPT-J in v1", "", times, _v1_instances(), 1e-3, interval_s)
    yield _Shuffle("v1 Fig. 9(b)", "Fig. 9(b), ", times, None, 1e-3, interval_s, _FEWER)


def _v1_instances(rows: int = 1) -> tuple[float, float]:
    """T1 and pace of FasterTransformer's instances in v1, at so many rows a request."""
    return paper.v1_single_request_s("FasterTransformer", rows), paper.v1_instance_pace_s(rows)


def _v2_instances(name: str) -> tuple[float, float]:
    """The same in v2, of a model: Fig. 4(a) at one request, and the slope from there to the most. Their total, which is
    a bar, is the printed speedup times Flover's total."""
    alone = paper.printed("FL-F4a", f"{name}, FasterTransformer")[1]
    speedup, fused = (paper.printed("FL-F4a", f"{name}, {each}")[paper.REQUESTS] for each in ("speedup", "Flover"))
    return alone, (speedup * fused - alone) / (paper.REQUESTS - 1)


def _v1_times(batch_cost: float) -> queueing.LinearTimes:
    return queueing.LinearTimes(paper.v1_single_request_s() / paper.TOKENS, batch_cost)


def _shapes(arrivals: np.ndarray) -> list[RequestShape]:
    """Requests of the paper's length; as in `cost.served`."""
    return [RequestShape(arrival, 1, paper.TOKENS + 1) for arrival in arrivals.tolist()]
