"""What Slurm tells a task of the step that it belongs to."""

import os
import subprocess

from repro.launch.variables import number

# Of 20000 ports: those of neighbouring jobs lie far apart (the golden section), also where they have hundreds of steps.
_BETWEEN_JOBS = 12361


def hosts() -> list[str]:
    """Names of the step's nodes, in Slurm's order, which is that of the ranks. ValueError outside a step, and where
    `scontrol` cannot tell."""
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    if nodes is None:
        raise ValueError("not in a step of a Slurm job: SLURM_STEP_NODELIST is not set")
    try:
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True)
    except OSError as error:
        reason = "is not on PATH" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror}"
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}: `scontrol` {reason}") from error
    if found.returncode or not found.stdout.strip():
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}: scontrol says {found.stderr.strip() or 'nothing'}")
    return found.stdout.split()


def rendezvous() -> dict[str, str]:
    """What of MASTER_ADDR and MASTER_PORT the environment lacks, the same for all tasks of the step: its first node,
    and a port from job and step number, seldom another step's: 10000 to 29999, below those that systems hand out. The
    first 1000 steps of jobs whose numbers are less than 13 apart have no port in common.
    ValueError where Slurm does not tell, or MASTER_PORT is no port."""
    env, found = os.environ, dict[str, str]()
    if not env.get("MASTER_ADDR"):
        if "SLURM_STEP_NODELIST" not in env:
            raise ValueError("MASTER_ADDR is not set, and no step of a Slurm job tells it")
        found["MASTER_ADDR"] = hosts()[0]
    if "MASTER_PORT" in env:
        number("MASTER_PORT", 1, 65535)
    else:
        if not {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= env.keys():
            raise ValueError("MASTER_PORT is not set, and no step of a Slurm job tells it")
        step = number("SLURM_JOB_ID", 0) * _BETWEEN_JOBS + number("SLURM_STEP_ID", 0)
        found["MASTER_PORT"] = str(10000 + step % 20000)
    return found
