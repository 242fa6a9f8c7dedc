"""The sizes that all decoders have."""

from typing import Protocol

__all__ = ["DecoderConfig"]


class DecoderConfig(Protocol):
    """`context`: the longest position it was trained for; the first `rotary_dim` entries of a head turn."""

    @property
    def layers(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rotary_dim(self) -> int: ...

    @property
    def ffn(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def rope_base(self) -> float: ...
