"""The collective model against published measurements: each study fits small machines and predicts larger ones."""

from dataclasses import dataclass

import pandas as pd

from repro.scaling import measured
from repro.scaling.algorithms import Algorithm
from repro.scaling.fit import Model, thinned

# The file's name of an algorithm, and ours. Others (bine, sparbit, radix-k Bruck, the library's own choice, segmented
# variants) are not modelled and left out.
_SLINGSHOT: dict[str, tuple[Algorithm, ...]] = {
    "ring_mpich": ("ring",),
    "ring_over": ("ring",),
    "recursive_doubling_over": ("recursive_doubling",),
    # From 64 KiB on its times are those of rabenseifner_over to 1 %: the library changes to the other algorithm there.
    "recursive_doubling_mpich": ("recursive_doubling", "rabenseifner"),
    "brucks_mpich": ("bruck",),
    "rabenseifner_mpich": ("rabenseifner",),
    "rabenseifner_over": ("rabenseifner",),
    "pairwise_mpich": ("pairwise",),
    "recursive_halving_mpich": ("recursive_doubling",),
    "recursive_halving_over": ("recursive_doubling",),
}


@dataclass(frozen=True, eq=False)
class Study:
    """Rows to fit, rows to predict, and the model, whose switches `fit.choose` takes from `candidates` (bytes)."""

    fitted: pd.DataFrame
    held_out: pd.DataFrame
    model: Model
    candidates: tuple[float, ...]


def a100_dgx() -> Study:
    """Fitted: 2 and 4 ranks, on one node and two. Predicted: 8 and 16, and every second size of the fitted shapes.
    Rings out of a node use up to four NICs: with more ranks the measured times stop falling."""
    table = thinned(measured.a100_dgx(), 40)
    small = table.nodes * table.ranks_per_node <= 4
    every_second = table.groupby(["collective", "nodes", "ranks_per_node"]).cumcount() % 2 == 0
    used = small & every_second
    model = Model(links={"cluster": 4})
    return Study(table[used], table[~used], model, (16384, 65536, 262144, 1048576))


def slingshot11() -> Study:
    """Fitted: 8 and 16 nodes. Predicted: 32 and 100 nodes, and reduce-scatter, which was not fitted at all. Only runs
    with one rank a node. MPICH's recursive doubling of a reduce-scatter, which sends larger and larger parts, is not
    modelled."""
    table = measured.slingshot11()
    other = (table.collective == "reduce_scatter") & (table.algorithm == "recursive_doubling_mpich")
    table = table[table.algorithm.isin(list(_SLINGSHOT)) & (table.ranks_per_node == 1) & ~other]
    model = Model(levels=("cluster",), algorithms=_SLINGSHOT, reduces=True)
    small = table.nodes <= 16
    return Study(table[small], table[~small], model, (8192, 65536, 262144, 4194304))


STUDIES = {"a100_dgx": a100_dgx, "slingshot11": slingshot11}
