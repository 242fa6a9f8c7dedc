"""Step times of ZeRO plans and of the libraries on the emulated machine: `python benchmarks/zero.py` (root, Linux).

2 nodes x 2 packages x 2 GCDs, links shaped 16 : 4 : 1. All systems train the same GPT with the same data, seed, AdamW and clipping;
each runs alone, one after the other, and the round is repeated, so that ratios are of the same minutes. Columns:

    step        median over repeats of the median step
    x hier.     how many times longer than the hierarchical plan
    MB          bytes per step on each level, counted by the kernel (headers included), all ranks together
    bound       measured compute, and bytes over the rates of the links: without overlap, no step of this plan is shorter.
                For a library, whose messages are not known, its counted bytes at the rates, one level after the other
    step/bound  what is lost to software on this machine
"""

import argparse
import statistics

from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import experiments
from repro.emulate import netns
from repro.experiments.common.ranks import LEVELS
from repro.experiments.zero_train import ZeroTrain

OURS = ("hierarchical", "best", "zeropp", "zero3", "hierarchical_fp", "mics", "ddp")
LIBRARIES = ("deepspeed_zeropp", "deepspeed_zero3", "fsdp2", "fsdp2_hsdp", "fsdp2_reshard")


def bound(point: ZeroTrain, found: dict[str, float]) -> float:
    """Seconds: predicted for our plans, from counted bytes for a library's."""
    if "predicted_step_seconds" in found:
        return found["predicted_step_seconds"]
    rate = point.cluster_mbit_s * 1e6 / 8 * point.ranks
    rates = {"package": rate * point.package_ratio, "node": rate * point.node_ratio, "cluster": rate}
    return found["compute_seconds"] + sum(found[f"wire_{level}"] / rates[level] for level in LEVELS)


def measure(point: ZeroTrain) -> dict[str, float]:
    """Metrics of one run."""
    return experiments.get("zero_train").run(point).metrics.model_dump(exclude_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4], help="micro-batches per step")
    parser.add_argument("--mbit", type=float, nargs="+", default=[25.0], help="inter-node rate per rank, Mbit/s")
    parser.add_argument("--steps", type=int, default=ZeroTrain.model_fields["steps"].default)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--plans", nargs="+", default=[*OURS, *LIBRARIES], help="names of zero_train's parameter `plan`"
    )
    options = parser.parse_args()
    if reason := netns.unavailable():
        raise SystemExit(f"needs the emulated network: {reason}")
    for mbit in options.mbit:
        for accumulation in options.accumulation:
            compare(options, mbit, accumulation)


def compare(options: argparse.Namespace, mbit: float, accumulation: int) -> None:
    """Run every plan and print one table."""
    points = [
        ZeroTrain(plan=plan, steps=options.steps, accumulation=accumulation, cluster_mbit_s=mbit)
        for plan in options.plans
    ]
    rounds = [point for _ in range(options.repeats) for point in points]
    runs = {point.plan: [] for point in points}
    for point in track(rounds, f"{mbit:g} Mbit/s, {accumulation} micro-batches", transient=True):
        runs[point.plan].append(measure(point))
    step = {plan: statistics.median(run["step_seconds"] for run in found) for plan, found in runs.items()}
    table = Table(
        *("plan", "step (s)", "x hier.", *(f"MB {level}" for level in LEVELS), "bound (s)", "step/bound", "loss"),
        title=f"{16 * mbit:g} : {4 * mbit:g} : {mbit:g} Mbit/s per rank, {accumulation} micro-batches per step",
    )
    for point in points:
        last, limit = runs[point.plan][-1], statistics.median(bound(point, run) for run in runs[point.plan])
        table.add_row(
            point.plan,
            f"{step[point.plan]:.3f}",
            f"{step[point.plan] / step['hierarchical']:.2f}" if "hierarchical" in step else "",
            *(f"{last[f'wire_{level}'] / 1e6:.1f}" for level in LEVELS),
            f"{limit:.3f}",
            f"{step[point.plan] / limit:.2f}",
            f"{last['loss_last']:.4f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
