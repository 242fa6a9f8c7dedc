"""Routing recorded from live models is what their routers chose, and nothing of the model changes."""

from typing import Any

import numpy as np
import pytest
import torch
from moe_models import EXPERTS, FAMILIES, TOP, build
from torch import nn

from repro import exflow
from repro.exflow.recording import record_routing


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request) -> nn.Module:
    return build(request.param)


def _chosen(model: nn.Module, tokens: torch.Tensor, **inputs: Any) -> list[np.ndarray]:
    """[tokens, k] sorted ids of each router, caught by hand."""
    caught: list[np.ndarray] = []
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    handles = [m.register_forward_hook(lambda m, a, out: caught.append(np.sort(out[2].numpy()))) for m in routers]
    with torch.no_grad():
        model(tokens, **inputs)
    for handle in handles:
        handle.remove()
    return caught


def test_experts_are_those_that_the_routers_chose(model):
    tokens = _tokens(2, 7)
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    trace = recording.trace()
    assert (trace.experts.shape, trace.num_experts, trace.k) == ((14, 3, TOP), EXPERTS, TOP)
    for layer, expected in enumerate(_chosen(model, tokens)):
        np.testing.assert_array_equal(np.sort(trace.experts[:, layer]), expected)
    assert (np.diff(trace.weights.astype(np.float32), axis=2) <= 0).all(), "the most weighted comes first"
    assert trace.sequences.tolist() == [0] * 7 + [1] * 7
    assert len(np.unique(trace.experts)) > TOP, "the test must see several experts"


def test_training_is_recorded(model):
    tokens = _tokens(2, 7)
    expected = _chosen(model, tokens)
    model.train()
    try:
        with record_routing(model) as recording:
            model(tokens, labels=tokens).loss.backward()
    finally:
        model.eval()
        model.zero_grad()
    for layer, chosen in enumerate(expected):
        np.testing.assert_array_equal(np.sort(recording.trace().experts[:, layer]), chosen)


def test_outputs_do_not_change_and_hooks_are_gone_afterwards(model):
    tokens = _tokens(1, 5)
    with torch.no_grad():
        before = model(tokens).logits
        with record_routing(model) as recording:
            inside = model(tokens).logits
        model(tokens)
    assert torch.equal(before, inside)
    assert recording.trace().tokens == 5
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_padding_is_left_out_and_decoded_tokens_join_their_sequences(model):
    """Left padding; generation then goes on with cached keys and values, a token per row at a time."""
    tokens = _tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    with record_routing(model) as recording:
        model.generate(tokens, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        model.generate(tokens[:1, :3], max_new_tokens=2, min_new_tokens=2, do_sample=False)
    with torch.no_grad(), record_routing(model) as padded:
        model(tokens, attention_mask=mask)
    for layer, chosen in enumerate(_chosen(model, tokens, attention_mask=mask)):
        found = np.sort(padded.trace().experts[:, layer])
        np.testing.assert_array_equal(found, chosen[mask.flatten().bool().numpy()])
    lengths = np.bincount(recording.trace().sequences)
    # The last generated token is never an input.
    assert lengths.tolist() == [6 + 3, 4 + 3, 3 + 1]


@pytest.mark.parametrize("several", [False, True])
def test_a_row_that_has_ended_is_left_out(model, several, monkeypatch):
    """What `generate` feeds it until the last row ends, and the end itself: each row as it is by itself."""
    tokens = _tokens(4, 6)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    answers = model.generate(tokens, max_new_tokens=12, do_sample=False)[:, 6:].tolist()
    # An end that one row comes to early, and another late or never.
    ends = {end: [[*row, end].index(end) for row in answers] for row in answers for end in row[:8]}
    end = max(ends, key=lambda each: max(ends[each]) - min(ends[each]))
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, 99] if several else end)
    with record_routing(model) as together:
        model.generate(tokens, max_new_tokens=12, do_sample=False)
    with record_routing(model) as alone:
        for row in tokens:
            model.generate(row[None], max_new_tokens=12, do_sample=False)
    found, expected = together.trace(), alone.trace()
    assert found.sequences.tolist() == expected.sequences.tolist()
    np.testing.assert_array_equal(np.sort(found.experts), np.sort(expected.experts))
    # The answer's last token, its end or not, is never an input.
    assert np.bincount(found.sequences).tolist() == [6 + min(at, 11) for at in ends[end]]
    assert len(set(ends[end])) > 1, "the test needs answers of unequal length"


def test_an_end_inside_a_prompt_ends_nothing(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", 5)
    tokens = _tokens(2, 6)
    tokens[:, 2] = tokens[0, -1] = 5
    with torch.no_grad(), record_routing(model) as recording:
        cache = model(tokens, use_cache=True).past_key_values
        model(tokens, past_key_values=cache)
    assert np.bincount(recording.trace().sequences).tolist() == [12, 12]


def test_padding_is_known_by_position_too_and_other_masks_are_refused(model):
    tokens = _tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens, mask)
        model(attention_mask=mask, input_ids=tokens)
    assert np.bincount(recording.trace().sequences).tolist() == [6, 4, 6, 4]
    with (
        record_routing(model) as recording,
        pytest.raises(ValueError, match=r"attention_mask is (of shape|a dict).*padding cannot be told from it"),
    ):
        model.generate(tokens, attention_mask=mask, max_new_tokens=2, cache_implementation="static")
    assert not recording._chunks


def test_a_saved_trace_is_read_back(model, tmp_path):
    with torch.no_grad(), record_routing(model) as recording:
        model(_tokens(3, 4))
    recording.save(tmp_path / "routing.npz")
    found, expected = exflow.load_trace(tmp_path / "routing.npz"), recording.trace()
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_array_equal(found.weights, expected.weights)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    assert found.num_experts == EXPERTS
    with pytest.raises(ValueError, match=r"written as \.npz"):
        recording.save(tmp_path / "routing.npy")


class _Gates(nn.Module):
    """Two layers of DeepSpeed's gate, as `deepspeed.moe.MoE` has them, without experts."""

    def __init__(self, k: int) -> None:
        super().__init__()
        gate = pytest.importorskip("deepspeed.moe.sharded_moe").TopKGate
        self.gates = nn.ModuleList(gate(16, EXPERTS, k, eval_capacity_factor=float(EXPERTS)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [gate(x.flatten(0, 1))[1] for gate in self.gates]


@pytest.mark.parametrize("k", [1, 2])
def test_deepspeeds_gate_is_recorded(k):
    """Against what it makes of its choice: combining weights [tokens, experts, capacity]."""
    torch.manual_seed(0)
    model = _Gates(k).eval()
    with torch.no_grad(), record_routing(model) as recording:
        combined = model(torch.randn(2, 6, 16))
    trace = recording.trace()
    assert trace.experts.shape == (12, 2, k)
    for layer, weights in enumerate(combined):
        chosen = weights.sum(dim=2).topk(k, dim=1).indices
        np.testing.assert_array_equal(trace.experts[:, layer], chosen.numpy())


class _Own(nn.Module):
    """Gates of one's own: plain layers, whose largest two logits are the choice."""

    def __init__(self, gates: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(16, EXPERTS, bias=False) for _ in range(gates))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [gate(x.flatten(0, 1)) for gate in self.gates]


def test_routers_of_ones_own_are_recorded():
    torch.manual_seed(0)
    model = _Own()

    def choices(router: nn.Module, args: tuple, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = logits.softmax(-1).topk(2)
        return experts, weights

    with torch.no_grad(), record_routing(model, list(model.gates), choices) as recording:
        logits = model(torch.randn(2, 6, 16))
    trace = recording.trace()
    assert (trace.experts.shape, trace.num_experts) == ((12, 3, 2), EXPERTS)
    for layer, of_layer in enumerate(logits):
        np.testing.assert_array_equal(trace.experts[:, layer], of_layer.topk(2).indices.numpy())


def test_routers_of_ones_own_that_say_too_little_are_refused():
    model = _Own()
    with (
        pytest.raises(ValueError, match=r"Linear gave Tensor, not \(logits, weights, experts\): give `choices`"),
        record_routing(model, list(model.gates)),
    ):
        model(torch.randn(2, 6, 16))
    with pytest.raises(ValueError, match="ReLU has neither `num_experts`"), record_routing(model, [nn.ReLU()] * 2):
        pass


@pytest.mark.parametrize(("wrong", "words"), [(EXPERTS, "chose experts 0 to 8"), (-1, "chose experts -1 to 7")])
def test_an_expert_that_the_layer_does_not_have_is_refused(wrong, words):
    """As of a router with experts that compute nothing (LongCat-Flash): cast to 8 bits, 256 would be expert 0."""
    ids = torch.arange(EXPERTS).repeat(2)[:12, None].clone()

    def choices(router: nn.Module, args: tuple, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = ids.clone()
        if router is model.gates[1]:
            found[-1] = wrong
        return found, torch.ones(12, 1)

    model = _Own()
    with (
        record_routing(model, list(model.gates), choices),
        pytest.raises(ValueError, match=f"Linear of layer 1 {words}, allowed: 0 to 7"),
    ):
        model(torch.randn(2, 6, 16))


def hashed() -> nn.Module:
    """A model whose first two layers choose by a table, as DeepSeek-V4's."""

    class HashRouter(nn.Module):
        pass

    model = build("Olmoe")
    for layer in model.model.layers[:2]:
        layer.mlp.gate = HashRouter()
    return model


def test_layers_without_a_known_router_are_not_left_out():
    words = r"layers\.0\.mlp: OlmoeSparseMoeBlock has experts and no known router, found HashRouter beside them, as in 2 of 3"
    with pytest.raises(ValueError, match=words), record_routing(hashed()):
        pass


def test_what_it_refuses():
    with (
        pytest.raises(ValueError, match="Linear has 0 routers that could be recorded, need at least 2"),
        record_routing(nn.Linear(2, 2)),
    ):
        pass
    with record_routing(build("Mixtral")) as recording:
        pass
    with pytest.raises(RuntimeError, match="no token was recorded"):
        recording.trace()
