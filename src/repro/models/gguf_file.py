"""GGUF files, version 2 or 3, little-endian: what they say of themselves, and their tensors, read one by one. What a
header claims is compared with the size of the file before memory is taken for it."""

import math
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro.models.reading import naming, ordinary_file

try:
    import gguf
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install 'repro-papers[flover]'", name=error.name) from error

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9  # the other kinds of values
_MOST_DIMENSIONS = 4  # ggml's


@dataclass(frozen=True)
class Stored:
    """A tensor in the file: `shape` as torch has it, [out, in]; `start` and `size` in bytes."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """`fields`: metadata by key. `tensors`: where they lie, by name. FileNotFoundError,
    or ValueError with the name of the file where it is no GGUF file or claims what it does not hold."""

    def __init__(self, path: str | Path) -> None:
        self.path = ordinary_file(Path(path))
        with naming(self.path), self.path.open("rb") as self._file:
            self._at, self._size = 0, os.fstat(self._file.fileno()).st_size
            self._read_header()

    def get(self, key: str) -> Any:
        """What the metadata hold under a key; ValueError when it is not there."""
        if key not in self.fields:
            raise ValueError(f"{self.path}: no {key}")
        return self.fields[key]

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantised to fp32; ValueError for a type that `gguf` cannot dequantise."""
        stored = self.tensors[name]
        with naming(self.path), np.errstate(all="ignore"):  # scales may be NaN or infinite: `finite` says so
            data = np.fromfile(self.path, np.uint8, stored.size, offset=stored.start)
            try:
                return gguf.dequantize(data.reshape(*stored.shape[:-1], -1), stored.kind)
            except NotImplementedError as error:
                raise ValueError(f"{name}: {error}") from error

    def _read_header(self) -> None:
        if (magic := self._take(4)) != b"GGUF":
            raise ValueError(f"not a GGUF file: begins with {magic!r}")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"GGUF version is {version}, allowed: 2, 3")
        tensors, fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"{key} is there twice")
            self.fields[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, allowed: a power of two")
        self.tensors = self._placed(infos, -(-self._at // alignment) * alignment, alignment)

    def _placed(self, infos: list[tuple], data: int, alignment: int) -> dict[str, Stored]:
        """Tensors whose offsets count from `data` on; ValueError where one is outside the file or in another one."""
        tensors: dict[str, Stored] = {}
        end, before = data, ""
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]}, allowed in {kind.name}: multiples of {block}")
            found = Stored(shape, kind, data + offset, math.prod(shape) // block * bytes_per_block)
            if found.start + found.size > self._size:
                raise ValueError(f"{name} ends at byte {found.start + found.size}, the file at {self._size}")
            if name in tensors or found.start < end or offset % alignment:
                wrong = "is there twice" if name in tensors else "overlaps" if found.start < end else "is not aligned"
                raise ValueError(f"{name} {wrong}, at byte {found.start}{f' after {before}' if before else ''}")
            tensors[name], end, before = found, found.start + found.size, name
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        """Name, shape, type and offset."""
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions, allowed: 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"{name} has type {kind}, which the package gguf does not know")
        return name, shape, gguf.GGMLQuantizationType(kind), offset

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind == _STRING:
                return [self._string() for _ in range(count)]
            if kind in _NUMBERS:
                code = _NUMBERS[kind].replace("?", "B")
                return array(code, self._take(count * array(code).itemsize))
        elif kind == _STRING:
            return self._string()
        elif kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        raise ValueError(f"a value of type {kind} at byte {self._at}, allowed: {_ARRAY} outside arrays, 0 to 12")

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _take(self, count: int) -> bytes:
        """The next bytes of the header."""
        if self._at + count > self._size:
            raise ValueError(f"{count} bytes should follow at byte {self._at}, the file has {self._size}")
        self._at += count
        return self._file.read(count)
