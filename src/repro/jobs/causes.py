"""Why a step left no record: from its late ranks, from Slurm's word on the job, and from the step's log."""

import re
import signal
from pathlib import Path

from repro.jobs.queue import JobState
from repro.launch import CollectiveHang, watchdog
from repro.records.record import Cause

# Failures from outside (the queue, a node, a signal): the point may be sound, and a new attempt is worth it.
OUTSIDE = frozenset({Cause.NODE_FAILURE, Cause.PREEMPTED, Cause.CANCELLED})
_OF_STATE = {
    "TIMEOUT": Cause.TIMEOUT,
    "DEADLINE": Cause.TIMEOUT,
    "OUT_OF_MEMORY": Cause.OOM,
    "NODE_FAIL": Cause.NODE_FAILURE,
    "BOOT_FAIL": Cause.NODE_FAILURE,
    "PREEMPTED": Cause.PREEMPTED,
    "REVOKED": Cause.PREEMPTED,
    "CANCELLED": Cause.CANCELLED,
}
# In a step's log, in the order of what explains more.
_IN_LOG = (
    (r"exceeded memory limit|Exceeded job memory limit|oom[-_ ]kill|OUT_OF_MEMORY|Out Of Memory", Cause.OOM),
    (r"^Timeout \(\d", Cause.TIMEOUT),  # faulthandler
    (r"Watchdog caught collective operation timeout", Cause.COMM_HANG),  # NCCL and RCCL
    (r"DUE TO PREEMPTION", Cause.PREEMPTED),
    (r"DUE TO NODE FAILURE|Node failure on|NODE FAILURE|NODE_FAIL", Cause.NODE_FAILURE),
    (r"DUE TO TIME LIMIT", Cause.TIMEOUT),
    # No rank began:
    (r"Task launch for .* failed|Unable to create step|Unable to contact slurm controller", Cause.NODE_FAILURE),
    # Of several tasks that ended alike srun says it once:
    (r"tasks? [\d,-]+: (Killed|Segmentation fault|Bus error|Aborted)", Cause.NODE_FAILURE),
    (r"tasks? [\d,-]+: Exited with exit code", Cause.UNEXPECTED),
    # Also said of the ranks that srun ends after another's failure, so it comes last:
    (r"CANCELLED AT", Cause.CANCELLED),
)
_SIGNALS = {each.value: each.name for each in signal.Signals}  # real-time signals have no names
_TAIL = 6000  # characters of a log that a record keeps


def of_step(log: Path, where: Path, ranks: int, exit_code: int | None) -> tuple[Cause, str]:
    """Cause and detail of a step that has ended. `where`: folder of its watchdogs; `exit_code`: None where it was ended
    for its time."""
    if late := of_watchdogs(where, ranks):
        return late
    if exit_code in (None, watchdog.EXIT_CODE):
        return Cause.TIMEOUT, f"not done in its time, and ended; the end of {log.name}:\n{tail(log)}"
    detail = f"the step ended with exit code {exit_code} and without a record; the end of {log.name}:\n{tail(log)}"
    return _in_log(log) or Cause.UNEXPECTED, detail


def of_process(exit_code: int, log: Path) -> tuple[Cause, str]:
    """Cause and detail of a point whose process ended without a record. `exit_code` is negative for a signal."""
    end = f"exit code {exit_code}" if exit_code >= 0 else _SIGNALS.get(-exit_code, f"signal {-exit_code}")
    cause = _in_log(log) or Cause.UNEXPECTED
    if exit_code == -signal.SIGKILL:
        cause, end = Cause.NODE_FAILURE, f"{end} (the kernel sends it when memory is short)"
    return cause, f"the process ended by {end} and without a record; the end of {log.name}:\n{tail(log)}"


def of_watchdogs(where: Path, ranks: int) -> tuple[Cause, str] | None:
    """What late ranks said of themselves; None when none did."""
    if (late := watchdog.cause(where, ranks)) is None:
        return None
    return (Cause.COMM_HANG if isinstance(late, CollectiveHang) else Cause.TIMEOUT), str(late)


def of_ending(found: JobState) -> Cause | None:
    """Why a job is being ended, while it is; None when Slurm does not say it yet."""
    return _OF_STATE.get(found.state)


def of_job(found: JobState, log: Path, restarted: bool) -> tuple[Cause, str]:
    """Cause and detail of a point whose job ended, or was put back into the queue, while it ran."""
    if restarted:
        return _in_log(log) or Cause.PREEMPTED, f"the job was put back into the queue while this ran\n{tail(log)}"
    end = f"the job ended as {found.state}" if found.state else "the job is not known to Slurm any more"
    end += f" ({found.reason})" if found.reason not in ("", "None") else ""
    return of_ending(found) or _in_log(log) or Cause.UNEXPECTED, f"{end} while this ran\n{tail(log)}"


def _in_log(log: Path) -> Cause | None:
    text = _text(log)
    return next((cause for pattern, cause in _IN_LOG if re.search(pattern, text, re.MULTILINE)), None)


def tail(log: Path) -> str:
    """The end of a log; empty where there is none."""
    return _text(log)[-_TAIL:].strip()


def _text(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""
