"""A small GPT: pre-norm blocks, causal attention through SDPA, learned positions (Radford et al. 2019)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes. The default vocabulary is bytes. `tied` shares the embedding with the output layer; `checkpointing` keeps
    only the inputs of the blocks and recomputes the rest in the backward. ValueError for a size below 1, and for
    `hidden` that is no multiple of `heads`."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    seq_len: int = 128
    vocab: int = 256
    tied: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.seq_len, self.vocab) < 1:
            raise ValueError(f"all sizes must be at least 1, found {self}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by {self.heads} heads")

    @property
    def parameters(self) -> int:
        """Parameters of the model: 12 h^2 + 13 h per block, embeddings, last norm, output layer."""
        h = self.hidden
        outside = (self.vocab + self.seq_len) * h + 2 * h + (0 if self.tied else self.vocab * h)
        return self.layers * (12 * h * h + 13 * h) + outside


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). [batch, seq, hidden] to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h = config.hidden
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.out.writes_residual = self.down.writes_residual = True
        self.checkpointing = config.checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        batch, seq, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [batch, seq] (int64, seq <= config.seq_len) to logits [batch, seq, vocab]; with targets of the same shape
    to the mean cross entropy in nats, an fp32 scalar. ValueError for a longer sequence."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for module in self.modules():
            self.init_weights(module)
        if config.tied:
            self.head.weight = self.tokens.weight

    def init_weights(self, module: nn.Module) -> None:
        """Fill the parameters that `module`, a part of this model, holds itself. GPT-2: normal with 0.02, and the
        layers that write to the residual stream by 1 / sqrt(their number) less."""
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = getattr(module, "writes_residual", False)
            nn.init.normal_(module.weight, std=0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.config.seq_len:
            raise ValueError(f"sequence of {tokens.shape[1]} tokens, the model has {self.config.seq_len} positions")
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
