"""A model with its experts reordered computes the same; dealt out in order, they follow the placement."""

import numpy as np
import pytest
import torch
from moe_models import EXPERTS, FAMILIES, build
from torch import nn

from repro import exflow
from repro.exflow.permute import permute_experts
from repro.exflow.recording import record_routing
from repro.exflow.serving.slots import physical_to_logical

LAYERS, GPUS = 3, 4


def _gpu(groups: int = 1) -> np.ndarray:
    """A random placement; with `groups`, one that deals out whole groups of experts."""
    rng = np.random.default_rng(3)
    size = EXPERTS // groups
    rows = [
        rng.permutation(groups)[:, None] * GPUS // groups + rng.permuted(np.arange(size) * GPUS // EXPERTS)
        for _ in range(LAYERS)
    ]
    return np.array(rows).reshape(LAYERS, EXPERTS)


def _tokens() -> torch.Tensor:
    return torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_the_original(family):
    model, gpu = build(family), _gpu(2 if family == "DeepseekV3" else 1)
    with torch.no_grad(), record_routing(model) as before:
        logits = model(_tokens()).logits
    answer = model.generate(_tokens(), max_new_tokens=8, do_sample=False)
    permute_experts(model, gpu)
    with torch.no_grad(), record_routing(model) as after:
        torch.testing.assert_close(model(_tokens()).logits, logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.generate(_tokens(), max_new_tokens=8, do_sample=False), answer)
    # The expert in place s is on GPU s // 2: tokens meet the GPUs that the placement promised.
    old, new = before.trace().experts, after.trace().experts
    assert not np.array_equal(old, new)
    layer = np.arange(LAYERS)[None, :, None]
    np.testing.assert_array_equal(new // (EXPERTS // GPUS), gpu[layer, old])


def test_the_inverse_order_restores_every_weight():
    model, gpu = build("Mixtral"), _gpu()
    original = {name: value.clone() for name, value in model.state_dict().items()}
    permute_experts(model, gpu)
    assert not all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    permute_experts(model, physical_to_logical(gpu))  # each expert back to a "GPU" of its old number
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())


def test_what_it_refuses():
    uneven = _gpu()
    uneven[1, uneven[1] == 1] = 0
    with pytest.raises(ValueError, match="layer 1 has 4 experts on GPU 0, allowed: 2 on each"):
        permute_experts(build("Olmoe"), uneven)
    with pytest.raises(ValueError, match=r"gpu is float64 \(3, 8\), must be integers \[layers, experts\]"):
        permute_experts(build("Olmoe"), _gpu().astype(float))
    with pytest.raises(ValueError, match="gpu is -1 to 2, allowed: 0 to 2"):
        permute_experts(build("Olmoe"), _gpu() - 1)
    with pytest.raises(ValueError, match="has 3 MoE layers, the placement 2"):
        permute_experts(build("Olmoe"), _gpu()[:2])
    with pytest.raises(ValueError, match="has 8 experts, the placement 4 in layer 0"):
        permute_experts(build("Olmoe"), _gpu()[:, :4])
    deepseek, mixed = build("DeepseekV3"), np.tile(np.arange(EXPERTS) % GPUS, (LAYERS, 1))
    before = {name: value.clone() for name, value in deepseek.state_dict().items()}
    with pytest.raises(ValueError, match="chooses among 2 groups of 4 experts first"):
        permute_experts(deepseek, mixed)
    assert all(torch.equal(value, before[name]) for name, value in deepseek.state_dict().items()), "and changes nothing"


def test_what_it_cannot_reorder_it_refuses_before_it_changes_anything():
    def refused(model: torch.nn.Module, match: str) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=match):
            permute_experts(model, _gpu())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    block = (model := build("Olmoe")).model.layers[2].mlp
    block.gate.register_buffer("turned", torch.zeros(5, EXPERTS))
    refused(model, r"layers\.2\.mlp: .*turned is of shape \(5, 8\)")
    block = (model := build("Olmoe")).model.layers[2].mlp
    del block.gate.weight
    block.gate.weight = torch.zeros(EXPERTS, 32)  # as where a library has put a tensor of its own
    refused(model, r"layers\.2\.mlp: its router has no weight of 8 rows")
    experts = (model := build("GptOss")).model.layers[2].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        delattr(experts, name)  # of a quantised model: the biases stay
    refused(model, r"layers\.2\.mlp: GptOssExperts has no weights of shape \[8, \.\., \.\.\]")


def test_what_is_not_there_or_of_no_expert_is_refused_before_anything_changes():
    """As accelerate offloads a layer (`device_map`), as PEFT adapts stacked experts, and as DeepSeek-V4 routes at first."""

    def refused(model: nn.Module, match: str) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
        with pytest.raises(ValueError, match=match):
            permute_experts(model, _gpu())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)

    (model := build("Olmoe")).model.layers[2].mlp.to("meta")
    refused(model, r"layers\.2\.mlp: OlmoeTopKRouter\.weight is on the meta device")
    (model := build("Olmoe")).model.layers[2].mlp.experts.to("meta")
    refused(model, r"layers\.2\.mlp: OlmoeExperts\.gate_up_proj is on the meta device")
    (model := build("Olmoe")).model.layers[2].mlp.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))
    model.model.layers[2].mlp.experts[5].to("meta")
    refused(model, r"layers\.2\.mlp: 5\.weight is on the meta device")
    (model := build("Olmoe")).model.layers[2].mlp.experts.lora = nn.Parameter(torch.zeros(2 * EXPERTS, 32))
    refused(
        model, r"layers\.2\.mlp: OlmoeExperts\.lora is of shape \(16, 32\); known are tensors with a row for each of"
    )
    (model := build("Olmoe")).model.layers[1].mlp.gate = nn.Linear(32, EXPERTS)
    refused(model, r"layers\.1\.mlp: OlmoeSparseMoeBlock has experts and no known router, found Linear beside them")


def test_deepspeeds_layers_are_refused():
    """Their gate is known to `record_routing`, their lists of experts are not stacked."""
    sharded = pytest.importorskip("deepspeed.moe.sharded_moe")
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
    for block in model.layers:
        block.gate, block.experts = sharded.TopKGate(16, EXPERTS, 1), nn.Module()
        block.experts.deepspeed_experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))
    with pytest.raises(ValueError, match=r"layers\.0: Module\.deepspeed_experts\.0\.weight is of shape \(16, 16\)"):
        permute_experts(model, _gpu())
    with pytest.raises(ValueError, match="has 8 experts, the placement 4 in layer 0"):
        permute_experts(model, _gpu()[:, :4])


def test_contiguous_placement_changes_nothing():
    contiguous = exflow.place(np.ones((LAYERS - 1, EXPERTS, EXPERTS)), GPUS, method="contiguous").gpu
    assert (physical_to_logical(contiguous) == np.arange(EXPERTS)).all()
