"""`python benchmarks/placement.py --serving`: placements that a server could switch on, with equal slots, held out.

Placed by one part of a trace, judged on sequences of the other. Top-1: hops of tokens that stay where their experts are.
Top-4: GPUs and nodes that a deduplicated all-to-all from each token's home sends to. Columns:

    split        seed of `split(0.7, seed)` of gpt-oss-20b's trace; the GPT-MoEs have their own held-out text
    slots        per GPU and layer for copies, beside its even share of the experts
    hops, nodes  per token, all layers: to other GPUs, and of these to other nodes
    levels       hops at each level of the machine, innermost first (top-1)
    bytes        one way per token, of hidden vectors in 16 bits (gpt-oss-20b 2880 wide, the GPT-MoEs 64): between GPUs,
                 and between nodes. With two all-to-alls combine sends as many back; with one, as here for top-1, none
    load, worst  tokens of a layer's busiest GPU over the even share, mean over layers and maximum
    moved        experts that come to a GPU which does not hold them in rank order, all layers
    s            to place

EPLB and its hierarchical policy give each slot an even share; servers deal to the nearest copy (`near`) or in turn
(`even`). MoETuner: experts are grouped for even load, then the groups of neighbouring layers matched for few hops, both
of its integer programs by heuristics here (longest first, assignment). GRACE-MoE: groups of experts that tokens use
together, and copies of the hottest group's heaviest experts; top-1 has no such pairs, so it is only in top-4.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from kept import keep
from placement_solvers.partitioners import PARTITIONERS
from rich.console import Console
from rich.table import Table

from repro import exflow, paths
from repro.exflow.evaluate import loads
from repro.exflow.levels import make_levels
from repro.exflow.search import balance, chain
from repro.exflow.serving.eplb import rebalance_experts
from repro.exflow.serving.fanout.dispatch import dispatch, place_for_dispatch
from repro.exflow.serving.replicas import evaluate_replicas, walk
from repro.exflow.serving.slots import Replicas, physical_to_logical
from repro.exflow.trace import Trace
from repro.topology import Level, Topology

LIMITS = (1.0, 1.05, 1.15, 1.3, None)  # of load that ours aims at
SLOTS = (0, 1, 2, 4)
WIDTH = {"gptoss": 2 * 2880, "gpt_moe": 2 * 64}  # bytes of a hidden vector
MACHINES = {  # name: levels, innermost first
    "4": (("node", 4),),
    "8": (("node", 8),),
    "2x4": (("node", 4), ("cluster", 2)),
    "16": (("node", 16),),
    "2x2x4": (("node", 4), ("rack", 2), ("cluster", 2)),
}
CHOSEN = ("gptoss 8", "gptoss 4", "gptoss 2x4", "gptoss 16", "gptoss 2x2x4", "gpt_moe_32e 8", "gpt_moe_64e 16")
TOP_4 = ("gptoss 8", "gptoss 2x4")


@dataclass(frozen=True)
class Row:
    instance: str
    split: int
    k: int
    slots: int
    method: str
    hops: float
    nodes: float
    levels: str
    bytes_gpus: float
    bytes_nodes: float
    load: float
    worst: float
    moved: int
    seconds: float


@dataclass(frozen=True)
class Setting:
    """An instance: tokens to place by and to judge on, and a machine."""

    name: str
    split: int
    train: Trace
    test: Trace
    machine: Topology

    @property
    def gpus(self) -> int:
        return make_levels(self.machine).gpus

    @property
    def per_node(self) -> int:
        return self.machine.levels[0].size

    @property
    def experts(self) -> int:
        return self.train.num_experts

    def replicas(self, slots: np.ndarray) -> Replicas:
        return Replicas(slots, self.gpus, self.per_node)

    def alone(self, gpu: np.ndarray) -> Replicas:
        return self.replicas(physical_to_logical(gpu))


def settings(names: tuple[str, ...], k: int, splits: Sequence[int]) -> Iterator[Setting]:
    for name, split in itertools.product(names, splits):
        trace, machine = name.split()
        path = paths.data("gptoss20b_routing.npz" if trace == "gptoss" else f"gpt_moe_routing_{trace[8:]}.npz")
        experts = 32 if trace == "gptoss" else int(trace[8:-1])
        routing = exflow.load_trace(path, experts, k)
        if trace == "gptoss":
            train, test = routing.split(0.7, seed=split)
        else:
            if split != splits[0]:
                continue
            held = np.load(path)["held_out"][routing.sequences]
            train, test = routing.take(~held), routing.take(held)
        yield Setting(name, split, train, test, Topology(tuple(Level(*each) for each in MACHINES[machine])))


Method = Callable[[Setting, np.ndarray, int], Replicas]  # of a setting, the tokens of each expert, slots for copies


def rows_of(layers: int, row: np.ndarray) -> np.ndarray:
    return np.tile(row, (layers, 1))


def contiguous(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    return setting.alone(rows_of(len(weight), np.arange(setting.experts) * setting.gpus // setting.experts))


def round_robin(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    return setting.alone(rows_of(len(weight), np.arange(setting.experts) % setting.gpus))


def eplb(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    slots = setting.experts + extra * setting.gpus
    return setting.replicas(rebalance_experts(weight, slots, 1, 1, setting.gpus)[0])


def eplb_hierarchical(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    slots, nodes = setting.experts + extra * setting.gpus, setting.gpus // setting.per_node
    return setting.replicas(rebalance_experts(weight, slots, 8, nodes, setting.gpus)[0])


def metis(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    return setting.alone(PARTITIONERS["METIS"](exflow.transitions(setting.train), setting.gpus, 0, 5.0))


def moetuner(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    groups = np.array([balance.lightest(own, setting.gpus) for own in weight])
    return setting.alone(chain.match_labels(exflow.transitions(setting.train), groups, setting.gpus))


def grace(setting: Setting, weight: np.ndarray, extra: int) -> Replicas:
    """Groups by co-activation: each GPU is filled with the experts that its experts are used with most."""
    size, found = setting.experts // setting.gpus, []
    for layer, own in enumerate(weight):
        on = np.zeros((setting.train.tokens, setting.experts), np.float32)
        np.put_along_axis(on, setting.train.experts[:, layer].astype(int), 1.0, axis=1)
        together = on.T @ on
        np.fill_diagonal(together, 0.0)
        free = np.ones(setting.experts, bool)
        groups = []
        for _ in range(setting.gpus):
            group = [int(np.where(free, own, -1).argmax())]
            free[group] = False
            while len(group) < size:
                group.append(int(np.where(free, together[group].sum(axis=0), -1).argmax()))
                free[group] = False
            groups.append(group)
        hottest = sorted(groups[int(np.argmax([own[g].sum() for g in groups]))], key=lambda e: -own[e])
        for number, group in enumerate(groups):
            others = [e for e in (*hottest, *np.argsort(-own)) if e not in group]
            group += [int(e) for e in others[number % 2 : number % 2 + extra]]
        found.append(np.concatenate(groups))
    return setting.replicas(np.array(found))


METHODS: dict[str, tuple[Method, bool]] = {  # whether it has copies
    "contiguous": (contiguous, False),
    "round robin": (round_robin, False),
    "METIS": (metis, False),
    "MoETuner": (moetuner, False),
    "EPLB": (eplb, True),
    "EPLB, hierarchical": (eplb_hierarchical, True),
}


def top_1(setting: Setting) -> Iterator[Row]:
    weight = loads(exflow.transitions(setting.train))
    for extra in SLOTS:
        for name, (method, copies) in METHODS.items():
            nodes = setting.gpus // setting.per_node
            if (extra and not copies) or (name.endswith("hierarchical") and (nodes == 1 or 8 % nodes)):
                continue
            start = time.perf_counter()
            placed = method(setting, weight, extra)
            seconds = time.perf_counter() - start
            for rule in ("nearest", "round_robin") if copies and extra else ("nearest",):
                yield judged(setting, extra, f"{name}, {rule}" if extra else name, placed, rule, seconds)
        for rule in ("shares", "nearest", "round_robin") if extra else ("shares",):
            for limit in LIMITS if rule == "shares" else LIMITS[1::3]:
                start = time.perf_counter()
                placed = exflow.place_copies(
                    setting.train, setting.machine, extra_slots=extra, max_load=limit, dispatch=rule, rounds=2
                )
                seconds = time.perf_counter() - start
                name = f"ours, {rule}, {'no limit' if limit is None else f'limit {limit:g}'}"
                yield judged(setting, extra, name, placed, rule, seconds)


def judged(setting: Setting, extra: int, name: str, placed: Replicas, rule: str, seconds: float) -> Row:
    cost = evaluate_replicas(placed, setting.test, rule)
    levels, width = make_levels(setting.machine), width_of(setting)
    at = walk(placed, setting.test, rule)
    travelled = levels.hop_levels()[at[1:-1], at[2:]]
    by_level = [float((travelled == level).sum() / setting.test.tokens) for level in range(len(levels.sizes))]
    return Row(
        setting.name,
        setting.split,
        1,
        extra,
        name,
        cost.hops_per_token,
        cost.inter_hops,
        " ".join(f"{hops:.2f}" for hops in by_level),
        cost.hops_per_token * width,
        cost.inter_hops * width,
        cost.max_load,
        cost.max_load_worst_layer,
        moved(setting, placed),
        seconds,
    )


def top_4(setting: Setting) -> Iterator[Row]:
    weight = loads(exflow.transitions(setting.train))
    for extra in SLOTS:
        for name, (method, copies) in (METHODS | {"GRACE-MoE": (grace, True)}).items():
            nodes = setting.gpus // setting.per_node
            if (extra and not copies) or (name.endswith("hierarchical") and (nodes == 1 or 8 % nodes)):
                continue
            start = time.perf_counter()
            placed = method(setting, weight, extra)
            yield sent(setting, extra, name, placed, time.perf_counter() - start)
        rank_order = exflow.place(exflow.transitions(setting.train), setting.gpus, setting.per_node, "contiguous")
        for limit in LIMITS[1::3]:
            start = time.perf_counter()
            placed = place_for_dispatch(setting.train, rank_order, extra, max_load=limit, sweeps=8)
            name = f"ours, {'no limit' if limit is None else f'limit {limit:g}'}"
            yield sent(setting, extra, name, placed, time.perf_counter() - start)


def sent(setting: Setting, extra: int, name: str, placed: Replicas, seconds: float) -> Row:
    found, width = dispatch(placed, setting.test), width_of(setting)
    gpus, nodes = found.gpus * setting.test.layers, found.nodes * setting.test.layers
    return Row(
        setting.name,
        setting.split,
        setting.test.k,
        extra,
        name,
        gpus,
        nodes,
        "",
        gpus * width,
        nodes * width,
        found.max_load,
        found.max_load_worst_layer,
        moved(setting, placed),
        seconds,
    )


def moved(setting: Setting, placed: Replicas) -> int:
    rank_order = contiguous(setting, np.empty((setting.train.layers, 0)), 0)
    return int((placed.hosted & ~rank_order.hosted).sum())


def width_of(setting: Setting) -> int:
    return WIDTH["gptoss" if setting.name.startswith("gptoss") else "gpt_moe"]


def shown(rows: list[Row]) -> Table:
    title = f"{rows[0].instance} GPUs, top-{rows[0].k}, split {rows[0].split}"
    table = Table("slots", "method", "hops", "nodes", "levels", "kB", "load", "worst", "moved", "s", title=title)
    for row in rows:
        numbers = (row.hops, row.nodes, row.levels, row.bytes_gpus / 1000, row.load, row.worst)
        texts = [number if isinstance(number, str) else f"{number:.2f}" for number in numbers]
        table.add_row(str(row.slots), row.method, *texts, str(row.moved), f"{row.seconds:.2f}")
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Hops against the mean load of the busiest GPU, a marker for each number of slots: our fronts as lines, EPLB hollow."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    for number, (extra, marker) in enumerate(zip(SLOTS, "osD^", strict=True)):
        look = {"color": f"C{number}", "marker": marker}
        label = f"{extra} slot{'s' * (extra != 1)} for copies" if extra else "no copies"
        own = sorted((r.load, r.hops) for r in rows if r.slots == extra and r.method.startswith("ours, shares"))
        axes.plot(*zip(*own, strict=True), ms=4, label=label, **look)
        for row in rows:
            if row.slots == extra and row.method.startswith("EPLB"):
                axes.plot(row.load, row.hops, mfc="none", ms=7, **look)
                how = "nearest copy" if row.method == "EPLB, nearest" else "in turn" if extra == SLOTS[-1] else ""
                axes.annotate(how, (row.load, row.hops), (14, -2), textcoords="offset points", fontsize=7)
    axes.plot([], [], "o", color="black", mfc="none", ms=7, label="DeepSeek's EPLB, as many slots")
    axes.set(xlabel="busiest GPU ÷ even share, mean over layers", ylabel="hops per token", ylim=(0, None))
    axes.legend(fontsize=8, loc="upper right")
    what = f"What does evenness cost in hops, with copies and without? gpt-oss-20b on {rows[0].instance.split()[-1]} GPUs, top-1,\n"
    what += "counted on recorded routing of held-out sequences, one split of them. A line: limits on load from none (right)\n"
    what += "to 1 (left), kept on the tokens that experts were placed by: on others a tighter one need not\n"
    what += "mean less load. EPLB with copies gives tokens to them in turn, or to the nearest where it says so."
    figure.supxlabel(what, fontsize=7.5, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(chosen: list[str], splits: Sequence[int], table: Path | None, figure: Path | None) -> None:
    """Rows of an instance are added to `table` when they are done."""
    console = Console(width=150)
    exflow.place_copies(np.ones((1, 4, 4)), 2, rounds=0)  # compile
    for k, names, method in ((1, CHOSEN, top_1), (4, TOP_4, top_4)):
        for setting in settings(tuple(n for n in names if any(part in f"{n} top-{k}" for part in chosen)), k, splits):
            mine = list(method(setting))
            console.print(shown(mine))
            if figure and k == 1 and setting.name == "gptoss 8" and setting.split == splits[0]:
                draw(mine, figure)
            if table:
                keep(table, [asdict(row) for row in mine])
