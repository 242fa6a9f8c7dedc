"""KEY=VALUE arguments: parameters of a point or of a notebook, or options of a figure."""

from collections.abc import Container
from typing import Any

from repro import experiments
from repro.experiments.base import Point
from repro.plan import config, documents


def read(pairs: list[str], texts: Container[str] = (), option: str = "--set") -> dict[str, Any]:
    """Values of KEY=VALUE, read as YAML except those of `texts`, where "25" is no number. ValueError names the option
    and the pair."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{option} {pair}: expected key=value")
        if key in values:
            raise ValueError(f"{option} {pair}: {key} is given twice")
        values[key] = documents.parse(text, f"{option} {key}") if text and key not in texts else text
    return values


def point(experiment: str, pairs: list[str]) -> Point:
    """The point that `--set` arguments describe: what `plan.arguments` writes, read back."""
    fields = experiments.get(experiment).parameters.model_fields
    texts = {key for key, field in fields.items() if field.annotation is str}
    return config.point(experiment, read(pairs, texts), f"repro run {experiment} --set")
