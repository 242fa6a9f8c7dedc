"""What a machine's processors really take, from a few measured steps, to predict other plans and networks.

A probe times messages in a loop that does nothing else; in a training step they find cold caches and other work. The
factors of `slowed` make up for that. Links keep their rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from repro.models.gpt import GPTConfig
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.scaling.step import predict_step
from repro.zero import Plan

FACTORS = ("message", "bytes", "memory")
PRIOR_LOG_SD = 1.0  # a factor of e more or less is nothing unusual
NOISE = 0.05  # of a measured step
DIFFERENCE = 0.01  # of a log factor


@dataclass(frozen=True, eq=False)
class Observation:
    """A measured step of `plan` on `machine`, as probed or as known. `compute_s`: of its forwards and backwards alone,
    where that was measured too. ValueError unless `seconds` is above 0 and finite."""

    plan: Plan
    config: GPTConfig
    machine: Machine
    seconds: float
    micro_batch: int = 1
    accumulation: int = 1
    compute_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"step of {self.plan.name}: seconds is {self.seconds}, allowed: above 0, and finite")

    def predicted(self, factors: Mapping[str, float]) -> Value:
        """Seconds of the step on the `slowed` machine."""
        size = (self.micro_batch, self.accumulation)
        return predict_step(self.plan, self.config, slowed(self.machine, factors), *size, self.compute_s).seconds


def calibrate(observations: Sequence[Observation]) -> dict[str, float]:
    """The `FACTORS` with which the observations are predicted best, as `slowed` takes them. Least squares of logarithms,
    with a weak prior around 1. ValueError for no observations."""
    if not observations:
        raise ValueError("no observations to calibrate with, needed is at least one measured step")

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(FACTORS, np.exp(log_factors), strict=True))
        errors = [np.log(one.predicted(factors) / one.seconds) for one in observations]
        return np.append(np.array(errors) / NOISE, log_factors / PRIOR_LOG_SD)

    def slopes(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over finite steps, as a simulated step is no smooth function."""
        steps = DIFFERENCE * np.eye(len(FACTORS))
        each = [(residuals(log_factors + step) - residuals(log_factors - step)) / (2 * DIFFERENCE) for step in steps]
        return np.stack(each, axis=1)

    found = least_squares(residuals, np.zeros(len(FACTORS)), slopes, bounds=(-4, 4)).x
    return {name: float(value) for name, value in zip(FACTORS, np.exp(found), strict=True)}


def slowed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine whose processors take longer.

    factors   message: on latencies and launches of messages, and gaps between them; bytes: on moving, adding up and
              quantising bytes; memory: on reading and writing memory
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
        peer_s=network.peer_s * message,
        reduce_bytes_per_s=network.reduce_bytes_per_s / nbytes,
        host_bytes_per_s=network.host_bytes_per_s / nbytes,
    )
    rate, hbm = machine.quantize_values_per_s, machine.hbm_bytes_per_s / factors["memory"]
    quantize = None if rate is None else rate / nbytes
    return replace(machine, network=slower, quantize_values_per_s=quantize, hbm_bytes_per_s=hbm)
