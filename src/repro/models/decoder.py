"""What the models that serve requests (`llama.py`, `gpt_j_neox.py`) share: one pass over rows of any requests, into a
KV cache (`kv_cache.py`) that the caller lays out: the engine decides which slot a request has."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.kernels import GELU, Attention, Choice, Linear, Wanted, choose
from repro.models.kv_cache import CacheSizes, KVCache, PagedCache
from repro.models.parallel import Shard, Split
from repro.models.reading import finite
from repro.models.rotary import turns
from repro.models.rows import Rows


@dataclass(frozen=True)
class Block:
    """Norms and linear layers of one block. `head_norms`: of each query and each key head, or none. `up`: of the
    feed-forward layer, with the gate where there is one."""

    attention_norm: Any
    qkv: Linear
    head_norms: list[Any]
    out: Linear
    ffn_norm: Any
    up: Linear
    down: Linear


@dataclass(frozen=True)
class _Drawn(Mapping[str, Tensor]):
    """Random weights, drawn when they are asked for: no memory holds them all beside the model that they become."""

    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    device: torch.device
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=self.device, dtype=self.dtype)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return drawn.div_(math.sqrt(shape[1])).to(self.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class GivenAway(dict[str, Tensor]):
    """Weights that nobody else needs: each leaves when a model makes a layer of it, or memory would hold them all beside
    the model."""


class Decoder(ABC):
    """Inference only. `kernels`: what computes its steps (`kernels.choose`); their name is `self.kernels.name`."""

    _gelu: GELU | None = None  # of the feed-forward layer, if it has any

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kernels: Choice = "auto",
        shard: Shard | None = None,
    ) -> None:
        """`weights`: tensors by their GGUF names, [out, in] (`checkpoint.read_gguf` gives config and weights). `shard`:
        which of several tensor-parallel ranks this is, each given all weights (`flover.parallel` runs them alike).
        ValueError for weights that are missing, unknown, of another shape, not floating point, or not finite in a
        `dtype` of smaller range than theirs (else that is left to the loaders), for sizes that the ranks cannot share
        evenly, and for kernels that cannot compute the model; `kernels.choose` names its other errors."""
        self.config, self.dtype, self.device, self.shard = config, dtype, torch.device(device), shard
        if shard is not None:
            shard.check(config)
        if not isinstance(weights, _Drawn):
            config.check_weights({name: weight.shape for name, weight in weights.items()})
        self.kernels = choose(kernels, self.device, dtype, config.head_dim)
        self._weights = weights
        self.embedding = self._get("token_embd.weight")
        self.norm, self.head = self._norm("output_norm"), self._linear("output", split="vocabulary")
        self.blocks = [self._block(f"blk.{i}") for i in range(config.layers)]
        del self._weights
        # fp32 [context, pairs]: by how much a position turns a pair. Never replaced: graphs of passes hold its address.
        self._turns = [table.to(self.device) for table in turns(config)]

    def _from_here(self, layer: int, x: Tensor, wanted: Wanted) -> Tensor:
        """The rows of x that go on when a layer has attended."""
        if layer < self.config.layers - 1:
            return x
        return x[wanted] if isinstance(wanted, slice) else self.kernels.take(x, wanted)

    @abstractmethod
    def _norm(self, name: str) -> Any:
        """The norm whose weights begin with `name`."""

    @abstractmethod
    def _hidden(self, x: Tensor, attend: Attention, wanted: Wanted) -> Tensor:
        """Embedded rows [n, width] to final, normed hidden states of the wanted ones [m, width]: the last layer needs no
        others once their keys and values are stored. May write over x."""

    def _block(self, name: str) -> Block:
        """The block whose weights begin with `name`. Not every architecture has a gate, a second norm, or Q, K and V
        apart: it has those of which its config tells the shapes."""
        shapes = self.config.weight_shapes()

        def those(*parts: str) -> list[str]:
            return [f"{name}.{part}" for part in parts if f"{name}.{part}.weight" in shapes]

        norms = [self._norm(norm) for norm in those("attn_norm", "ffn_norm")]
        qkv = those("attn_qkv", "attn_q", "attn_k", "attn_v")
        return Block(
            attention_norm=norms[0],
            qkv=self._linear(*qkv, split="outputs", parts=3 // len(qkv)),
            head_norms=[self._norm(norm) for norm in those("attn_q_norm", "attn_k_norm")],
            out=self._linear(f"{name}.attn_output", split="inputs"),
            ffn_norm=norms[-1],
            up=self._linear(*those("ffn_gate", "ffn_up"), split="outputs", gelu=self._gelu),
            down=self._linear(f"{name}.ffn_down", split="inputs"),
        )

    def _get(self, name: str) -> Tensor:
        """A weight in the model's dtype and place."""
        if name == "output.weight" and name not in self._weights:
            return self.embedding  # no output head: it is the embedding
        weight = self._weights.pop(name) if isinstance(self._weights, GivenAway) else self._weights[name]
        if not weight.is_floating_point():
            raise ValueError(f"{name} has dtype {weight.dtype}, allowed: floating point")
        converted = weight.to(self.device, self.dtype)
        narrower = torch.finfo(self.dtype).max < torch.finfo(weight.dtype).max
        return finite(f"{name} in {self.dtype}", converted) if narrower else converted

    def _linear(self, *names: str, split: Split, parts: int = 1, gelu: GELU | None = None) -> Linear:
        """Fused: layers that see the same input, and their biases where they have any. `split`: how tensor-parallel
        ranks share them; `parts`: each name holds so many layers, one below the other."""
        weights = [self._get(f"{name}.weight") for name in names]
        biases = [self._get(f"{name}.bias") for name in names if f"{name}.bias" in self._weights]
        assert len(biases) in (0, len(names)), f"some of {names} have a bias and some not"
        if self.shard is None:
            return self.kernels.linear(torch.cat(weights), torch.cat(biases) if biases else None, gelu)
        weights, biases = ([part for whole in several for part in whole.chunk(parts)] for several in (weights, biases))
        return self.shard.linear(self.kernels, weights, biases, split, gelu)

    @classmethod
    def random(cls, config: DecoderConfig, seed: int = 0, **options: Any) -> Self:
        """Gaussian matrices of standard deviation 1/√in, vectors of 1 (weights) and 0 (biases). They are drawn on the
        device, in fp32: a CPU would take a minute for 13 billion. So a seed gives other weights on a GPU."""
        device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
        return cls(config, _Drawn(config.weight_shapes(), seed, torch.device(device), dtype), **options)

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        """An empty cache of the model's sizes, dtype and device. ValueError for a capacity below 1, or beyond
        `config.longest` (the context, or a shorter sliding window)."""
        return KVCache(self._cached(capacity), slots, capacity)

    def new_paged_cache(self, slots: int, capacity: int, blocks: int, block: int) -> PagedCache:
        """The same in a pool of `blocks` blocks of `block` positions. ValueError also where either is below 1."""
        return PagedCache(self._cached(capacity), slots, capacity, blocks, block)

    def _cached(self, capacity: int) -> CacheSizes:
        most = self.config.longest
        if not 1 <= capacity <= most:
            what = (
                "context" if most == self.config.context else "sliding window, beyond which nothing is computed here:"
            )
            raise ValueError(f"capacity is {capacity}, allowed: 1 to the model's {what} {most}")
        ranks = self.shard.size if self.shard is not None else 1
        config = self.config
        return CacheSizes(config.layers, config.kv_heads // ranks, config.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, wanted: Wanted = slice(None)) -> Tensor:
        """One pass; no Python per request. Logits [m, vocab] of the rows that `wanted` (a slice, or int64 [m]) picks;
        of tensor-parallel ranks only rank 0 gets any."""
        with torch.cuda.device_of(rows.tokens):  # Triton launches on the current device
            cosine, sine = (self.kernels.take(table, rows.positions) for table in self._turns)
            attend = self.kernels.attention(rows, cosine, sine, cache, wanted)
            hidden = self._hidden(self.kernels.take(self.embedding, rows.tokens), attend, wanted)
            return self.head(hidden) if len(hidden) else hidden.new_empty(0, self.config.vocab)

    def prefill(self, tokens: Tensor, cache: KVCache, slot: int = 0, start: int = 0) -> Tensor:
        """Logits [vocab] after a prompt [n] int64, or the chunk of one from position `start` on. ValueError where it is
        empty."""
        if not len(tokens):
            raise ValueError("a prompt has no tokens, allowed: at least one")
        return self.forward(Rows.prompt(tokens, slot, start), cache, slice(len(tokens) - 1, len(tokens)))[0]
