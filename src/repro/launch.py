"""Run a function on N ranks joined in a gloo process group: results in rank order, or the first real error.

`launch` forks the ranks from a parent that has imported torch (0.1 s for 8 ranks). It spawns them, which imports torch
once per rank, where a fork is unsafe: on macOS, after CUDA was initialised, and for more than one thread per rank (GNU
OpenMP hangs in a fork of a process that has used it). In a `torchrun` or `srun` job this process already is a rank, and
`launch` runs the function here.

A rank writes its result or error to a private folder, says so, and stays until all are done: its neighbours never see
a closed connection before the parent has the true cause. Every rank watches a pipe that only the parent can write to;
it ends at end of file, so killing the parent leaves no rank behind.

A hang inside a collective is told from slow work by asking each rank, at the deadline, where its main thread is and how
long its TCP connections have been silent: blocked means inside torch.distributed while nothing moved for a second. (A
process-group timeout cannot decide this at the deadline: it starts anew with every operation.)
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from repro.fabric import Fabric

T = TypeVar("T")

_SILENT_S = 1.0  # connections quiet for this long, inside a collective: blocked
_ANSWER_S = 1.0  # patience for the answer to "where are you"; a rank that holds the GIL in native code gives none
_CAUSE_S = 1.0  # patience for the cause when ranks only report that a neighbour's connection broke or was silent
_EXIT_S = 2.0  # patience for a released rank to end by itself
_RESULT, _ERROR, _WHERE = range(3)  # what a rank tells of, and the name of the file that holds it
_TCP_ESTABLISHED, _LAST_DATA = 1, (44, 52)  # struct tcp_info: state; tcpi_last_data_sent and _recv, milliseconds ago
_LINUX = sys.platform.startswith("linux")


class RankError(RuntimeError):
    """A rank raised or died. `exception` is the rank's own exception object where it can be pickled, `traceback` its
    text; `signal` is set for a rank that a signal killed, `exit_code` is that of the process (negative: killed)."""

    def __init__(
        self,
        rank: int,
        type_name: str = "",
        message: str = "",
        traceback: str = "",
        exit_code: int | None = None,
        signal: int | None = None,
        exception: BaseException | None = None,
    ) -> None:
        super().__init__(rank, type_name, message, traceback, exit_code, signal, exception)
        self.rank, self.type_name, self.message, self.traceback = rank, type_name, message, traceback
        self.exit_code, self.signal, self.exception = exit_code, signal, exception

    def __str__(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was killed by signal {self.signal}"
        if not self.type_name:
            return f"rank {self.rank} ended with exit code {self.exit_code} and no result"
        return f"rank {self.rank}: {self.type_name}: {self.message}\n{self.traceback}".rstrip()


class LaunchTimeout(TimeoutError):
    """The ranks were not done in time. `stacks` holds the Python stack of each rank that was still running."""

    def __init__(self, message: str, stacks: dict[int, str]) -> None:
        super().__init__(message, stacks)
        self.message, self.stacks = message, stacks

    def __str__(self) -> str:
        ranks_at: dict[str, list[int]] = {}
        for rank, stack in self.stacks.items():
            ranks_at.setdefault(stack, []).append(rank)
        return "\n".join([self.message, *(f"{_list(ranks)}:\n{stack.rstrip()}" for stack, ranks in ranks_at.items())])


class CollectiveHang(LaunchTimeout):
    """Ranks would have waited for ever: all that were not finished were blocked in torch.distributed, or a process
    group's own timeout ran out."""


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    fabric: "Fabric | None" = None,
    timeout_s: float = 300.0,
    threads: int = 1,
) -> list[T]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes joined in a gloo group; results in rank order.

    With `fabric`, rank r runs in the fabric's namespace of rank r. `threads` is torch's intra-op threads per rank. Ranks
    see RANK, WORLD_SIZE and LOCAL_RANK; a forked rank's random generators are copies of the parent's, so `fn` seeds its
    own. Results must be picklable; `fn` and its arguments only where ranks are spawned (see the module).

    Raises ValueError (arguments), RankError (a rank raised or died), LaunchTimeout (not done in `timeout_s`) and its
    subclass CollectiveHang. In a torchrun or srun job the results of all ranks are returned on every rank, errors of
    `fn` propagate as they are, and `timeout_s` bounds single collectives only.
    """
    if world_size < 1 or threads < 1 or timeout_s <= 0:
        raise ValueError(f"world_size {world_size}, threads {threads}, timeout_s {timeout_s}: all must be positive")
    if fabric is not None and fabric.topology.world_size != world_size:
        raise ValueError(f"world_size is {world_size}, but the fabric has {fabric.topology.world_size} ranks")
    if (joined := _joined()) is not None:
        return _run_joined(fn, world_size, args, joined, fabric, timeout_s, threads)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="repro-ranks-", ignore_cleanup_errors=True) as folder:
        ranks = _Ranks(Path(folder))
        try:
            ranks.start(fn, args, _Setup(folder, world_size, timeout_s, threads, fabric))
            ranks.wait(deadline, timeout_s)
            return [ranks.results[rank] for rank in range(world_size)]
        finally:
            ranks.stop()


def _context(threads: int) -> Any:
    import torch.distributed  # before the fork, so that ranks share it

    forks = _LINUX and threads == 1 and not torch.cuda.is_initialized()
    return multiprocessing.get_context("fork" if forks else "spawn")


def _list(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# --- in the rank ---------------------------------------------------------------------------------------------------

_in_rank = False
_parent_ends: set[Connection] = set()  # write ends of control pipes: a forked rank must not keep its siblings alive


@dataclass(frozen=True)
class _Setup:
    """What a rank has to know before it runs the function."""

    folder: str
    world_size: int
    timeout_s: float
    threads: int
    fabric: "Fabric | None"

    def enter(self, rank: int) -> None:
        """Join the namespace and the process group."""
        import torch
        import torch.distributed as dist

        if self.fabric is not None:
            from repro.fabric import enter

            enter(self.fabric.namespace(rank))
            os.environ["GLOO_SOCKET_IFNAME"] = self.fabric.interface
        else:  # gloo's default is the host name's address, which need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if _LINUX else "lo0")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
        torch.set_num_threads(self.threads)
        store = dist.FileStore(f"{self.folder}/store", self.world_size)
        patience = timedelta(seconds=self.timeout_s + 60)  # the parent's deadline comes first, and knows more
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world_size, timeout=patience)
        _make_waits_visible()


@dataclass(frozen=True)
class _Teller:
    """A rank's way to tell its parent something of any size: the file first, then a message that it is there."""

    rank: int
    folder: Path
    pipe: Connection

    def __call__(self, kind: int, content: bytes) -> None:
        (self.folder / f"{kind}-{self.rank}").write_bytes(content)
        self.pipe.send_bytes(bytes([kind]) + self.rank.to_bytes(4, "big"))  # short, so whole even if ranks tell at once


def _rank_main(
    rank: int, setup: _Setup, fn: Callable[..., Any], args: tuple, control: Connection, told: Connection
) -> None:
    global _in_rank
    _in_rank = True
    for end in _parent_ends:
        end.close()
    _parent_ends.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell, done, released = _Teller(rank, Path(setup.folder), told), threading.Event(), threading.Event()
    threading.Thread(target=_obey, args=(control, tell, done, released), daemon=True).start()
    try:
        setup.enter(rank)
        report = _RESULT, pickle.dumps(fn(rank, setup.world_size, *args))
    except BaseException as error:
        report = _ERROR, _pickled(rank, error)
    done.set()
    tell(*report)
    released.wait()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(report[0] == _ERROR))  # at a usual exit, a spawned rank would abort in gloo's threads


def _pickled(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    for exception in (error, None):
        with contextlib.suppress(Exception):
            content = pickle.dumps(RankError(rank, type(error).__name__, str(error), text, exception=exception))
            pickle.loads(content)  # an exception with an __init__ of its own often fails only here
            return content
    raise AssertionError("a RankError of strings can be pickled")


def _obey(control: Connection, tell: _Teller, done: threading.Event, released: threading.Event) -> None:
    """Serve the parent: a message asks where the main thread is; end of file (released, or parent gone) ends the rank."""
    try:
        while True:
            control.recv_bytes()
            tell(_WHERE, pickle.dumps(_where()))
    except (EOFError, OSError):
        pass
    finally:
        shutil.rmtree(tell.folder, ignore_errors=True)  # a killed parent cannot
        if not done.is_set():
            os._exit(1)
        released.set()


def _make_waits_visible() -> None:
    """Route `Work.wait` through a Python frame: the stack of a rank in `handle.wait()` would else end at its caller."""
    import torch.distributed as dist

    native = dist.Work.wait

    def wait_for_work(self: Any, *args: Any, **kwargs: Any) -> Any:
        return native(self, *args, **kwargs)

    dist.Work.wait = wait_for_work  # type: ignore[method-assign]


def _where() -> tuple[str, bool]:
    """(stack of this process's main thread, whether it is blocked in a collective)."""
    innermost = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    in_collective = False
    for frame in frames:  # the library's frames, up to the first of its caller
        module, code = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        in_collective |= module.startswith("torch.distributed") or (module, code) == (__name__, "wait_for_work")
        if not module.startswith("torch."):
            break
    depth = next((i for i, frame in enumerate(frames) if frame.f_code is _rank_main.__code__), len(frames))
    return "".join(traceback.format_stack(innermost)[-depth:]), in_collective and _silent_s() >= _SILENT_S


def _silent_s() -> float:
    """Seconds since the last byte went over any TCP connection of this process; infinite without one, or off Linux."""
    silent_ms = [float("inf")]
    for descriptor in os.listdir("/proc/self/fd") if _LINUX else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or neither a socket nor TCP
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
            if info[0] == _TCP_ESTABLISHED:
                silent_ms += [struct.unpack_from("=I", info, offset)[0] for offset in _LAST_DATA]
    return min(silent_ms) / 1e3


# --- in the parent -------------------------------------------------------------------------------------------------


class _Ranks:
    """The processes of one launch, seen from the parent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []
        self.controls: list[Connection] = []
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RankError] = {}
        self.answers: dict[int, tuple[str, bool]] = {}

    def start(self, fn: Callable[..., Any], args: tuple, setup: _Setup) -> None:
        context = _context(setup.threads)
        self.told, self.telling = context.Pipe(duplex=False)  # kept open here too: its end of file means nothing
        for rank in range(setup.world_size):
            reader, control = context.Pipe(duplex=False)
            _parent_ends.add(control)
            self.controls.append(control)
            process = context.Process(target=_rank_main, args=(rank, setup, fn, args, reader, self.telling))
            process.start()
            reader.close()
            self.processes.append(process)

    def unreported(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.results and rank not in self.errors]

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Return when every rank has a result; raise the first real cause otherwise."""
        limit = deadline
        while self.unreported():
            if not self._listen(limit):
                break
            for error in self.errors.values():
                if "gloo/transport" not in error.traceback:
                    raise self._final(error)
            if self.errors and limit == deadline:  # only of neighbours gone or silent: let the cause show up
                limit = min(deadline, time.monotonic() + _CAUSE_S)
        for error in self.errors.values():
            if "Timed out waiting" in error.traceback:
                raise CollectiveHang(f"rank {error.rank}: {error.message}", {error.rank: error.traceback})
            raise self._final(error)
        if self.unreported() and (late := self._late(timeout_s)):
            raise late

    def _listen(self, limit: float) -> bool:
        """Take in what the ranks tell until `limit`; False when nothing came. RankError when a rank died."""
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        ready = wait([self.told, *sentinels], timeout=max(0.0, limit - time.monotonic()))
        while self.told.poll():
            message = self.told.recv_bytes()
            kind, rank = message[0], int.from_bytes(message[1:], "big")
            content = pickle.loads((self.folder / f"{kind}-{rank}").read_bytes())
            {_RESULT: self.results, _ERROR: self.errors, _WHERE: self.answers}[kind][rank] = content
        for rank in sorted(sentinels[dead] for dead in set(ready) & sentinels.keys()):
            raise self._final(self.errors.get(rank) or RankError(rank))
        return bool(ready)

    def _final(self, error: RankError) -> RankError:
        """The error with its process's fate, after all ranks were stopped. A rank that raised ends with exit code 1."""
        self.stop()
        code = self.processes[error.rank].exitcode
        killed = -code if code < 0 and not error.type_name else None
        return RankError(*error.args[:4], code, killed, error.exception)

    def _late(self, timeout_s: float) -> LaunchTimeout | None:
        """The deadline passed: ask the ranks where they are, and say whether they wait for each other.

        RankError when one dies or raises meanwhile; None when all get done after all.
        """
        time.sleep(_SILENT_S)  # a rank that has only just entered a collective is not stuck there
        waiting, limit = self.unreported(), time.monotonic() + _ANSWER_S
        for rank in waiting:
            with contextlib.suppress(OSError):  # died just now: `_listen` says so
                self.controls[rank].send_bytes(b"?")
        while any(rank not in self.answers for rank in self.unreported()) and self._listen(limit):
            pass
        for error in self.errors.values():
            raise self._final(error)
        if not (waiting := self.unreported()):
            return None
        nowhere = "  no answer: busy in native code\n", False
        answers = {rank: self.answers.get(rank, nowhere) for rank in waiting}
        blocked = [rank for rank, (_, is_blocked) in answers.items() if is_blocked]
        message = f"{len(waiting)} of {len(self.processes)} ranks were not done after {timeout_s:g} s"
        message += f"; blocked in torch.distributed: {_list(blocked)}" if blocked else ""
        kind = CollectiveHang if blocked == waiting else LaunchTimeout
        return kind(message, {rank: stack for rank, (stack, _) in answers.items()})

    def stop(self) -> None:
        """End every rank: those that reported leave by themselves, the others are killed."""
        for rank in self.unreported():
            self.processes[rank].kill()
        for control in self.controls:
            control.close()
            _parent_ends.discard(control)
        limit = time.monotonic() + _EXIT_S
        for process in self.processes:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


# --- when this process already is a rank ---------------------------------------------------------------------------


def _joined() -> tuple[int, int] | None:
    """(rank, world size) when torchrun or a step of several srun tasks started this process."""
    env = os.environ
    if _in_rank:  # started by `launch`: a rank may launch ranks of its own
        return None
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    # SLURM_NTASKS is also set in a batch script, which is no rank; a step of one task (as Snakemake uses) is none either.
    if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return None


def _run_joined(
    fn: Callable[..., T],
    world_size: int,
    args: tuple,
    joined: tuple[int, int],
    fabric: Any,
    timeout_s: float,
    threads: int,
) -> list[T]:
    """Run `fn` as this rank and gather the results of all. The group stays: env:// cannot be joined twice."""
    import torch
    import torch.distributed as dist

    rank, size = joined
    if size != world_size:
        raise ValueError(f"world_size is {world_size}, but torchrun or srun started {size} ranks")
    if fabric is not None:
        raise ValueError("an emulated fabric needs ranks that launch starts itself, not torchrun or srun")
    if missing := {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        raise ValueError(f"{', '.join(sorted(missing))} not set: srun does not, so the job script has to export them")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.setdefault("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    torch.set_num_threads(threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo", "env://", timedelta(seconds=timeout_s), world_size, rank)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # else gloo's threads abort
    results: list[Any] = [None] * size
    dist.all_gather_object(results, fn(rank, size, *args))
    return results
