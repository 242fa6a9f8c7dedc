"""A saved GPT-MoE is the same model after loading; what is no GPT-MoE is refused with the name of the file."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from repro.models import gpt_moe_checkpoint as checkpoint
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

SIZES = GPTMoEConfig(layers=2, hidden=16, heads=2, seq_len=8, vocab=20, experts=3, top_k=2, expert_hidden=4, kv_heads=1)


def build():
    torch.manual_seed(0)
    return GPTMoE(SIZES)


def edited(path, change):
    """Rewrite a checkpoint with other weights or sizes."""
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sizes = json.loads(file.metadata()["gpt_moe_config"])
    change(weights, sizes)
    save_file(weights, path, {"gpt_moe_config": json.dumps(sizes)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loaded_model_is_the_saved_one(tmp_path, dtype):
    model, path = build(), tmp_path / "model.safetensors"
    checkpoint.save(model, path, dtype)
    loaded = checkpoint.load(path)
    assert loaded.config == SIZES and not loaded.training
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(dtype).float()), name
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens)) == (dtype == torch.float32)


def test_half_precision_is_the_default(tmp_path):
    checkpoint.save(build(), tmp_path / "model.safetensors")
    bytes_of_weights = 2 * sum(weight.numel() for weight in build().parameters())
    assert 0 <= (tmp_path / "model.safetensors").stat().st_size - bytes_of_weights < 4096


def test_a_weight_beyond_the_range_is_refused(tmp_path):
    model = build()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"model\.safetensors: head\.weight is not finite in torch\.float16"):
        checkpoint.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors: no such file"):
        checkpoint.load(tmp_path / "nothing.safetensors")


MISTAKES = {
    "not a safetensors file": lambda path: path.write_bytes(b"not a checkpoint at all"),
    "no metadata 'gpt_moe_config', found: format": lambda path: save_file({}, path, {"format": "pt"}),
    "no metadata 'gpt_moe_config', found: none": lambda path: save_file({"a": torch.zeros(1)}, path),
    "unexpected keyword argument 'width'": lambda path: edited(path, lambda weights, sizes: sizes.update(width=9)),
    "size mismatch for blocks.0.router.weight": lambda path: edited(path, lambda w, sizes: sizes.update(experts=4)),
    'Missing key.*"norm.bias"': lambda path: edited(path, lambda weights, sizes: weights.pop("norm.bias")),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_what_is_no_checkpoint_is_refused(tmp_path, says):
    path = tmp_path / "model.safetensors"
    checkpoint.save(build(), path)
    MISTAKES[says](path)
    with pytest.raises(ValueError, match=f"(?s)model.safetensors: .*{says}"):
        checkpoint.load(path)
