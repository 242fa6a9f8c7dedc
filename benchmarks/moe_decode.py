"""Expert-parallel decoding on the emulated machine: `python benchmarks/moe_decode.py` (root, Linux; elsewhere unshaped).

2 nodes x 2 packages x 2 ranks, links shaped 16 : 4 : 1, a trained GPT-MoE, prompts of held-out text. Each system runs alone, one after
the other, and the round is repeated, so that ratios are of the same minutes. Columns:

    tokens/s    of all ranks, median over repeats of the median iteration
    x two       throughput over that of two all-to-alls per layer
    routing     ms of an iteration in which hidden vectors travel, or ids, or keys and values; ranks meet before each exchange
    less        of that, than with two all-to-alls (the paper's headline: up to 67 %)
    compute     ms of an iteration in attention, gate and experts
    kB, slow    sent per iteration by all ranks, and over the slowest links
    leave       share of rows that leave their rank on the way to their expert
    same        share of checked requests with the tokens of a single process
"""

import argparse
import statistics

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import experiments
from repro.experiments.moe_decode import MoEDecodePoint

SYSTEMS = {
    "DeepSpeed, two all-to-alls": {"system": "deepspeed"},
    "two all-to-alls": {"system": "two_all_to_alls"},
    "coherent, ids only": {"keys_values": "shared"},
    "coherent, ids only, placed": {"keys_values": "shared", "placement": "affinity"},
    "coherent, K/V sent": {"keys_values": "gathered"},
    "coherent, K/V sent, placed": {"keys_values": "gathered", "placement": "affinity"},
}
BASE = "two all-to-alls"


def measure(point: MoEDecodePoint) -> dict[str, float]:
    """Metrics of one run."""
    return experiments.get("moe_decode").run(point).metrics.model_dump(exclude_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64], help="of the trained models")
    parser.add_argument("--mbit", type=float, nargs="+", default=[25.0], help="inter-node rate per rank, Mbit/s")
    parser.add_argument(
        "--requests", type=int, default=MoEDecodePoint.model_fields["requests"].default, help="per rank"
    )
    parser.add_argument("--new-tokens", type=int, default=MoEDecodePoint.model_fields["new_tokens"].default)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    for mbit in options.mbit:
        for experts in options.experts:
            compare(options, mbit, experts)


def compare(options: argparse.Namespace, mbit: float, experts: int) -> None:
    """Run every system and print one table."""
    same = {"experts": experts, "cluster_mbit_s": mbit, "requests": options.requests, "new_tokens": options.new_tokens}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    rounds = [name for _ in range(options.repeats) for name in SYSTEMS]
    for name in track(rounds, f"{experts} experts, {mbit:g} Mbit/s", transient=True):
        runs[name].append(measure(MoEDecodePoint(**SYSTEMS[name], **same)))

    def median(name: str, metric: str) -> float:
        return statistics.median(run.get(metric, float("nan")) for run in runs[name])

    table = Table(
        *("system", "tokens/s", "x two", "routing (ms)", "less", "compute (ms)", "kB", "slow (kB)", "leave", "same"),
        title=f"{experts} experts on 8 ranks, {16 * mbit:g} : {4 * mbit:g} : {mbit:g} Mbit/s, {options.requests} requests per rank",
    )
    for name in SYSTEMS:
        routing = median(name, "routing_seconds")
        compute = sum(median(name, f"seconds_{part}") for part in ("attention", "gate", "expert"))
        table.add_row(
            name,
            f"{median(name, 'tokens_per_s'):.0f}",
            f"{median(name, 'tokens_per_s') / median(BASE, 'tokens_per_s'):.2f}",
            f"{1e3 * routing:.0f}",
            f"{1 - routing / median(BASE, 'routing_seconds'):.0%}",
            f"{1e3 * compute:.0f}",
            f"{median(name, 'bytes') / 1e3:.0f}",
            f"{median(name, 'bytes_cluster') / 1e3:.0f}",
            f"{median(name, 'leaving_fraction'):.0%}",
            f"{median(name, 'tokens_equal'):.0%}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
