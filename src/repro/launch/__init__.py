"""Run a function on N ranks joined in a process group: results in rank order, or the first real error.

Read `rank` (what a started rank does), then `watch` (how the parent waits, and finds the cause of a failure); `where`
tells a hang from slow work, `errors` is what comes out. `joined` serves torchrun and srun, with `slurm_env` (what Slurm
tells), `seats` (do ranks sit where they should) and `watchdog` (a late rank ends itself).

`launch` forks the ranks, or spawns them where a fork is unsafe: on macOS, after CUDA was initialised, and for more than
one thread per rank (GNU OpenMP hangs in a fork of a process that has used it). In a `torchrun` or `srun` job this
process already is a rank, and `launch` runs the function here.

A rank writes its result or error to a private folder, says so, and stays until all are done: its neighbours never see
a closed connection before the parent has the true cause. Every rank watches a pipe that only the parent can write to;
it ends at end of file, so killing the parent leaves no rank behind. At the deadline each rank is asked where its main
thread is, and whether it is blocked. (A process-group timeout starts anew with every operation.)
"""

from collections.abc import Callable
from typing import Any, TypeVar

from repro.emulate.netns import Fabric
from repro.launch.errors import CollectiveHang, Done, LaunchTimeout, PlacementError, RankError
from repro.launch.folder import private
from repro.launch.joined import place_in_job, run_in_job
from repro.launch.rank import Setup
from repro.launch.watch import Ranks
from repro.topology import Topology

__all__ = ["CollectiveHang", "Done", "LaunchTimeout", "PlacementError", "RankError", "launch"]

T = TypeVar("T")
_MOST_S = 1e8  # three years; torch counts 64 bits of nanoseconds


def launch(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    fabric: Fabric | None = None,
    topology: Topology | None = None,
    timeout_s: float = 300.0,
    threads: int = 1,
    first_only: bool = False,
) -> list[T]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes joined in a gloo group; results in rank order.

    With `fabric`, rank r runs in the fabric's namespace of rank r. `threads` is torch's intra-op threads per rank.
    Ranks see RANK, WORLD_SIZE and LOCAL_RANK; a forked rank's random generators are copies of the parent's, so `fn`
    seeds its own. Results must be picklable; `fn` and its arguments only where ranks are spawned (see the module).

    Raises ValueError (arguments, or what torchrun and Slurm put into the environment), RankError (a rank raised or
    died), LaunchTimeout (not done in `timeout_s`), its subclass CollectiveHang, and FileNotFoundError (no folder for
    temporary files).

    In a torchrun or srun job the results of all ranks are returned on every rank (with `first_only` on rank 0; the
    others get Done), errors of `fn` propagate as they are, and a rank that is not done in `timeout_s` tells where it is
    and ends with code 124. `topology` is then compared with where the ranks are: PlacementError when they sit
    elsewhere. Where the job's machine has GPUs, the current device is number LOCAL_RANK (modulo their count), and the
    group serves GPU tensors by NCCL (RCCL on ROCm).
    """
    if world_size < 1 or threads < 1 or not 0 < timeout_s <= _MOST_S:
        found = f"world_size {world_size}, threads {threads}, timeout_s {timeout_s}"
        raise ValueError(f"{found}: all must be positive, and the time at most {_MOST_S:.0e} s")
    for what, shape in {"fabric": fabric.topology if fabric else None, "topology": topology}.items():
        if shape is not None and shape.world_size != world_size:
            raise ValueError(f"world_size is {world_size}, but the {what} has {shape.world_size} ranks")
    if (place := place_in_job()) is not None:
        if place[1] != world_size:
            raise ValueError(f"world_size is {world_size}, but torchrun or srun started {place[1]} ranks")
        return run_in_job(fn, place, args, fabric, topology, timeout_s, threads, first_only)
    with private() as folder:
        ranks = Ranks(Setup(folder, world_size, timeout_s, threads, fabric))
        try:
            ranks.start(fn, args)
            return ranks.wait()
        finally:
            ranks.stop()
