"""What a machine's processors really take, from a few measured steps: then other plans, networks and sizes are predicted.

A probe times messages in a loop that does nothing else; in a training step the same messages find cold caches and other work. Three
factors make up for that, on launching a message, on moving its bytes, and on what only memory is needed for (copies, sums, the update), and a share of the work that links do not hide as
they do in the probe. Links keep the rates that were probed.
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

START = {"message": 1.0, "bytes": 1.0, "memory": 1.0, "exposed": 0.2}
PRIOR_LOG_SD = 1.0  # a factor of e more or less is nothing unusual
NOISE = 0.05  # of a measured step


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
    """The factors with which the observations are predicted best: least squares of logarithms, drawn towards `START`.

    Raises ValueError for no observations.
    """
    if not observations:
        raise ValueError("no observations to calibrate with, needed is at least one measured step")

    start = np.log(list(START.values()))

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(START, np.exp(log_factors), strict=True))
        errors = [np.log(one.predicted(factors) / one.seconds) for one in observations]
        return np.append(np.array(errors) / NOISE, (log_factors - start) / PRIOR_LOG_SD)

    limits = ([-4.0] * len(START), [4.0, 4.0, 4.0, 0.0])  # no more than all of the work is exposed
    found = least_squares(residuals, start, diff_step=1e-3, bounds=limits).x
    return {name: float(value) for name, value in zip(START, np.exp(found), strict=True)}


def slowed(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with launching messages, moving their bytes, and reading and writing memory taking so many times as long, and with a
    share `exposed` of what its links would hide."""
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
        hidden=network.hidden * (1 - factors["exposed"]),
    )
    rate = machine.quantize_values_per_s
    return replace(
        machine,
        network=work,
        quantize_values_per_s=None if rate is None else rate / factors["bytes"],
        hbm_bytes_per_s=machine.hbm_bytes_per_s / factors["memory"],
    )
