"""What every served workload reports (`workload.summary`), and the units of it."""

SUMMARY = frozenset(
    [
        "total_seconds",
        "tokens_per_s",
        "latency_mean",
        "latency_p50",
        "latency_p99",
        "ttft_mean",
        "ttft_p50",
        "ttft_p99",
        "tpot_mean",
        "tpot_p50",
        "tpot_p99",
        "output_tokens",
        "iterations",
        "waste_fraction",
        "slot_moves",
        "moved_bytes",
        "cache_bytes",
    ]
)
_UNITS = {"tokens_per_s": "tokens/s", "output_tokens": "tokens"}
_SAMPLE_UNITS = {"latency": "s", "ttft": "s", "tpot": "s/token", "predicted": "s"}


def unit(name: str) -> str:
    """Unit of a metric by its name; `1` for counts and shares."""
    if name.startswith("error_"):
        return "1"
    if name.endswith("_seconds"):
        return "s"
    if name.endswith("_bytes"):
        return "bytes"
    return _UNITS.get(name) or _SAMPLE_UNITS.get(name.split("_")[0], "1")
