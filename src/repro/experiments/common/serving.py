"""What every served workload reports, and the paper's requests."""

from repro.experiments.base import Bytes, Metrics, Number, Seconds, SecondsPerToken, Tokens, TokensPerSecond

PAPER_PROMPT_TOKENS = 8
PAPER_SHORTEST = 128  # tokens of the shortest answer of random length


class ServedMetrics(Metrics):
    """As `repro.flover.workload.summary` gives them. There is no time per output token where every answer is a single token."""

    total_seconds: Seconds
    tokens_per_s: TokensPerSecond
    output_tokens: Tokens
    iterations: Number
    slot_moves: Number
    moved_bytes: Bytes
    cache_bytes: Bytes
    waste_fraction: Number
    latency_mean: Seconds | None = None
    latency_p50: Seconds | None = None
    latency_p99: Seconds | None = None
    ttft_mean: Seconds | None = None
    ttft_p50: Seconds | None = None
    ttft_p99: Seconds | None = None
    tpot_mean: SecondsPerToken | None = None
    tpot_p50: SecondsPerToken | None = None
    tpot_p99: SecondsPerToken | None = None
