"""Measured times of collectives as one table: its columns, and the measurements that this package ships (`data/`).

A row is one measurement: `nodes` x `ranks_per_node` ranks ran `collective` on `nbytes` in `seconds`. `algorithm` is
empty where the library chose it. `nbytes` is the whole tensor of one rank, whatever the benchmark counts:

    all_gather      the gathered output
    reduce_scatter  the input
    all_reduce      the tensor
    all_to_all      what one rank sends in all, its own share included
    send_recv       the message

A user's own files are read into the same table by `measured_files`.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from repro.scaling.algorithms import ALGORITHMS

COLLECTIVES = tuple(ALGORITHMS)
COLUMNS = ("source", "collective", "algorithm", "nodes", "ranks_per_node", "nbytes", "seconds")

_DATA = Path(__file__).with_name("data")
_PICO = {"ALLGATHER": "all_gather", "ALLREDUCE": "all_reduce", "REDUCE_SCATTER": "reduce_scatter"}


def a100_dgx() -> pd.DataFrame:
    """NCCL on DGX A100 (8 GPUs a node, NVLink), from vidur. 8946 rows of 2 KiB to 64 MiB, by NCCL's choice of
    algorithm: all_reduce of 2 to 16 ranks and send_recv of 2 ranks, on 1 or 2 nodes.

    Found in vidur's `profiling/collectives`: `size` is in bytes, times are in ms, and a value is the median of the NCCL
    kernels of 11 launches on rank 0, so it includes the wait for slower ranks. We take the median of three such values.
    The network between the nodes is not named: 64 MiB go from rank to rank at 8 GB/s.
    """
    files = [_DATA / f"vidur_net_a100_dgx_{collective}.csv" for collective in ("all_reduce", "send_recv")]
    found = pd.concat([pd.read_csv(file, index_col=0) for file in files], ignore_index=True)
    milliseconds = found["time_stats.all_reduce.median"].fillna(found["time_stats.send_recv.median"])
    return tidy(
        found.assign(
            source="A100 DGX, NCCL (vidur)",
            algorithm="",
            nodes=found["num_workers"] // found["devices_per_node"],
            ranks_per_node=found["devices_per_node"],
            nbytes=found["size"],
            seconds=milliseconds * 1e-3,
        )
    )


def slingshot11() -> pd.DataFrame:
    """Cray MPICH 8.1.29 on LUMI (Slingshot 11, as Frontier), CPU buffers of int32, from pico. 816 rows: all_gather on
    16, 37 and 100 nodes, all_reduce on 8, 16, 32 and 37, reduce_scatter on 100. 1 rank a node, but 56 on each of the
    37.

    Algorithms are named as in the file: `*_mpich` are the library's (`default_mpich` its choice), the others are pico's
    own, over point-to-point. Runs of different days stay separate rows; times of one test differ by up to 2.2x between
    them (2.9x below 1 MB). Seconds are the median over iterations of the slowest rank's time.

    Found in pico's source: the file's size (`count_int32` x 4 bytes) is the whole tensor for all three collectives. A
    rank's share is rounded down to whole elements, so all_gather and reduce_scatter move `count_int32 // ranks * ranks`
    elements, and `nbytes` counts those.
    """
    found = pd.read_csv(_DATA / "pico_lumi_slingshot11_cpu_collectives.csv")
    found = found[found["collective"].isin(list(_PICO))]  # leaves out REDUCE, which nothing here models
    ranks = found["nodes"] * found["tasks_per_node"]
    shared = found["collective"] != "ALLREDUCE"
    count = found["count_int32"].where(~shared, found["count_int32"] // ranks * ranks)
    return tidy(
        found.assign(
            source="LUMI, Cray MPICH, CPU buffers (pico)",
            collective=found["collective"].map(_PICO),
            ranks_per_node=found["tasks_per_node"],
            nbytes=count * 4,
            seconds=found["median_us"] * 1e-6,
        )
    )


def blink(system: str) -> pd.DataFrame:
    """NCCL or RCCL among all GPUs of the nodes of a supercomputer, from Blink (the runs behind arXiv 2408.14090):
    all_reduce and all_to_all, by the library's choice of algorithm. `nbytes` of 1 B to 8 GiB, of an all-to-all times
    the ranks. Runs of one test stay separate rows; seconds are the median over at least 100 iterations.

        alps       4 GH200 and 4 NICs of 200 Gbit/s a node, Slingshot 11: 1 to 512 nodes. Without the runs on two nodes
                   before the evening of 2024-03-25: 1 GiB took 3.6 times as long as in the run of that evening
        leonardo   4 A100 and 4 ports of 100 Gbit/s a node, InfiniBand HDR: 1 to 256 nodes. Without the runs in service
                   level 0, which all other jobs share: there some take ten times as long
        lumi       4 MI250X (8 GCDs) and 4 NICs of 200 Gbit/s a node, Slingshot 11, RCCL: the kind of node and network
                   that Frontier has. 1 to 64 nodes. Without the runs until the afternoon of 2024-03-26: in all of them
                   between nodes a byte took 12 ms and more, and at most 3 ms after it. [INF] they went over sockets

    ValueError for another name.
    """
    found = pd.read_csv(_DATA / "blink_gpu_collectives.csv", keep_default_na=False)
    if system not in (known := sorted(found.system.unique())):
        raise ValueError(f"system {system!r} has no measured times, known: {', '.join(known)}")
    slow = (found.system == "alps") & (found.nodes > 1) & (found.run < "2024-03-25T20")
    slow |= (found.system == "lumi") & (found.run < "2024-03-26T16")
    found = found[(found.system == system) & ~found.setting.str.contains("SL0") & ~slow]
    messages = np.where(found.collective == "all_to_all", found.nodes * found.ranks_per_node, 1)
    library = "RCCL" if system == "lumi" else "NCCL"
    return tidy(
        found.assign(
            source=f"{system.capitalize()}, {library} (Blink)",
            algorithm="",
            nbytes=found.message_bytes * messages,
            seconds=found.median_us * 1e-6,
        )
    )


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with exactly `COLUMNS`, in their order and of their types; other columns are left out.

    ValueError for a missing column or a value that is not allowed.
    """
    if missing := ", ".join(name for name in COLUMNS if name not in rows):
        raise ValueError(f"no column {missing}; found {', '.join(rows)}, needed {', '.join(COLUMNS)}")
    table = rows[list(COLUMNS)].reset_index(drop=True)
    _check(table.collective, table.collective.isin(COLLECTIVES), f"one of {', '.join(COLLECTIVES)}")
    for name, least in (("nodes", 1), ("ranks_per_node", 1), ("nbytes", 0)):
        numbers = pd.to_numeric(table[name], errors="coerce")
        _check(table[name], (numbers >= least) & (numbers % 1 == 0), f"a whole number of at least {least}")
        table[name] = numbers.astype(np.int64)
    seconds = pd.to_numeric(table.seconds, errors="coerce")
    _check(table.seconds, (seconds > 0) & np.isfinite(seconds), "a positive number of seconds")
    table["seconds"] = seconds.astype(np.float64)
    text = ["source", "collective", "algorithm"]
    table[text] = table[text].astype(object).fillna("").astype(str)  # a CSV's empty column comes as NaN
    return table


def _check(column: pd.Series, good: pd.Series, allowed: str) -> None:
    """ValueError about the first value of `column` that is not `good`; rows count from 1."""
    if not good.all():
        row = int(good.to_numpy().argmin())
        raise ValueError(f"row {row + 1}, column {column.name}: found {str(column[row])!r}, allowed is {allowed}")
