"""The files of a transformers folder: JSON, and weights in one safetensors file or in shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError(f"{__name__} needs safetensors: pip install 'repro-papers[flover]'", name=error.name) from error


def read_json(path: Path) -> dict[str, Any]:
    """FileNotFoundError, or ValueError where it holds no JSON object; both name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, allowed: an object")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files of weights: one, or the shards that an index names. FileNotFoundError where one is missing."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: neither {whole.name} nor {index.name}")
    if "weight_map" not in (found := read_json(index)):
        raise ValueError(f"{index}: no weight_map")
    shards = [folder / name for name in sorted(set(found["weight_map"].values()))]
    for shard in shards:
        if not shard.is_file():
            raise FileNotFoundError(f"{shard}: no such file, named in {index.name}")
    return shards


def tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a safetensors file by name, read one by one; ValueError where it is none."""
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                yield name, weights.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error
