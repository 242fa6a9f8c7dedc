"""How near a pass over prompts is to what the machine can do:
`python benchmarks/prompt_pass.py [--models M ...] [--dtypes D ...] [--kernels cpp torch]`.

The bound of a pass is the time of its multiplications at the measured peak, plus that of its bytes (every matrix once,
keys and values once) at the measured bandwidth. Only what is needed counts: of the last layer, and of the output head,
the last row of each prompt and the rows that decode. The peak is the fastest product of large matrices that any library
here makes, with the same threads. Random weights: what a pass takes does not depend on what they say.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from decode_step import SMOLLM2, bandwidth, kv_bytes, read, weight_bytes
from kept import keep

from repro.experiments.flover_serving.inputs import RANDOM
from repro.models.kernels import Choice, choose
from repro.models.kernels.torch_kernels import Kernels
from repro.models.llama import Llama, LlamaConfig
from repro.models.rows import Rows

PROMPTS = (32, 128, 512, 700)
DECODING, CONTEXT = 32, 128  # rows that decode beside a prompt, and what each attends to
PASSES = 9
PEAK_ROUNDS = 8  # over a second or two: virtual processors that were idle take a while to become fast


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def peak(dtype: torch.dtype) -> float:
    """Flop/s: the best of several products, by torch's kernels and by the fastest ones."""
    kernels = [Kernels(), choose("auto", torch.device("cpu"), dtype, 64)]
    best = 0.0
    for rows, inputs, outputs in ((384, 1024, 1024), (768, 512, 2048), (1024, 2048, 2048)) * PEAK_ROUNDS:
        weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
        for layer in [each.linear(weight) for each in kernels]:
            best = max(best, 2 * rows * inputs * outputs / min(timed(functools.partial(layer, x), 12)))
    return best


def flops(config: LlamaConfig, positions: list[int], wanted: list[int]) -> int:
    """Of a pass over rows at `positions`, of which the `wanted` rows get logits."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    after = q * config.width + 3 * config.ffn * config.width  # weights of a layer behind its attention
    last = [positions[row] for row in wanted]
    weights = config.layers * config.width * 2 * kv * len(positions)
    weights += ((config.layers - 1) * len(positions) + len(wanted)) * (config.width * q + after)
    weights += len(wanted) * config.vocab * config.width
    attended = (config.layers - 1) * sum(p + 1 for p in positions) + sum(p + 1 for p in last)
    return 2 * weights + 4 * q * attended


def one_pass(model: Llama, prompt: int, decoding: int) -> tuple[Callable[[], object], list[int], list[int]]:
    """A prompt beside rows that decode; positions of all rows, and those that get logits."""
    cache = model.new_cache(decoding + 1, max(PROMPTS))
    parts = [Rows.prompt(torch.arange(prompt) % model.config.vocab, 0)]
    if decoding:
        at = torch.full((decoding,), CONTEXT)
        parts.append(Rows.decode(torch.arange(decoding), at, slice(1, 1 + decoding), CONTEXT))
    rows, wanted = Rows.joined(parts), torch.arange(prompt - 1, prompt + decoding)
    return lambda: model.forward(rows, cache, wanted), rows.positions.tolist(), wanted.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--models", nargs="+", choices=(SMOLLM2, *RANDOM))
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=("bfloat16", "float32"))
    parser.add_argument("--kernels", choices=("cpp", "torch", "auto"), default="auto")
    parser.add_argument("--csv", type=Path, help="add each row to this file as soon as it is there")
    parser.set_defaults(models=("random-40m", "random-110m", SMOLLM2))
    options = parser.parse_args()
    choice: Choice = options.kernels
    rate, peaks = bandwidth(), {kind: peak(getattr(torch, kind)) for kind in options.dtypes}
    print(f"memory: {rate / 1e9:.1f} GB/s with {torch.get_num_threads()} threads; peak of products: ", end="")
    print(", ".join(f"{kind} {found / 1e9:.0f} Gflop/s" for kind, found in peaks.items()))
    for name, kind in itertools.product(options.models, options.dtypes):
        (config, weights), dtype = read(name), getattr(torch, kind)
        model = Llama(config, weights, dtype=dtype, kernels=choice)
        for prompt, decoding in itertools.product(PROMPTS, (0, DECODING)):
            run, positions, wanted = one_pass(model, prompt, decoding)
            read_bytes = weight_bytes(weights, dtype) + (prompt + decoding * CONTEXT) * kv_bytes(config, dtype)
            bound = flops(config, positions, wanted) / peaks[kind] + read_bytes / rate
            run()
            times = timed(run, PASSES)
            median, best = statistics.median(times), min(times)
            print(
                f"{name} {kind}, prompt of {prompt:3}, {decoding:2} that decode: {1e3 * median:6.1f} ms "
                f"(best {1e3 * best:.1f}), bound {1e3 * bound:.1f} ms, {median / bound:.2f} x",
                flush=True,
            )
            if options.csv:
                setting = {"model": name, "dtype": kind, "kernels": choice, "prompt": prompt, "decoding": decoding}
                found = {"median s": median, "best s": best, "bound s": bound, "× bound": median / bound}
                keep(options.csv, [setting | found])


if __name__ == "__main__":
    main()
