"""GPT-J and GPT-NeoX that were read from a transformers folder: logits are those of transformers, and what we would get
wrong is refused."""

import json

import pytest
import torch
from kernel_inputs import decode
from saved_models import save

from repro.models.gpt_j_neox import GPTJ, GPTNeoX
from repro.models.huggingface import load_huggingface, read_huggingface

transformers = pytest.importorskip("transformers")
SIZES = {
    "gptj": {"n_embd": 48, "n_head": 4, "n_layer": 3, "rotary_dim": 6, "vocab_size": 61, "n_positions": 64},
    "gpt_neox": {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 100,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}
CLASSES = {
    "gptj": (transformers.GPTJConfig, transformers.GPTJForCausalLM, GPTJ),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, GPTNeoX),
}


def saved(folder, kind, shard="1GB", **options):
    config, model, _ = CLASSES[kind]
    return save(model(config(**(SIZES[kind] | options))).eval(), folder, shard)


def change(folder, **changes):
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


TOKENS = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1))


def expected_logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def found_logits(ours, cache=None):
    """Of the last 16 tokens: of a prompt in two chunks, then token by token over the same cache."""
    cache = cache or ours.new_cache(2, 64)
    found = [ours.prefill(TOKENS[:10], cache, 1), ours.prefill(TOKENS[10:25], cache, 1, start=10)]
    for n in range(25, 40):
        found.append(decode(ours, TOKENS[n : n + 1], torch.tensor([n]), cache, slice(1, 2), n)[0])
    return torch.stack(found[1:])


OPTIONS = [
    ("gptj", {}),
    ("gptj", {"tie_word_embeddings": True, "n_inner": 72, "layer_norm_epsilon": 1e-3}),
    ("gptj", {"rotary_dim": 12, "activation_function": "gelu", "shard": "20KB"}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-3}),
    ("gpt_neox", {"tie_word_embeddings": True, "attention_bias": False, "shard": "20KB"}),
    ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_logits_are_those_of_transformers(tmp_path, kind, options, kernels):
    expected = expected_logits(saved(tmp_path, kind, **options))
    ours = load_huggingface(tmp_path, kernels=kernels)
    assert type(ours) is CLASSES[kind][2]
    torch.testing.assert_close(found_logits(ours), expected[24:], atol=1e-4, rtol=1e-4)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "shard" not in options


@pytest.mark.parametrize("kind", CLASSES)
def test_a_head_that_a_tied_model_holds_is_used_where_it_differs(tmp_path, kind):
    saved(tmp_path, kind)
    change(tmp_path, tie_word_embeddings=True)
    expected = expected_logits(CLASSES[kind][1].from_pretrained(tmp_path))
    torch.testing.assert_close(found_logits(load_huggingface(tmp_path)), expected[24:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", CLASSES)
def test_in_blocks_of_a_pool(tmp_path, kind, kernels):
    expected = expected_logits(saved(tmp_path, kind))
    ours = load_huggingface(tmp_path, kernels=kernels)
    cache = ours.new_paged_cache(2, 64, 12, 8)
    cache.reserve(0, 20)
    cache.reserve(1, 64)
    torch.testing.assert_close(found_logits(ours, cache), expected[24:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", CLASSES)
def test_bfloat16_is_near(tmp_path, kind, kernels):
    expected = expected_logits(saved(tmp_path, kind))[24:]
    found = found_logits(load_huggingface(tmp_path, dtype=torch.bfloat16, kernels=kernels)).float()
    assert torch.nn.functional.cosine_similarity(found, expected, dim=1).min() > 0.999


def test_a_folder_of_an_older_version(tmp_path):
    """Its own keys for rotary positions, another name of the head, and buffers among the weights."""
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "gpt_neox")
    change(tmp_path, rope_parameters=None, rotary_pct=0.67, rotary_emb_base=500)
    weights = {
        name.replace("lm_head", "embed_out"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    for i in range(3):
        weights[f"gpt_neox.layers.{i}.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
        weights[f"gpt_neox.layers.{i}.attention.masked_bias"] = torch.tensor(-1e9)
        weights[f"gpt_neox.layers.{i}.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = expected_logits(transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path))
    ours = load_huggingface(tmp_path)
    assert (ours.config.rotary_dim, ours.config.rope_base) == (8, 500.0)
    torch.testing.assert_close(found_logits(ours), expected[24:], atol=1e-4, rtol=1e-4)


REFUSED = [
    ("gptj", {"model_type": "gpt2"}, "model_type is 'gpt2', allowed: 'llama', .*'gptj', 'gpt_neox'"),
    ("gptj", {"activation_function": "relu"}, "activation_function is 'relu', allowed: 'gelu', .*'gelu_new'"),
    ("gptj", {"rotary_dim": None}, "no rotary_dim"),
    ("gptj", {"n_inner": 100}, r"mlp\.\S+ has shape .* by config\.json: "),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', allowed: 'gelu', "),
    ("gpt_neox", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope', allowed: 'default', "),
    (
        "gpt_neox",
        {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
        "rope_type is 'linear', but there is no",
    ),
    ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.1}, "rotary_dim is 1, allowed: even, 2 to 12"),
    ("gpt_neox", {"use_parallel_residual": "no"}, "use_parallel_residual is 'no', allowed: True, False"),
    ("gpt_neox", {"attention_bias": False}, r"query_key_value\.bias has shape .*: no such weight|dense\.bias"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_a_model_that_we_would_get_wrong_is_refused(tmp_path, kind, changes, message):
    saved(tmp_path, kind)
    change(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        read_huggingface(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", CLASSES)
def test_unknown_weights_are_named(tmp_path, kind):
    from safetensors.torch import load_file, save_file

    saved(tmp_path, kind)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"lm_head.scale": torch.ones(1)}, path)
    model = CLASSES[kind][2].__name__
    message = rf"model\.safetensors: unknown weight 'lm_head\.scale', allowed: those of {model} with 3 layers"
    with pytest.raises(ValueError, match=message):
        load_huggingface(tmp_path)
