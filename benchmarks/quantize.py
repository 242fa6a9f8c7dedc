"""Speed of the quantisers beside a plain copy, in one process:
`python benchmarks/quantize.py [--values N] [--block N] [--devices cpu cuda]`.

Every number is GB/s of the float tensor, the side that is read (quantise), written (dequantise) or both (accumulate),
so that a ratio to `copy_` of the same tensor is a ratio of times: 0.5 takes as long as two copies. On the CPU with one
thread; on the GPU too where there is one. Medians after warm-up; eager, kernel and copy take turns, so that all see the
same machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from repro import quantize
from repro.quantize import reference
from repro.records import provenance

REPEATS = 15
IN_A_ROW = {"cpu": 1, "cuda": 10}  # calls of a sample: on a GPU the host launches ahead, as it does in training


def into(payload: Tensor, out: Tensor, bits: int, block: int) -> None:
    """What decoding into a buffer takes in eager torch."""
    out.copy_(reference.dequantize(payload, out.shape[-1], bits, block, out.dtype))


def onto(payload: Tensor, total: Tensor, bits: int, block: int) -> None:
    """What adding the values to fp32 sums takes there."""
    total += reference.dequantize(payload, total.shape[-1], bits, block)


def kernel_into(payload: Tensor, out: Tensor, bits: int, block: int) -> None:
    """The same by the kernel."""
    quantize.dequantize(payload, out.shape[-1], bits, block, out=out)


def seconds(runs: list[Callable[[], object]], device: str) -> list[float]:
    """Median time of each; they take turns. Two rounds warm up compilers, caches and memory."""
    samples: list[list[float]] = [[] for _ in runs]
    for round_ in range(REPEATS + 2):
        for run, kept in zip(runs, samples, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(IN_A_ROW[device]):
                run()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_ >= 2:
                kept.append((time.perf_counter() - start) / IN_A_ROW[device])
    return [statistics.median(kept) for kept in samples]


def table(device: str, values: int, block: int) -> None:
    """One line per format, dtype and operation."""
    print(f"{'':13}{'bits':>4} {'dtype':<9}{'eager':>8}{'kernel':>8}{'copy':>8}{'speed-up':>10}{'of copy':>9}")
    for bits in quantize.BITS:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(values, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
            payload, out = quantize.quantize(x, bits, block), torch.empty_like(x)
            pairs = {
                "quantise": (reference.quantize, quantize.quantize, (x, bits, block)),
                "dequantise": (reference.dequantize, quantize.dequantize, (payload, values, bits, block, dtype)),
                "  to a buffer": (into, kernel_into, (payload, out, bits, block)),
                "accumulate": (onto, quantize.accumulate, (payload, out, bits, block)),
            }
            if dtype != torch.float32:
                del pairs["accumulate"]  # sums are kept in fp32
            for name, (eager, kernel, arguments) in pairs.items():
                runs = [partial(eager, *arguments), partial(kernel, *arguments), partial(out.copy_, x)]
                speeds = [x.nbytes / t / 1e9 for t in seconds(runs, device)]
                print(
                    f"{name:13}{bits:4} {str(dtype).removeprefix('torch.'):<9}"
                    f"{speeds[0]:8.2f}{speeds[1]:8.2f}{speeds[2]:8.2f}"
                    f"{speeds[1] / speeds[0]:9.1f}x{speeds[1] / speeds[2]:9.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=2**24, help="values of the tensor (default: 16 Mi)")
    parser.add_argument("--block", type=int, default=256, help="values that share a scale (default: 256)")
    gpus = ["cuda"] if torch.cuda.is_available() else []
    parser.add_argument("--devices", nargs="+", choices=["cpu", *gpus], default=["cpu", *gpus])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for device in options.devices:
        name = torch.cuda.get_device_name() if device == "cuda" else f"{provenance.cpu_model()}, one thread"
        print(f"{name}; torch {torch.__version__}; {options.values} values in blocks of {options.block}; GB/s")
        table(device, options.values, options.block)


if __name__ == "__main__":
    main()
