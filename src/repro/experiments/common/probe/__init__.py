"""Probe of a network and of the processors beside it: what the ranks measure, and what is fitted to it."""

from repro.experiments.base import BytesPerSecond, Metrics, Number, PerSecond, Seconds


class ProbeMetrics(Metrics):
    """Errors on sizes that were not fitted; values per second of a rank while all ranks share the processors; fitted parameters,
    those of a level only where it has more than one member."""

    error_median: Number
    error_p90: Number
    quantize_values_per_s: PerSecond
    update_values_per_s: PerSecond
    overhead_s: Seconds | None = None
    reduce_bytes_per_s: BytesPerSecond | None = None
    host_bytes_per_s: BytesPerSecond | None = None
    package_latency_s: Seconds | None = None
    package_bytes_per_s: BytesPerSecond | None = None
    node_latency_s: Seconds | None = None
    node_bytes_per_s: BytesPerSecond | None = None
    cluster_latency_s: Seconds | None = None
    cluster_bytes_per_s: BytesPerSecond | None = None
