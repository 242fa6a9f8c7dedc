"""Predicted time of collectives, training steps, expert-parallel decoding and serving on machines that are not at hand.

    from repro import scaling

    step = scaling.predict("hierarchical", scaling.gpt(20e9), scaling.hardware("frontier"), nodes=48)
    print(step.tflops_per_rank, step.critical)  # [256] draws, and what the step waits for

Collectives: `network` (latencies, rates, shared links), `algorithms` (rounds and messages), `nccl` (which of them NCCL
chooses), `collectives` (their seconds), `fit` (parameters from measured times: `measured`, `measured_files`,
`published`), `validate` (rows that no fit has seen). On top of them: `machines` (parameters as intervals),
`assumptions` (what is not known of an engine), `step` with `hops`, `calibrate` and `overlap` (fitted to published
steps), `schedule` (this package's engine, message by message), `decode`, and `serving` (the papers), `whatif` (sweeps),
`ladder` (which assumptions give a paper's numbers).
"""

try:
    import pandas  # noqa: F401
    import scipy  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"repro.scaling needs {error.name}: pip install 'repro-papers[scaling]'", name=error.name
    ) from error

from repro.scaling import network
from repro.scaling.assumptions import Assumptions
from repro.scaling.calibrate import Observation, calibrate, slowed
from repro.scaling.collectives import seconds
from repro.scaling.machines import CATALOGUE, Hardware, Interval, Machine, Tier, hardware
from repro.scaling.step import Step, predict_step
from repro.scaling.whatif import (
    best_plan,
    crossover,
    gpt,
    largest_model,
    predict,
    search,
    sensitivity,
    sweep,
    with_network,
)

__all__ = [
    "CATALOGUE",
    "Assumptions",
    "Hardware",
    "Interval",
    "Machine",
    "Observation",
    "Step",
    "Tier",
    "best_plan",
    "calibrate",
    "crossover",
    "gpt",
    "hardware",
    "largest_model",
    "network",
    "predict",
    "predict_step",
    "search",
    "seconds",
    "sensitivity",
    "slowed",
    "sweep",
    "with_network",
]
