"""A model small enough that hundreds of generations take a second."""

import pytest

from repro.models.llama import Llama, LlamaConfig


@pytest.fixture(scope="session")
def model() -> Llama:
    return Llama.random(LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=256), seed=7)
