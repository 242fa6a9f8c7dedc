"""What a machine's processors really take, from a few measured steps: then other plans, networks and sizes are predicted.

A probe times messages in a loop that does nothing else; in a training step the same messages find cold caches and other work. Three
factors make up for that, on launching a message, on moving bytes, and on the update; links keep the rates that were probed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from repro.models.gpt import GPTConfig
from repro.scaling.machines import Machine
from repro.scaling.network import Network, Value
from repro.scaling.step import predict_step
from repro.zero import Plan

FACTORS = ("message", "bytes", "update")
PRIOR_LOG_SD = 1.0  # a factor of e more or less is nothing unusual


@dataclass(frozen=True, eq=False)
class Observation:
    """A measured step of `plan` on `machine` (as probed, or as known), and the compute alone where that was measured too."""

    plan: Plan
    config: GPTConfig
    machine: Machine
    seconds: float
    micro_batch: int = 1
    accumulation: int = 1
    compute_s: float | None = None

    def predicted(self, factors: Mapping[str, float]) -> Value:
        """Seconds with the machine's work taking so many times as long."""
        machine = slowed(self.machine, factors)
        compute: Value | None = self.compute_s
        return predict_step(self.plan, self.config, machine, self.micro_batch, self.accumulation, compute).seconds


def calibrate(observations: Sequence[Observation]) -> dict[str, float]:
    """The factors with which the observations are predicted best (least squares of logarithms, drawn towards 1).

    Raises ValueError for no observations.
    """
    if not observations:
        raise ValueError("no observations to calibrate with, needed is at least one measured step")

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(FACTORS, np.exp(log_factors), strict=True))
        errors = [np.log(one.predicted(factors) / one.seconds) for one in observations]
        return np.append(errors, 0.1 * log_factors / PRIOR_LOG_SD)  # as if a tenth were the noise of a step

    found = least_squares(residuals, np.zeros(len(FACTORS)), diff_step=1e-3).x
    return {name: float(value) for name, value in zip(FACTORS, np.exp(found), strict=True)}


def slowed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with launching messages, moving their bytes, and updating taking so many times as long."""
    network = machine.network
    links = tuple(
        replace(
            level,
            protocols=tuple(replace(p, latency_s=p.latency_s * factors["message"]) for p in level.protocols),
        )
        for level in network.links
    )
    work = Network(
        network.topology,
        links,
        overhead_s=network.overhead_s * factors["message"],
        reduce_bytes_per_s=network.reduce_bytes_per_s / factors["bytes"],
        host_bytes_per_s=network.host_bytes_per_s / factors["bytes"],
        queues=network.queues,
    )
    rate = machine.quantize_values_per_s
    return replace(
        machine,
        network=work,
        quantize_values_per_s=None if rate is None else rate / factors["bytes"],
        hbm_bytes_per_s=machine.hbm_bytes_per_s / factors["update"],
    )
