"""Which requests a point of `flover_serving` serves: lengths and arrivals, and the same in words."""

from repro import paths
from repro.experiments.common.serving import PAPER_PROMPT_TOKENS, PAPER_SHORTEST
from repro.experiments.flover_parallel import ParallelPoint
from repro.experiments.flover_serving import ServingPoint
from repro.flover import workload
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals

_PAPER_OUTPUT_TOKENS = 512


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
    output_tokens = max(1, round(_PAPER_OUTPUT_TOKENS * point.length_scale))
    return [RequestShape(time, PAPER_PROMPT_TOKENS, output_tokens) for time in times]


def uniform(point: ServingPoint | ParallelPoint, interval_s: float) -> list[RequestShape]:
    """Answers of lengths drawn uniformly, as in the paper's experiments with reordering."""
    ends = (max(1, round(tokens * point.length_scale)) for tokens in (PAPER_SHORTEST, point.longest))
    return workload.uniform(point.requests, interval_s, PAPER_PROMPT_TOKENS, *ends, point.seed)


def description(point: ServingPoint) -> str:
    """The workload with every factor."""
    every = f"{point.interval_t1:g} times a lone request" if point.interval_t1 else f"{point.interval_s:g} s"
    cut = f"prompts cut to {point.max_prompt_tokens}, answers to {point.max_output_tokens}"
    if point.workload == "azure":
        scales = f"gaps x {point.time_scale:g}, lengths x {point.length_scale:g}"
        return f"Azure 2023 conversations from row {point.trace_start}: {scales}, {cut}"
    if point.workload == "sharegpt":
        lengths = f"ShareGPT lengths from row {point.trace_start} x {point.length_scale:g}"
        return f"{lengths}, {cut}; Poisson arrivals every {every}"
    answers, arrivals = str(_PAPER_OUTPUT_TOKENS), point.workload
    if point.workload == "uniform":
        answers, arrivals = f"{PAPER_SHORTEST} to {point.longest}, drawn uniformly,", "fixed"
    lengths = f"prompts of {PAPER_PROMPT_TOKENS} tokens, answers of {answers} x {point.length_scale:g} tokens"
    return f"{arrivals} arrivals every {every}, {lengths}"
