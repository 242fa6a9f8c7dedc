"""A small GPT with a mixture of experts in every block: GShard's top-k routing and balance loss (Lepikhin et al. 2020).

The blocks are those of `gpt.py` with the MLP replaced by `experts` of them, of which each token visits `top_k`. No
token is dropped: an expert takes all that come. The parts of a block can be called on their own (`attention.project`,
`attention.mix`, `router`, `experts`), which is how `repro.exflow.moe` spreads one model over ranks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.models.config import check_sizes


@dataclass(frozen=True)
class GPTMoEConfig:
    """Sizes. `kv_heads` below `heads` is grouped-query attention (None: one per head); `expert_hidden` is the width
    inside an expert; `balance` weighs the balance loss. ValueError for sizes that do not fit together."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    seq_len: int = 128
    vocab: int = 256
    experts: int = 16
    top_k: int = 1
    expert_hidden: int = 256
    kv_heads: int | None = None
    balance: float = 0.01

    def __post_init__(self) -> None:
        check_sizes({name: value for name, value in vars(self).items() if (name, value) != ("kv_heads", None)})
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by {self.heads} heads")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)")

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of one token in one layer; its values take as many."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)


class Attention(nn.Module):
    """Causal attention in two steps, so that keys and values may come from a cache."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.width, self.kv_heads = config.hidden // config.heads, config.kv_heads or config.heads
        self.split = [config.hidden, config.kv_width, config.kv_width]
        self.qkv, self.out = nn.Linear(config.hidden, sum(self.split)), nn.Linear(config.hidden, config.hidden)
        self.out.writes_residual = True

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[.., hidden] to queries [.., heads, width], keys and values [.., kv_heads, width]."""
        return tuple(part.unflatten(-1, (-1, self.width)) for part in self.qkv(x).split(self.split, dim=-1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Queries [batch, n, heads, width] over keys and values [batch, m, kv_heads, width] to [batch, n, hidden].
        `mask`: bool [batch, 1, n, m], True where a query sees a key; None: causal, for n = m."""
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GPTMoETopKRouter(nn.Module):
    """Chooses `top_k` experts for each token. [tokens, hidden] to (logits [tokens, experts], weights and experts
    [tokens, top_k], heaviest first); weights are softmax probabilities, for top_k > 1 scaled to sum 1, as GShard does.

    Named and returning as the routers of Hugging Face transformers, so `record_routing` finds it.
    """

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.experts, config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):  # which expert it is takes all bits
            logits = F.linear(x, self.weight)
        weights, experts = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, experts


class Experts(nn.Module):
    """`experts` MLPs side by side: `up` [experts, hidden, expert_hidden], `down` [experts, expert_hidden, hidden]."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.hidden))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """[n, hidden] through the expert of each row, int64 [n], to [n, hidden]: sorted, each expert is one product.
        Under autocast on a GPU all are one, in 16 bits: the host launches little and waits for no expert's size."""
        order = expert.argsort(stable=True)
        rows, sizes = x[order], torch.bincount(expert, minlength=len(self.up))
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            return self._at_once(rows, sizes, torch.get_autocast_dtype("cuda"))[order.argsort()]
        each = zip(rows.split(sizes.tolist()), self.up, self.down, strict=True)
        parts = [F.gelu(part @ up) @ down for part, up, down in each if len(part)]
        return torch.cat([*parts, x[:0]])[order.argsort()]

    def _at_once(self, rows: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, hidden] sorted by expert, int64 [experts] rows for each, to [n, hidden] of `dtype`, of 16 bits. A row has to
        be of whole 16 bytes, as `MoeTrain` sees to."""
        ends = sizes.cumsum(0, dtype=torch.int32)
        inside = F.gelu(F.grouped_mm(rows.to(dtype), self.up.to(dtype), offs=ends))
        return F.grouped_mm(inside, self.down.to(dtype), offs=ends)


class MoEBlock(nn.Module):
    """x + attention(norm(x)), then x + Σ weight · expert(norm(x)) over the chosen experts."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.router, self.experts = GPTMoETopKRouter(config), Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, seq, hidden] to (the same, balance loss)."""
        x = x + self.attention.mix(*self.attention.project(self.norm1(x)))
        flat = self.norm2(x).flatten(0, 1)
        logits, weights, experts = self.router(flat)
        k = experts.shape[1]
        out = self.experts(flat.repeat_interleave(k, dim=0), experts.flatten()).unflatten(0, (-1, k))
        mixed = (weights.unsqueeze(-1) * out).sum(dim=1)
        return x + mixed.view_as(x), balance_loss(logits, experts)


def balance_loss(logits: Tensor, experts: Tensor) -> Tensor:
    """GShard's auxiliary loss of one layer: E · Σ_e (share of tokens first sent to e) · (mean probability of e).

    logits [tokens, E]; experts int64 [tokens, top_k], heaviest first. Returns a scalar."""
    share = torch.bincount(experts[:, 0], minlength=logits.shape[1]) / len(logits)
    return logits.shape[1] * (share * logits.softmax(dim=-1).mean(dim=0)).sum()


class GPTMoE(nn.Module):
    """Tokens [batch, seq] (int64, seq <= config.seq_len) to logits [batch, seq, vocab]; with targets of the same shape
    to the mean cross entropy in nats plus `balance` times the mean balance loss of the layers, an fp32 scalar.
    ValueError for a longer sequence."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq_len, config.hidden)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        """GPT-2's: normal with 0.02; layers that write to the residual stream by 1 / sqrt(their number) less."""
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=residual if getattr(module, "writes_residual", False) else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, GPTMoETopKRouter):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Experts):
            nn.init.normal_(module.up, std=0.02)
            nn.init.normal_(module.down, std=residual)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """int64 [..] and their positions, broadcastable, to [.., hidden]."""
        return self.tokens(tokens) + self.positions(positions)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.shape[1] > self.config.seq_len:
            raise ValueError(f"sequence of {tokens.shape[1]} tokens, the model has {self.config.seq_len} positions")
        x = self.embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        balance = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, uneven = block(x)
            balance = balance + uneven.float()
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss + self.config.balance * balance / self.config.layers


@torch.no_grad()
def generate(model: GPTMoE, prompt: Tensor, new_tokens: int) -> Tensor:
    """Greedy decoding without any cache, int64 [new_tokens] for a prompt int64 [n]: the reference of faster ways."""
    tokens = prompt
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax().view(1)])
    return tokens[len(prompt) :]
