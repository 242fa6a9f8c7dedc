"""Training in bfloat16 on processors without instructions for it."""

import copy

import pytest
import torch
from torch import nn

from repro.models import wide_linear
from repro.models.gpt import GPT, GPTConfig
from repro.models.wide_linear import WideLinear, widen


@pytest.fixture
def without_bfloat16(monkeypatch):
    monkeypatch.setattr(wide_linear, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (0, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_products_and_gradients_are_those_of_float32_rounded_once(shape, biased):
    torch.manual_seed(0)
    layer = WideLinear(24, 10, bias=biased).bfloat16()
    exact = nn.Linear(24, 10, bias=biased).double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(*shape, 24).bfloat16().requires_grad_()
    same, gradient = x.detach().double().requires_grad_(), torch.randn(*shape, 10).bfloat16()
    y, expected = layer(x), exact(same)
    y.backward(gradient)
    expected.backward(gradient.double())
    parts = zip((x, *layer.parameters()), (same, *exact.parameters()), strict=True)
    for ours, theirs in [(y, expected), *((one.grad, other.grad) for one, other in parts)]:
        assert ours.dtype is torch.bfloat16
        # Half of the last of 8 bits, and what sums of 24 numbers lose in float32.
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-8, atol=1e-5)


def test_a_backward_keeps_nothing_but_inputs_and_the_weight_itself():
    """Else the weights that ZeRO frees after the forward would stay."""
    layer, x, kept = WideLinear(24, 10).bfloat16(), torch.randn(3, 24).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), layer.weight.data_ptr()}


def test_what_needs_no_gradient_gets_none():
    layer = WideLinear(24, 10).bfloat16()
    layer.weight.requires_grad_(False)
    layer(torch.randn(3, 24).bfloat16()).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


def test_a_model_trains_as_torch_trains_it(without_bfloat16):
    torch.manual_seed(0)
    theirs = GPT(GPTConfig(layers=2, hidden=32, heads=2, seq_len=16, checkpointing=True)).bfloat16()
    ours = copy.deepcopy(theirs)
    widen(ours)
    assert {type(module) for module in ours.modules() if isinstance(module, nn.Linear)} == {WideLinear}
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    tokens, targets = torch.randint(256, (2, 4, 16))
    losses = [model(tokens, targets) for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    # Other orders of the sums, each rounded to 8 bits, through two blocks; a wrong gradient is off by its own size.
    torch.testing.assert_close(*losses, atol=0.02, rtol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad.float() - other.grad.float()).norm() <= 0.05 * other.grad.float().norm() + 1e-6


def test_float32_is_multiplied_as_torch_does(without_bfloat16):
    layer, x = nn.Linear(24, 10), torch.randn(3, 24)
    y = layer(x)
    widen(layer)
    assert isinstance(layer, WideLinear) and torch.equal(layer(x), y)


def test_processors_that_multiply_bfloat16_keep_the_layers_of_torch(monkeypatch):
    monkeypatch.setattr(wide_linear, "multiplies_bfloat16", lambda: True)
    layer = nn.Linear(24, 10)
    widen(layer)
    assert type(layer) is nn.Linear
