"""The small GPT: sizes, causality, the loss it starts with and that it learns."""

import math

import pytest
import torch

from repro.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, hidden=32, heads=4, seq_len=16)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("layers", "hidden", "vocab"), [(1, 8, 11), (3, 32, 256)])
def test_parameter_count_is_predicted(layers, hidden, vocab, tied):
    config = GPTConfig(layers=layers, hidden=hidden, heads=2, seq_len=7, vocab=vocab, tied=tied)
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.parameters


def test_a_token_sees_nothing_after_it():
    torch.manual_seed(0)
    model, tokens = GPT(SMALL).eval(), torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert (a[:, 9:] - b[:, 9:]).abs().amax(dim=(0, 2)).min() > 0


def test_order_matters():
    torch.manual_seed(0)
    model, tokens = GPT(SMALL), torch.randint(0, 256, (1, 16))
    swapped = tokens.clone()
    swapped[0, [0, 1]] = tokens[0, [1, 0]]
    assert (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-5


def test_starts_near_a_uniform_guess_and_learns_a_batch():
    torch.manual_seed(0)
    model, tokens = GPT(SMALL), torch.randint(0, 256, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 0.5


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    torch.manual_seed(0)
    model, tokens = GPT(SMALL).bfloat16(), torch.randint(0, 256, (2, 9))
    logits = model(tokens[:, :-1]).float()
    expected = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="hidden 30 is not divisible by 4 heads"):
        GPTConfig(hidden=30, heads=4)
    with pytest.raises(ValueError, match="at least 1"):
        GPTConfig(layers=0)
    with pytest.raises(ValueError, match="sequence of 17 tokens, the model has 16 positions"):
        GPT(SMALL)(torch.zeros(1, 17, dtype=torch.int64))
