"""GPT-J and GPT-NeoX with random weights: a row's bits are its own, sizes are checked, and parameters counted."""

import copy

import pytest
import torch
from kernel_inputs import decode

from repro.models.gpt_j_neox import GPT_J_6B, GPTJ, GPTJConfig, GPTNeoX, GPTNeoXConfig

SMALL = {"layers": 2, "rotary_dim": 8, "vocab": 101, "context": 96}
WIDE = SMALL | {"width": 512, "heads": 8, "ffn": 2048}
UNEVEN = SMALL | {"width": 60, "heads": 5, "ffn": 100}  # no multiple of what vector instructions take at once
MODELS = {
    "GPT-J": lambda sizes, **options: GPTJ.random(GPTJConfig(**sizes), seed=3, **options),
    "GPT-NeoX": lambda sizes, **options: GPTNeoX.random(GPTNeoXConfig(**sizes), seed=3, **options),
    "sequential": lambda sizes, **options: GPTNeoX.random(
        GPTNeoXConfig(**sizes, parallel_residual=False), seed=3, **options
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("sizes", [WIDE, UNEVEN], ids=["wide", "uneven"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind, sizes, kernels, dtype):
    """Bit for bit: what makes fused answers equal lone ones."""
    model = MODELS[kind](sizes, dtype=dtype, kernels=kernels)
    lengths = torch.tensor([3, 64, 17, 90, 1, 33, 70, 12, 40])
    cache = model.new_cache(9, 96)
    for slot, length in enumerate(lengths.tolist()):
        model.prefill(torch.arange(length), cache, slot)
    tokens, before = torch.arange(11, 20), copy.deepcopy(cache)
    together = decode(model, tokens, lengths, cache, slice(0, 9), 90)
    for count in (1, 2, 3, 5, 8):
        for slot in range(0, 9 - count + 1, count):
            rows = slice(slot, slot + count)
            own = copy.deepcopy(before)
            fewer = decode(model, tokens[rows], lengths[rows], own, rows, int(lengths[rows].max()))
            assert torch.equal(together[rows], fewer)
            assert torch.equal(own.keys[:, rows], cache.keys[:, rows])


def test_random_in_bfloat16_is_random_in_float32_rounded():
    exact, rounded = (MODELS["GPT-J"](UNEVEN, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.embedding.bfloat16(), rounded.embedding)
    logits = [model.prefill(torch.arange(20), model.new_cache(1, 32)).float() for model in (exact, rounded)]
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.999


def test_parameters_of_published_models():
    assert GPT_J_6B.parameters == 6_050_882_784
    neox_20b = GPTNeoXConfig(
        layers=44, width=6144, heads=64, rotary_dim=24, ffn=24576, vocab=50432, activation="gelu_fast"
    )
    assert neox_20b.parameters == 20_554_567_680


@pytest.mark.parametrize("config", [GPTJConfig, GPTNeoXConfig])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 7}, "width 60 must be a multiple of heads 7"),
        ({"rotary_dim": 7}, r"rotary_dim is 7, allowed: even, 2 to 12 \(width / heads\)"),
        ({"rotary_dim": 0}, "rotary_dim is 0, allowed: even, 2 to 12"),
        ({"rotary_dim": 14}, "rotary_dim is 14, allowed: even, 2 to 12"),
        ({"activation": "relu"}, "activation is 'relu', allowed: 'gelu', "),
    ],
)
def test_config_refuses_what_does_not_fit(config, wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**(UNEVEN | wrong))
