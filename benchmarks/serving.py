"""This engine, with three limits to the wait for a next token, beside other servers:
`python benchmarks/serving.py [--workload W ...] [--model M ...] [--dtype D ...]`.

The servers are those of the experiment `flover_peers` (`make peers` installs them): every pass is a process of its own,
with loading and warm-up before its clock starts, and all passes have the same prompts, lengths and arrival times. Each
round has a pass of every server, in turns, so that ratios within a round are of the same minutes.

    tokens/s   answers' tokens until the last is done
    × ours     the same over `ours`, geometric mean over the rounds, and the smallest and largest
    × bound    seconds until the last is done over the least that they can be (`bound_seconds`); only if all come at once
    TTFT       time to first token from arrival, mean and 99th percentile; missing where a server hands out whole answers
    latency    from arrival until done, 99th percentile
    gap        longest wait of anybody for the next token

Lengths of `sharegpt` are those of the shipped trace, scaled; the others are drawn: `short`, prompts of 8 to 64 and
answers of 16 to 256 tokens, uniform; `mixed`, prompts of 4 to 700 tokens, 490 on average (a beta distribution), answers
of 84; `azure-code`, log-normal around the medians of Azure's coding service, prompts of 1,500 and answers of 13 tokens
(Splitwise, arXiv 2311.18677), prompts scaled; `long`, prompts of 700 to 960 tokens, uniform, answers of 32. Two more
tell what a server makes of prompts and of decoding alone: `prompts`, those of `mixed` with answers of one token, and
`decodes`, prompts of 4 and answers of 84 tokens.

`--load N`: N processes that compute all the time run beside every pass.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from decode_step import bandwidth, kv_bytes, read, weight_bytes
from kept import keep
from prompt_pass import flops, peak
from rich.console import Console
from rich.table import Table

from repro import paths
from repro.experiments.flover_peers import models, processes
from repro.experiments.flover_peers.catalogue import ENGINES, Engine
from repro.experiments.flover_peers.engines.protocol import Job, Request, Result
from repro.flover import workload
from repro.flover.arrivals import fixed_arrivals
from repro.models.llama import LlamaConfig

OURS = {
    "ours": ENGINES["fused"],  # `token_gap_s` as it is when nobody says it, 0.2
    "ours, gap 0.8": Engine("ours, gap 0.8", "ours.py", "0.8"),  # about as long as vLLM lets people wait on two cores
    "ours, whole prompts": Engine("ours, whole prompts", "ours.py", "0"),  # Flover's policy
}
PEERS = [name for name in ENGINES if name not in ("fused", "serial")]
SETTING = ("workload", "model", "dtype", "load")
VOCAB, POSITIONS, SCALE = 32_000, 1024, 0.5  # the models have so many positions; of lengths in traces
Lengths = tuple[np.ndarray, np.ndarray]


def short(rng: np.random.Generator, count: int) -> Lengths:
    return rng.integers(8, 64, count, endpoint=True), rng.integers(16, 256, count, endpoint=True)


def mixed(rng: np.random.Generator, count: int) -> Lengths:
    return 4 + 696 * rng.beta(2.1, 0.9, count), np.full(count, 84)


def azure_code(rng: np.random.Generator, count: int) -> Lengths:
    return 1500 * SCALE * rng.lognormal(0, 0.5, count), 13 * rng.lognormal(0, 0.8, count)


def long(rng: np.random.Generator, count: int) -> Lengths:
    return rng.integers(700, 960, count, endpoint=True), np.full(count, 32)


def sharegpt(rng: np.random.Generator, count: int) -> Lengths:
    rows = workload.sharegpt(paths.data("sharegpt_lengths_llmservingsim.csv"), [0.0] * count, 0, SCALE)
    return np.array([row.prompt_tokens for row in rows]), np.array([row.output_tokens for row in rows])


def prompts(rng: np.random.Generator, count: int) -> Lengths:
    return mixed(rng, count)[0], np.ones(count)


def decodes(rng: np.random.Generator, count: int) -> Lengths:
    return np.full(count, 4), np.full(count, 84)


WORKLOADS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "short": short,
    "mixed": mixed,
    "sharegpt": sharegpt,
    "azure-code": azure_code,
    "long": long,
    "prompts": prompts,
    "decodes": decodes,
}


def asked(name: str, count: int, every_s: float, seed: int = 0) -> list[Request]:
    """Requests of random tokens, one every so many seconds; lengths are cut to what the models have positions for."""
    rng = np.random.default_rng(seed)
    prompts, answers = (np.maximum(1, np.round(lengths)).astype(int) for lengths in WORKLOADS[name](rng, count))
    prompts = np.minimum(prompts, 15 * POSITIONS // 16)
    answers = np.minimum(answers, POSITIONS - prompts)
    arrivals = fixed_arrivals(count, every_s).tolist()
    return [Request(n, arrivals[n], rng.integers(0, VOCAB, prompts[n]).tolist(), int(answers[n])) for n in range(count)]


def served(engine: Engine, model: str, dtype: str, requests: list[Request]) -> Result:
    cores, cache = sorted(os.sched_getaffinity(0)), paths.root() / ".cache" / "peers"
    folder = models.folder_of(model, dtype, cache)
    gguf = str(models.gguf_of(folder, dtype)) if engine.name == "llama_cpp" else ""
    return processes.serve(engine, Job(str(folder), gguf, dtype, len(cores), engine.variant, requests), cores, cache)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the time, until the end of the block."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def work(config: LlamaConfig, requests: list[Request], fixed: int, each: int) -> tuple[int, int]:
    """What nobody can do without, who keeps keys and values: flops, and bytes read. `fixed`, `each`: bytes of the
    weights and of a position's keys and values. Weights are read once for each token of the longest answer at least,
    for all requests together; keys and values once for each token that is decoded, and once for the prompt."""
    done, contexts = 0, 0
    for request in requests:
        prompt, end = len(request.prompt), len(request.prompt) + request.output_tokens - 1
        done += flops(config, list(range(end)), list(range(prompt - 1, end)))
        contexts += prompt + sum(range(prompt + 1, end + 1))
    return done, fixed * max(request.output_tokens for request in requests) + each * contexts


def bound_seconds(model: str, dtype: str, requests: list[Request], peaks: dict[str, float], rate: float) -> float:
    """Of requests that come at once: flops at the measured peak of products and bytes at the measured bandwidth, one
    after the other, as in the other benchmarks."""
    (config, weights), kind = read(model), getattr(torch, dtype)
    done, moved = work(config, requests, weight_bytes(weights, kind), kv_bytes(config, kind))
    return done / peaks[dtype] + moved / rate


def numbers(requests: list[Request], result: Result, bound_s: float) -> dict[str, float]:
    """Of one pass; not a number where a server does not tell."""
    arrival = {request.id: request.arrival_s for request in requests}
    told = [a for a in result.requests if a.first_token_s is not None]
    ttft = [a.first_token_s - arrival[a.id] for a in told] or [np.nan]
    total = max(answer.finish_s for answer in result.requests)
    return {
        "tokens/s": sum(len(answer.tokens) for answer in result.requests) / total,
        "× bound": total / bound_s,
        "TTFT mean": float(np.mean(ttft)),
        "TTFT p99": float(np.percentile(ttft, 99)),
        "latency p99": float(np.percentile([a.finish_s - arrival[a.id] for a in result.requests], 99)),
        "gap": max((a.longest_gap_s for a in told if a.longest_gap_s is not None), default=np.nan),
    }


def shown(rows: list[dict], title: str) -> Table:
    """Medians over the rounds, and ratios within them."""
    names = list(dict.fromkeys(row["server"] for row in rows))
    measures = [key for key in rows[0] if key not in (*SETTING, "server", "round")]
    ours = {row["round"]: row["tokens/s"] for row in rows if row["server"] == "ours"}
    table = Table("server", *measures[:1], "× ours", *measures[1:], title=title)
    for name in names:
        mine = [row for row in rows if row["server"] == name]
        median = {key: float(np.median([row[key] for row in mine])) for key in measures}
        ratios = [row["tokens/s"] / ours[row["round"]] for row in mine if row["round"] in ours]
        ratio = f"{np.exp(np.mean(np.log(ratios))):.2f} ({min(ratios):.2f} … {max(ratios):.2f})" if ratios else "–"
        cells = ["–" if np.isnan(median[key]) else f"{median[key]:.3g}" for key in measures]
        table.add_row(name, cells[0], ratio, *cells[1:])
    return table


def described(name: str, requests: list[Request], every_s: float, model: str, dtype: str) -> str:
    prompts, answers = ([f(r) for r in requests] for f in (lambda r: len(r.prompt), lambda r: r.output_tokens))
    lengths = f"prompts {min(prompts)} to {max(prompts)}, mean {np.mean(prompts):.0f}; answers {min(answers)} to "
    lengths += f"{max(answers)}, mean {np.mean(answers):.0f}"
    arrivals = f"every {every_s:g} s" if every_s else "at once"
    return f"{name}, {len(requests)} {arrivals}: {lengths}; {model}, {dtype}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["mixed"])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between arrivals; 0: all at once")
    models = ("random-40m", "random-110m", "random-1b", "smollm2-135m")
    parser.add_argument("--model", nargs="+", choices=models, default=["random-40m"])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--servers", nargs="*", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside every pass")
    parser.add_argument("--csv", type=Path, help="add each pass to this file as soon as it is done")
    given, console = parser.parse_args(), Console(width=140)
    engines = {name: (OURS | ENGINES)[name] for name in given.servers}
    for name, reason in {name: engine.missing() for name, engine in engines.items()}.items():
        if reason:
            console.print(f"left out: {name}: {reason}")
            del engines[name]
    peaks, rate = {dtype: peak(getattr(torch, dtype)) for dtype in given.dtype}, bandwidth()
    told = ", ".join(f"{dtype} {found / 1e9:.0f} Gflop/s" for dtype, found in peaks.items())
    console.print(f"peak of products: {told}; memory: {rate / 1e9:.1f} GB/s")
    for setting in itertools.product(given.workload, given.model, given.dtype, [given.load]):
        name_of, model, dtype, load = setting
        requests, rows = asked(name_of, given.requests, given.every), []
        bound_s = np.nan if given.every else bound_seconds(model, dtype, requests, peaks, rate)
        for turn, (name, engine) in itertools.product(range(given.rounds), engines.items()):
            with busy(load):
                found = numbers(requests, served(engine, model, dtype, requests), bound_s)
            rows.append({**dict(zip(SETTING, setting, strict=True)), "server": name, "round": turn, **found})
            console.print(rows[-1])
            if given.csv:
                keep(given.csv, rows[-1:])
        least = "" if given.every else f"; bound {bound_s:.2f} s"
        beside = f"; {load} busy processes beside" if load else ""
        console.print(shown(rows, described(name_of, requests, given.every, model, dtype) + least + beside))


if __name__ == "__main__":
    main()
