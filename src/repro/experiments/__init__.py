"""One package per experiment; its name is the experiment's id. `common` holds what several of them use."""

import functools
import importlib
import pkgutil

from repro.experiments.base import Experiment


@functools.cache
def names() -> list[str]:
    """Ids of all experiments."""
    return sorted(each.name for each in pkgutil.iter_modules(__path__) if each.ispkg and each.name != "common")


def get(name: str) -> Experiment:
    """The experiment called `name`; ValueError lists the known ones."""
    if name not in names():
        raise ValueError(f"unknown experiment {name!r}, known: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").EXPERIMENT
