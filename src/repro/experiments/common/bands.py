"""Values with uncertainty as the fields that `repro.experiments.base.bands` declares."""

from collections.abc import Mapping

from repro.scaling.network import Value
from repro.scaling.whatif import banded


def bands_of(values: Mapping[str, Value]) -> dict[str, float]:
    """`name_low`, `name` and `name_high` of every value."""
    return {key: end for name, value in values.items() for key, end in banded(name, value).items()}
