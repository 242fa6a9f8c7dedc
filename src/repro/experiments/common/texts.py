"""The texts that the models train on and are judged on, as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from repro import paths

FILES = {"shakespeare": "tinyshakespeare.txt", "python": "python_stdlib.txt"}
HELD_OUT = 0.1  # the end of each text, never trained on


@dataclass(frozen=True)
class Text:
    """Bytes of one text, uint8: what the model trains on, and the part behind it that it does not."""

    train: Tensor
    held_out: Tensor


def whole(name: str) -> Tensor:
    """A shipped text, "shakespeare" or "python", uint8."""
    return torch.frombuffer(bytearray(paths.data(FILES[name]).read_bytes()), dtype=torch.uint8)


def read(name: str) -> Text:
    """A shipped text in its two parts."""
    content = whole(name)
    cut = len(content) - int(HELD_OUT * len(content))
    return Text(content[:cut], content[cut:])


def slices(text: Tensor, starts: Sequence[int], length: int) -> Tensor:
    """int64 [starts, length]."""
    return torch.stack([text[start : start + length] for start in starts]).long()


def windows(text: Tensor, tokens: int, length: int) -> Tensor:
    """About `tokens` bytes as sequences spread evenly over `text`, int64 [sequences, length + 1]: each with the byte
    behind it. They do not overlap as long as the text is long enough. ValueError when it is shorter than one."""
    if len(text) <= length:
        raise ValueError(f"a text of {len(text)} bytes has no sequence of seq_len {length}")
    starts = np.linspace(0, len(text) - length - 1, max(tokens // length, 1)).astype(int)
    return slices(text, starts.tolist(), length + 1)
