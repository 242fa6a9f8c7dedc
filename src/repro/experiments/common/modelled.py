"""The GPT models of hierarchical ZeRO++, whose steps are predicted."""

from typing import Literal

from repro.models.gpt import GPTConfig

# Layers, hidden size, heads. 20B: GPT-NeoX-20B; 10B: the same depth, narrower.
_SIZES = {"gpt-20b": (44, 6144, 64), "gpt-10b": (44, 4352, 32)}


def paper_gpt(name: Literal["gpt-20b", "gpt-10b"], seq_len: int) -> GPTConfig:
    """Sizes of a model that is trained with recomputation."""
    return GPTConfig(*_SIZES[name], seq_len, vocab=50432, checkpointing=True)
