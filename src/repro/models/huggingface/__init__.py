"""Models as Hugging Face transformers saves them: a folder with `config.json` and one safetensors file or shards."""

from pathlib import Path
from typing import Any

from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.decoder import Decoder
from repro.models.huggingface.architecture import Architecture
from repro.models.huggingface.files import read_json, tensors, weight_files
from repro.models.huggingface.gpt_j import GPT_J
from repro.models.huggingface.gpt_neox import GPT_NEOX
from repro.models.huggingface.llama import LLAMA

__all__ = ["ARCHITECTURES", "load_huggingface", "read_huggingface"]

ARCHITECTURES = {"llama": LLAMA, "gptj": GPT_J, "gpt_neox": GPT_NEOX}
"""By the `model_type` of `config.json`."""


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
    found = read_json(path)
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
    shapes = config.weight_shapes() | {"output.weight": (config.vocab, config.width)}
    weights = {}
    for file in weight_files(folder):
        for name, tensor in tensors(file):
            if name.endswith(architecture.buffers):
                continue
            known = architecture.name(name)
            if known is None:
                allowed = architecture.model.__name__
                raise ValueError(f"{file}: unknown weight {name!r}, allowed: those of {allowed}")
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
