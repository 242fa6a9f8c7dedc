"""LLaMA as transformers saves it."""

from typing import Any

from torch import Tensor

from repro.models.huggingface.architecture import SIZES, Architecture, neighbours, rope_parameters
from repro.models.llama import Llama, LlamaConfig


def _others(found: dict[str, Any]) -> dict[str, Any]:
    rope = rope_parameters(found)
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if (dim := found.get("head_dim") or width // heads) * heads != width:
        raise ValueError(f"head_dim is {dim}, allowed: hidden_size / num_attention_heads, {width / heads:g}")
    base = rope.get("rope_theta") or found.get("rope_theta") or 10_000.0
    return {"kv_heads": found.get("num_key_value_heads") or heads, "rope_base": float(base)}


def _arrange(config: LlamaConfig, name: str, tensor: Tensor) -> Tensor:
    if name.endswith(("attn_q.weight", "attn_k.weight")):
        return neighbours(tensor.unflatten(0, (-1, config.head_dim)), config.head_dim).flatten(0, 1)
    return tensor


LLAMA = Architecture(
    model=Llama,
    config=LlamaConfig,
    required=SIZES | {"norm_eps": "rms_norm_eps"},
    others=_others,
    computed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
    layers="model.layers.",
    inside={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    outside={"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"},
    buffers=("rotary_emb.inv_freq",),
    arrange=_arrange,
)
