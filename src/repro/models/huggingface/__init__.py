"""Models as Hugging Face transformers saves them: a folder with `config.json` and one safetensors file or shards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.decoder import Decoder
from repro.models.huggingface.architectures import ARCHITECTURES, BUFFERS, Architecture

try:
    import gguf
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install 'repro-papers[flover]'", name=error.name) from error


def load_huggingface(folder: str | Path, **options: Any) -> Decoder:
    """The model in a folder. `options`: those of `Decoder`; errors: those of `read_huggingface`."""
    architecture, config, weights = _read(Path(folder))
    return architecture.model(config, weights, **options)


def read_huggingface(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Sizes, and weights by their GGUF names in the dtype of the file, as `Llama`, `GPTJ` and `GPTNeoX` take them.

    FileNotFoundError when `config.json` or a file of weights is missing; ValueError names the file, the key and what is
    allowed for whatever we do not compute, scaled rotary positions say, and for missing or unknown weights.
    """
    return _read(Path(folder))[1:]


def _read(folder: Path) -> tuple[Architecture, Any, dict[str, Tensor]]:
    path = folder / "config.json"
    found = _json(path)
    try:
        if (kind := found.get("model_type", "llama")) not in ARCHITECTURES:
            raise ValueError(f"model_type is {kind!r}, allowed: {', '.join(map(repr, ARCHITECTURES))}")
        architecture = ARCHITECTURES[kind]
        config = architecture.sizes(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return architecture, config, _weights(folder, architecture, config, bool(found.get("tie_word_embeddings")))


def _weights(folder: Path, architecture: Architecture, config: Any, tied: bool) -> dict[str, Tensor]:
    """All weights, arranged, and no others. `tied`: the embedding is the output head."""
    model = architecture.model.__name__
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.upper()], config.layers)
    shapes = config.weight_shapes() | {"output.weight": (config.vocab, config.width)}
    weights = {}
    for file in _weight_files(folder):
        for name, tensor in _tensors(file):
            if name.endswith(BUFFERS):
                continue
            known = names.get_name(name, (".weight", ".bias"))
            if known is None:
                allowed = f"those of {model} with {config.layers} layers"
                raise ValueError(f"{file}: unknown weight {name!r}, allowed: {allowed}")
            if known not in shapes or tuple(tensor.shape) != shapes[known]:
                place = shapes.get(known, "no such weight")
                raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, by config.json: {place}")
            weights[known] = architecture.arrange(config, known, tensor)
    if tied:  # transformers ties it, whatever the file holds
        del shapes["output.weight"]
        weights.pop("output.weight", None)
    if missing := sorted(set(shapes) - set(weights)):
        raise ValueError(f"{folder}: no weights for {', '.join(missing[:5])}")
    return weights


def _weight_files(folder: Path) -> list[Path]:
    """The files of weights: one, or the shards that an index names. FileNotFoundError where one is missing."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: neither {whole.name} nor {index.name}")
    if "weight_map" not in (found := _json(index)):
        raise ValueError(f"{index}: no weight_map")
    shards = [folder / name for name in sorted(set(found["weight_map"].values()))]
    for shard in shards:
        if not shard.is_file():
            raise FileNotFoundError(f"{shard}: no such file, named in {index.name}")
    return shards


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a safetensors file by name, read one by one; ValueError where it is none."""
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                yield name, weights.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """FileNotFoundError, or ValueError where it holds no JSON object; both name the file."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, allowed: an object")
    return found
