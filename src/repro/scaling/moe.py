"""Sizes of decoders whose MLPs are experts, and the numbers of weights and values that follow from them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoE:
    """Sizes of a decoder with experts of two matrices.

    moe_layers    layers with experts; each other layer has one MLP, on every GPU
    value_bytes   of a weight, an activation, a key or a value

    ValueError for sizes that do not fit together.
    """

    layers: int
    moe_layers: int
    hidden: int
    ffn: int
    heads: int
    experts: int
    vocab: int
    kv_heads: int | None = None
    top_k: int = 1
    value_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.ffn, self.heads, self.experts, self.vocab, self.value_bytes) < 1:
            raise ValueError(f"all sizes must be at least 1, found {self}")
        if not 0 <= self.moe_layers <= self.layers:
            raise ValueError(f"moe_layers is {self.moe_layers}, allowed: 0 to {self.layers} (layers)")
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            sizes = f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}"
            raise ValueError(f"{sizes}: each must be a multiple of the next")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)")

    @property
    def kv_width(self) -> int:
        """Width of a token's keys in one layer, and as much of its values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention: Q, K, V and output."""
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: up and down."""
        return 2 * self.hidden * self.ffn


def paper_models(hidden: int = 1024, layers: int = 24) -> dict[int, MoE]:
    """The paper's GPT-MoE by their number of experts.

    [INF] all sizes: 24 MoE layers are likely, the hidden size was not found. These are those of the "350M" GPT, with 16
    heads and Megatron's vocabulary.
    """
    return {experts: MoE(layers, layers, hidden, 4 * hidden, 16, experts, vocab=50304) for experts in (8, 16, 32, 64)}
