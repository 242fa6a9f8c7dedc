"""Our engine beside the servers of others on the same requests and cores: `make peers`, then `python
benchmarks/serving.py`.

32 requests, prompts of 8 … 64 random tokens, answers of 16 … 256 tokens, greedy, never ended by a token. Each engine
runs alone in a process of its own, one after the other, and the round is repeated in turn forwards and backwards, so
that ratios are of the same minutes. Warm-up and loading are not timed. Columns:

    total       until the last answer is done: median over rounds (range)
    x ours      tokens/s over those of repro_fused in the same round
    latency     from a request's arrival until its answer is done: mean, 99th percentile
    TTFT        from its arrival until its first token, where the engine hands tokens out as they come
    same        share of requests with the tokens of repro_fused. In fp32 all should be; in bf16 a near tie may differ
    others      share of the cores' time that other processes took; above --others a run says little, stands in red,
                and is done again by the next call

Then, for our decode step: what share of the time would be needed to read weights, keys and values at the speed of the
memory. Finished runs are kept in the folder --cache; what failed is tried again, and stands in the table with its
reason.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from engines import models
from engines.catalogue import ENGINES, OURS, SCRIPTS
from engines.protocol import Job
from engines.runs import Bench, Cell, Run
from engines.workload import requests
from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import paths
from repro.records import provenance


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "--device", choices=models.USUAL, default="cpu", help="cuda: on one GPU, engines that can (ROCm as well)"
    )
    parser.add_argument(
        "--models", nargs="+", choices=models.NAMES, help="default: SmolLM2, S and M; on a GPU SmolLM2 and 1B"
    )
    parser.add_argument("--dtypes", nargs="+", choices=models.GGUF_TYPES, default=["bfloat16", "float32"])
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.0, 0.1], help="seconds between arrivals")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all that run on the device")
    parser.add_argument("--requests", type=int, default=32, help="default: 32; fewer to try whether all engines work")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=len(cores()), help="default: all cores")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run with its loading")
    parser.add_argument(
        "--others", type=float, default=0.1, help="a run in which others took more is done again next time"
    )
    parser.add_argument("--cache", type=Path, default=paths.root() / ".cache" / "serving", help="models and runs")
    parser.add_argument("--out", type=Path, help="CSV of all runs (default: serving.csv in --cache)")
    parser.add_argument("--fresh", action="store_true", help="do finished runs again")
    options = parser.parse_args()
    for name, least in {"threads": 1, "requests": 1, "repeats": 1, "timeout": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}, at least {least} allowed")
    if options.threads > len(cores()):
        parser.error(f"--threads is {options.threads}, at most the {len(cores())} cores of this process allowed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch sees no GPU")
    able = [name for name, engine in ENGINES.items() if engine.gpu or options.device == "cpu"]
    options.models, options.engines = options.models or models.USUAL[options.device], options.engines or able
    if not_able := [name for name in options.engines if name not in able]:
        parser.error(f"--engines has {', '.join(not_able)}; on a GPU allowed: {', '.join(able)}")
    if min(options.intervals) < 0:
        parser.error(f"--intervals has {min(options.intervals)}, at least 0 allowed")
    return options


def cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine that runs is ended as well
    used = cores()[: options.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, used)  # every engine inherits it
    (options.cache / "models").mkdir(parents=True, exist_ok=True)
    bench = Bench(
        options.cache.resolve(), used, options.requests, options.timeout, options.device, options.others, options.fresh
    )
    cells = [Cell(*cell) for cell in product(options.models, options.dtypes, options.intervals)]
    runs = measure(bench, cells, options.engines, options.repeats)
    write_csv(options.out or options.cache / "serving.csv", runs)
    console = Console(width=170)
    console.print(f"{provenance.cpu_model()}, {len(used)} of {os.cpu_count()} cores, a thread each")
    if options.device == "cuda":
        console.print(torch.cuda.get_device_name())
    console.print(comparison(cells, options.engines, runs, options.requests, options.others))
    if dirty := sum(run.others > options.others for run in runs):
        console.print(
            f"{dirty} of {len(runs)} runs were disturbed by other processes (red): the same command does them again"
        )
    if kept := sum(run.kept for run in runs):
        console.print(f"{kept} of {len(runs)} runs are of an earlier call (--fresh does them again)")
    console.print(roofline(bench, list(product(options.models, options.dtypes))))


def measure(bench: Bench, cells: Sequence[Cell], engines: Sequence[str], repeats: int) -> list[Run]:
    """All runs. Rounds go through the engines forwards and backwards in turn, so that drift favours none."""
    order = [
        (cell, name, round_)
        for cell in cells
        for round_ in range(repeats)
        for name in (engines if round_ % 2 == 0 else reversed(engines))
    ]
    return [bench.run(ENGINES[name], cell, round_) for cell, name, round_ in track(order, "serving", transient=True)]


def comparison(cells: Sequence[Cell], engines: Sequence[str], runs: Sequence[Run], count: int, most: float) -> Table:
    """One section per model, dtype and arrivals; a row per engine, red where others took more than `most` of the cores'
    time."""
    table = Table(title=f"{count} requests, prompts of 8 … 64 tokens, answers of 16 … 256")
    for name in ("engine", "version, or why it failed"):
        table.add_column(name, overflow="fold")
    columns = ("total (s)", "tokens/s", "x ours", "latency mean", "p99 (s)", "TTFT mean", "p99 (s)", "same", "others")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_section()
        table.add_row(f"[bold]{cell}")
        here = [run for run in runs if run.cell == cell]
        ours = {run.round: run for run in here if run.engine == OURS and not run.failed}
        for name in engines:
            mine = [run for run in here if run.engine == name]
            table.add_row(*row(name, mine, ours), style="red" if any(run.others > most for run in mine) else None)
    return table


def row(name: str, runs: Sequence[Run], ours: dict[int, Run]) -> list[str]:
    """Medians over the rounds that finished."""
    done, failed = [run for run in runs if not run.failed], [run.failed for run in runs if run.failed]
    if not done:
        return [name, f"failed: {failed[0]}"]

    def median(value: Callable[[Run], float | None], form: str, among: Sequence[Run] = done) -> str:
        found = [value(run) for run in among]
        return format(statistics.median(found), form) if found and None not in found else ""

    both = [run for run in done if run.round in ours]
    totals = [run.total_s for run in done]
    spread = f" ({min(totals):.2f}–{max(totals):.2f})" if len(totals) > 1 else ""
    return [
        name,
        done[0].version + (f"; {len(failed)} of {len(runs)} failed: {failed[0]}" if failed else ""),
        median(lambda run: run.total_s, ".2f") + spread,
        median(lambda run: run.tokens_per_s, ".0f"),
        median(lambda run: run.tokens_per_s / ours[run.round].tokens_per_s, ".2f", both),
        median(lambda run: run.latency_mean_s, ".2f"),
        median(lambda run: run.latency_p99_s, ".2f"),
        median(lambda run: run.ttft_mean_s, ".3f"),
        median(lambda run: run.ttft_p99_s, ".3f"),
        median(lambda run: same(run, ours[run.round]), ".0%", both),
        median(lambda run: run.others, ".0%"),
    ]


def same(run: Run, ours: Run) -> float:
    """Share of requests with equal tokens."""
    return statistics.mean(a == b for a, b in zip(run.answers, ours.answers, strict=True))


def roofline(bench: Bench, cells: Sequence[tuple[str, str]]) -> Table:
    """Our decode step beside the speed of the memory; measured anew in every call."""
    table = Table(title="decode step of repro_fused, n equal requests in steady state")
    for name in (
        "model",
        "n",
        "weights (MB)",
        "KV (MB)",
        "memory (GB/s)",
        "step (ms)",
        "tokens/s",
        "of memory's speed",
    ):
        table.add_column(name, justify="left" if name == "model" else "right")
    engine = ENGINES[OURS]
    for model, dtype in track(cells, "roofline", transient=True):
        folder, gguf = models.prepare(model, dtype, bench.cache)
        asked, answer = bench.cache / "roofline.job", bench.cache / "roofline.result"
        Job(str(folder), str(gguf), dtype, len(bench.cores), "", requests(0.0), bench.device).write(asked)
        command = [engine.python, str(SCRIPTS / "roofline.py"), str(asked), str(answer)]
        environment = engine.environment(bench.cores, bench.cache)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=bench.timeout_s)
        if done.returncode:
            table.add_row(f"{model} {dtype}: failed: {done.stderr.strip().splitlines()[-1][:100]}")
            continue
        found = json.loads(answer.read_text())
        for step in found["steps"]:
            table.add_row(
                f"{model} {dtype}",
                str(step["batch"]),
                f"{step['weight_bytes'] / 1e6:.0f}",
                f"{step['kv_bytes'] / 1e6:.1f}",
                f"{found['bytes_per_s'] / 1e9:.1f}",
                f"{1e3 * step['step_s']:.2f}",
                f"{step['batch'] / step['step_s']:.0f}",
                f"{step['fraction']:.0%}",
            )
    return table


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """A line per run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(runs[0].row()))
        writer.writeheader()
        writer.writerows(run.row() for run in runs)


if __name__ == "__main__":
    main()
