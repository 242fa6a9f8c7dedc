"""The sizes of a decoder, and the shapes of the weights that follow from them."""

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

Shapes = dict[str, tuple[int, ...]]

LIMITS: dict[str, tuple[float, float]] = {
    "layers": (1, 1000),
    "context": (1, 2**22),
    "rotary_dim": (0, 2**31 - 1),  # its own check says more
    "rope_base": (1.0, 1e30),
    "rope_divisors": (1e-6, 1e6),
    "rope_magnitude": (1e-6, 1e6),
    "norm_eps": (1e-30, 1.0),
    "balance": (0.0, 1e30),
}
"""Least and largest value of a size by its name, others in `check_sizes`: names of layers and a table of positions are
made before the weights of a file can say that it claims too much. Whole numbers only where the limits are whole."""

_MOST_TURNS = 2**29  # positions times entries of a head that turn: tables of 2 GiB; 4 million positions of 128 entries

_OPTIONAL = int | None
_CHECKED = int, float, _OPTIONAL  # types of fields that are sizes

FUSED = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
"""Layers that see the same input: one product, so all of them have a bias or none."""


def check_sizes(sizes: Mapping[str, Any], limits: Mapping[str, tuple[float, float]] = LIMITS) -> None:
    """ValueError that names the first size of the wrong type or beyond its limits: those of `limits`, else a whole
    number from 1 to 2^31 - 1."""
    for name, value in sizes.items():
        least, most = limits.get(name, (1, 2**31 - 1))
        whole = isinstance(least, int)
        numeric = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not numeric or not least <= value <= most:
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{name} is {reprlib.repr(value)}, allowed: {kind} from {least} to {most}")


def listed(names: Collection[str], most: int = 10) -> str:
    """Names for a message, which stays short when a file lacks thousands."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + rest


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """`context`: number of positions it was trained for. Of `kv_heads` and `rotary_dim` (the first entries of a head,
    which turn with the position) an architecture has one as a field, the other follows.

    `rope_divisors`: by what the frequency of each rotary pair is divided, if they are scaled; `rope_magnitude`: what
    cosines and sines are multiplied with (both from `rotary.scaling`). `window`: how many positions a token attends to,
    its own among them; within it that is all of them, longer contexts are refused."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int
    context: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    rope_divisors: tuple[float, ...] = ()
    rope_magnitude: float = 1.0
    window: int | None = None

    if TYPE_CHECKING:

        @property
        def kv_heads(self) -> int: ...
        @property
        def rotary_dim(self) -> int: ...

    def __post_init__(self) -> None:
        """ValueError for a size that is none."""
        sizes = [(field, getattr(self, field.name)) for field in fields(self) if field.type in _CHECKED]
        check_sizes({field.name: size for field, size in sizes if size is not None or field.type != _OPTIONAL})
        for divisor in self.rope_divisors:
            check_sizes({"rope_divisors": divisor})

    def _check_turns(self) -> None:
        """ValueError where tables of all positions would be too large; for subclasses, once their sizes are known."""
        if self.context * self.rotary_dim > _MOST_TURNS:
            found = f"context is {self.context}, and {self.rotary_dim} entries of a head turn with the position"
            raise ValueError(f"{found}, allowed: a product of at most {_MOST_TURNS}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def longest(self) -> int:
        """Positions that a request may have: the context, or the window where that is shorter."""
        return self.context if self.window is None else min(self.context, self.window)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(map(math.prod, self.weight_shapes().values()))

    @abstractmethod
    def weight_shapes(self) -> Shapes:
        """Shapes of all weights by their GGUF names, matrices [out, in]; no output head where it is tied as a rule."""

    def check_weights(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError unless these shapes by name are the model's: with an output head or without, and with biases where
        it can add them. The message names up to 10 each that are missing, unknown or of another shape."""
        needed = self.weight_shapes()
        possible = needed | {"output.weight": (self.vocab, self.width)}
        matrices = [name for name, shape in possible.items() if len(shape) == 2 and name != "token_embd.weight"]
        possible |= {f"{name.removesuffix('.weight')}.bias": possible[name][:1] for name in matrices}
        fused = [{f"blk.{i}.{part}.bias" for part in parts} for i in range(self.layers) for parts in FUSED]
        biases = set().union(*(group for group in fused if group & found.keys())) & possible.keys()
        wrong = [
            f"{name} has shape {tuple(shape)}, expected {possible[name]}"
            for name, shape in found.items()
            if name in possible and tuple(shape) != possible[name]
        ]
        problems = {
            "no weights for ": (needed.keys() | biases) - found.keys() - {"output.weight"},
            "unknown weights ": found.keys() - possible.keys(),
            "": wrong,
        }
        if said := [what + listed(names) for what, names in problems.items() if names]:
            raise ValueError("; ".join(said))


def affine(name: str, *shape: int, bias: bool = True) -> Shapes:
    """Shapes of the weight and the bias of a linear layer [out, in] or a norm [width]."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def blocks(layers: int, block: Shapes) -> Shapes:
    """Shapes of all layers' weights from those of one: `blk.3.attn_norm.weight` for `attn_norm.weight`."""
    return {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
