"""Requests to serve, and what to report of serving them. Lengths come from a real trace (Azure, ShareGPT), scaled by
stated factors, or are drawn as in the paper's experiments; prompts are cut from real text or drawn at random."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from repro.flover.arrivals import RequestShape, fixed_arrivals
from repro.flover.report import ServingReport
from repro.flover.request import Request


def azure(
    path: Path,
    count: int,
    start: int = 0,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_prompt_tokens: int = 1024,
    max_output_tokens: int = 1024,
) -> list[RequestShape]:
    """`count` successive requests of the Azure LLM trace of 2023 from row `start`. Gaps are multiplied by `time_scale`,
    lengths by `length_scale`, rounded, then clipped to 1 … the given maximum. ValueError when it has too few rows."""
    table = _rows(path, count, start)
    times = pd.to_datetime(table.TIMESTAMP)
    arrivals = (times - times.min()).dt.total_seconds() * time_scale
    prompts = _lengths(table.ContextTokens, length_scale, max_prompt_tokens)
    outputs = _lengths(table.GeneratedTokens, length_scale, max_output_tokens)
    return [RequestShape(*row) for row in zip(arrivals.tolist(), prompts, outputs, strict=True)]


def sharegpt(
    path: Path,
    arrivals: Sequence[float],
    start: int = 0,
    length_scale: float = 1.0,
    max_prompt_tokens: int = 4096,
    max_output_tokens: int = 1024,
) -> list[RequestShape]:
    """Successive requests of the ShareGPT lengths from row `start`, one for each of `arrivals` (seconds, ascending);
    the file's own are not observed but generated. Lengths are scaled and clipped, too few rows refused, as by `azure`.
    """
    table = _rows(path, len(arrivals), start)
    prompts = _lengths(table.input_toks, length_scale, max_prompt_tokens)
    outputs = _lengths(table.output_toks, length_scale, max_output_tokens)
    return [RequestShape(*row) for row in zip(map(float, arrivals), prompts, outputs, strict=True)]


def _rows(path: Path, count: int, start: int) -> pd.DataFrame:
    table = pd.read_csv(path, encoding="utf-8-sig", skiprows=range(1, start + 1), nrows=count)
    if len(table) < count:
        raise ValueError(f"{path.name} has {len(table)} requests from row {start}, asked for {count}")
    return table


def _lengths(tokens: pd.Series, scale: float, most: int) -> list[int]:
    return (tokens * scale).round().clip(1, most).astype(int).tolist()


def uniform(
    count: int, interval_s: float, prompt_tokens: int, shortest: int, longest: int, seed: int
) -> list[RequestShape]:
    """One request every `interval_s`; answers of `shortest` to `longest` tokens, drawn uniformly as in the paper."""
    drawn = np.random.default_rng(seed).integers(shortest, longest, count, endpoint=True).tolist()
    arrivals = fixed_arrivals(count, interval_s).tolist()
    return [RequestShape(arrival, prompt_tokens, tokens) for arrival, tokens in zip(arrivals, drawn, strict=True)]


def prompts_from_text(shapes: Sequence[RequestShape], token_ids: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Passages of the text `token_ids` from seeded positions, as long as each shape asks. ValueError when the text is
    shorter than the longest prompt."""
    generator = np.random.default_rng(seed)
    longest = max((shape.prompt_tokens for shape in shapes), default=0)
    if len(token_ids) < longest:
        raise ValueError(f"the text has {len(token_ids)} tokens, the longest prompt needs {longest}")
    starts = generator.integers(0, len(token_ids) - longest + 1, len(shapes)).tolist()
    return [tuple(token_ids[at : at + s.prompt_tokens]) for at, s in zip(starts, shapes, strict=True)]


def random_prompts(shapes: Sequence[RequestShape], vocab: int, seed: int) -> list[tuple[int, ...]]:
    """Token ids drawn uniformly: for models with random weights, which have no text."""
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(0, vocab, shape.prompt_tokens).tolist()) for shape in shapes]


def requests(shapes: Sequence[RequestShape], prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Requests numbered in order; they ignore the end-of-sequence token, so that every engine decodes equally much."""
    return [
        Request(index, prompt, shape.output_tokens, shape.arrival_s)
        for index, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True))
    ]


def summary(report: ServingReport) -> dict[str, float]:
    """Serving metrics: seconds, tokens/s, mean, median and 99th percentile of latency, TTFT and TPOT over the requests
    that were answered to their end, and waste, the share of decoded rows that gave no token."""
    tokens = sum(len(generation.tokens) for generation in report.generations)
    answered = [g for g in report.generations if g.finish_reason not in ("cancelled", "deadline", "error")]
    samples = {
        "latency": [generation.latency_s for generation in answered],
        "ttft": [g.ttft_s for g in answered if g.ttft_s is not None],
        "tpot": [g.tpot_s for g in answered if g.tpot_s is not None],
    }
    told = ("total_seconds", "iterations", "slot_moves", "moved_bytes", "cache_bytes")
    result = {name: float(getattr(report, name)) for name in told} | {
        "output_tokens": float(tokens),
        "tokens_per_s": tokens / report.total_seconds if tokens else 0.0,
        "waste_fraction": report.dead_rows / report.rows if report.rows else 0.0,
    }
    for name, sample in samples.items():
        if sample:  # no TPOT when every answer is a single token
            result[f"{name}_mean"] = float(np.mean(sample))
            result |= {f"{name}_p{q}": float(np.percentile(sample, q)) for q in (50, 99)}
    return result
