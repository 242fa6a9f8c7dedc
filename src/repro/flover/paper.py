"""What Flover's paper (arXiv 2305.13484, v1 and v2) says of its runs: the home of every constant that we take.

How it was set up stands here, with a tag for where that was found (`repro.claims.claim.TAG`). What its figures print
stands in data/published/flover.csv, which `printed` reads. The cost of a further request is printed nowhere: it is
derived from both (`queueing.cost`).
"""

import csv
import functools
from dataclasses import dataclass

from repro import paths

REQUESTS = 32  # [IMG] of the largest runs
TOKENS = 512  # [CODE] of a request; v1 Fig. 8 counts as many iterations for one
PROMPT_TOKENS = 8  # [CODE] of them
SHORTEST = 128  # [CODE] tokens of the shortest answer of random length
INTERVAL_S = 0.5  # [INF] between requests in v2, which names none: the printed totals are near T1 + 0.5 (n - 1) s


@dataclass(frozen=True)
class Model:
    """`name` in the figures and [IMG] the `gpus` of Fig. 4's caption."""

    name: str
    gpus: int

    @property
    def single_request_s(self) -> float:
        """[IMG] T1, a request alone: Fig. 4(a) at one request."""
        return printed("FL-F4a", f"{self.name}, Flover")[1]


MODELS = {
    "gpt-j-6b": Model("GPT-J 6B", 1),
    "llama-13b": Model("LLaMA-13B", 1),
    "llama-33b": Model("LLaMA-33B", 2),
    "llama-65b": Model("LLaMA-65B", 4),
}
V1_SHUFFLE_INTERVAL_S = 0.02  # [IMG] of v1 Fig. 9(a)
V1_INTERVALS_MS = (500, 2500, 5000)  # [IMG] of v1 Fig. 7, which serves GPT-J


def v1_seconds(system: str, interval_ms: int, rows: int = 1) -> dict[float | None, float]:
    """[IMG] Of v1 Fig. 7, by the number of requests, each of so many rows (there: its batch)."""
    return printed("FL-F7", f"{system}, {interval_ms} ms, batch {rows}")


def v1_single_request_s(system: str = "Flover", rows: int = 1) -> float:
    """[D] T1 of GPT-J in v1, or with "FasterTransformer": the mean of the three that Fig. 7 prints for so many rows."""
    alone = [v1_seconds(system, each, rows)[1] for each in V1_INTERVALS_MS]
    return sum(alone) / len(alone)


def v1_instance_pace_s(rows: int = 1) -> float:
    """[D] Seconds between two answers of FasterTransformer's instances in v1: Fig. 7's slope at 500 ms."""
    seconds = v1_seconds("FasterTransformer", V1_INTERVALS_MS[0], rows)
    return (seconds[8] - seconds[1]) / 7


@functools.cache
def printed(row: str, label: str) -> dict[float | None, float]:
    """The numbers of one curve of a figure by their place on its axis (None: it has no axis).

    `row`: the id of its claims without their letters. FileNotFoundError without data/; ValueError lists the known
    labels.
    """
    with paths.data("published/flover.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["claim"].split(".")[0] == row]
    found = {float(line["x"]) if line["x"] else None: float(line["value"]) for line in lines if line["label"] == label}
    if not found:
        known = ", ".join(dict.fromkeys(line["label"] for line in lines)) or "none"
        raise ValueError(f"data/published/flover.csv: found no {label!r} of {row}; known: {known}")
    return found
