"""Parameters of a network from measured times of collectives, with their uncertainty, and predictions by them.

The fit is robust least squares of log(predicted / measured): libraries switch algorithm at sizes of their own, where no
smooth model follows. The uncertainty is clustered, as errors of one machine shape are correlated. With one shape only,
each size counts as independent of the others, and intervals are too narrow where neighbours err together.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from repro.scaling import collectives, nccl
from repro.scaling.algorithms import Algorithm
from repro.scaling.network import Links, Network, Protocol, Value
from repro.topology import Level, Topology

PRIOR_LOG_SD = 3.0  # of a weak prior around the start, for parameters that the data do not determine
ROBUST_LOG = 0.2  # log errors beyond it count less than their square
SHAPE = ["source", "collective", "sizes"]  # columns that name one machine shape of a table
OF_RANKS = ("peer_s", "reduce_bytes_per_s", "host_bytes_per_s")  # of processors, not of links


@dataclass(frozen=True)
class Model:
    """What is fitted: a latency and a rate for every level and protocol, and the time to launch a collective.

    levels       names, innermost first
    links        by level, links that the ranks of a unit share (NICs); default, and for fewer ranks: one per rank
    switches     message bytes at which the next protocol begins
    algorithms   ours by a table's name of an algorithm; of several the fastest. "": the library chose
    peers        fit the time to begin a message to each further rank of an all-to-all
    reduces      fit the rate at which received values are added up (CPU collectives); infinite otherwise
    host         an emulated network: all ranks share the processors of one machine, and its links queue. Fit the rate
                 at which the processors move bytes
    nccl         NCCL's latencies, protocols and choice (`repro.scaling.nccl`) instead of fitted ones and `algorithms`:
                 fit the rates of the links, the overhead, and how many times NCCL's latencies those between nodes are.
                 The innermost level is NVLink
    ll128        with `nccl`: LL128 runs between nodes. NCCL asks for GPUs and NICs on the same PCIe switches (a path of
                 PXB at most); on Hopper a NIC may also be reached through another GPU (PXN), and from 2.27 on be behind
                 the processor (P2C), as on GH200
    nominal      by level, bytes per second of one link by its data sheet: its search begins at half of that. Default: at
                 the highest rate of the table, which several links reach together. From there a level that is about as
                 fast as the one inside it may not be found, as no time depends on it

    ValueError for no levels, and where `links` or `nominal` name another one.
    """

    levels: tuple[str, ...] = ("node", "cluster")
    links: Mapping[str, float] = field(default_factory=dict)
    switches: tuple[float, ...] = ()
    algorithms: Mapping[str, Sequence[Algorithm]] = field(default_factory=lambda: {"": ("ring", "tree", "direct")})
    peers: bool = False
    reduces: bool = False
    host: bool = False
    nccl: bool = False
    ll128: bool = True
    nominal: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, named in (("links", self.links), ("nominal", self.nominal)):
            if not self.levels or not named.keys() <= set(self.levels):
                raise ValueError(f"levels are {self.levels}, {what} are of {tuple(named)}: allowed are the levels")

    @property
    def names(self) -> list[str]:
        """Names of the fitted parameters: overhead_s, `LEVEL.latency_s.N` and `LEVEL.bytes_per_s.N`, and those `OF_RANKS`;
        with `nccl` `network_latency`, a factor, in place of latencies."""
        numbers, kinds = range(len(self.switches) + 1), ("bytes_per_s",) if self.nccl else ("latency_s", "bytes_per_s")
        each = [f"{v}.{what}.{i}" for v in self.levels for i in numbers for what in kinds]
        each += ["network_latency"] * (self.nccl and len(self.levels) > 1)
        of_ranks = [
            name for name, fitted in zip(OF_RANKS, (self.peers, self.reduces, self.host), strict=True) if fitted
        ]
        return ["overhead_s", *each, *of_ranks]

    def choices(self, values: Mapping[str, Value], sizes: Sequence[int]) -> list[tuple[Network, tuple[Algorithm, ...]]]:
        """What the library can choose from, without names of algorithms in the table: networks with levels of these
        `sizes`, and the algorithms that run on each."""
        if not self.nccl:
            return [(self.network(values, sizes), tuple(self.algorithms.get("", ())))]
        topology = Topology(tuple(map(Level, self.levels, sizes)))
        rates = [values[f"{level}.bytes_per_s.0"] for level in self.levels]
        rest = {name: values[name] for name in ("network_latency", "peer_s") if name in values}
        return nccl.networks(topology, self._counts(sizes), rates, values["overhead_s"], ll128=self.ll128, **rest)

    def network(self, values: Mapping[str, Value], sizes: Sequence[int]) -> Network:
        """The network with levels of these `sizes` and the parameters `values`, by name. ValueError for `nccl`, which
        has one for each algorithm and protocol."""
        if self.nccl:
            raise ValueError("NCCL has a network for each algorithm and protocol: ask for seconds, or choices")
        links = []
        for level, count in zip(self.levels, self._counts(sizes), strict=True):
            protocols = tuple(
                Protocol(values[f"{level}.latency_s.{i}"], values[f"{level}.bytes_per_s.{i}"], start)
                for i, start in enumerate((0.0, *self.switches))
            )
            links.append(Links(count, protocols))
        topology = Topology(tuple(map(Level, self.levels, sizes)))
        rest = {name: values[name] for name in OF_RANKS if name in values}
        return Network(topology, tuple(links), overhead_s=values["overhead_s"], **rest)

    def _counts(self, sizes: Sequence[int]) -> list[float]:
        """By level, links out of a unit."""
        below = [math.prod(sizes[:level]) for level in range(len(sizes))]
        return [min(unit, self.links.get(level, unit)) for level, unit in zip(self.levels, below, strict=True)]


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted parameters in the order of `model.names`.

    log_values   [parameters] natural logarithms
    covariance   [parameters, parameters] of them
    """

    model: Model
    log_values: NDArray[np.float64]
    covariance: NDArray[np.float64]

    def network(self, *sizes: int, draws: int = 0, seed: int = 0, scale: float = 1.0) -> Network:
        """The network with levels of these sizes, innermost first, at the best values or in `draws` of them; the links at
        `scale` times the fitted rates."""
        return self.model.network(_scaled(self.values(draws, seed), scale), sizes)

    def values(self, draws: int = 0, seed: int = 0) -> dict[str, Value]:
        """The parameters by name, at the best values or in `draws` of them."""
        values: list[Value] = np.exp(self.log_values).tolist()
        if draws:
            rng = np.random.default_rng(seed)
            values = list(np.exp(rng.multivariate_normal(self.log_values, self.covariance, draws, method="eigh")).T)
        return dict(zip(self.model.names, values, strict=True))

    def table(self) -> pd.DataFrame:
        """Value and 95 % interval of every parameter."""
        sd = np.sqrt(np.diag(self.covariance))
        ends = {"value": self.log_values, "low": self.log_values - 1.96 * sd, "high": self.log_values + 1.96 * sd}
        return pd.DataFrame({"parameter": self.model.names} | {name: np.exp(end) for name, end in ends.items()})


def fit(measured: pd.DataFrame, model: Model = Model()) -> Fit:
    """Fit `model` to a table with the columns of `repro.scaling.measured`.

    In place of nodes and ranks_per_node it may have `sizes` (a tuple, of the model's levels), and `hop` (names of the
    levels that a group spans; None: all). `scale`: rate of the links in a row over the fitted rate (default 1), for a
    network that was set to several rates. ValueError for no rows, for rows of other levels than the model's, and when
    an algorithm of the table has no counterpart in the model.
    """
    if measured.empty:
        raise ValueError("no measured times to fit: the table has no rows")
    if unknown := sorted(set(measured.algorithm) - ({""} if model.nccl else set(model.algorithms))):
        known = "none of NCCL's" if model.nccl else ", ".join(map(repr, model.algorithms))
        raise ValueError(f"algorithm {unknown[0]!r} of the table has no counterpart in the model, known: {known}")
    table, names = shaped(measured, model), model.names
    start = np.log([_start(table, model, name) for name in names])

    def residuals(log_values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.append(_log_errors(table, model, log_values), (log_values - start) / PRIOR_LOG_SD)

    best = least_squares(residuals, start, loss="soft_l1", f_scale=ROBUST_LOG).x
    plain = least_squares(residuals, best, max_nfev=1)  # for its Jacobian, which is not weighted by the loss
    return Fit(model, best, _clustered(plain.jac, residuals(best), table))


def predict(found: Fit, measured: pd.DataFrame) -> pd.DataFrame:
    """The table with `predicted` (seconds) and `log_error` = log(predicted / measured)."""
    table = shaped(measured, found.model)
    errors = _log_errors(table, found.model, found.log_values)
    return table.assign(log_error=errors, predicted=table.seconds * np.exp(errors))


def error_quantiles(log_errors: Sequence[float] | pd.Series, at: Sequence[float] = (0.5, 0.9)) -> list[float]:
    """Quantiles of the relative error, as factors minus 1: 0.2 is a factor of 1.2, too much or too little."""
    return [float(np.expm1(q)) for q in np.quantile(np.abs(log_errors), at)]


def choose(measured: pd.DataFrame, model: Model, candidates: Sequence[float], at_most: int = 2) -> pd.DataFrame:
    """Compare protocol switches by cross-validation: each machine shape in turn is left out of the fit and predicted. A
    row for each choice of up to `at_most` of `candidates` (message bytes), the best first: `switches`, and
    `error_median` and `error_p90` on the shapes left out. ValueError for a table of one shape."""
    measured = shaped(measured, model)
    groups = measured.groupby(SHAPE).ngroup()
    if groups.nunique() < 2:
        raise ValueError(f"{groups.nunique()} machine shape in the table: needed are two, to leave one out")
    rows = []
    for count in range(at_most + 1):
        for switches in itertools.combinations(sorted(set(candidates)), count):
            tried = replace(model, switches=switches)
            fits = [(fit(measured[groups != g], tried), measured[groups == g]) for g in groups.unique()]
            left_out = [predict(found, others).log_error for found, others in fits]
            median, p90 = error_quantiles(pd.concat(left_out))
            rows.append({"switches": switches, "error_median": median, "error_p90": p90})
    return pd.DataFrame(rows).sort_values("error_median", kind="stable", ignore_index=True)


def thinned(measured: pd.DataFrame, sizes: int) -> pd.DataFrame:
    """About `sizes` message sizes of every shape and algorithm, evenly spread on a logarithmic scale."""

    def some(group: pd.DataFrame) -> pd.DataFrame:
        wanted = np.geomspace(group.nbytes.min(), group.nbytes.max(), sizes)
        ordered = group.sort_values("nbytes")
        at = np.searchsorted(ordered.nbytes, wanted).clip(0, len(ordered) - 1)
        return ordered.iloc[np.unique(at)]

    each = ["source", "collective", "nodes", "ranks_per_node", "algorithm"]
    return pd.concat([some(group) for _, group in measured.groupby(each)], ignore_index=True)


def _start(table: pd.DataFrame, model: Model, name: str) -> float:
    """Where the search for a parameter begins: at a quarter of the shortest time, a message to a further rank at a tenth
    of that; at half the nominal rate, or else the highest of the table; for a level over the rows that cross none
    further out; at NCCL's own latencies."""
    if name == "network_latency":
        return 1.0
    level, _, what = name.partition(".")
    if level in model.nominal and what.startswith("bytes_per_s"):
        return model.nominal[level] / 2
    crossed = [
        [level for level, size in zip(model.levels, sizes, strict=True) if size > 1 and level in (hop or model.levels)]
        for sizes, hop in zip(table.sizes, table.hop, strict=True)
    ]
    mine = table[[levels[-1] == name.split(".")[0] for levels in crossed]]
    rows = table if mine.empty else mine
    if "bytes_per_s" not in name:
        return float(rows.seconds.min()) / (40 if name == "peer_s" else 4)
    ranks = float(table.sizes.map(np.prod).max()) if name == "host_bytes_per_s" else 1.0
    scale = 1.0 if name in OF_RANKS else rows.scale
    return float((rows.nbytes / rows.seconds / scale).max()) * ranks


def shaped(measured: pd.DataFrame, model: Model) -> pd.DataFrame:
    """The table with columns `sizes`, of the model's levels, `hop` and `scale`."""
    table = measured.reset_index(drop=True)
    if "sizes" not in table:
        columns = [table.ranks_per_node, table.nodes][-len(model.levels) :]
        if len(columns) == 1 and (table.ranks_per_node > 1).any():
            raise ValueError(f"the table has several ranks a node, the model only the level {model.levels[0]}")
        table["sizes"] = list(zip(*columns, strict=True))
    if wrong := next((sizes for sizes in table.sizes if len(sizes) != len(model.levels)), None):
        raise ValueError(f"the table has sizes of {len(wrong)} levels, {wrong}, the model {', '.join(model.levels)}")
    return table.assign(**{name: value for name, value in (("hop", None), ("scale", 1.0)) if name not in table})


def _scaled(values: Mapping[str, Value], scale: float) -> dict[str, Value]:
    """The parameters with the links' rates times `scale`."""
    links = [name for name in values if ".bytes_per_s." in name]
    return dict(values) | {name: values[name] * scale for name in links}


def _log_errors(table: pd.DataFrame, model: Model, log_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(predicted / measured), by the fastest algorithm that a row may have. ValueError where its collective has none."""
    values = dict(zip(model.names, np.exp(log_values), strict=True))
    places = list(zip(table.sizes, table.scale, strict=True))
    choices = {(sizes, scale): model.choices(_scaled(values, scale), sizes) for sizes, scale in set(places)}
    found = []
    for kind, name, place, hop, nbytes in zip(
        table.collective, table.algorithm, places, table.hop, table.nbytes, strict=True
    ):
        options = [(network, model.algorithms[name] if name else usual) for network, usual in choices[place]]
        found.append(collectives.fastest(kind, nbytes, options, levels=hop))
    return np.log(np.array(found) / table.seconds.to_numpy())


def _clustered(
    jacobian: NDArray[np.float64], residuals: NDArray[np.float64], table: pd.DataFrame
) -> NDArray[np.float64]:
    """Sandwich covariance with one cluster per collective and machine shape; per row where all are of one shape, since
    the scores of all rows together are zero at the optimum, and few clusters tell nearly nothing. A parameter that the
    data do not determine has the prior's variance."""
    weights = 1 / np.sqrt(1 + (residuals / ROBUST_LOG) ** 2)  # of soft_l1
    weighted = jacobian * weights[:, None]
    bread = np.linalg.inv(jacobian.T @ weighted)
    shapes = table.groupby(SHAPE).indices.values()  # row numbers
    clusters = shapes if table.sizes.nunique() > 1 else [[row] for row in range(len(table))]
    scores = [weighted[rows].T @ residuals[rows] for rows in clusters]
    meat = sum(np.outer(score, score) for score in scores) * (len(scores) / max(len(scores) - 1, 1))
    meat += np.eye(len(bread)) / PRIOR_LOG_SD**2
    return bread @ meat @ bread
