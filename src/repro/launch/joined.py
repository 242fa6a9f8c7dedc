"""`launch` where this process already is a rank: in a `torchrun` job, or in a step of several `srun` tasks."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from repro.launch.rank import in_rank


def place_in_job() -> tuple[int, int] | None:
    """(rank, world size) when torchrun or a step of several srun tasks started this process."""
    env = os.environ
    if in_rank():  # started by `launch`: a rank may launch ranks of its own
        return None
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    # SLURM_NTASKS is also set in a batch script, which is no rank; a step of one task (as Snakemake uses) is none either.
    if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return None


def run_in_job(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple,
    place: tuple[int, int],
    fabric: Any,
    timeout_s: float,
    threads: int,
) -> list[Any]:
    """Run `fn` as this rank and gather the results of all. The group stays: env:// cannot be joined twice."""
    import torch
    import torch.distributed as dist

    rank, size = place
    if size != world_size:
        raise ValueError(f"world_size is {world_size}, but torchrun or srun started {size} ranks")
    if fabric is not None:
        raise ValueError("an emulated fabric needs ranks that launch starts itself, not torchrun or srun")
    if missing := {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        raise ValueError(f"{', '.join(sorted(missing))} not set: srun does not, so the job script has to export them")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    torch.set_num_threads(threads)
    if not dist.is_initialized():
        dist.init_process_group(_take_gpu(), "env://", timedelta(seconds=timeout_s), world_size, rank)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # else gloo's threads abort
    results: list[Any] = [None] * size
    dist.all_gather_object(results, fn(rank, size, *args))
    return results


def _take_gpu() -> str:
    """Make this rank's GPU, if the machine has any, the current one; the backend for tensors there and on the CPU.

    The GPU comes before the group, which NCCL (on ROCm RCCL, by the same name) forms on the current device.
    """
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(
        int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    )  # srun may show a rank only its own
    return "cpu:gloo,cuda:nccl"
