"""Where a number comes from: source, configuration, versions, machine, job."""

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

from repro import paths
from repro.launch.step import hosts
from repro.record import Provenance

PACKAGES = (
    "torch",
    "deepspeed",
    "numpy",
    "pandas",
    "scipy",
    "highspy",
    "numba",
    "snakemake",
    "papermill",
    "seaborn",
    "gguf",
    "tokenizers",
)
SLURM = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_PARTITION",
    "SLURM_CLUSTER_NAME",
)
# How numbers are carried, not how they are made: a change of it (SCHEMA_VERSION counts those that matter) leaves records as good as they were.
CARRIERS = frozenset({"repro.record", "repro.experiments.base"})


def now() -> datetime:
    return datetime.now(UTC)


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(["git", *arguments], cwd=paths.root(), capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def file_hash(*files: Path) -> str:
    """Short SHA-256 over the contents of files, in the given order."""
    return _digest(*(path.read_bytes() for path in files))


def config_hash() -> str:
    """Hash of every file under `config/`."""
    return file_hash(*sorted((paths.root() / "config").rglob("*.yaml")))


def lock_hash() -> str:
    """Hash of `constraints.txt`, the versions that this checkout is tested with."""
    return file_hash(paths.root() / "constraints.txt")


@functools.cache
def _parsed(module: str) -> tuple[bytes, frozenset[str]]:
    """Code of a `repro` module without comments and docstrings, and the `repro` modules that it imports anywhere."""
    tree = ast.parse(_file(module).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    # The last part of a name may be a class or a function, which has no file.
    found = {name for name in imported if name.startswith("repro.") and _file(name).exists()}
    return _dump(tree).encode(), frozenset(found)


def _dump(node: object) -> str:
    """Like `ast.dump`, but without empty fields, which differ between versions of Python."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields)})"
    return f"[{','.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


def _file(module: str) -> Path:
    """Where the source of a `repro` module is. Python's own finder would import the packages above it, torch with them."""
    base = Path(__file__).parent.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def source_hash(module: str) -> str:
    """Hash of `module` and every `repro` module it reaches by imports. Comments and docstrings do not count, so mending
    a text does not make measured records stale."""
    todo, seen = {module}, {}
    while todo:
        name = todo.pop()
        seen[name], imported = _parsed(name)
        packages = {
            name.rsplit(".", depth)[0] for depth in range(1, name.count("."))
        }  # a package's __init__ runs as well
        todo |= (imported | packages) - seen.keys() - CARRIERS
    return _digest(*(code for _, code in sorted(seen.items())))


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; a missing one is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """Name of the processor as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpus() -> tuple[list[str], str]:
    """Names of visible GPUs and the driver or runtime version. Asks torch only when a job already loaded it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return [], ""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return names, f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"


def collect(module: str, start: datetime, topology: str = "") -> Provenance:
    """Provenance of a run of `module` that began at `start` and ends now."""
    names, driver = gpus()
    return Provenance(
        git_commit=_git("rev-parse", "HEAD"),
        git_dirty=bool(_git("status", "--porcelain", "--untracked-files=no")),
        source_hash=source_hash(module),
        config_hash=config_hash(),
        lock_hash=lock_hash(),
        packages=versions(),
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        cpu=cpu_model(),
        cores=os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpu=names,
        driver=driver,
        topology=topology,
        hosts=hosts() if "SLURM_STEP_NODELIST" in os.environ else [socket.gethostname()],
        slurm={name: os.environ[name] for name in SLURM if name in os.environ},
        start=start,
        end=now(),
    )
