"""What a point of `flover_serving` serves: the model on its device, the requests, and both in words."""

import functools
from collections.abc import Sequence

import torch

from repro import paths
from repro.experiments.base import MissingHardware
from repro.experiments.common.launched import need_device
from repro.experiments.flover_parallel import ParallelPoint
from repro.experiments.flover_serving import ServingPoint
from repro.flover import paper, workload
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals
from repro.flover.request import Request
from repro.models import checkpoint
from repro.models.llama import Llama, LlamaConfig

# LLaMA's sizes; 1b is TinyLlama's. Weights are drawn: what is measured does not depend on what they say.
RANDOM = {
    "random-40m": {"layers": 8, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1376},
    "random-110m": {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "ffn": 2048},
    "random-1b": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "ffn": 5632},
    "random-7b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008},
    "random-13b": {"layers": 40, "width": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824},
}
VOCAB = 32_000
_WEIGHTS_SHARE = 0.9  # the rest of a GPU is for keys, values and what each process holds


def model(point: ServingPoint) -> Llama:
    """MissingHardware where there is no such device, or not enough memory on it."""
    need_device(point.device)
    if point.device == "cuda":
        _check_memory(point)
    options = {"dtype": getattr(torch, point.dtype), "device": point.device}
    if point.model == "smollm2-135m":
        return checkpoint.load_gguf(checkpoint.smollm2_path(), **options)
    return Llama.random(LlamaConfig(**RANDOM[point.model], vocab=VOCAB), seed=point.seed, **options)


def _check_memory(point: ServingPoint) -> None:
    if point.model in RANDOM:
        weights = LlamaConfig(**RANDOM[point.model], vocab=VOCAB).parameters * getattr(torch, point.dtype).itemsize
        models = (point.instances or point.requests) if point.engine == "instances" else 1
        memory = torch.cuda.get_device_properties(0).total_memory
        if models * weights > _WEIGHTS_SHARE * memory:
            raise MissingHardware(
                f"{point.model} in {point.dtype} needs {models * weights / 1e9:.0f} GB of GPU memory for "
                f"{models} times its weights, and they may take {_WEIGHTS_SHARE:.0%} of this GPU's {memory / 1e9:.0f}"
            )


def shapes(point: ServingPoint, interval_s: float) -> list[RequestShape]:
    """Arrivals and lengths of the point's workload; `interval_s`: its interval in seconds."""
    cuts = point.trace_start, point.length_scale, point.max_prompt_tokens, point.max_output_tokens
    if point.workload == "azure":
        return workload.azure(paths.data("azure23_conv.csv"), point.requests, cuts[0], point.time_scale, *cuts[1:])
    if point.workload in ("sharegpt", "poisson"):
        times = poisson_arrivals(point.requests, interval_s, point.seed).tolist()
    else:
        times = fixed_arrivals(point.requests, interval_s).tolist()
    if point.workload == "sharegpt":
        return workload.sharegpt(paths.data("sharegpt_lengths_llmservingsim.csv"), times, *cuts)
    if point.workload == "uniform":
        return uniform(point, interval_s)
    output_tokens = max(1, round(paper.TOKENS * point.length_scale))
    return [RequestShape(time, paper.PROMPT_TOKENS, output_tokens) for time in times]


def uniform(point: ServingPoint | ParallelPoint, interval_s: float) -> list[RequestShape]:
    """Answers of lengths drawn uniformly, as in the paper's experiments with reordering."""
    ends = (max(1, round(tokens * point.length_scale)) for tokens in (paper.SHORTEST, point.longest))
    return workload.uniform(point.requests, interval_s, paper.PROMPT_TOKENS, *ends, point.seed)


def requests(point: ServingPoint, shapes: Sequence[RequestShape]) -> list[Request]:
    """Of text for a model that reads text, of random tokens for the others."""
    if point.model == "smollm2-135m":
        return workload.requests(shapes, workload.prompts_from_text(shapes, text_tokens(), point.seed))
    return workload.requests(shapes, workload.random_prompts(shapes, VOCAB, point.seed))


@functools.cache
def text_tokens() -> list[int]:
    """The text, as SmolLM2's tokens. Parsing the model's file for them takes longer than many points do."""
    words = paths.data("tinyshakespeare.txt").read_text()[:100_000]
    return checkpoint.tokenizer(checkpoint.smollm2_path()).encode(words).ids


def weights(point: ServingPoint) -> str:
    """For the record."""
    if point.model == "smollm2-135m":
        return f"SmolLM2-135M-Instruct, weights dequantised from Q4_1 to {point.dtype}"
    return f"LLaMA, {point.model.removeprefix('random-').upper()}, random weights in {point.dtype}"


def scales(point: ServingPoint) -> str:
    """The workload with every factor."""
    every = f"{point.interval_t1:g} times a lone request" if point.interval_t1 else f"{point.interval_s:g} s"
    cut = f"prompts cut to {point.max_prompt_tokens}, answers to {point.max_output_tokens}"
    if point.workload == "azure":
        scales = f"gaps x {point.time_scale:g}, lengths x {point.length_scale:g}"
        return f"Azure 2023 conversations from row {point.trace_start}: {scales}, {cut}"
    if point.workload == "sharegpt":
        lengths = f"ShareGPT lengths from row {point.trace_start} x {point.length_scale:g}"
        return f"{lengths}, {cut}; Poisson arrivals every {every}"
    answers, arrivals = str(paper.TOKENS), point.workload
    if point.workload == "uniform":
        answers, arrivals = f"{paper.SHORTEST} to {point.longest}, drawn uniformly,", "fixed"
    lengths = f"prompts of {paper.PROMPT_TOKENS} tokens, answers of {answers} x {point.length_scale:g} tokens"
    return f"{arrivals} arrivals every {every}, {lengths}"
