"""How near a training step is to what its machine allows: `python benchmarks/zero.py [--plans P ...] [--rates R ...]`.

8 ranks, 2 nodes x 2 packages x 2 GCDs, train the GPT of the experiment zero_train over the emulated network (Linux,
root). Every round trains each plan with each number of micro-batches, one after the other on the same ranks, so that
what slows the machine slows all of them: trust ratios, not seconds.

    x          micro-batches
    step s     median over rounds of the seconds of a step, several steps in a row
    compute s  of its passes without communication, all ranks at the same time
    bound s    no step is shorter: the longest of compute and, of each level, its bytes over its rate
               (`zero.traffic.bound_seconds`)
    x bound    step over bound
    x links    what the order of messages alone costs: the engine's step, simulated on these links with processors and
               latencies that take no time (`scaling.schedule`), over the links' bound
    over       median over rounds of ZeRO++'s seconds over this plan's, with as many micro-batches
    MB         bytes of a step that all ranks together send over each level, by the ledger

`--trace FILE` writes one step of the first plan, at the first rate with the fewest micro-batches, for Perfetto
(https://ui.perfetto.dev) or chrome://tracing: a process per rank, with a row for each kind of message on each level.

`apart` behind a plan: nothing of the step's end overlaps, neither with the last backward nor with the next forward.
"""

import argparse
import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # AdamW imports it on first use: once here, not in every rank
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from repro import quantize
from repro.comm import Communicator
from repro.experiments.zero_train import ZeroTrain
from repro.experiments.zero_train.run import keep_freed_memory
from repro.launch import launch, network
from repro.models.gpt import GPT
from repro.scaling.assumptions import Assumptions
from repro.scaling.machines import Machine
from repro.scaling.network import network_of
from repro.scaling.schedule import step_seconds
from repro.scaling.step import layout_of
from repro.zero import Plan, ZeroOptimizer, plan, traffic
from repro.zero.engine import KINDS

T = TypeVar("T")

Case = tuple[str, int]  # plan, micro-batches
APART = " apart"  # behind a plan's name
WARM_UP = 2  # steps of each case that are not timed


@dataclass
class Seen:
    """What a rank saw: seconds of compute by micro-batches, and of each case seconds a step by round, and bytes a step
    by level."""

    compute: dict[int, float]
    seconds: dict[Case, list[float]]
    sent: dict[Case, dict[str, float]]


def train(rank: int, world: int, point: ZeroTrain, cases: list[Case], rounds: int, steps: int) -> Seen:
    """All rounds on one rank."""
    keep_freed_memory()
    tokens = _tokens(point, rank)
    communicator = Communicator(point.topology)  # shared: groups take longer than steps
    engines = {name: _engine(point, name, communicator) for name in dict.fromkeys(name for name, _ in cases)}
    seen = Seen({count: _compute(point, tokens, count) for _, count in cases}, {case: [] for case in cases}, {})
    for number in range(rounds + 1):
        for name, count in cases:
            model, optimizer = engines[name]
            times = steps if number else WARM_UP
            communicator.ledger.take()
            start = _together()
            for _ in range(times):
                _step(name, model, optimizer, tokens, count)
            optimizer.synchronize()
            seconds = (_together() - start) / times
            if number:
                seen.seconds[name, count].append(seconds)
                sent = communicator.ledger.take()
                seen.sent[name, count] = {level: nbytes / times for level, nbytes in sent.items()}
    return seen


def traced(rank: int, world: int, point: ZeroTrain, case: Case) -> list[dict[str, object]]:
    """One step of a rank, between others, as complete events of Chrome's trace format."""
    keep_freed_memory()
    (name, count), tokens = case, _tokens(point, rank)
    model, optimizer = _engine(point, name, Communicator(point.topology))
    for _ in range(WARM_UP):
        _step(name, model, optimizer, tokens, count)
    optimizer.ledger.events = events = []
    start = time.perf_counter()
    _step(name, model, optimizer, tokens, count)
    end = time.perf_counter()
    _step(name, model, optimizer, tokens, count)
    optimizer.synchronize()
    found = [_event(rank, "program", "step", start, end)]
    for event in list(events):
        if start <= event.start < end:
            bucket, kind = divmod(event.label, len(KINDS))
            row = f"{'+'.join(event.levels)}: {KINDS[kind]}"
            found.append(_event(rank, row, f"{KINDS[kind]} {bucket}", event.start, event.end, bytes=event.nbytes))
    return found


def _event(rank: int, row: str, name: str, start: float, end: float, **args: int) -> dict[str, object]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, "args": args} | times


def _tokens(point: ZeroTrain, rank: int) -> torch.Tensor:
    return torch.randint(point.vocab, (1, point.seq_len + 1), generator=torch.Generator().manual_seed(rank))


def _engine(point: ZeroTrain, name: str, communicator: Communicator) -> tuple[GPT, ZeroOptimizer]:
    torch.manual_seed(0)
    model = GPT(point.gpt)
    options = {"gradient_dtype": torch.bfloat16, "max_grad_norm": 1.0, "broadcast": False, "fused": True}
    ends = {"late_weights": False} if name.endswith(APART) else {"accumulation": 1}
    return model, ZeroOptimizer(
        model, _plan(point, name), torch.optim.AdamW, communicator=communicator, lr=1e-4, **options, **ends
    )


def _plan(point: ZeroTrain, name: str) -> Plan:
    return plan.named(name.removesuffix(APART), point.topology)


def _step(name: str, model: GPT, optimizer: ZeroOptimizer, tokens: torch.Tensor, micro_batches: int) -> None:
    with contextlib.nullcontext() if name.endswith(APART) else optimizer.no_sync():
        _passes(model, tokens, micro_batches - 1, micro_batches)
    _passes(model, tokens, 1, micro_batches)
    optimizer.step()


def _passes(model: torch.nn.Module, tokens: torch.Tensor, times: int, micro_batches: int) -> None:
    for _ in range(times):
        (model(tokens[:, :-1], tokens[:, 1:]) / micro_batches).backward()


def _together() -> float:
    """The time when all ranks have come here."""
    dist.barrier()
    return time.perf_counter()


def _compute(point: ZeroTrain, tokens: torch.Tensor, micro_batches: int) -> float:
    model, seconds = GPT(point.gpt).bfloat16(), []
    for _ in range(5):
        start = _together()
        _passes(model, tokens, micro_batches, micro_batches)
        seconds.append(_together() - start)
        model.zero_grad(set_to_none=True)
    return statistics.median(seconds[2:])


def on_ranks(rate: float, work: Callable[..., T], *args: Any) -> list[T]:
    """What `work(rank, world, point, *args)` returns on each, at `rate` Mbit/s between nodes. RuntimeError where no
    network can be shaped."""
    point = ZeroTrain(cluster_mbit_s=rate)
    with network.between(point.topology) as links:
        if links.fabric is None:
            raise RuntimeError(f"a step needs links of known rates, this network is {links.state}")
        return launch(work, point.ranks, point, *args, fabric=links.fabric, topology=point.topology, timeout_s=3600)


def table(point: ZeroTrain, cases: list[Case], seen: list[Seen]) -> Table:
    """Of what the ranks saw at one rate."""
    levels = point.topology.names
    heads = (
        "plan",
        "x",
        "step s",
        "compute s",
        "bound s",
        "x bound",
        "x links",
        "over",
        *(f"MB {level}" for level in levels),
    )
    shown = Table(*heads, title=f"{point.cluster_mbit_s:g} Mbit/s between nodes")
    for name, count in cases:
        seconds = statistics.median(seen[0].seconds[name, count])
        compute = max(each.compute[count] for each in seen)
        bound = traffic.bound_seconds(_plan(point, name), layout_of(point.gpt), count, compute_s=compute)
        sent = [sum(each.sent[name, count][level] for each in seen) / 1e6 for level in levels]
        ratios = (seconds / bound, over_links(point, name, count), over_zeropp(seen[0], (name, count)))
        numbers = (seconds, compute, bound, *ratios)
        shown.add_row(name, str(count), *(f"{number:.3f}" for number in numbers), *(f"{mb:.2f}" for mb in sent))
    return shown


def over_links(point: ZeroTrain, name: str, micro_batches: int) -> float:
    """The simulated step on links alone over their bound; NaN for plans apart, whose order is not simulated."""
    if name.endswith(APART):
        return float("nan")
    endless = {"flops_per_s": math.inf, "hbm_bytes_per_s": math.inf, "quantize_values_per_s": math.inf}
    machine = Machine(network_of(point.topology), launch_s=0.0, overlap=0.0, native=False, **endless)
    chosen, model = _plan(point, name), layout_of(point.gpt)
    seconds = step_seconds(chosen, model, machine, micro_batches, 0.0, 0.0, Assumptions())
    return seconds / traffic.bound_seconds(chosen, model, micro_batches)


def links_table(point: ZeroTrain, names: list[str], counts: list[int]) -> Table:
    """`over_links` of models with the same parameters in more and more blocks. Nothing is trained."""
    shown = Table(
        "plan", "blocks", *(f"x = {count}" for count in counts), title="step over the links' bound, links alone"
    )
    for name, blocks in itertools.product(names, (2, 4, 8, 16, 44)):
        hidden = int((point.gpt.parameters / 12 / blocks) ** 0.5) // point.heads * point.heads
        model = point.model_copy(update={"layers": blocks, "hidden": hidden})
        shown.add_row(name, str(blocks), *(f"{over_links(model, name, count):.2f}" for count in counts))
    return shown


def over_zeropp(seen: Seen, case: Case) -> float:
    """ZeRO++'s seconds over a case's in the same round, the median; NaN where ZeRO++ was left out."""
    baseline = seen.seconds.get(("zeropp", case[1]))
    if baseline is None:
        return float("nan")
    return statistics.median(a / b for a, b in zip(baseline, seen.seconds[case], strict=True))


def _names() -> list[str]:
    return [name + end for name in plan.NAMED for end in ("", APART)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--plans", nargs="+", default=["hierarchical", "zeropp", "zero3"], choices=_names())
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 12.5, 6.25], help="Mbit/s between nodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a case in a round")
    parser.add_argument("--trace", type=Path, help="file to write, JSON")
    parser.add_argument("--links", action="store_true", help="only `x links`, by number of blocks, without training")
    options = parser.parse_args()
    if options.links:
        Console(width=120).print(links_table(ZeroTrain(), options.plans, options.micro_batches))
        return
    quantize.warm_up()
    cases = [(name, count) for count in options.micro_batches for name in options.plans]
    for rate in options.rates:
        seen = on_ranks(rate, train, cases, options.rounds, options.steps)
        Console(width=120).print(table(ZeroTrain(cluster_mbit_s=rate), cases, seen))
    if options.trace:
        events = itertools.chain(*on_ranks(options.rates[0], traced, cases[0]))
        options.trace.write_text(json.dumps({"traceEvents": list(events)}))


if __name__ == "__main__":
    main()
