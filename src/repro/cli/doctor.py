"""What this machine has, and what each tier lacks on it."""

import shutil
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table

from repro import paths
from repro.cli.console import stdout
from repro.emulate import netns
from repro.records import provenance

JOB_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_MIN_MEMORY_GIB = 5.5  # of 6, as the system keeps some for itself: 8 ranks with torch loaded, or SmolLM2-135M in fp32 beside its KV cache
_MIN_CORES = 2
_MIN_DISK_GIB = 3  # the virtual environment is 2.6 GB
_FINE = {"namespaces": "can be made and shaped", "model": "installed", "kernels": "can be built"}


def examine() -> dict[str, Any]:
    """Facts about this machine. `namespaces`, `model` and `kernels` are None where all is well, else why not;
    `missing_servers` has, by the name of each server that cannot be started, what it needs; `lacks` what is missing for
    each tier. Takes a few seconds, at first half a minute: torch is imported, a network namespace is tried, kernels are
    built."""
    import torch
    import torch.distributed as dist

    from repro.experiments.flover_peers.catalogue import ENGINES
    from repro.models import checkpoint
    from repro.models.kernels.cpp import BuildError, CppKernels

    def why_not(attempt: Callable[[], object]) -> str | None:
        try:
            attempt()
        except (OSError, ValueError, BuildError) as error:
            return str(error)
        return None

    names, driver = provenance.gpus()
    found = provenance.machine() | {
        "disk_free_gib": round(shutil.disk_usage(paths.root()).free / 2**30, 1),
        "torch": torch.__version__,
        "backends": {
            "cuda": torch.cuda.is_available() and torch.version.hip is None,
            "rocm": torch.cuda.is_available() and torch.version.hip is not None,
            "mps": torch.backends.mps.is_available(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        },
        "gpus": names,
        "gpu_driver": driver,
        "packages": provenance.versions(),
        "slurm": {name: shutil.which(name) for name in (*JOB_COMMANDS, "slurmctld", "slurmd")},
        "namespaces": netns.unavailable(),
        "model": why_not(checkpoint.smollm2_path),
        "kernels": why_not(CppKernels),
        "missing_servers": {name: reason for name, engine in ENGINES.items() if (reason := engine.missing())},
    }
    return found | {"lacks": _lacks(found)}


def _lacks(found: dict[str, Any]) -> dict[str, list[str]]:
    common = []
    if found["memory_gib"] < _MIN_MEMORY_GIB:
        common.append(f"memory: {found['memory_gib']} GiB, needs {_MIN_MEMORY_GIB}")
    if found["cores"] < _MIN_CORES:
        common.append(f"cores: {found['cores']}, needs {_MIN_CORES}")
    if found["disk_free_gib"] < _MIN_DISK_GIB:
        common.append(f"free disk: {found['disk_free_gib']} GiB, needs {_MIN_DISK_GIB}")
    if found["model"]:
        common.append(f"language model: {found['model']}")
    local = list(common)
    if found["namespaces"]:
        local.append(f"shaped network (runs unshaped, times not comparable): {found['namespaces']}")
    if found["kernels"]:
        local.append(f"kernels in C++ (serving runs in torch, slower): {found['kernels']}")
    full = list(local)
    if servers := found["missing_servers"]:
        full.append(f"servers to compare with: {next(iter(servers.values()))}")
    missing = [name for name in JOB_COMMANDS if not found["slurm"][name]]
    return {
        "replot": [],
        **dict.fromkeys(("smoke", "laptop"), local),
        "full": full,
        "gpu": common + ([] if found["gpus"] else ["a CUDA or ROCm GPU with a matching torch build"]),
        "cluster": [f"Slurm: {', '.join(missing)}"] if missing else [],
    }


def show(found: dict[str, Any]) -> None:
    """The facts as a table, then a line for each tier."""
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        if name == "lacks":
            continue
        if name == "missing_servers":
            value = list(value)
        if isinstance(value, dict):
            value = [f"{key} {'yes' if each is True else each or 'no'}" for key, each in value.items()]
        text = ", ".join(value) if isinstance(value, list) else value
        table.add_row(name.replace("_", " "), escape(str(text or _FINE.get(name, "none"))))
    stdout.print(table)
    for tier, lacks in found["lacks"].items():
        words = escape("lacks " + "; ".join(lacks)) if lacks else "[green]ready[/]"
        stdout.print(f"[bold]{tier:8}[/] {words}", soft_wrap=True)
