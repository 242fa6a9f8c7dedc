"""Where a rank is: its stack, and whether it is blocked in a collective rather than slow. Blocked means inside
torch.distributed while no TCP connection of the rank has moved a byte for `SILENT_S`."""

import contextlib
import os
import socket
import stat
import struct
import sys
import threading
import traceback
from types import CodeType
from typing import Any

SILENT_S = 1.0  # connections quiet for this long, inside a collective: blocked
_TCP_ESTABLISHED, _LAST_DATA = 1, (44, 52)  # struct tcp_info: state; tcpi_last_data_sent and _recv, milliseconds ago


def make_waits_visible() -> None:
    """Route `Work.wait` through a Python frame: the stack of a rank in `handle.wait()` would else end at its caller."""
    import torch.distributed as dist

    native = dist.Work.wait

    def wait_for_work(self: Any, *args: Any, **kwargs: Any) -> Any:
        return native(self, *args, **kwargs)

    dist.Work.wait = wait_for_work  # type: ignore[method-assign]


def where(outermost: CodeType) -> tuple[str, bool]:
    """(stack of this process's main thread inside the frame of `outermost`, whether it is blocked in a collective)."""
    innermost = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    in_collective = False
    for frame in frames:  # the library's frames, up to the first of its caller
        module, code = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        in_collective |= module.startswith("torch.distributed") or (module, code) == (__name__, "wait_for_work")
        in_collective |= module == "repro.comm.pending"  # a thread of which waits for messages
        if module not in ("threading", "repro.comm.pending") and not module.startswith("torch."):
            break
    depth = next((i for i, frame in enumerate(frames) if frame.f_code is outermost), len(frames))
    return "".join(traceback.format_stack(innermost)[-depth:]), in_collective and _silent_s() >= SILENT_S


def _silent_s() -> float:
    """Seconds since the last byte went over any TCP connection of this process; infinite without one, or off Linux."""
    silent_ms = [float("inf")]
    for descriptor in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):  # of which `socket` would leave the copy open
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
            if info[0] == _TCP_ESTABLISHED:
                silent_ms += [struct.unpack_from("=I", info, offset)[0] for offset in _LAST_DATA]
    return min(silent_ms) / 1e3
