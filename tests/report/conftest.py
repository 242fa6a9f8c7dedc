"""What all tests of figures share."""

import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def closed():
    """No figure is left open."""
    yield
    plt.close("all")
