"""What a machine's processors really take, from a few measured steps, to predict other plans and networks.

A probe times messages in a loop that does nothing else; in a training step they find cold caches and other work. The
factors of `slowed` make up for that. Links keep their rates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from repro.models.gpt import GPTConfig
from repro.scaling.assumptions import SIDE_BY_SIDE
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.scaling.step import OURS, predict_step
from repro.zero import Plan

START = {"message": 1.0, "bytes": 1.0, "memory": 1.0, "exposed": 0.3, "beside": SIDE_BY_SIDE}
# A factor of e more or less is nothing unusual for work, shares are better known (docs/log.md).
PRIOR_LOG_SD = {"message": 1.0, "bytes": 1.0, "memory": 1.0, "exposed": 0.3, "beside": 0.3}
NOISE = 0.05  # of a measured step


@dataclass(frozen=True, eq=False)
class Observation:
    """A measured step of `plan` on `machine`, as probed or as known. `compute_s`: of its forwards and backwards alone,
    where that was measured too."""

    plan: Plan
    config: GPTConfig
    machine: Machine
    seconds: float
    micro_batch: int = 1
    accumulation: int = 1
    compute_s: float | None = None

    def predicted(self, factors: Mapping[str, float]) -> Value:
        """Seconds of the step on the `slowed` machine; `beside` of the factors, where it is one, is the engine's
        `Assumptions.side_by_side`."""
        machine = slowed(self.machine, factors)
        assumed = replace(OURS, side_by_side=factors.get("beside", SIDE_BY_SIDE))
        size = (self.micro_batch, self.accumulation)
        return predict_step(self.plan, self.config, machine, *size, self.compute_s, assumed).seconds


def calibrate(observations: Sequence[Observation]) -> dict[str, float]:
    """The factors with which the observations are predicted best: keys of `START`, as `slowed` takes them. Least
    squares of logarithms, with a weak prior around `START`. ValueError for no observations."""
    if not observations:
        raise ValueError("no observations to calibrate with, needed is at least one measured step")
    start, sd = np.log(list(START.values())), np.array(list(PRIOR_LOG_SD.values()))

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(START, np.exp(log_factors), strict=True))
        errors = [np.log(one.predicted(factors) / one.seconds) for one in observations]
        return np.append(np.array(errors) / NOISE, (log_factors - start) / sd)

    limits = ([-4.0] * len(START), [4.0, 4.0, 4.0, 0.0, 0.0])  # shares are at most 1
    found = least_squares(residuals, start, diff_step=1e-3, bounds=limits).x
    return {name: float(value) for name, value in zip(START, np.exp(found), strict=True)}


def slowed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine whose processors take longer.

    factors   message: on latencies and launches of messages; bytes: on moving, adding up and quantising bytes; memory:
              on reading and writing memory; exposed: share of what links hid that they hide no more
    """
    message, nbytes, network = factors["message"], factors["bytes"], machine.network
    links = tuple(
        replace(level, protocols=tuple(replace(p, latency_s=p.latency_s * message) for p in level.protocols))
        for level in network.links
    )
    slower = replace(
        network,
        links=links,
        overhead_s=network.overhead_s * message,
        reduce_bytes_per_s=network.reduce_bytes_per_s / nbytes,
        host_bytes_per_s=network.host_bytes_per_s / nbytes,
        hidden=network.hidden * (1 - factors["exposed"]),
    )
    rate, hbm = machine.quantize_values_per_s, machine.hbm_bytes_per_s / factors["memory"]
    quantize = None if rate is None else rate / nbytes
    return replace(machine, network=slower, quantize_values_per_s=quantize, hbm_bytes_per_s=hbm)
