"""GPT-J as transformers saves it. Rotary pairs are interleaved there as well."""

from typing import Any

from repro.models.gpt_j import GPTJ, GPTJConfig
from repro.models.gpt_layers import ACTIVATIONS
from repro.models.huggingface.architecture import Architecture


def _others(found: dict[str, Any]) -> dict[str, Any]:
    activation = found.get("activation_function", "gelu_new")
    return {"ffn": found.get("n_inner") or 4 * found["n_embd"], "activation": activation}


GPT_J = Architecture(
    model=GPTJ,
    config=GPTJConfig,
    required={
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "rotary_dim": "rotary_dim",
        "vocab": "vocab_size",
        "context": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    others=_others,
    computed={"activation_function": tuple(ACTIVATIONS)},
    layers="transformer.h.",
    inside={
        "ln_1": "attn_norm",
        "attn.q_proj": "attn_q",
        "attn.k_proj": "attn_k",
        "attn.v_proj": "attn_v",
        "attn.out_proj": "attn_output",
        "mlp.fc_in": "ffn_up",
        "mlp.fc_out": "ffn_down",
    },
    outside={"transformer.wte": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output"},
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)
