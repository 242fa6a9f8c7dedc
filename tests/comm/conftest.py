"""What the ranks of these tests share."""

import pytest

from repro import quantize


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compiled or read from disk once here, and not in every rank of every test."""
    quantize.warm_up()
