"""What the tests of the ZeRO engine share: the small machine."""

import pytest
import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in every rank of every test)

from repro import quantize
from repro.topology import Topology, frontier


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compiled or read from disk once here, and not in every rank of every test."""
    quantize.warm_up()


@pytest.fixture(scope="session")
def topology() -> Topology:
    """2 nodes x 2 packages x 2 GCDs."""
    return frontier(2, 2, 2)
