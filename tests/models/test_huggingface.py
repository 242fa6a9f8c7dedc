"""Logits of a model that was read from a transformers folder are those of transformers."""

import json

import pytest
import torch
from kernel_inputs import decode
from safetensors import safe_open

from repro.models.huggingface import read_huggingface, stop_tokens
from repro.models.llama import Llama

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def saved(folder, shard="1GB", **options):
    """A random model, saved by transformers."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | options))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [128001, 128009]}, {"eos_token_id": 2}, {128001, 128009}),
        ({"temperature": 0.6}, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": [3]}, {3}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_tokens_that_end_an_answer(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize("found", ["</s>", [2, "</s>"], -1, True, 2.0])
def test_what_ends_no_answer_is_refused(tmp_path, found):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id is .*, allowed: a token or a list of tokens"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"num_key_value_heads": 6, "rms_norm_eps": 1e-3},
        {"shard": "20KB"},
    ],
)
def test_logits_are_those_of_transformers(tmp_path, options):
    model = saved(tmp_path, **options)
    tokens = torch.randint(0, 61, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    ours = Llama(*read_huggingface(tmp_path))
    cache = ours.new_cache(1, 64)
    found = [ours.prefill(tokens[:20], cache)]
    found += [decode(ours, tokens[n : n + 1], torch.tensor([n]), cache, slice(0, 1), n)[0] for n in range(20, 30)]
    torch.testing.assert_close(torch.stack(found), expected[19:], atol=2e-5, rtol=1e-4)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "shard" not in options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, allowed: False"),
        ({"num_hidden_layers": 2}, r"unknown weight 'model\.layers\.2\.\S+', allowed: those of Llama with 2 layers"),
    ],
)
def test_a_model_that_we_would_get_wrong_is_refused(tmp_path, changes, message):
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as error:
        read_huggingface(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_output_head_is_tied_only_if_the_file_says_so(tmp_path):
    """A lost head is an error, not the embedding."""
    saved(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "config.json"
    assert "output.weight" not in read_huggingface(tmp_path)[1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"no weights for output\.weight"):
        read_huggingface(tmp_path)
    saved(tmp_path)
    assert "output.weight" in read_huggingface(tmp_path)[1]


@pytest.mark.parametrize("like_the_embedding", [False, True])
def test_a_head_that_a_tied_model_holds_is_used_where_it_differs(tmp_path, like_the_embedding):
    """As transformers reads it: what was trained apart from the embedding is the head, a copy of it is not kept."""
    model, path = saved(tmp_path), tmp_path / "config.json"
    if like_the_embedding:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
        model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(file.keys())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    config, weights = read_huggingface(tmp_path)
    assert ("output.weight" in weights) != like_the_embedding
    tokens = torch.arange(20)
    with torch.no_grad():
        expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path)(tokens[None]).logits[0, -1]
    ours = Llama(config, weights)
    torch.testing.assert_close(ours.prefill(tokens, ours.new_cache(1, 64)), expected, atol=2e-5, rtol=1e-4)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "vocab_size": 9}')
    with pytest.raises(ValueError, match="no intermediate_size, max_position_embeddings, num_attention_heads"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        read_huggingface(tmp_path)
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        read_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        read_huggingface(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: no weight_map"):
        read_huggingface(tmp_path)
