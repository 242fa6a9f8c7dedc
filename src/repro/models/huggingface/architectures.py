"""What `config.json` of transformers says of each architecture, and how its weights lie there. The weights' names are
known to `gguf`."""

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
from repro.models.rotary import interleaved, neighbours, scaling

BUFFERS = (
    *(".attn.bias", ".attn.masked_bias", ".attn.embed_positions", ".attention.bias", ".attention.masked_bias"),
    "rotary_emb.inv_freq",
)
"""Ends of names that are no weights: older versions saved them as well."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers, and which of our models computes it.

    `names`: the architecture as which `gguf` knows its weights. `required`: by our name of a size the key of
    `config.json` that must hold it, a number; `computed`: keys that may be left out, and the values that our model
    computes. `others(the file's keys)`: our other sizes, or a ValueError. `arrange(config, GGUF name, tensor)`: the
    tensor as our model takes it.
    """

    names: str
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
            return self.config(**(sizes | self.others(found)))


def _first(*found: Any) -> Any:
    """What is given first: null is as good as nothing in a `config.json`, 0 is not."""
    return next((value for value in found if value is not None), None)


def _rope(found: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of rotary positions. Newer versions of transformers, too, prefer the older key."""
    rope = {}
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(found.get(key), dict | None):
            raise ValueError(f"{key} is {reprlib.repr(found[key])}, allowed: an object")
        rope = found.get(key) or rope
    if (outside := found.get("original_max_position_embeddings")) is not None:
        rope = rope | {"original_max_position_embeddings": outside}
    return rope


def _turning(rope: dict[str, Any], rotary_dim: int, context: int, *bases: Any) -> dict[str, Any]:
    """Our sizes of rotary positions. `bases`: under the names that versions give it."""
    base = _first(*bases, 10_000.0)
    check_sizes({"rope_base": base})
    return {"rope_base": float(base)} | scaling(rope, float(base), rotary_dim, context)


def _llama_sizes(found: dict[str, Any]) -> dict[str, Any]:
    rope, heads, dim = _rope(found), found["num_attention_heads"], found.get("head_dim")
    share = _first(rope.get("partial_rotary_factor"), found.get("partial_rotary_factor"), 1)
    if share != 1:
        raise ValueError(f"partial_rotary_factor is {reprlib.repr(share)}, allowed: 1")
    if dim is not None:
        check_sizes({"head_dim": dim})
    kv_heads, rotary_dim = _first(found.get("num_key_value_heads"), heads), _first(dim, found["hidden_size"] // heads)
    bases = rope.get("rope_theta"), found.get("rope_theta")
    turning = _turning(rope, rotary_dim, found["max_position_embeddings"], *bases)
    return {"kv_heads": kv_heads, "head_dim": dim} | turning


def _qwen_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """With a window only where the file says so: others name its size as well."""
    windowed, kinds = found.get("use_sliding_window", False), _first(found.get("layer_types"), [])
    allowed = ("full_attention", "sliding_attention") if windowed else ("full_attention",)
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise ValueError(f"layer_types is {reprlib.repr(kinds)}, allowed: a list of {', '.join(map(repr, allowed))}")
    return _llama_sizes(found) | {"window": found.get("sliding_window", 4096) if windowed else None}


def _gpt_j_sizes(found: dict[str, Any]) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    return {"ffn": _first(found.get("n_inner"), 4 * found["n_embd"]), "activation": activation}


def _gpt_neox_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Versions before 5 name the rotary part `rotary_pct` and the base `rotary_emb_base`."""
    rope = _rope(found)
    share = _first(rope.get("partial_rotary_factor"), found.get("rotary_pct"), 0.25)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor or rotary_pct is {reprlib.repr(share)}, allowed: above 0, at most 1")
    rotary_dim = int(found["hidden_size"] // found["num_attention_heads"] * share)
    bases = rope.get("rope_theta"), found.get("rotary_emb_base")
    return _turning(rope, rotary_dim, found["max_position_embeddings"], *bases) | {
        "rotary_dim": rotary_dim,
        "activation": found.get("hidden_act", "gelu"),
        "parallel_residual": found.get("use_parallel_residual", True),
        "attention_bias": found.get("attention_bias", True),
    }


def _gpt_neox_weight(config: GPTNeoXConfig, name: str, tensor: Tensor) -> Tensor:
    """Weight [heads · 3 · dim, width] or bias [heads · 3 · dim], q, k and v of each head, to all heads' q, k and v."""
    if "attn_qkv" not in name:
        return tensor
    queries, keys, values = tensor.unflatten(0, (config.heads, 3, config.head_dim)).unbind(1)
    queries, keys = (neighbours(part, config.rotary_dim) for part in (queries, keys))
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
_OPTIONAL = {
    "kv_heads": "num_key_value_heads",
    "rope_base": "rope_theta",
    "ffn": "n_inner",
    "window": "sliding_window",
}
_GELUS, _EITHER, _NEVER = tuple(ACTIVATIONS), (True, False), (False,)
_TIED = {"tie_word_embeddings": (False, True, None)}


def _llama(
    names: str,
    others: Callable[[dict[str, Any]], dict[str, Any]],
    required: Mapping[str, str] | None = None,
    computed: Mapping[str, tuple[Any, ...]] | None = None,
    **options: bool,
) -> Architecture:
    """LLaMA, or one of those that differ by `options` of its config."""
    return Architecture(
        names,
        Llama,
        LlamaConfig,
        _SIZES | {"norm_eps": "rms_norm_eps"} | (required or {}),
        {"hidden_act": ("silu",)} | (computed or {}) | _TIED,
        lambda found: others(found) | options,
        interleaved,
    )


_KV_HEADS = {"kv_heads": "num_key_value_heads"}  # what transformers takes where it is missing differs
_WINDOWED = {"use_sliding_window": _EITHER}

ARCHITECTURES = {
    "llama": _llama("llama", _llama_sizes, computed={"attention_bias": _NEVER, "mlp_bias": _NEVER}),
    "mistral": _llama(
        "llama", lambda found: _llama_sizes(found) | {"window": found.get("sliding_window", 4096)}, _KV_HEADS
    ),
    "qwen2": _llama("qwen2", _qwen_sizes, _KV_HEADS, _WINDOWED, qkv_bias=True),
    "qwen3": _llama(
        "qwen3",
        _qwen_sizes,
        _KV_HEADS | {"head_dim": "head_dim"},
        _WINDOWED | {"attention_bias": _NEVER},
        head_norms=True,
    ),
    "gptj": Architecture("gptj", GPTJ, GPTJConfig, _GPT_J_SIZES, {"activation_function": _GELUS} | _TIED, _gpt_j_sizes),
    "gpt_neox": Architecture(
        "gptneox",
        GPTNeoX,
        GPTNeoXConfig,
        _SIZES | {"norm_eps": "layer_norm_eps"},
        {"hidden_act": _GELUS, "use_parallel_residual": _EITHER, "attention_bias": _EITHER} | _TIED,
        _gpt_neox_sizes,
        _gpt_neox_weight,
    ),
}
"""By the `model_type` of `config.json`. In GPT-J rotary pairs are interleaved as here; in the others half-split."""
