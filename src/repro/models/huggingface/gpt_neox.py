"""GPT-NeoX as transformers saves it: queries, keys and values of a head together, rotary pairs half-split."""

from typing import Any

import torch
from torch import Tensor

from repro.models.gpt_layers import ACTIVATIONS
from repro.models.gpt_neox import GPTNeoX, GPTNeoXConfig
from repro.models.huggingface.architecture import SIZES, Architecture, neighbours, rope_parameters


def _others(found: dict[str, Any]) -> dict[str, Any]:
    """Versions before 5 name the rotary part `rotary_pct` and the base `rotary_emb_base`."""
    rope = rope_parameters(found)
    share = rope.get("partial_rotary_factor", found.get("rotary_pct", 0.25))
    return {
        "rotary_dim": int(found["hidden_size"] // found["num_attention_heads"] * share),
        "rope_base": float(rope.get("rope_theta") or found.get("rotary_emb_base") or 10_000.0),
        "activation": found.get("hidden_act", "gelu"),
        "parallel_residual": found.get("use_parallel_residual", True),
        "attention_bias": found.get("attention_bias", True),
    }


def _arrange(config: GPTNeoXConfig, name: str, tensor: Tensor) -> Tensor:
    """Weight [heads · 3 · dim, width] or bias [heads · 3 · dim], q, k and v of each head, to all heads' q, k and v."""
    if "attn_qkv" not in name:
        return tensor
    queries, keys, values = tensor.unflatten(0, (config.heads, 3, config.head_dim)).unbind(1)
    queries, keys = (neighbours(part, config.rotary_dim) for part in (queries, keys))
    return torch.cat((queries, keys, values)).flatten(0, 1)


GPT_NEOX = Architecture(
    model=GPTNeoX,
    config=GPTNeoXConfig,
    required=SIZES | {"norm_eps": "layer_norm_eps"},
    others=_others,
    computed={
        "hidden_act": tuple(ACTIVATIONS),
        "use_parallel_residual": (True, False),
        "attention_bias": (True, False),
    },
    layers="gpt_neox.layers.",
    inside={
        "input_layernorm": "attn_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    outside={
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "lm_head": "output",
        "embed_out": "output",  # before version 5
    },
    buffers=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    arrange=_arrange,
)
