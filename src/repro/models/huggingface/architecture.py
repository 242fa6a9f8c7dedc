"""What there is to know about how transformers saves an architecture, and what several of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.decoder import Decoder

SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
"""By our names, the keys that most architectures of transformers have."""


@dataclass(frozen=True)
class Architecture:
    """Which of our models computes an architecture of transformers, and where its sizes and weights are in a folder.

    `required`: by our name of a size the key of `config.json` that must hold it, a number; `computed`: keys that may be
    left out, and the values that our model computes. `others(the file's keys)`: our other sizes, or a ValueError.
    `layers` begins the names of weights inside layers; `inside` and `outside`: our names for the stems of weights (the
    rest is `weight` or `bias`). Names that end like one of `buffers` are no weights: older versions saved them as well.
    `arrange(config, our name, tensor)`: the tensor as our model takes it.
    """

    model: type[Decoder]
    config: Callable[..., DecoderConfig]
    required: Mapping[str, str]
    others: Callable[[dict[str, Any]], dict[str, Any]]
    computed: Mapping[str, tuple[Any, ...]]
    layers: str
    inside: Mapping[str, str]
    outside: Mapping[str, str]
    buffers: tuple[str, ...] = ()
    arrange: Callable[[Any, str, Tensor], Tensor] = lambda config, name, tensor: tensor

    def sizes(self, found: dict[str, Any]) -> DecoderConfig:
        """Our sizes of what `config.json` holds; ValueError names the key, what it holds and what is allowed."""
        if missing := sorted(key for key in self.required.values() if found.get(key) is None):
            raise ValueError(f"no {', '.join(missing)}")
        for key in self.required.values():
            if not isinstance(found[key], int | float):
                raise ValueError(f"{key} is {found[key]!r}, allowed: a number")
        for key, allowed in self.computed.items():
            if (value := found.get(key, allowed[0])) not in allowed:
                raise ValueError(f"{key} is {value!r}, allowed: {', '.join(map(repr, allowed))}")
        return self.config(**{ours: found[theirs] for ours, theirs in self.required.items()}, **self.others(found))

    def name(self, name: str) -> str | None:
        """Our name of a weight: `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`; or None."""
        stem, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            if stem in self.outside:
                return f"{self.outside[stem]}.{kind}"
            layer, _, part = stem.removeprefix(self.layers).partition(".")
            if stem.startswith(self.layers) and layer.isdecimal() and part in self.inside:
                return f"blk.{layer}.{self.inside[part]}.{kind}"
        return None


def rope_parameters(found: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` says of rotary positions; ValueError where they are scaled."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(f"rope_type is {kind!r}, allowed: 'default'")
    return rope


def neighbours(heads: Tensor, rotary_dim: int) -> Tensor:
    """Rows of query or key heads [heads, dim, ...] with interleaved rotary pairs: what transformers has at i and i +
    rotary_dim/2 is at 2i and 2i + 1 here. Products of queries and keys stay the same."""
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    return torch.cat((turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest), 1)
