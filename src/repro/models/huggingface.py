"""A LLaMA model as Hugging Face transformers saves it: a folder with `config.json` and safetensors files, whole or in shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from repro.models.llama import LlamaConfig, weight_shapes

__all__ = ["read_huggingface"]

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
# What our model computes. A file may leave these out; another value is a model that we would get wrong.
_COMPUTED: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def read_huggingface(folder: str | Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Sizes, and weights by their GGUF names in the dtype of the file, as `Llama` takes them.

    FileNotFoundError when `config.json` or a file of weights is missing; ValueError names the file, the key and what is allowed for
    another architecture, for scaled rotary positions, and for weights that are missing or unknown.
    """
    folder = Path(folder)
    config, tied = _config(folder / "config.json")
    shapes = weight_shapes(config) | ({} if tied else {"output.weight": (config.vocab, config.width)})
    weights = {}
    for file in _files(folder):
        for name, tensor in _tensors(file):
            known = _gguf_name(file, name)
            if tied and known == "output.weight":
                continue  # transformers ties it, whatever the file holds
            if known not in shapes or tuple(tensor.shape) != shapes[known]:
                place = shapes.get(known, "no such weight")
                raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, by config.json: {place}")
            weights[known] = tensor
    if missing := sorted(set(shapes) - set(weights)):
        raise ValueError(f"{folder}: no weights for {', '.join(missing[:5])}")
    for name in shapes:
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weights[name] = _interleaved(weights[name], config.heads if "attn_q" in name else config.kv_heads)
    return config, weights


def _config(path: Path) -> tuple[LlamaConfig, bool]:
    """Sizes, and whether the output head is tied to the embedding."""
    found = _json(path)
    if missing := [key for key in _SIZES if key not in found]:
        raise ValueError(f"{path}: no {', '.join(missing)}")
    for key, allowed in _COMPUTED.items():
        if (value := found.get(key, allowed)) != allowed:
            raise ValueError(f"{path}: {key} is {value!r}, allowed: {allowed!r}")
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"{path}: rope_type is {kind!r}, allowed: 'default'")
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if (dim := found.get("head_dim") or width // heads) * heads != width:
        raise ValueError(f"{path}: head_dim is {dim}, allowed: hidden_size / num_attention_heads, {width / heads:g}")
    sizes = dict(
        layers=found["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        ffn=found["intermediate_size"],
        vocab=found["vocab_size"],
        context=found["max_position_embeddings"],
        rope_base=float(rope.get("rope_theta") or found.get("rope_theta") or 10_000.0),
        norm_eps=found["rms_norm_eps"],
    )
    try:
        return LlamaConfig(**sizes), bool(found.get("tie_word_embeddings", False))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The files of weights: one, or the shards that an index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: neither {whole.name} nor {index.name}")
    if "weight_map" not in (found := _json(index)):
        raise ValueError(f"{index}: no weight_map")
    shards = [folder / name for name in sorted(set(found["weight_map"].values()))]
    for shard in shards:
        if not shard.is_file():
            raise FileNotFoundError(f"{shard}: no such file, named in {index.name}")
    return shards


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                if not name.endswith("rotary_emb.inv_freq"):  # a buffer, which old versions saved as well
                    yield name, weights.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error


def _gguf_name(file: Path, name: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if kind == "weight" and stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    if kind == "weight" and stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        if layer.isdecimal() and part in _INSIDE:
            return f"blk.{layer}.{_INSIDE[part]}.weight"
    raise ValueError(f"{file}: unknown weight {name!r}, allowed: those of LLaMA")


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads · dim, in] in the order of GGUF: transformers rotates entry i of a head with entry
    i + dim/2, GGUF neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
