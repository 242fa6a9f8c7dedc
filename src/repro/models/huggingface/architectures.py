"""What `config.json` of transformers says of each architecture, and how its weights lie there. The weights' names are
known to `gguf`, under the name of our class."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.models.config import DecoderConfig, check_sizes
from repro.models.decoder import Decoder
from repro.models.gpt_j_neox import ACTIVATIONS, GPTJ, GPTJConfig, GPTNeoX, GPTNeoXConfig
from repro.models.llama import Llama, LlamaConfig
from repro.models.reading import wording

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
        for key, allowed in self.computed.items():
            if (value := found.get(key, allowed[0])) not in allowed:
                raise ValueError(f"{key} is {reprlib.repr(value)}, allowed: {', '.join(map(repr, allowed))}")
        sizes = {ours: found[theirs] for ours, theirs in self.required.items()}
        with wording(_OPTIONAL | self.required):
            check_sizes(sizes)  # `others` divides them
            return self.config(**sizes, **self.others(found))


def _first(*found: Any) -> Any:
    """What is given first: null is as good as nothing in a `config.json`, 0 is not."""
    return next((value for value in found if value is not None), None)


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of rotary positions; ValueError where they are scaled."""
    rope = _first(found.get("rope_parameters"), found.get("rope_scaling"), {})
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters or rope_scaling is {reprlib.repr(rope)}, allowed: an object")
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"rope_type is {reprlib.repr(kind)}, allowed: 'default'")
    return rope


def _base(*found: Any) -> float:
    """The base of rotary positions, which older versions call otherwise."""
    base = _first(*found, 10_000.0)
    check_sizes({"rope_base": base})
    return float(base)


def _neighbours(heads: Tensor, rotary_dim: int) -> Tensor:
    """Rows of query or key heads [heads, dim, ...] with interleaved rotary pairs: what transformers has at i and i +
    rotary_dim/2 is at 2i and 2i + 1 here. Products of queries and keys stay the same."""
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    return torch.cat((turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest), 1)


def _llama_sizes(found: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(found)
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if (dim := found.get("head_dim")) is not None and dim != width / heads:
        raise ValueError(
            f"head_dim is {reprlib.repr(dim)}, allowed: hidden_size / num_attention_heads, {width / heads:g}"
        )
    kv_heads = _first(found.get("num_key_value_heads"), heads)
    return {"kv_heads": kv_heads, "rope_base": _base(rope.get("rope_theta"), found.get("rope_theta"))}


def _llama_weight(config: LlamaConfig, name: str, tensor: Tensor) -> Tensor:
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        return _neighbours(tensor.unflatten(0, (-1, config.head_dim)), config.head_dim).flatten(0, 1)
    return tensor


def _gpt_j_sizes(found: dict[str, Any]) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    return {"ffn": _first(found.get("n_inner"), 4 * found["n_embd"]), "activation": activation}


def _gpt_neox_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Versions before 5 name the rotary part `rotary_pct` and the base `rotary_emb_base`."""
    rope = _rope(found)
    share = _first(rope.get("partial_rotary_factor"), found.get("rotary_pct"), 0.25)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor or rotary_pct is {reprlib.repr(share)}, allowed: above 0, at most 1")
    return {
        "rotary_dim": int(found["hidden_size"] // found["num_attention_heads"] * share),
        "rope_base": _base(rope.get("rope_theta"), found.get("rotary_emb_base")),
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
_OPTIONAL = {"kv_heads": "num_key_value_heads", "rope_base": "rope_theta", "ffn": "n_inner"}
_GELUS, _EITHER, _NEVER = tuple(ACTIVATIONS), (True, False), (False,)
_TIED = {"tie_word_embeddings": (False, True, None)}

ARCHITECTURES = {
    "llama": Architecture(
        Llama,
        LlamaConfig,
        _SIZES | {"norm_eps": "rms_norm_eps"},
        {"hidden_act": ("silu",), "attention_bias": _NEVER, "mlp_bias": _NEVER} | _TIED,
        _llama_sizes,
        _llama_weight,
    ),
    "gptj": Architecture(GPTJ, GPTJConfig, _GPT_J_SIZES, {"activation_function": _GELUS} | _TIED, _gpt_j_sizes),
    "gpt_neox": Architecture(
        GPTNeoX,
        GPTNeoXConfig,
        _SIZES | {"norm_eps": "layer_norm_eps"},
        {"hidden_act": _GELUS, "use_parallel_residual": _EITHER, "attention_bias": _EITHER} | _TIED,
        _gpt_neox_sizes,
        _gpt_neox_weight,
    ),
}
"""By the `model_type` of `config.json`. In GPT-J rotary pairs are interleaved as here; in the others half-split."""
