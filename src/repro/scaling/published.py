"""The collective model against published measurements: what of each study is fitted, and what is held out.

Splits:

    ranks     small machines are fitted; larger ones, and collectives that only they ran, are predicted
    sizes     messages of at most 1 MiB are fitted; larger ones, as training sends, are predicted
    machine   nothing is fitted here, but LUMI's `peer_s` (`Study.taken`): a machine of the catalogue with the same
              links predicts
    scenario  the same, by another machine of the catalogue: the same links, but one ring and slow messages
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from repro.scaling import measured
from repro.scaling.algorithms import Algorithm
from repro.scaling.collectives import fastest
from repro.scaling.fit import Model, shaped, thinned
from repro.scaling.machines import Hardware, hardware
from repro.scaling.network import Value
from repro.scaling.validate import with_band

Split = Literal["ranks", "sizes", "machine", "scenario"]
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
    machines     by the splits that fit nothing, a machine of the catalogue: of the same links inside a node, or, with
                 `whole_nodes`, of the same nodes and network
    taken        parameters of these machines that were set from rows of this study: of them no prediction is blind
    """

    table: pd.DataFrame
    model: Model
    small: int
    candidates: tuple[float, ...] = ()
    machines: Mapping[str, str] = field(default_factory=dict)
    whole_nodes: bool = False
    taken: tuple[str, ...] = ()

    def split(self, how: Split) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Rows to fit, and rows held out, by `ranks` or by `sizes`."""
        ranks = self.table.nodes * self.table.ranks_per_node
        fitted = {"ranks": ranks <= self.small, "sizes": self.table.nbytes <= LARGE}[how]
        return self.table[fitted].reset_index(drop=True), self.table[~fitted].reset_index(drop=True)


def by_catalogue(study: Study, how: Split = "machine", draws: int = 256) -> pd.DataFrame:
    """All rows as predicted by the study's machine, without a fit but for what was `taken`: `predicted`, `log_error`,
    and the 90 % band (`low`, `high`, `inside`) of its intervals. ValueError for a study without a machine."""
    if how not in study.machines:
        raise ValueError(f"no machine of the catalogue is like this study's for the split {how!r}")
    table, kind = shaped(study.table, study.model), hardware(study.machines[how])
    seconds = _of_nodes if study.whole_nodes else _of_links
    found = [seconds(kind, study.model, table, count) for count in (0, draws)]
    table = table.assign(predicted=np.array(found[0], dtype=float))
    table["log_error"] = np.log(table.predicted / table.seconds)
    low, high = np.quantile(np.array(found[1]), (0.05, 0.95), axis=1)
    return with_band(table, low, high)


def _of_nodes(kind: Hardware, _: Model, table: pd.DataFrame, draws: int) -> list[Value]:
    """Seconds of each row on as many nodes of the machine, by the faster of the algorithms that NCCL and RCCL have."""
    machines = {nodes: kind.machine(nodes, draws) for nodes in table.nodes.unique()}
    rows = zip(table.collective, table.nbytes, (machines[nodes] for nodes in table.nodes), strict=True)
    return [
        fastest(what, n, [(machine.network, ("ring", "tree", "direct"))], channels=machine.channels)
        for what, n, machine in rows
    ]


def _of_links(kind: Hardware, model: Model, table: pd.DataFrame, draws: int) -> list[Value]:
    """Seconds of each row by NCCL's own reckoning, over links as inside a node of the machine."""
    network = kind.machine(1, draws).network
    rate = network.links[0].protocols[0].bytes_per_s
    values = {"overhead_s": network.overhead_s} | {f"{level}.bytes_per_s.0": rate for level in model.levels}
    rows = zip(table.sizes, table.collective, table.nbytes, strict=True)
    return [fastest(what, n, model.choices(values, sizes)) for sizes, what, n in rows]


def a100_node() -> Study:
    """Inside one DGX A100: 2 and 4 GPUs are fitted, 8 predicted. Wilkes3 has the same links from GPU to GPU."""
    table = measured.a100_dgx()
    return Study(thinned(table[table.nodes == 1], 40), Model(nccl=True), 4, machines={"machine": "wilkes3"})


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


def alps() -> Study:
    """Up to 16 nodes of four GH200 are fitted; 32 to 512 predicted. The NICs are behind the processor, and the runs are
    older than NCCL 2.27: no LL128 between nodes."""
    study = _gpu_nodes("alps", {"node": 450e9, "cluster": 25e9}, 64)
    return replace(study, model=replace(study.model, ll128=False))


def leonardo() -> Study:
    """Up to 16 nodes of four A100 are fitted; 32 to 256 predicted."""
    return _gpu_nodes("leonardo", {"node": 300e9, "cluster": 12.5e9}, 64)


def lumi() -> Study:
    """Up to 16 of LUMI's nodes, of Frontier's kind, are fitted; 32 to 64 predicted. [INF] RCCL's tuner has constants of
    its own; we take NCCL's. The catalogue's Frontier has its `peer_s` from the all-to-alls here."""
    study = _gpu_nodes("lumi", {"node": 200e9, "cluster": 25e9}, 128)
    machines = {"machine": "frontier", "scenario": "frontier-rccl"}
    return replace(study, machines=machines, whole_nodes=True, taken=("peer_s",))


def _gpu_nodes(system: str, nominal: Mapping[str, float], small: int) -> Study:
    """Nodes with four NICs. Messages of at least 512 bytes, as smaller ones take as long."""
    table = measured.blink(system)
    messages = table.nbytes / np.where(table.collective == "all_to_all", table.nodes * table.ranks_per_node, 1)
    model = Model(links={"cluster": 4}, nccl=True, peers=True, nominal=nominal)
    return Study(table[messages >= 512].reset_index(drop=True), model, small)


STUDIES = {
    "a100_node": a100_node,
    "a100_dgx": a100_dgx,
    "slingshot11": slingshot11,
    "alps": alps,
    "leonardo": leonardo,
    "lumi": lumi,
}
