"""A program that ends as a whole: with all that it has started, however its caller is ended."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil

from repro.cli.console import stderr
from repro.jobs import forks

_HEARING_S = 15.0  # after which those who have not ended are asked (again)
_PATIENCE_S = 60.0  # for Snakemake to end its jobs then


@contextlib.contextmanager
def started(words: list[str], **options: Any) -> "Iterator[subprocess.Popen[Any]]":
    """Start a program that nothing is left of after an exception. Ctrl-C, SIGTERM and SIGHUP, of a terminal that is
    closed, become the exit codes 130, 143 and 129."""

    process: subprocess.Popen[Any] | None = None
    asked_to_end = 0

    def end(number: int, frame: object) -> None:
        nonlocal asked_to_end
        asked_to_end = number
        if process is not None:  # else it would go on, and nobody would know it
            sys.exit(128 + number)

    with forks.handled({number: end for number in forks.heeded() if number != signal.SIGINT}):
        process = subprocess.Popen(words, **options)
        try:
            if asked_to_end:
                sys.exit(128 + asked_to_end)
            yield process
        except BaseException as ended:
            _end(process, asked=isinstance(ended, KeyboardInterrupt))  # Ctrl-C reaches all of a terminal by itself
            if not isinstance(ended, KeyboardInterrupt | SystemExit):
                raise
            with contextlib.suppress(OSError):  # the terminal is gone
                stderr.print("interrupted; what is finished stays, and the same command goes on from here")
            sys.exit(130 if isinstance(ended, KeyboardInterrupt) else ended.code)


def _end(process: "subprocess.Popen[Any]", asked: bool) -> None:
    """Wait until Snakemake and all that it started have ended. Those whom nobody has `asked` to, or who do not hear, are
    asked as by Ctrl-C, upon which points clean up; who stays is killed. Parents are asked first: whose program ends before
    it was asked itself cleans up after a failure, and is then interrupted at that."""
    with forks.handled(dict.fromkeys(forks.ENDING, signal.SIG_IGN)), contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        left = [top]
        for ask, patience in ((not asked, _HEARING_S), (True, _PATIENCE_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                left = list(dict.fromkeys([*left, *top.children(recursive=True)]))
            for one in left if ask else ():
                with contextlib.suppress(psutil.Error):  # SIGTERM: it starts no more jobs, also where SIGINT is ignored
                    one.send_signal(signal.SIGTERM if one == top else signal.SIGINT)
            stay = psutil.wait_procs(left, patience)[1]
            left = [one for one in left if one in stay]
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()
