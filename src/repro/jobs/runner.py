"""Run one point and write its record, whatever happens: numbers, or a typed cause why there are none."""

import contextlib
import errno
import faulthandler
import fcntl
import os
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from repro import experiments, paths
from repro.experiments.base import MissingHardware, Outcome, Point
from repro.launch.errors import CollectiveHang, Done, RankError
from repro.launch.joined import place_in_job, refuse_other_place
from repro.launch.variables import number
from repro.launch.watchdog import seconds_left
from repro.records import provenance, record
from repro.records.record import Cause, Record

# What gloo, NCCL and torch's store say, in the order of what explains more. In a job a neighbour that fails tells it
# itself, and first (see `run`); one that is gone without a word was killed, or its node is down.
_OF_NETWORK = {
    "Timed out waiting": Cause.COMM_HANG,
    "collective operation timeout": Cause.COMM_HANG,
    "gloo/transport": Cause.NODE_FAILURE,
    "remote process exited or there was a network error": Cause.NODE_FAILURE,
    "Connection reset by peer": Cause.NODE_FAILURE,
    "Broken pipe": Cause.NODE_FAILURE,
}
# What the system, torch, Triton, NCCL, cuBLAS and hipBLAS say without an exception of that name.
_NO_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
_SEEN_FROM_AFAR = (Cause.NODE_FAILURE, Cause.COMM_HANG)  # a rank's failure as its neighbours have it
_DEAF_S = 20.0  # beyond its limit, for a point that does not hear of it
_LOCK_ADVICE = "timed runs lock it to be alone on the machine. Remove it, or set TMPDIR to a folder of yours"
_NEIGHBOUR_S = 1.0  # for the neighbour to say it better
NEEDS_GPU = "REPRO_NEEDS_GPU"  # set to 1 for a point that is to find a GPU


def classify(error: BaseException) -> Cause:
    """Typed cause of an exception; a failed rank is judged by what happened in that rank."""
    if isinstance(error, RankError):
        if error.exception is not None:
            return classify(error.exception)
        if error.signal:
            return Cause.NODE_FAILURE
        return Cause.OOM if _out_of_memory(error.type_name, error.message) else Cause.UNEXPECTED
    if isinstance(error, MissingHardware):
        return Cause.MISSING_HARDWARE
    if isinstance(error, CollectiveHang):
        return Cause.COMM_HANG
    if isinstance(error, TimeoutError):
        return Cause.TIMEOUT
    if _out_of_memory(type(error).__name__, str(error)) or getattr(error, "errno", None) == errno.ENOMEM:
        return Cause.OOM
    if isinstance(error, AssertionError | ValidationError):  # the point was valid, so a result is not: not a number
        return Cause.ASSERTION
    if isinstance(error, ValueError | FileNotFoundError):
        return Cause.BAD_INPUT
    return next((cause for sign, cause in _OF_NETWORK.items() if sign in str(error)), Cause.UNEXPECTED)


def _out_of_memory(name: str, message: str) -> bool:
    """Of an exception's class and words."""
    return name in ("MemoryError", "OutOfMemoryError") or any(sign in message for sign in _NO_MEMORY)


@contextlib.contextmanager
def machine(timed: bool, silent: bool = False) -> Iterator[None]:
    """Hold this machine's measuring lock: a timed run alone, others together. The lock dies with its holder. Who has
    to wait says so, unless `silent`. OSError where something else is in its place."""
    path = Path(tempfile.gettempdir()) / "repro-measure.lock"
    kind = fcntl.LOCK_EX if timed else fcntl.LOCK_SH
    handle = _open_lock(path)
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not silent:
                print(f"waiting for another run on this machine ({path})", file=sys.stderr, flush=True)
            fcntl.flock(handle, kind)
        except OSError as error:  # a file system without locks
            raise OSError(f"{path}: cannot be locked: {error.strerror}; {_LOCK_ADVICE}") from error
        yield
    finally:
        os.close(handle)


def _open_lock(path: Path) -> int:
    """One file for all users of the machine, as timed runs of two users spoil each other's times no less than those of
    one; so it lies in the folder where everybody may make files. Whoever made it, a descriptor for reading is enough to
    lock it: nothing is written, and a link, which may lead to any file of whoever follows it, is refused. A neighbour
    can hold the lock for ever, or put something else in its place; then TMPDIR names a folder of one's own."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would keep who opens it waiting
    try:
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.fchmod(handle, 0o644)  # whatever the umask
            return handle
        try:
            handle = os.open(path, flags | os.O_RDWR)  # NFS locks no file that is open for reading alone
        except PermissionError:
            handle = os.open(path, flags | os.O_RDONLY)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}; {_LOCK_ADVICE}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path}: not an ordinary file; {_LOCK_ADVICE}")
    return handle


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer than `seconds`. Native code does not hear of
    it: a while later the process prints where it is, and ends."""

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"no result after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + _DEAF_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def run(experiment: str, point: Point, repeat: int = 0, attempt: int = 1, out: Path | None = None) -> Record:
    """Run `point` and return its record, written to `out` when given.

    In a torchrun or srun job every rank calls this. Rank 0 holds the machine's lock and writes the record. Ranks
    that fail write it too: in a step of srun the first of them stays, unless it only lost a neighbour and a later one
    knows more; under torchrun the last stays. Ranks other than the first end the process here (SystemExit) when all
    went well. ValueError, before anything is run, where the job has another number of
    ranks than the point; OSError where the machine's lock cannot be had.

    Every exception of the engine becomes a *failed* or *skipped* record. KeyboardInterrupt and a failing write do not:
    an interrupted run leaves nothing and is run again.
    """
    definition = experiments.get(experiment)
    module = f"repro.experiments.{experiment}"
    common = {"experiment": experiment, "point": point.model_dump(), "repeat": repeat, "seed": point.seed}
    common["attempt"] = attempt
    outcome: Outcome | None = None
    refuse_other_place(point.shape.ranks)
    place = place_in_job()
    first = place is None or place[0] == 0
    if first:  # kept from here on: of the code that runs, not of what it is edited to meanwhile
        provenance.source_hash(module)
        provenance.commit(paths.root())
    with machine(definition.timed) if first else contextlib.nullcontext():
        start = provenance.now()
        try:
            with limited(seconds_left(definition.timeout_s)):
                _require_gpu()
                _take_gpu(place)
                outcome = definition.check(definition.run(point))
        except Done:
            raise SystemExit(0) from None
        except Exception as error:
            if _interrupted(error):
                raise KeyboardInterrupt from error
            cause = classify(error)
            status = "skipped" if cause is Cause.MISSING_HARDWARE else "failed"
            detail = (
                str(error) if status == "skipped" else "".join(traceback.format_exception(error, limit=-12))[-6000:]
            )
            common |= {"status": status, "cause": cause, "detail": detail}
        else:
            common |= {"status": "ok", "evidence": outcome.evidence, "metrics": outcome.metrics.with_units()}
            common |= {"conditions": outcome.conditions}
    found = Record(**common, provenance=provenance.collect(module, start, outcome.topology if outcome else ""))
    if out is not None and (first or found.status == "failed") and not _told_already(found, out, place):
        record.write(found, out, outcome.series if outcome else None)
    return found


def _require_gpu() -> None:
    """RuntimeError where the job has given this point a GPU and torch sees none: on a CPU it would take its whole limit,
    give a number of another machine than it says, or count as skipped for good."""
    if os.environ.get(NEEDS_GPU) != "1":
        return
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"this job has GPUs, and torch {torch.__version__} (CUDA: {torch.version.cuda}, ROCm: "
            f"{torch.version.hip}) sees none: install a build for the GPUs and their driver (TORCH_INDEX in docs/slurm.md)"
        )


def _take_gpu(place: tuple[int, int] | None) -> None:
    """Make a rank's GPU the current one, as `launch` does later: where ranks see all GPUs of their node, a model that a
    point makes before that would lie on the first, with those of all others. `place`: None for a process that is no rank."""
    local = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ), None)
    if place is None or local is None:  # without a local rank `launch` says what is missing
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(number(local, 0) % torch.cuda.device_count())


def _interrupted(error: BaseException | None) -> bool:
    """Whether an exception comes of KeyboardInterrupt, which extension modules turn into an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _told_already(found: Record, out: Path, place: tuple[int, int] | None) -> bool:
    """Whether another rank of the same step has written why it failed, beyond that it lost a neighbour. `place`: this
    rank's among them. A shell that srun started runs any number of points in one step."""
    alone = place is None or place[1] == 1
    if alone or found.status != "failed" or "SLURM_STEP_ID" not in found.provenance.slurm:
        return False
    if found.cause in _SEEN_FROM_AFAR:
        time.sleep(_NEIGHBOUR_S)
    try:
        other = record.read(out)
    except record.RecordError:
        return False
    same = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    of_step = all(other.provenance.slurm.get(name) == found.provenance.slurm.get(name) for name in same)
    of_step = of_step and other.attempt == found.attempt  # a job that was requeued may count its steps anew
    return (
        other.status == "failed" and of_step and (other.cause not in _SEEN_FROM_AFAR or found.cause in _SEEN_FROM_AFAR)
    )
