"""What this machine has, and what each tier lacks on it."""

import os
import platform
import shutil
from dataclasses import asdict, dataclass, field

import psutil

from repro import paths
from repro.emulate import netns
from repro.records import provenance

JOB_COMMANDS = ("sbatch", "srun", "squeue", "sacct", "scancel")
SLURM_COMMANDS = (*JOB_COMMANDS, "slurmctld", "slurmd")
_MIN_MEMORY_GIB = 6  # 8 ranks with torch loaded, or SmolLM2-135M in fp32 beside its KV cache
_MIN_DISK_GIB = 3  # the virtual environment is 2.5 GB


@dataclass
class Report:
    """Facts as found; `lacks` maps each tier to what is missing for it (an empty list: it can run)."""

    python: str
    os: str
    cpu: str
    cores: int
    memory_gib: float
    disk_free_gib: float
    torch: str
    backends: dict[str, bool]
    gpus: list[str]
    gpu_driver: str
    packages: dict[str, str]
    slurm: dict[str, str | None]
    namespaces: str | None  # None: they can be made and shaped; else why not
    model: str | None  # None: the language model is installed; else why not
    kernels: str | None  # None: the serving engine's kernels in C++ can be built; else why not
    lacks: dict[str, list[str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _backends() -> dict[str, bool]:
    import torch
    import torch.distributed as dist

    return {
        "cuda": torch.cuda.is_available() and torch.version.hip is None,
        "rocm": torch.cuda.is_available() and torch.version.hip is not None,
        "mps": torch.backends.mps.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }


def _model() -> str | None:
    from repro.models import checkpoint

    try:
        checkpoint.smollm2_path()
    except FileNotFoundError as error:
        return str(error)
    return None


def _kernels() -> str | None:
    from repro.models.kernels.cpp import BuildError, CppKernels

    try:
        CppKernels()
    except BuildError as error:
        return str(error)
    return None


def examine() -> Report:
    """Look at this machine. Takes a few seconds, at first half a minute: torch is imported, a network namespace is
    tried, kernels are built."""
    import torch

    names, driver = provenance.gpus()
    report = Report(
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        cpu=provenance.cpu_model(),
        cores=os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        disk_free_gib=round(shutil.disk_usage(paths.root()).free / 2**30, 1),
        torch=torch.__version__,
        backends=_backends(),
        gpus=names,
        gpu_driver=driver,
        packages=provenance.versions(),
        slurm={name: shutil.which(name) for name in SLURM_COMMANDS},
        namespaces=netns.unavailable(),
        model=_model(),
        kernels=_kernels(),
    )
    report.lacks = _lacks(report)
    return report


def _lacks(report: Report) -> dict[str, list[str]]:
    common = []
    if report.memory_gib < _MIN_MEMORY_GIB:
        common.append(f"memory: {report.memory_gib} GiB, needs {_MIN_MEMORY_GIB}")
    if report.disk_free_gib < _MIN_DISK_GIB:
        common.append(f"free disk: {report.disk_free_gib} GiB, needs {_MIN_DISK_GIB}")
    if report.model:
        common.append(f"language model: {report.model}")
    shaped = [f"shaped network (runs unshaped, times not comparable): {report.namespaces}"] if report.namespaces else []
    if report.kernels:
        shaped.append(f"kernels in C++ (serving runs in torch, slower): {report.kernels}")
    slurm = [f"Slurm: {', '.join(missing)}"] if (missing := [c for c in JOB_COMMANDS if not report.slurm[c]]) else []
    gpu = [] if report.gpus else ["a CUDA or ROCm GPU with a matching torch build"]
    return {
        "replot": [],
        "smoke": common + shaped,
        "laptop": common + shaped,
        "full": common + shaped,
        "gpu": common + gpu,
        "cluster": slurm,
    }
