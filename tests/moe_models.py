"""Small random MoE models of the families in Hugging Face transformers."""

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS, TOP = 8, 2
# What differs: how a family names its sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP},
    "Qwen2Moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3Moe": {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": 16, "head_dim": 16},
    "Olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": TOP},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "MiniMaxM2": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP, "head_dim": 16},  # bias beside the router
    "Ernie4_5_Moe": {  # bias inside a part of the router, [1, experts]
        "moe_num_experts": EXPERTS,
        "moe_k": TOP,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
    },
    "GptOss": {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP, "head_dim": 16},
}


def build(family: str) -> nn.Module:
    """A small random model; router weights large enough that choices differ between tokens."""
    config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family]))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "router" in name or ".gate." in name:
            nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if "bias" in name:  # of the choice
            nn.init.normal_(buffer)
    return model
