"""What Slurm says of jobs: squeue while it remembers them, the accounting after that, where there is one.

All but `step_reports` raise QueueError where Slurm cannot tell or does not obey.
"""

import getpass
import os
import re
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LIVING = frozenset(
    {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT", "STOPPED"}
    | {"SIGNALING", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
# In messages of Slurm's commands.
_FOR_THE_MOMENT = "Unable to contact slurm|Socket timed out|Connection refused|no answer in|Zero Bytes were transmitted"
_PAUSES_S = (1, 2, 5, 10, 20, 20)
_NO_ACCOUNTING = "accounting storage is disabled|not on PATH"
# Of squeue, which a user may have set: a job that they leave out would count as ended.
_FILTERS = ("ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS")


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
    """Standard output. What Slurm cannot answer for the moment is asked six times more, with pauses of a minute in all; an
    answer that does not come takes a minute each time."""
    for pause_s in _PAUSES_S:
        try:
            return _said(*command)
        except QueueError as error:
            if not re.search(_FOR_THE_MOMENT, str(error)):
                raise
        time.sleep(pause_s)
    return _said(*command)


def _said(*command: str, timeout_s: float = 60) -> str:
    try:
        environment = os.environ | {"SLURM_TIME_FORMAT": "standard"}  # what `facts` reads, whatever the user prefers
        for name in _FILTERS:
            environment.pop(f"SQUEUE_{name}", None)
        found = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    except FileNotFoundError as error:
        raise QueueError(f"{command[0]}: not on PATH; is this a node of a Slurm cluster?") from error
    except subprocess.TimeoutExpired as error:
        raise QueueError(f"{' '.join(command)}: no answer in {error.timeout:.0f} s") from error
    if found.returncode:
        raise QueueError(f"{' '.join(command)}: {found.stderr.strip() or f'exit code {found.returncode}'}")
    return found.stdout


def state(job_id: str) -> JobState:
    """Of a job that may have ended. QueueError where Slurm cannot tell."""
    try:
        found = _ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
    except QueueError as error:
        if "Invalid job id" not in str(error):
            raise
        found = ""
    found = found or _accounted(job_id)
    word, _, reason = found.partition("\n")[0].partition("|")
    return JobState(word.split(" ")[0], reason)  # "CANCELLED by 0"


def _accounted(job_id: str) -> str:
    try:
        return _ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,Reason")
    except QueueError as error:
        if re.search(_NO_ACCOUNTING, str(error)):
            return ""
        raise


def step_reports(job_id: str) -> dict[str, dict[str, str]] | None:
    """Elapsed, ExitCode, MaxRSS and ConsumedEnergyRaw of the job's ended steps by their number, as far as the
    accounting has them; None where there is none. Asked once and not for long: it only adds to what the records say."""
    fields = ("JobID", "State", "Elapsed", "ExitCode", "MaxRSS", "ConsumedEnergyRaw")
    try:
        lines = _said("sacct", "-n", "-P", "-j", job_id, "-o", ",".join(fields), timeout_s=10).splitlines()
    except QueueError as error:
        return None if re.search(_NO_ACCOUNTING, str(error)) else {}
    found = {}
    for line in lines:
        values = dict(zip(fields, line.split("|"), strict=True))
        step = values.pop("JobID").partition(".")[2]
        if values.pop("State") != "RUNNING":
            found[step] = {name: value for name, value in values.items() if value not in ("", "0")}
    return found


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says of a job that runs: when it will be ended, its nodes in Slurm's short form."""

    ends_at: datetime
    nodes: str


def facts(job_id: str) -> JobFacts:
    """Of a job that runs; QueueError where Slurm cannot tell."""
    words = _ask("scontrol", "show", "job", "--oneliner", job_id).split()
    shown = {name: value for name, equals, value in (word.partition("=") for word in words) if equals}
    return JobFacts(datetime.fromisoformat(shown["EndTime"]), shown["NodeList"])


def kill_wait_s() -> float:
    """Seconds that Slurm leaves processes between SIGTERM and SIGKILL."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.MULTILINE)
    return float(found.group(1)) if found else 30.0


def kill_steps(job_id: str) -> None:
    """End what srun has started in the job, at once and without asking; the job's script goes on."""
    steps = _ask("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i").split()
    ours = [step for step in steps if step.partition(".")[2].isdigit()]
    if ours:
        _ask("scancel", "--signal=KILL", *ours)


def jobs_of(folder: Path, comment: str, ending: bool = True) -> list[str]:
    """This user's jobs in the queue that were submitted from `folder` with a comment that begins as the regular
    expression `comment` says; without `ending` only those that wait or run."""
    which = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED" + (",COMPLETING" if ending else "")
    lines = _ask("squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%i|%Z|%k", which).splitlines()
    jobs = (line.partition("|") for line in lines)  # a comment of a job that is not of this workflow may have any form
    found = [(job_id, *rest.rpartition("|")[::2]) for job_id, _, rest in jobs]
    own = folder.resolve()
    return [job_id for job_id, where, text in found if re.match(comment, text) and Path(where).resolve() == own]


def cancel(job_ids: list[str]) -> None:
    """End jobs, those that wait as well."""
    _ask("scancel", *job_ids)
