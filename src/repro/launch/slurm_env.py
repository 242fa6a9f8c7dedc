"""What Slurm tells a task of the step that it belongs to."""

import os
import subprocess


def hosts() -> list[str]:
    """Names of the step's nodes, in Slurm's order, which is that of the ranks. ValueError outside a step."""
    if "SLURM_STEP_NODELIST" not in os.environ:
        raise ValueError("not in a step of a Slurm job: SLURM_STEP_NODELIST is not set")
    return expand(os.environ["SLURM_STEP_NODELIST"])


def expand(nodes: str) -> list[str]:
    """Slurm's short form of node names (`node[1-2]`), one by one; ValueError where `scontrol` cannot tell."""
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(f"nodes {nodes!r}: `scontrol` is not on PATH") from error
    if found.returncode:
        raise ValueError(f"nodes {nodes!r}: scontrol says {found.stderr.strip()}")
    return found.stdout.split()


def master_address() -> str:
    """Where rank 0 listens: the step's first node. ValueError outside Slurm."""
    if "SLURM_STEP_NODELIST" not in os.environ:
        raise ValueError("MASTER_ADDR is not set, and no step of a Slurm job tells it")
    return hosts()[0]


def master_port() -> str:
    """A port that every task of this step finds, and no other step of the moment: 10000 to 29999, below those that
    systems hand out by themselves."""
    job, step = (os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if job is None or step is None:
        raise ValueError("MASTER_PORT is not set, and no step of a Slurm job tells it")
    return str(10000 + (int(job) * 101 + int(step)) % 20000)
