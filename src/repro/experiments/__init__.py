"""One package per experiment; its name is the experiment's id. `common` holds what several of them use."""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable

from repro.experiments.base import Experiment


@functools.cache
def names() -> tuple[str, ...]:
    """Ids of all experiments, sorted."""
    return tuple(each.name for each in pkgutil.iter_modules(__path__) if each.ispkg and each.name != "common")


def closest(name: str, known: Iterable[str]) -> str:
    """For a message on an unknown name: `; closest: zero_bytes`, or nothing where none is like it."""
    near = difflib.get_close_matches(name, list(known))
    return f"; closest: {', '.join(near)}" if near else ""


def get(name: str) -> Experiment:
    """The experiment called `name`; ValueError lists the known ones."""
    if name not in names():
        raise ValueError(f"unknown experiment {name!r}{closest(name, names())}; known: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").EXPERIMENT
