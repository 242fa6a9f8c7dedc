"""How near a decode step of the fused engine is to the memory's speed:
`python benchmarks/decode_step.py [--models M ...] [--dtypes D ...] [--device D] [--load N]`.

A step reads every matrix once for all requests, and the keys and values of each. Bytes over the measured bandwidth of a
large read with the same threads is the least time of a step whose weights do not fit into the cache; the fraction is
that time over the measured one. Small models live in the last-level cache in part, so a fraction can be above 1; a
large batch in fp32 is bound by arithmetic. Random weights: what a step takes does not depend on what they say.

`--load N` asks another question: what is left when other programs are busy? It times steps with and without
`stress-ng --cpu N` at equal priority, in turns. The fair share is what the threads would get if the cores were divided
evenly among them and the N, over what they get alone.
"""

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from kept import keep

from repro.experiments.flover_serving.inputs import RANDOM, VOCAB
from repro.flover import Engine, Request, Scheduler
from repro.models import checkpoint
from repro.models.llama import Llama, LlamaConfig

BATCHES = (1, 32)
ROUNDS = 3  # with and without load
PROMPT, WARM, STEPS = 64, 16, 64  # tokens of a prompt; steps before the clock starts, and timed ones
SMOLLM2 = "smollm2-135m"


def bandwidth(device: str = "cpu", repeats: int = 12) -> float:
    """Bytes/s of a sum over a tensor far larger than the caches: the best of several, since nothing but other processes
    slows it."""
    values = torch.ones(2**28 if device == "cpu" else 2**31, device=device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        values.sum().item()  # which waits for the device
        times.append(time.perf_counter() - start)
    return values.nbytes / min(times)


def weight_bytes(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> int:
    """What a step reads: all but the embedding, of which it takes single rows, unless that is the output head as
    well."""
    untied = "output.weight" in weights
    read = [w for name, w in weights.items() if not (untied and name == "token_embd.weight")]
    return sum(weight.numel() for weight in read) * dtype.itemsize


def steps(model: Llama, batch: int) -> list[tuple[float, int]]:
    """Seconds, and live KV positions, of each step in steady state: `batch` equal requests, none comes or goes."""
    engine = Engine(model, Scheduler(slots=batch, token_gap_s=0), capacity=PROMPT + WARM + STEPS + 16)
    engine.prepare()
    for i in range(batch):
        engine.submit(Request(i, tuple(range(10, 10 + PROMPT)), max_new_tokens=WARM + STEPS + 16))
    running = engine.scheduler.running
    while len(running) < batch or not all(generation.decoding for generation in running.values()):
        engine.step()
    for _ in range(WARM):
        engine.step()
    found = []
    for _ in range(STEPS):
        positions = sum(PROMPT + len(generation.tokens) for generation in running.values())
        start = time.perf_counter()
        engine.step()
        found.append((time.perf_counter() - start, positions))
        after = sum(PROMPT + len(generation.tokens) for generation in running.values())
        assert after == positions + batch, f"a step gave {after - positions} tokens to {batch} requests"
    return found


def kv_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Of one position."""
    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


def read(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Sizes and weights of a model."""
    if name == SMOLLM2:
        return checkpoint.read_gguf(checkpoint.smollm2_path())
    config, generator = LlamaConfig(**RANDOM[name], vocab=VOCAB), torch.Generator(device).manual_seed(0)
    return config, {
        part: (torch.randn(shape, generator=generator, device=device) / 32).to(dtype)
        for part, shape in config.weight_shapes().items()
    }


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    stress = subprocess.Popen(["stress-ng", "--quiet", "--cpu", str(processes)])
    try:
        time.sleep(1)
        yield
    finally:
        stress.terminate()
        stress.wait()


def under_load(model: Llama, batch: int, processes: int) -> tuple[float, float]:
    """Tokens/s of all steps without and with load."""
    quiet, loaded = 0.0, 0.0
    for _ in range(ROUNDS):
        quiet += sum(took for took, _ in steps(model, batch))
        with busy(processes):
            loaded += sum(took for took, _ in steps(model, batch))
    tokens = ROUNDS * STEPS * batch
    return tokens / quiet, tokens / loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--models", nargs="+", choices=(SMOLLM2, *RANDOM), default=(SMOLLM2, "random-40m"))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32", "float16"), default=("bfloat16", "float32")
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--load", type=int, default=0, help="busy processes; 0: none, and the memory's speed instead")
    parser.add_argument("--csv", type=Path, help="without --load: add each row to this file as soon as it is there")
    options = parser.parse_args()
    if options.load and shutil.which("stress-ng") is None:
        parser.error("--load needs stress-ng (Debian: apt-get install stress-ng)")
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    fair = min(1.0, cores / (threads + options.load)) / min(1.0, cores / threads)
    rate = bandwidth(options.device)
    where = f"{threads} threads" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"memory: {rate / 1e9:.1f} GB/s with {where}")
    for name, kind in itertools.product(options.models, options.dtypes):
        dtype = getattr(torch, kind)
        config, weights = read(name, options.device, dtype)
        model = Llama(config, weights, dtype=dtype, device=options.device)
        fixed, each = weight_bytes(weights, dtype), kv_bytes(config, dtype)
        del weights
        for batch in BATCHES:
            if options.load:
                quiet, loaded = under_load(model, batch, options.load)
                print(
                    f"{name} {kind}, {batch:2} requests: {quiet:.0f} tokens/s, {loaded:.0f} beside {options.load} busy "
                    f"processes, {loaded / quiet:.0%}; fair share: {fair:.0%} ({threads} threads on {cores} cores)",
                    flush=True,
                )
                continue
            timed = steps(model, batch)
            seconds = statistics.median(took for took, _ in timed)
            share = statistics.median((fixed + positions * each) / rate / took for took, positions in timed)
            print(
                f"{name} {kind}, {batch:2} requests: {fixed / 1e6:.0f} MB of weights, step {1e3 * seconds:.2f} ms, "
                f"{batch / seconds:.0f} tokens/s, {share:.0%} of the memory's speed",
                flush=True,
            )
            if options.csv:
                setting = {"model": name, "dtype": kind, "device": options.device, "requests": batch}
                found = {"weights MB": fixed / 1e6, "step s": seconds, "tokens/s": batch / seconds}
                keep(options.csv, [setting | found | {"of the memory's speed": share}])


if __name__ == "__main__":
    main()
