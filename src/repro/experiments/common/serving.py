"""What every served workload reports."""

from repro.experiments.base import Bytes, Number, Seconds, SecondsPerToken, Tokens, TokensPerSecond, metrics

WINDOW = "dynamic: from the first request that waits until its batch is formed"  # description of `window_s`

_AVERAGES = ("mean", "p50", "p99")


class ServedMetrics(
    metrics(Seconds | None, *(f"{time}_{of}" for time in ("latency", "ttft") for of in _AVERAGES)),
    metrics(SecondsPerToken | None, *(f"tpot_{of}" for of in _AVERAGES)),
    metrics(Number, "iterations", "slot_moves", "waste_fraction"),
    metrics(Bytes, "moved_bytes", "cache_bytes"),
):
    """As `repro.flover.workload.summary` gives them. Answers of a single token have no time per output token."""

    total_seconds: Seconds
    tokens_per_s: TokensPerSecond
    output_tokens: Tokens
