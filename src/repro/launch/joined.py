"""`launch` where this process already is a rank: in a `torchrun` job, or in a step of several `srun` tasks."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from repro.emulate.netns import Fabric, enter
from repro.launch import watchdog
from repro.launch.errors import Done
from repro.launch.rank import in_rank
from repro.launch.seats import check_placement
from repro.launch.slurm_env import rendezvous
from repro.launch.variables import number
from repro.launch.where import make_waits_visible
from repro.topology import Topology

ALONE = "REPRO_ALONE"  # set to 1 by a job: the step's only task is the only rank of its point


def place_in_job() -> tuple[int, int] | None:
    """(rank, world size) when torchrun or a step of several srun tasks started this process. ValueError where what
    they have put into the environment is no such thing."""
    env = os.environ
    if in_rank():  # started by `launch`: a rank may launch ranks of its own
        return None
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        size = number("WORLD_SIZE", 1)
        return number("RANK", 0, size - 1), size
    # SLURM_NTASKS is also set in a batch script, which is no rank; a step of one task (as Snakemake uses) is none
    # either, unless it says so.
    if "SLURM_PROCID" in env:
        tasks = number("SLURM_STEP_NUM_TASKS", 1) if "SLURM_STEP_NUM_TASKS" in env else 1
        if tasks > 1 or env.get(ALONE) == "1":
            return number("SLURM_PROCID", 0, tasks - 1), tasks
    return None


def refuse_other_place(ranks: int | None) -> None:
    """ValueError where torchrun or srun started this process as one of a number of ranks that is not `ranks` (None: it
    should be none): most of them would do nothing, or the work of another. Variables that an ended job left behind are
    refused alike."""
    if (place := place_in_job()) is not None and place[1] != ranks:
        raise ValueError(
            f"the environment says that this is rank {place[0]} of {place[1]} (RANK and WORLD_SIZE, or Slurm's"
            f" SLURM_PROCID and SLURM_STEP_NUM_TASKS), but this needs {'to be no rank' if ranks is None else ranks};"
            " unset them, or start it as it needs"
        )


def run_in_job(
    fn: Callable[..., Any],
    place: tuple[int, int],
    args: tuple,
    fabric: Fabric | None,
    topology: Topology | None,
    timeout_s: float,
    threads: int,
    first_only: bool,
) -> list[Any]:
    """Run `fn` as this rank and gather the results of all. The group stays: env:// cannot be joined twice. ValueError
    where torchrun or srun do not say enough to join it."""
    import torch
    import torch.distributed as dist

    env = os.environ
    rank, size = place
    if fabric is not None and not fabric.shared:
        raise ValueError("an emulated fabric needs ranks that launch starts itself, not torchrun or srun")
    with watchdog.until(timeout_s, rank, run_in_job.__code__):
        if fabric is not None:
            enter(fabric.namespace(rank))
            env |= {"GLOO_SOCKET_IFNAME": fabric.interface, "MASTER_ADDR": fabric.address(0)}
        env |= rendezvous() | {"RANK": str(rank), "WORLD_SIZE": str(size)}
        if "LOCAL_RANK" not in env:
            if size > 1 and "SLURM_LOCALID" not in env and torch.cuda.is_available():
                raise ValueError("LOCAL_RANK is not set, so that all ranks of a node would take the same GPU")
            env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
        number("LOCAL_RANK", 0)
        torch.set_num_threads(threads)
        if not dist.is_initialized():
            dist.init_process_group(_take_gpu(), "env://", timedelta(seconds=timeout_s + 60), size, rank)
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # else gloo's threads abort
            make_waits_visible()
        if topology is not None:
            check_placement(topology)
        results: list[Any] = [None] * size
        dist.all_gather_object(results, fn(rank, size, *args))
    if first_only and rank:
        raise Done
    return results


def _take_gpu() -> str:
    """Make this rank's GPU, if the machine has any, the current one; the backend for tensors there and on the CPU.
    Before the group is made, which NCCL (on ROCm RCCL, by the same name) forms on the current device."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    # srun may show a rank only its own.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"
