"""What `config.json` of transformers says of each architecture, and how its weights lie there. The weights' names are
known to `gguf`, under the name of our class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.decoder import Decoder
from repro.models.gpt_j_neox import ACTIVATIONS, GPTJ, GPTJConfig, GPTNeoX, GPTNeoXConfig
from repro.models.llama import Llama, LlamaConfig

BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attn.embed_positions", ".attention.bias", ".attention.masked_bias"),
    "rotary_emb.inv_freq",
)
"""Ends of names that are no weights: older versions saved them as well."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers, and which of our models computes it.

    `required`: by our name of a size the key of `config.json` that must hold it, a number; `computed`: keys that may be
    left out, and the values that our model computes. `others(the file's keys)`: our other sizes, or a ValueError.
    `arrange(config, GGUF name, tensor)`: the tensor as our model takes it.
    """

    model: type[Decoder]
    config: Callable[..., DecoderConfig]
    required: Mapping[str, str]
    computed: Mapping[str, tuple[Any, ...]]
    others: Callable[[dict[str, Any]], dict[str, Any]]
    arrange: Callable[[Any, str, Tensor], Tensor] = lambda config, name, tensor: tensor

    def sizes(self, found: dict[str, Any]) -> DecoderConfig:
        """Our sizes of what `config.json` holds; ValueError names the key, what it holds and what is allowed."""
        if missing := sorted(key for key in self.required.values() if found.get(key) is None):
            raise ValueError(f"no {', '.join(missing)}")
        for key in self.required.values():
            if not isinstance(found[key], int | float):
                raise ValueError(f"{key} is {found[key]!r}, allowed: a number")
        for key, allowed in self.computed.items():
            if (value := found.get(key, allowed[0])) not in allowed:
                raise ValueError(f"{key} is {value!r}, allowed: {', '.join(map(repr, allowed))}")
        return self.config(**{ours: found[theirs] for ours, theirs in self.required.items()}, **self.others(found))


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of rotary positions; ValueError where they are scaled."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"rope_type is {kind!r}, allowed: 'default'")
    return rope


def _neighbours(heads: Tensor, rotary_dim: int) -> Tensor:
    """Rows of query or key heads [heads, dim, ...] with interleaved rotary pairs: what transformers has at i and i +
    rotary_dim/2 is at 2i and 2i + 1 here. Products of queries and keys stay the same."""
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    return torch.cat((turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest), 1)


def _llama_sizes(found: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(found)
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if (dim := found.get("head_dim") or width // heads) * heads != width:
        raise ValueError(f"head_dim is {dim}, allowed: hidden_size / num_attention_heads, {width / heads:g}")
    base = rope.get("rope_theta") or found.get("rope_theta") or 10_000.0
    return {"kv_heads": found.get("num_key_value_heads") or heads, "rope_base": float(base)}


def _llama_weight(config: LlamaConfig, name: str, tensor: Tensor) -> Tensor:
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        return _neighbours(tensor.unflatten(0, (-1, config.head_dim)), config.head_dim).flatten(0, 1)
    return tensor


def _gpt_j_sizes(found: dict[str, Any]) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    return {"ffn": found.get("n_inner") or 4 * found["n_embd"], "activation": activation}


def _gpt_neox_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Versions before 5 name the rotary part `rotary_pct` and the base `rotary_emb_base`."""
    rope = _rope(found)
    share = rope.get("partial_rotary_factor", found.get("rotary_pct", 0.25))
    return {
        "rotary_dim": int(found["hidden_size"] // found["num_attention_heads"] * share),
        "rope_base": float(rope.get("rope_theta") or found.get("rotary_emb_base") or 10_000.0),
        "activation": found.get("hidden_act", "gelu"),
        "parallel_residual": found.get("use_parallel_residual", True),
        "attention_bias": found.get("attention_bias", True),
    }


def _gpt_neox_weight(config: GPTNeoXConfig, name: str, tensor: Tensor) -> Tensor:
    """Weight [heads · 3 · dim, width] or bias [heads · 3 · dim], q, k and v of each head, to all heads' q, k and v."""
    if "attn_qkv" not in name:
        return tensor
    queries, keys, values = tensor.unflatten(0, (config.heads, 3, config.head_dim)).unbind(1)
    queries, keys = (_neighbours(part, config.rotary_dim) for part in (queries, keys))
    return torch.cat((queries, keys, values)).flatten(0, 1)


_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
_GPT_J_SIZES = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "rotary_dim": "rotary_dim",
    "vocab": "vocab_size",
    "context": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}
_GELUS, _EITHER, _NEVER = tuple(ACTIVATIONS), (True, False), (False,)

ARCHITECTURES = {
    "llama": Architecture(
        Llama,
        LlamaConfig,
        _SIZES | {"norm_eps": "rms_norm_eps"},
        {"hidden_act": ("silu",), "attention_bias": _NEVER, "mlp_bias": _NEVER},
        _llama_sizes,
        _llama_weight,
    ),
    "gptj": Architecture(GPTJ, GPTJConfig, _GPT_J_SIZES, {"activation_function": _GELUS}, _gpt_j_sizes),
    "gpt_neox": Architecture(
        GPTNeoX,
        GPTNeoXConfig,
        _SIZES | {"norm_eps": "layer_norm_eps"},
        {"hidden_act": _GELUS, "use_parallel_residual": _EITHER, "attention_bias": _EITHER},
        _gpt_neox_sizes,
        _gpt_neox_weight,
    ),
}
"""By the `model_type` of `config.json`. In GPT-J rotary pairs are interleaved as here; in the others half-split."""
