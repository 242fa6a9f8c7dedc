"""What a claim reads from run records: the `value:` of `config/claims.yaml`. `sample` reads it, `interval` says how sure it is."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from repro.claims.filters import Filters, accepts
from repro.records import statistics
from repro.records.record import Record, Strict

Sampled = Literal["once", "occasions", "seeds", "sequences"]
_RUNS: dict[Sampled, int] = {"once": 1, "occasions": 2 * statistics.OCCASIONS, "seeds": 3, "sequences": 1}


class Reading(Strict):
    """Which number of which runs.

    The value of a run is `factor` · `metric` ÷ `per` (a metric or point field), or 1 minus that (`complement`).
    Of the runs that match `where`, the claim's value is
    - that value, where nothing more is given;
    - with `banded`: that value; its interval is the run's own `<metric>_low` and `<metric>_high`, a prediction's band;
    - with `over`: its ratio to the value of the runs that match `where` changed by `over`;
      with `form: reduction` as well: 1 − that ratio;
    - with `sequence` and `expect`: one group of runs per entry, `where` changed by it; they increase or decrease.
      The value is the ratio of a step in that direction: the smallest for an ordering, first to last for a trend.
    A field that `over` or `sequence` names, or whose filter is {}, may differ between the groups; no other may. One that
    no filter names has its default, unless the claim's scope has filters and the runs pass them.

    `sampled` says what another run would change, and so what the interval is of:
    - once: nothing (bytes, counts, models). One run, and no interval but a band;
    - occasions: the state of the machine. `runs` pairs, repeats 0, 1, ..., on `statistics.OCCASIONS` occasions; the
      t-interval of the means of occasions, of logarithms where `over`, `sequence` or `per` makes it a ratio, no
      narrower than the pairs inside occasions let expect;
    - seeds: what is drawn at random. Seeds 0 to `runs` - 1, and the t-interval of their mean;
    - sequences: which texts are routed. Resampled from the series of the runs, whose `columns` are the numerator and
      denominator of the metric, a row per sequence; both sides of a ratio together. With several seeds, which draw what
      is compared, half of the interval is the root of the sum of squares of both halves, of seeds and of sequences. It
      covers at least what each of them claims (Banerjee, 1960); the wider of the two would not.
    """

    experiment: str
    metric: str
    per: str | None = None
    factor: float = 1.0
    complement: bool = False
    banded: bool = False
    where: Filters = Field(default_factory=dict)
    over: Filters | None = None
    form: Literal["ratio", "reduction"] = "ratio"
    sequence: list[Filters] | None = Field(None, min_length=2)
    expect: Literal["increasing", "decreasing"] | None = None
    sampled: Sampled = "once"
    runs: int | None = Field(None, ge=1)
    columns: tuple[str, str] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Reading":
        if (self.sampled == "sequences") != (self.columns is not None):
            raise ValueError("sampled: sequences and columns (numerator and denominator) belong together")
        if self.banded and self.sampled != "once":
            raise ValueError("banded reads one run's band: sampled once")
        if self.over is not None and self.sequence is not None:
            raise ValueError("over and sequence exclude each other")
        if (self.sequence is None) != (self.expect is None):
            raise ValueError("sequence and expect (increasing or decreasing) belong together")
        if self.form == "reduction" and self.over is None:
            raise ValueError("form: reduction needs over")
        if self.banded and (self.over is not None or self.sequence is not None or self.per is not None):
            raise ValueError("banded reads one number with its band: no over, sequence or per")
        if self.factor != 1 and not self.complement and (self.over is not None or self.sequence is not None):
            raise ValueError("factor cancels in a ratio: found it with over or sequence, and without complement")
        return self

    def band(self, run: Record) -> tuple[float, float]:
        """The run's band around the metric, as `factor` and `complement` make it."""
        ends = [run.metrics[name].value * self.factor for name in self.metrics[1:]]
        low, high = sorted(1 - end if self.complement else end for end in ends)
        return low, high

    @property
    def metrics(self) -> list[str]:
        """Names of those that a run must have."""
        return [self.metric, *([f"{self.metric}_low", f"{self.metric}_high"] if self.banded else [])]

    @property
    def needed(self) -> int:
        """How many runs, or pairs of runs, a verdict takes."""
        return self.runs or _RUNS[self.sampled]

    @property
    def together(self) -> int:
        """How many repeats of a point one occasion has."""
        return max(1, self.needed // statistics.OCCASIONS) if self.sampled == "occasions" else 1

    def counts(self, run: Record) -> bool:
        """Whether the run's repeat and seed are among those that a verdict takes."""
        by_seed = self.sampled in ("seeds", "sequences")
        number, other = (run.seed, run.repeat) if by_seed else (run.repeat, run.seed)
        return number < self.needed and (other == 0 or "seed" in self.where)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Filters of each group."""
        changes = self.sequence or ([{}] if self.over is None else [{}, self.over])
        return [self.where | change for change in changes]

    def may_read(self, point: Mapping[str, Any]) -> bool:
        """Whether a run of this point may be in one of the groups; what it depends on beyond the point is not known yet."""
        return any(
            all(accepts(wanted, point[name]) for name, wanted in filters.items() if name in point)
            for filters in self.groups
        )

    def configuration(self, run: Record) -> tuple[tuple[str, Any], ...]:
        """Point fields that must be the same in all groups and repeats."""
        free = {name for change in [self.over or {}, *(self.sequence or [])] for name in change} | {"seed"}
        free |= {name for name, wanted in self.where.items() if wanted == {}}
        return tuple(sorted((name, value) for name, value in run.point.items() if name not in free))

    def of_run(self, run: Record) -> float | None:
        """The value of one run; None when it is not ok, lacks the metric or its band, or gives no finite number."""
        if run.status != "ok" or not run.metrics.keys() >= set(self.metrics):
            return None
        value = run.metrics[self.metric].value * self.factor
        if self.per is not None:
            divisor = run.facts.get(self.per)
            if not isinstance(divisor, int | float) or divisor == 0:
                return None
            value /= divisor
        return _finite(1 - value if self.complement else value)

    def combine(self, values: list[float], ordering: bool) -> float | None:
        """One number from the values of the groups in one repeat; None where they give no finite one."""
        if len(values) == 1:
            return values[0]
        rising = values if self.expect == "increasing" else values[::-1]
        if 0 in rising[:-1] or (self.expect and min(values) < 0):
            return None
        steps = [later / earlier for earlier, later in itertools.pairwise(rising)]
        ratio = min(steps) if ordering else rising[-1] / rising[0]
        return _finite(1 - ratio if self.form == "reduction" else ratio)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
