"""A small GPT-MoE that decodes on several ranks: its modes, sizes, weights, and the memory that ranks may share."""

import torch

from repro.exflow.moe.cache import KeysValues
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

MODES = {  # mode and keys_values of a `Decoder`
    "two_all_to_alls": ("two_all_to_alls", "gathered"),
    "coherent": ("coherent", "gathered"),
    "coherent_shared": ("coherent", "shared"),
}


def config(top_k: int = 1, experts: int = 8, kv_heads: int | None = None) -> GPTMoEConfig:
    sizes = {"layers": 3, "hidden": 16, "heads": 4, "seq_len": 24, "vocab": 40, "expert_hidden": 8}
    return GPTMoEConfig(experts=experts, top_k=top_k, kv_heads=kv_heads, **sizes)


def build(sizes: GPTMoEConfig, dtype: torch.dtype = torch.float64) -> GPTMoE:
    """The same weights at each call, drawn so widely that routers choose all experts."""
    torch.manual_seed(0)
    model = GPTMoE(sizes).to(dtype)
    for block in model.blocks:
        for weight in (block.router.weight, block.experts.up, block.experts.down):
            torch.nn.init.normal_(weight)
    return model


def shared_memory(sizes: GPTMoEConfig, requests: int, dtype: torch.dtype = torch.float64) -> KeysValues:
    """Keys and values of all requests, for all ranks."""
    return KeysValues(sizes, torch.ones(requests, dtype=torch.bool), sizes.seq_len, dtype).share_memory()
