"""Total times that the queue model predicts of policies on this engine, beside the measured ones: for docs/flover.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repro.experiments.sarathi_prefill import POLICIES
from repro.records import provenance
from repro.records.record import Record

AIM = 0.1  # of an error, as a share
_SETTING = ("model", "prompt_tokens", "output_tokens", "chunk", "dtype", "requests", "slots")


@dataclass(frozen=True)
class Setting:
    """Equal requests, all there at the start. `errors`: predicted ÷ measured - 1, a list over the `runs` for each of
    `POLICIES`. `older`: whether code other than the present one made one of the runs."""

    name: str
    runs: int
    older: bool
    errors: Mapping[str, list[float]]

    @property
    def within(self) -> int:
        """How many errors meet the aim."""
        return sum(abs(error) <= AIM for errors in self.errors.values() for error in errors)


def predicted(records: Mapping[Path, Record]) -> list[Setting]:
    """Every setting of `sarathi_prefill` that measures throughput, that with most runs first. ValueError without any."""
    groups: dict[tuple[object, ...], dict[Path, Record]] = {}
    for path, run in records.items():
        point = run.point
        if run.experiment == "sarathi_prefill" and run.status == "ok" and point["measures"] == "throughput":
            key = tuple(point[name] for name in _SETTING)
            groups.setdefault(key, {})[path] = run
    if not groups:
        raise ValueError("docs/flover.md shows sarathi_prefill with measures=throughput: found no such shipped run")
    return [_setting(key, groups[key]) for key in sorted(groups, key=lambda key: (-len(groups[key]), *map(str, key)))]


def _setting(key: tuple[object, ...], runs: Mapping[Path, Record]) -> Setting:
    found = [run.metrics for run in runs.values()]
    errors = {policy: sorted(metrics[f"{policy}_error_seconds"].value for metrics in found) for policy in POLICIES}
    model, prompt, output, chunk, *_ = key
    return Setting(f"`{model}`, {prompt} + {output}, {chunk}", len(runs), bool(provenance.older(runs)), errors)
