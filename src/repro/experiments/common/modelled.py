"""What experiments share that predict the papers' sizes: the GPT models of hierarchical ZeRO++, and bands."""

from collections.abc import Mapping
from typing import Literal

from repro.models.gpt import GPTConfig
from repro.scaling.network import Value
from repro.scaling.whatif import banded

# Layers, hidden size, heads. 20B: GPT-NeoX-20B; 10B: the same depth, narrower.
_SIZES = {"gpt-20b": (44, 6144, 64), "gpt-10b": (44, 4352, 32)}


def paper_gpt(name: Literal["gpt-20b", "gpt-10b"], seq_len: int) -> GPTConfig:
    """Sizes of a model that is trained with recomputation."""
    return GPTConfig(*_SIZES[name], seq_len, vocab=50432, checkpointing=True)


def bands_of(values: Mapping[str, Value]) -> dict[str, float]:
    """`name_low`, `name` and `name_high` of every value, as `repro.experiments.base.bands` declares them."""
    return {key: end for name, value in values.items() for key, end in banded(name, value).items()}
