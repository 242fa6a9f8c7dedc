"""Every number that a figure of the paper prints, predicted: by T1 of Fig. 4(a) (v1: of Fig. 7) and c of Fig. 4(c)."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from scipy.stats import chi2

from repro.flover import paper, queueing
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals
from repro.flover.queueing import cost

_RUNS = 5  # [IMG] v1 Fig. 10: "numbers are avg. 5 runs"; Fig. 8 does not say
_WINDOW_S = 16.0  # [IMG] of the progress figure, whose smaller windows print shares of work and not seconds

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
    free = table[~table.used & (table.quantity == table.quantity.iloc[0])]
    rms = {each: float(np.sqrt(np.mean(rows.error**2))) for each, rows in table.groupby("quantity")}
    found = {
        "points": len(free),
        "rms_relative_error": float(np.sqrt(np.mean(free.error**2))),
        "worst_relative_error": float(free.error[free.error.abs().idxmax()]),
    }
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
    """Seconds of GPT-J in v1, a request a batch; c is that of v2. One request is T1, which was put in."""
    times = _v1_times(costs["gpt-j-6b"])
    for interval_ms in paper.V1_INTERVALS_MS:
        for requests, seconds in paper.printed("FL-F7", f"Flover, {interval_ms} ms, batch 1").items():
            shapes = _shapes(fixed_arrivals(int(requests), interval_ms / 1000))
            total = cost.AUTHORS.run(shapes, times).total_seconds
            yield _row("seconds", f"{interval_ms} ms", requests, seconds, total, used=requests == 1)


def _progress(costs: Mapping[str, float]) -> Iterator[Row]:
    """When all requests of the 13B model are done, fused and by the largest window."""
    times = queueing.LinearTimes(paper.MODELS["llama-13b"].single_request_s / paper.TOKENS, costs["llama-13b"])
    shapes = _shapes(fixed_arrivals(paper.REQUESTS, paper.INTERVAL_S))
    policies = {"fused": cost.AUTHORS, f"window {_WINDOW_S:g} s": queueing.Batches(window_s=_WINDOW_S)}
    for name, policy in policies.items():
        seconds = paper.printed("FL-PROG", f"{name}, all done")[None]
        yield _row("seconds", name, None, seconds, policy.run(shapes, times).total_seconds)


def _fig8(batch_cost: float, seeds: list[int]) -> list[Row]:
    """GPT-J in v1, Poisson arrivals: iterations, overlap (%) and speedup over FasterTransformer's instances at the pace
    that Fig. 7 shows of them. Means over the draws."""
    times = _v1_times(batch_cost)
    alone, pace = paper.v1_single_request_s("FasterTransformer"), paper.v1_instance_pace_s()
    instances = queueing.Instances(slowdown=lambda running: max(1.0, running * pace / alone))
    instance_times = queueing.LinearTimes(alone / paper.TOKENS)
    printed = {name: paper.printed("FL-F8", name) for name in ("iterations", "overlap", "speedup")}
    rows: list[Row] = []
    for interval_ms in printed["iterations"]:
        drawn = []
        for seed in seeds:
            shapes = _shapes(poisson_arrivals(paper.REQUESTS, interval_ms / 1000, seed))
            found = cost.AUTHORS.run(shapes, times)
            other = instances.run(shapes, instance_times).total_seconds
            drawn.append((found.iterations, 100 * found.overlap_fraction, other / found.total_seconds))
        means, deviations = np.mean(drawn, axis=0), np.std(drawn, axis=0, ddof=len(drawn) > 1)
        for (name, values), mean, sd in zip(printed.items(), means, deviations, strict=True):
            rows.append(_row(name, name, interval_ms, values[interval_ms], float(mean)) | {"sd": float(sd)})
    return rows


def _reordering(costs: Mapping[str, float], seeds: list[int]) -> Iterator[Row]:
    """Answers of random lengths: seconds without reordering and with it, and their ratio. Means over the draws."""
    for curve, label, unit_s, interval_s, times in _shuffled(costs):
        printed = {name: paper.printed("FL-MS", f"{label}Flover {name} reordering") for name in ("without", "with")}
        for longest in printed["with"]:
            drawn = []
            for seed in seeds:
                arrivals = fixed_arrivals(paper.REQUESTS, interval_s).tolist()
                tokens = np.random.default_rng(seed).integers(paper.SHORTEST, longest, paper.REQUESTS, endpoint=True)
                shapes = [RequestShape(at, 1, int(count) + 1) for at, count in zip(arrivals, tokens, strict=True)]
                both = [policy.run(shapes, times).total_seconds for policy in (queueing.FixedSlots(), cost.AUTHORS)]
                drawn.append((*both, both[0] / both[1]))
            values = {name: unit_s * seconds[longest] for name, seconds in printed.items()}
            values["gain"] = values["without"] / values["with"]
            means, deviations = np.mean(drawn, axis=0), np.std(drawn, axis=0)
            for (name, value), mean, sd in zip(values.items(), means, deviations, strict=True):
                quantity = name if name == "gain" else "seconds"
                yield _row(quantity, f"{curve}, {name}", longest, value, float(mean)) | {"sd": float(sd)}


def _shuffled(costs: Mapping[str, float]) -> Iterator[tuple[str, str, float, float, queueing.LinearTimes]]:
    """Name of a curve, how its labels begin, their unit, interval and times: of v2's figure and of v1 Fig. 9(a)."""
    for key in ("llama-13b", "llama-65b"):
        model = paper.MODELS[key]
        times = queueing.LinearTimes(model.single_request_s / paper.TOKENS, costs[key])
        yield model.name, f"{model.name}, ", 1.0, paper.INTERVAL_S, times
    yield "GPT-J in v1", "", 1e-3, paper.V1_SHUFFLE_INTERVAL_S, _v1_times(costs["gpt-j-6b"])


def _v1_times(batch_cost: float) -> queueing.LinearTimes:
    return queueing.LinearTimes(paper.v1_single_request_s() / paper.TOKENS, batch_cost)


def _shapes(arrivals: np.ndarray) -> list[RequestShape]:
    """Requests of the paper's length; as in `cost.served`."""
    return [RequestShape(arrival, 1, paper.TOKENS + 1) for arrival in arrivals.tolist()]
