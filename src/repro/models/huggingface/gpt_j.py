"""GPT-J as transformers saves it. Rotary pairs are interleaved there as well."""

from typing import Any

from repro.models.gpt_j import GPTJ, GPTJConfig
from repro.models.gpt_layers import ACTIVATIONS
from repro.models.huggingface.architecture import Architecture


def _config(found: dict[str, Any]) -> GPTJConfig:
    return GPTJConfig(
        layers=found["n_layer"],
        width=found["n_embd"],
        heads=found["n_head"],
        rotary_dim=found["rotary_dim"],
        ffn=found.get("n_inner") or 4 * found["n_embd"],
        vocab=found["vocab_size"],
        context=found["n_positions"],
        norm_eps=found["layer_norm_epsilon"],
        activation=found.get("activation_function", "gelu_new"),
    )


GPT_J = Architecture(
    model=GPTJ,
    config=_config,
    required=("layer_norm_epsilon", "n_embd", "n_head", "n_layer", "n_positions", "rotary_dim", "vocab_size"),
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
