"""How near a decode step of ours is to the memory's speed: `python roofline.py job.json result.json`.

A step reads every matrix once for all requests, and the keys and values of each. Bytes over the measured bandwidth of a
large read with the same threads is the least time of a step whose weights do not fit into the cache; the fraction is
that time over the measured one. Small models live in the last-level cache in part, so a fraction can be above 1; a
large batch in fp32 is bound by arithmetic.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from protocol import Job

from repro.flover import Engine, Request, Scheduler
from repro.models.huggingface import read_huggingface
from repro.models.llama import Llama, LlamaConfig

BATCHES = (1, 32)
PROMPT, WARM, STEPS = 64, 16, 64  # tokens of a prompt; steps before the clock starts, and timed ones


def bandwidth(device: str, repeats: int = 12) -> float:
    """Bytes/s of a sum over a tensor far larger than the caches: the best of several, since nothing but other processes
    slows it."""
    gib = 1 if device == "cpu" else 8
    values = torch.ones(gib * 2**28, device=device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        values.sum().item()  # which waits for a GPU
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
    engine = Engine(model, Scheduler(slots=batch), capacity=PROMPT + WARM + STEPS + 16)
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


def main() -> None:
    job = Job.read(sys.argv[1])
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.dtype)
    config, weights = read_huggingface(job.model)
    model = Llama(config, weights, dtype=dtype, device=job.device)
    rate, fixed, each = bandwidth(job.device), weight_bytes(weights, dtype), kv_bytes(config, dtype)
    rows = []
    for batch in BATCHES:
        timed = steps(model, batch)
        rows.append(
            {
                "batch": batch,
                "weight_bytes": fixed,
                "kv_bytes": statistics.median(positions for _, positions in timed) * each,
                "step_s": statistics.median(seconds for seconds, _ in timed),
                "fraction": statistics.median((fixed + positions * each) / rate / s for s, positions in timed),
            }
        )
    Path(sys.argv[2]).write_text(json.dumps({"bytes_per_s": rate, "steps": rows}))


if __name__ == "__main__":
    main()
