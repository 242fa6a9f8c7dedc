"""One file per experiment; a file's name is the experiment's id. Names that begin with `_` are parts of one."""

import importlib
import pkgutil

from repro.experiments.base import Experiment

_NOT_EXPERIMENTS = {"base"}


def names() -> list[str]:
    """Ids of all experiments."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if name not in _NOT_EXPERIMENTS and not name.startswith("_"))


def get(name: str) -> Experiment:
    """The experiment called `name`; ValueError lists the known ones."""
    if name not in names():
        raise ValueError(f"unknown experiment {name!r}, known: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").EXPERIMENT
