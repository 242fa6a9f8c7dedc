"""Where a number comes from: source, configuration, versions, machine, job."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from repro import paths
from repro.launch.slurm_env import hosts
from repro.records.record import Provenance, Record
from repro.records.source import digest, exists, gpu_hash, source_hash

PACKAGES = ("torch", "deepspeed", "numpy", "pandas", "scipy", "highspy", "numba")
PACKAGES += ("snakemake", "papermill", "seaborn", "gguf", "tokenizers")
CPUINFO = Path("/proc/cpuinfo")
# By the name of its flag there; the first that a processor has is its widest.
VECTORS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}
VECTORS |= {"sve": "SVE", "asimd": "NEON"}
SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
SLURM += ("SLURM_JOB_PARTITION", "SLURM_CLUSTER_NAME")


def now() -> datetime:
    return datetime.now(UTC)


@functools.cache
def commit(root: Path) -> tuple[str, bool]:
    """Commit of the checkout at `root`, and whether its files differ from it, or git does not say; as this process first
    asks, since what is committed later did not run. Empty where `root` only lies in another checkout, as an unpacked
    bundle may."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if not top and (root / ".git").exists():  # of another user, for instance, whom git does not trust
        return "", True
    if not top or Path(top).resolve() != root.resolve():
        return "", False
    return _git(root, "rev-parse", "HEAD") or "", _git(root, "status", "--porcelain", "--untracked-files=no") != ""


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails. It takes no lock of the checkout, which it would leave if it were killed."""
    options = {"cwd": root, "capture_output": True, "text": True, "timeout": 20, "check": True}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "--no-optional-locks", *arguments], **options).stdout.strip()
    return None


def file_hash(*files: Path) -> str:
    """Short SHA-256 over the contents of files, in the given order."""
    return digest(*(path.read_bytes() for path in files))


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; a missing one is left out."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_model() -> str:
    """Name of the processor as the system gives it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_kind() -> str:
    """What tells processors of one name apart, since virtual machines call theirs `AMD EPYC` whatever they are: family,
    model (of ARM: implementer and part), and the widest vector instructions. Empty where the system does not say."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    numbered = ("cpu family", "model", "CPU implementer", "CPU part")  # of x86; of ARM
    numbers = [f"{what.lower().removeprefix('cpu ')} {_cpuinfo(what)}" for what in numbered if _cpuinfo(what)]
    return ", ".join([*numbers, *[VECTORS[flag] for flag in VECTORS if flag in flags][:1]])


def _cpuinfo(key: str) -> str:
    """What Linux says of the first processor; empty where it does not."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(rf"^{key}\s*: *(.*?) *$", text, re.MULTILINE)
    return found[1] if found else ""


def gpus() -> tuple[list[str], str]:
    """Names of visible GPUs and the driver or runtime version. Asks torch only when a job already loaded it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return [], ""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return names, f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"


def is_older(experiment: str, source: str, gpu_code: str, on: Sequence[str]) -> bool:
    """Whether code other than the present one made a run, so that its numbers may differ if it ran again. `source`,
    `gpu_code`, `on`: `source_hash`, `gpu_hash` and `gpu` of its provenance."""
    module = f"repro.experiments.{experiment}"
    return not exists(module) or source != source_hash(module) or gpu_code != _gpu_hash(module, on)


def older(runs: Mapping[Path, Record]) -> set[Path]:
    """The runs that code other than the present one made."""
    made = ((path, run.experiment, run.provenance) for path, run in runs.items())
    return {path for path, name, by in made if is_older(name, by.source_hash, by.gpu_hash, by.gpu)}


def _gpu_hash(module: str, on: Sequence[str]) -> str:
    return gpu_hash(module) if on else ""


def machine() -> dict[str, Any]:
    """Of this machine and its Python, the fields of `Provenance`."""
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cpu_kind": cpu_kind(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _hosts() -> list[str]:
    """Names of the nodes in SLURM_STEP_NODELIST where `scontrol` can tell them, else of this machine."""
    with contextlib.suppress(ValueError):
        return hosts()
    return [socket.gethostname()]


def collect(module: str, start: datetime, topology: str = "", ran_here: bool = True) -> Provenance:
    """Provenance of a run of `module` that began at `start` and ends now. `ran_here`: whether this
    process ran it and may ask torch for its GPUs. Not in one that later points are forked from: once it has asked, they
    can use none."""
    names, driver = gpus() if ran_here else ([], "")
    git_commit, git_dirty = commit(paths.root())
    return Provenance(
        git_commit=git_commit,
        git_dirty=git_dirty,
        source_hash=source_hash(module),
        gpu_hash=_gpu_hash(module, names),
        config_hash=file_hash(*sorted((paths.root() / "config").rglob("[!.]*.yaml"))),  # no lock of an editor
        lock_hash=file_hash(paths.root() / "constraints.txt"),
        packages=versions(),
        **machine(),
        gpu=names,
        driver=driver,
        topology=topology,
        hosts=_hosts(),
        slurm={name: os.environ[name] for name in SLURM if name in os.environ},
        start=start,
        end=now(),
    )
