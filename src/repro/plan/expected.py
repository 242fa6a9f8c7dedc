"""What a point is expected to take: by shipped records, or by prediction where a platform asks for it."""

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from repro import experiments, files
from repro.experiments.base import Point
from repro.plan import config

Predictor = Callable[[Any], float | None]  # seconds or bytes of a point


def shipped(folder: Path) -> tuple[dict[str, float], list[tuple[Any, ...]]]:
    """Of the shipped records: minutes that each point took, by experiment and point, and what `provenance.is_older`
    asks of each. Those of older code count too, those of runs that failed or were skipped do not; a file that is no
    record tells nothing."""
    times: dict[str, list[float]] = {}
    code = []
    for path in folder.rglob("*.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
            run = json.loads(files.read(path))  # not `record.read`: hundreds of them take half a second to check
            start, end = (datetime.fromisoformat(run["provenance"][name]) for name in ("start", "end"))
            made = run["provenance"]
            code.append((str(run["experiment"]), made["source_hash"], made.get("gpu_hash", ""), made.get("gpu", [])))
            if run["status"] != "ok":  # how soon a point was skipped says nothing of what it takes
                continue
            point = experiments.get(run["experiment"]).defaults | run["point"]  # one may be from before a parameter
            times.setdefault(key(run["experiment"], point), []).append((end - start).total_seconds() / 60)
    return {key: median(values) for key, values in times.items()}, code


def key(experiment: str, point: dict[str, Any]) -> str:
    return json.dumps([experiment, point], sort_keys=True)


def predictors(hardware: str | None, file: str) -> dict[str, Predictor]:
    """By experiment, what predicts its points on the platform's hardware; ConfigError for unknown hardware."""
    if hardware is None:
        return {}
    from repro import scaling  # scipy and torch: only where a platform asks for it

    if hardware not in scaling.CATALOGUE:
        raise config.ConfigError(f"{file}: hardware: found {hardware!r}, allowed: {', '.join(scaling.CATALOGUE)}")
    found = [each for name in experiments.names() for each in experiments.get(name).predicts.items()]
    return {name: partial(predict, hardware=hardware) for name, predict in found}


def predicted(predict: Predictor, point: Point, where: str) -> float | None:
    """Seconds or bytes of a point; ConfigError where its numbers are beyond what predicts them."""
    try:
        return predict(point)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise config.ConfigError(f"{where}: {point.label}: {error}") from error
