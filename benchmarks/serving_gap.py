"""The pass of `serving.py` of this engine with another limit to the wait for a next token; variant: seconds."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from repro.experiments.flover_peers.catalogue import SCRIPTS
from repro.flover import Scheduler

sys.path.insert(0, str(SCRIPTS))  # where a script that is started has its protocol
import ours
import protocol
from protocol import Answer, Job, Request


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    ours.Scheduler = partial(Scheduler, token_gap_s=float(job.variant))
    return ours.start(job)


if __name__ == "__main__":
    protocol.run(start, lambda: "this package")
