"""Rotary positions as model files describe them: which entries of a head turn together, and how fast."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repro.models.config import DecoderConfig, check_sizes

SCALINGS = "default", "linear", "dynamic", "llama3", "yarn"
"""What transformers calls `rope_type`, as far as it is computed here."""

_NUMBERS = {
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "original_max_position_embeddings": (1, 2**22),
    "attention_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
_MOST_DIMENSIONS = 2**16  # of a head whose pairs are listed; files may claim any
_NEEDED = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}


def scaling(rope: Mapping[str, Any], base: float, rotary_dim: int, context: int) -> dict[str, Any]:
    """`rope_divisors` and `rope_magnitude` of a config, from what transformers calls `rope_parameters`.

    `dynamic` changes nothing: it stretches positions beyond the context only, which no cache has here. ValueError with
    the key for another type than those in `SCALINGS`, and for numbers that are missing or none.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        raise ValueError(f"rope_type is {reprlib.repr(kind)}, allowed: {', '.join(map(repr, SCALINGS))}")
    if kind not in _NEEDED:
        return {}
    check_sizes({"rotary_dim": rotary_dim}, {"rotary_dim": (0, _MOST_DIMENSIONS)})
    numbers = {"original_max_position_embeddings": context} | {
        key: rope[key] for key in _NUMBERS if rope.get(key) is not None
    }
    if missing := [key for key in _NEEDED[kind] if key not in numbers]:
        raise ValueError(f"rope_type is {kind!r}, but there is no {', '.join(missing)}")
    check_sizes(numbers, _NUMBERS)
    factor, magnitude, pairs = numbers["factor"], 1.0, rotary_dim // 2
    # Of each pair, the share of its frequency that stays as it was; the rest is divided by the factor.
    shares = [0.0] * pairs
    if kind == "llama3":
        shares = _by_turns(numbers, [base ** (-2 * i / rotary_dim) for i in range(pairs)])
    elif kind == "yarn":
        shares = _by_place(numbers, base, rotary_dim, bool(rope.get("truncate", True)))
        magnitude = numbers.get("attention_factor") or _yarn_magnitude(numbers)
    return {"rope_divisors": tuple(1 / ((1 - s) / factor + s) for s in shares), "rope_magnitude": magnitude}


def _by_turns(numbers: Mapping[str, Any], frequencies: list[float]) -> list[float]:
    """LLaMA 3: pairs that turn often within the original context stay as they were, those that seldom do slow down."""
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, allowed: above low_freq_factor {low}")
    turns = [numbers["original_max_position_embeddings"] * f / (2 * math.pi) for f in frequencies]
    return [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]


def _by_place(numbers: Mapping[str, Any], base: float, rotary_dim: int, truncate: bool) -> list[float]:
    """YaRN (Peng et al. 2023, section 3.2): linear between the pairs that turn `beta_fast` and `beta_slow` times."""
    if base <= 1:
        raise ValueError(f"rope_base is {base}, allowed with rope_type 'yarn': above 1")
    original = numbers["original_max_position_embeddings"]
    first, last = (
        rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (numbers.get("beta_fast", 32), numbers.get("beta_slow", 1))
    )
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    over = last - first or 0.001
    return [1 - min(max((i - first) / over, 0.0), 1.0) for i in range(rotary_dim // 2)]


def _yarn_magnitude(numbers: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied with, for logits of attention that are as sharp as before."""

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(numbers["factor"]) + 1.0

    above, below = numbers.get("mscale"), numbers.get("mscale_all_dim")
    return grown(above) / grown(below) if above and below else grown(1.0)


def turns(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of what a position turns a pair by: fp32 [context, pairs], rounded as in transformers. ValueError
    for `rope_divisors` that are not one per pair."""
    pairs = torch.arange(0, config.rotary_dim, 2, device="cpu").float()
    frequencies = 1.0 / config.rope_base ** (pairs / config.rotary_dim)
    if config.rope_divisors:
        if len(config.rope_divisors) != len(frequencies):
            raise ValueError(f"rope_divisors are {len(config.rope_divisors)}, allowed: {len(frequencies)}, one a pair")
        frequencies /= torch.tensor(config.rope_divisors, device="cpu", dtype=torch.float32)
    angles = torch.arange(config.context, device="cpu")[:, None] * frequencies
    return angles.cos().mul_(config.rope_magnitude), angles.sin_().mul_(config.rope_magnitude)  # no third table


def neighbours(heads: Tensor, rotary_dim: int) -> Tensor:
    """Rows of query or key heads [heads, dim, ...] with interleaved rotary pairs: what lies at i and i + rotary_dim/2
    (transformers, and most architectures in GGUF) is at 2i and 2i + 1 here. Products of queries and keys stay the
    same."""
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    return torch.cat((turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest), 1)


def interleaved(config: DecoderConfig, name: str, tensor: Tensor) -> Tensor:
    """A weight by its GGUF name, its rows in the order of `neighbours` if it makes queries or keys: of a matrix, a bias
    or a norm of heads."""
    if name.split(".")[-2] not in ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm"):
        return tensor
    return neighbours(tensor.unflatten(0, (-1, config.head_dim)), config.rotary_dim).flatten(0, 1)
