"""What Slurm says of jobs: squeue while it remembers them, the accounting after that, where there is one."""

import getpass
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LIVING = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT", "STOPPED"}
)


@dataclass(frozen=True)
class JobState:
    """`state`: Slurm's word, empty where nothing knows the job; `reason`: Slurm's word for why it ended or waits."""

    state: str
    reason: str = ""

    @property
    def over(self) -> bool:
        return self.state not in _LIVING


class QueueError(OSError):
    """A Slurm command is not there, or failed; the message holds what it said."""


def _ask(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise QueueError(f"{command[0]}: not on PATH; is this a node of a Slurm cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise QueueError(f"{' '.join(command)}: no answer in {error.timeout:.0f} s") from error
    if found.returncode:
        raise QueueError(f"{' '.join(command)}: {found.stderr.strip() or f'exit code {found.returncode}'}")
    return found.stdout


def state(job_id: str) -> JobState:
    """Of a job that may have ended. QueueError only where Slurm cannot be asked at all."""
    try:
        found = _ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
    except QueueError as error:
        if "Invalid job id" not in str(error):
            raise
        found = ""
    lines = found.split("\n") if found.strip() else _accounted(job_id)
    word, _, reason = lines[0].partition("|")
    return JobState(word.split(" ")[0], reason)  # "CANCELLED by 0"


def _accounted(job_id: str) -> list[str]:
    try:
        lines = _ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,Reason").splitlines()
    except QueueError:  # no accounting
        lines = []
    return lines or [""]


def step_reports(job_id: str) -> dict[str, dict[str, str]] | None:
    """Elapsed, ExitCode, MaxRSS and ConsumedEnergyRaw of the job's ended steps by their number, as far as the accounting has them; None
    where there is no accounting."""
    fields = ("JobID", "State", "Elapsed", "ExitCode", "MaxRSS", "ConsumedEnergyRaw")
    try:
        lines = _ask("sacct", "-n", "-P", "-j", job_id, "-o", ",".join(fields)).splitlines()
    except QueueError:
        return None
    found = {}
    for line in lines:
        values = dict(zip(fields, line.split("|"), strict=True))
        step = values.pop("JobID").partition(".")[2]
        if values.pop("State") != "RUNNING":
            found[step] = {name: value for name, value in values.items() if value not in ("", "0")}
    return found


def restarts(job_id: str) -> int:
    """How often Slurm has put the job back into the queue."""
    return int(_shown(job_id).get("Restarts", "0"))


def ends_at(job_id: str) -> datetime:
    """When Slurm will end the job, in local time."""
    return datetime.fromisoformat(_shown(job_id)["EndTime"])


def nodes(job_id: str) -> str:
    """The job's nodes, in Slurm's short form."""
    return _shown(job_id)["NodeList"]


def _shown(job_id: str) -> dict[str, str]:
    words = _ask("scontrol", "show", "job", "--oneliner", job_id).split()
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def jobs_of(folder: Path, comment: str) -> list[str]:
    """This user's jobs in the queue that were submitted from `folder` with a comment that begins so."""
    lines = _ask("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%Z|%k").splitlines()
    found = []
    for line in lines:
        job_id, where, text = line.split("|", 2)
        if text.startswith(comment) and Path(where).resolve() == folder.resolve():
            found.append(job_id)
    return found


def cancel(job_ids: list[str]) -> None:
    """End jobs, those that wait as well."""
    if job_ids:
        _ask("scancel", *job_ids)
