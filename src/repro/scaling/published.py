"""The collective model against published measurements: what of each study is fitted, and what is held out.

Splits:

    ranks     small machines are fitted; larger ones, and collectives that only they ran, are predicted
    sizes     messages of at most 1 MiB are fitted; larger ones, as training sends, are predicted
    machine   nothing is fitted: a machine of the catalogue with the same links predicts
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from repro.scaling import measured
from repro.scaling.algorithms import Algorithm
from repro.scaling.collectives import fastest
from repro.scaling.fit import Model, shaped, thinned
from repro.scaling.machines import hardware
from repro.scaling.validate import with_band

Split = Literal["ranks", "sizes", "machine"]
LARGE = 1 << 20  # bytes from which a message is of the size that training sends

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
    """Measurements, and how they are modelled.

    small        the most ranks that the split `ranks` fits
    candidates   bytes at which `fit.choose` may switch protocols
    machine      name in the catalogue of one with the same links inside a node; "" where there is none
    """

    table: pd.DataFrame
    model: Model
    small: int
    candidates: tuple[float, ...] = ()
    machine: str = ""

    def split(self, how: Split) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Rows to fit, and rows held out."""
        ranks = self.table.nodes * self.table.ranks_per_node
        fitted = {"ranks": ranks <= self.small, "sizes": self.table.nbytes <= LARGE, "machine": ranks < 0}[how]
        return self.table[fitted].reset_index(drop=True), self.table[~fitted].reset_index(drop=True)


def by_catalogue(study: Study, draws: int = 256) -> pd.DataFrame:
    """All rows as predicted by the study's machine, to which nothing was fitted: `predicted`, `log_error`, and the 90 %
    band (`low`, `high`, `inside`) of its intervals. ValueError for a study without a machine."""
    if not study.machine:
        raise ValueError("no machine of the catalogue has the links of this study; it has splits ranks and sizes")
    table, found = shaped(study.table, study.model), []
    for count in (0, draws):
        network = hardware(study.machine).machine(1, count).network
        rate = network.links[0].protocols[0].bytes_per_s
        values = {"overhead_s": network.overhead_s} | {f"{level}.bytes_per_s.0": rate for level in study.model.levels}
        rows = zip(table.sizes, table.collective, table.nbytes, strict=True)
        found.append([fastest(kind, n, study.model.choices(values, sizes)) for sizes, kind, n in rows])
    table = table.assign(predicted=np.array(found[0], dtype=float))
    table["log_error"] = np.log(table.predicted / table.seconds)
    low, high = np.quantile(np.array(found[1]), (0.05, 0.95), axis=1)
    return with_band(table, low, high)


def a100_node() -> Study:
    """Inside one DGX A100: 2 and 4 GPUs are fitted, 8 predicted. Wilkes3 has the same links from GPU to GPU."""
    table = measured.a100_dgx()
    return Study(thinned(table[table.nodes == 1], 40), Model(nccl=True), 4, machine="wilkes3")


def a100_dgx() -> Study:
    """One and two nodes. Rings out of a node use up to four NICs: with more ranks the measured times stop falling."""
    return Study(thinned(measured.a100_dgx(), 40), Model(links={"cluster": 4}, nccl=True), 4)


def slingshot11() -> Study:
    """8 and 16 nodes are fitted; 32 and 100 nodes, and reduce-scatter, predicted. Only runs with one rank a node.
    MPICH's recursive doubling of a reduce-scatter, which sends larger and larger parts, is not modelled."""
    table = measured.slingshot11()
    other = (table.collective == "reduce_scatter") & (table.algorithm == "recursive_doubling_mpich")
    table = table[table.algorithm.isin(list(_SLINGSHOT)) & (table.ranks_per_node == 1) & ~other]
    model = Model(levels=("cluster",), algorithms=_SLINGSHOT, reduces=True)
    return Study(table, model, 16, (8192, 65536, 262144, 4194304))


STUDIES = {"a100_node": a100_node, "a100_dgx": a100_dgx, "slingshot11": slingshot11}
