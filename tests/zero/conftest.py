"""What the tests of the ZeRO engine share: the small machine, and a model whose sizes no group divides."""

import pytest
import torch
import torch._dynamo  # AdamW imports it on first use: once here, not in every rank of every test

from repro.topology import Topology, frontier


@pytest.fixture(scope="session")
def topology() -> Topology:
    """2 nodes x 2 packages x 2 GCDs."""
    return frontier(2, 2, 2)


class Batches:
    """Sequences that a small model can learn, x -> 3 x + 5 mod 32 from a random start: different for every step, micro-batch
    and rank, and the same in every process."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __call__(self, step: int, rank: int, micro_batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(step * 10_000 + rank * 100 + micro_batch)
        tokens = torch.randint(0, 32, (2, 1), generator=draw)
        for _ in range(self.seq_len):
            tokens = torch.cat((tokens, (3 * tokens[:, -1:] + 5) % 32), dim=1)
        return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(scope="session")
def batches() -> Batches:
    return Batches(8)
