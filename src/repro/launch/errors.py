"""What `launch` raises, told so that the first real cause and every rank's stack are in it."""

from dataclasses import dataclass


@dataclass(eq=False)
class RankError(RuntimeError):
    """A rank raised or died. `exception` is the rank's own exception object where it can be pickled, `traceback` its
    text; `signal` is set for a rank that a signal killed, `exit_code` is that of the process (negative: killed)."""

    rank: int
    type_name: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    exception: BaseException | None = None

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
        return "\n".join([self.message, *(f"{_listed(ranks)}:\n{stack.rstrip()}" for stack, ranks in ranks_at.items())])


class CollectiveHang(LaunchTimeout):
    """Ranks would have waited for ever: all that were not finished were blocked in torch.distributed, or a process
    group's own timeout ran out."""


class PlacementError(ValueError):
    """Ranks of a job do not sit as the topology says; the message names the first that does not."""


class Done(BaseException):
    """Raised by `launch(..., first_only=True)` on the other ranks of a job: nothing is left for them to do."""


def late(found: dict[int, tuple[str, bool]], world_size: int, after_s: float) -> LaunchTimeout:
    """The error for late ranks: of each its stack, and whether it is blocked in a collective. A CollectiveHang where
    all of them are."""
    blocked = [rank for rank, (_, is_blocked) in found.items() if is_blocked]
    message = f"{len(found)} of {world_size} ranks were not done after {after_s:g} s"
    message += f"; blocked in torch.distributed: {_listed(blocked)}" if blocked else ""
    kind = CollectiveHang if len(blocked) == len(found) else LaunchTimeout
    return kind(message, {rank: stack for rank, (stack, _) in found.items()})


def _listed(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
