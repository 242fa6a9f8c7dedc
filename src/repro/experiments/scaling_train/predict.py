"""How long a run of zero_train takes on a machine, for the plan of a platform."""

import numpy as np

from repro import scaling
from repro.experiments.zero_train import ZeroTrain
from repro.zero import plan

# Our plans under the libraries' names, for the time that a run takes.
_LIKE = {
    "deepspeed_zero3": "zero3",
    "deepspeed_zeropp": "zeropp",
    "fsdp2": "zero3",
    "fsdp2_hsdp": "hsdp",
    "fsdp2_reshard": "hpz",
    "qgz_one_hop": "qgz",
    "best": "zeropp",
}
SETUP_S = 60.0  # [INF] model, optimizer and first connections, once a run


def train_seconds(point: ZeroTrain, hardware: str) -> float | None:
    """Seconds of a zero_train run on `hardware`: set-up, and its steps at the slow end of the band. None for a shape of node that the
    hardware does not have, and where times are not the machine's."""
    machine = scaling.hardware(hardware)
    if point.fabric != "auto" or machine.topology(1).world_size != point.packages * point.gcds:
        return None
    chosen = plan.named(_LIKE.get(point.plan, point.plan), machine.topology(point.nodes))
    step = scaling.predict_step(
        chosen, point.gpt, machine.machine(point.nodes, draws=64), point.micro_batch, point.accumulation
    )
    return SETUP_S + point.steps * float(np.quantile(step.seconds, 0.95))
