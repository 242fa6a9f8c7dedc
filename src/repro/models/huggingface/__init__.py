"""Models as Hugging Face transformers saves them: a folder with `config.json` and one safetensors file or shards."""

import contextlib
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.models.config import DecoderConfig, listed
from repro.models.decoder import Decoder, GivenAway
from repro.models.huggingface.architectures import ARCHITECTURES, BUFFERS, Architecture
from repro.models.reading import finite, json_object, naming, ordinary_file

try:
    import gguf
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install 'repro-papers[flover]'", name=error.name) from error

_DTYPES = "F64", "F32", "F16", "BF16"  # as safetensors has them


def load_huggingface(folder: str | Path, **options: Any) -> Decoder:
    """The model in a folder. `options`: those of `Decoder` (`dtype`: default float32; `device`: default the CPU;
    `kernels`: default "auto"; `shard`). Errors: those of `read_huggingface` and of `Decoder`."""
    architecture, config, weights = _read(Path(folder))
    return architecture.model(config, weights, **options)


def stop_tokens(folder: str | Path) -> frozenset[int]:
    """Tokens that end an answer, for `Request.stop_tokens`: `eos_token_id` of a folder's `generation_config.json`, else
    of its `config.json`; chat models have several. Empty where neither says. ValueError names the file, what it holds
    and what is allowed; FileNotFoundError without `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if name == "config.json" or path.exists():
            found = json_object(path).get("eos_token_id")
            ends = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(end) is int and end >= 0 for end in ends):
                raise ValueError(f"{path}: eos_token_id is {reprlib.repr(found)}, allowed: a token or a list of tokens")
            if ends:
                return frozenset(ends)
    return frozenset()


def read_huggingface(folder: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Sizes, and weights by their GGUF names in the dtype of the file, as `Llama`, `GPTJ` and `GPTNeoX` take them.

    FileNotFoundError when `config.json` or a file of weights is missing. ValueError names the file, the key and what is
    allowed: for whatever we do not compute, another activation say; for sizes that are none; for an index that
    leaves the folder or names what is not there; for weights that are missing, unknown, of another shape or type, NaN
    or infinite. Shapes and types are compared before weights are read.
    """
    _, config, weights = _read(Path(folder))
    return config, dict(weights)


def _read(folder: Path) -> tuple[Architecture, Any, GivenAway]:
    path = folder / "config.json"
    found = json_object(path)
    with naming(path):
        kind = found.get("model_type", "llama")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise ValueError(f"model_type is {reprlib.repr(kind)}, allowed: {', '.join(map(repr, ARCHITECTURES))}")
        architecture = ARCHITECTURES[kind]
        config = architecture.sizes(found)
    return architecture, config, _weights(folder, architecture, config, bool(found.get("tie_word_embeddings")))


def _weights(folder: Path, architecture: Architecture, config: Any, tied: bool) -> GivenAway:
    """All weights, arranged, and no others. `tied`: the embedding is the output head, unless the files hold another."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.names.upper()], config.layers)
    shapes = config.weight_shapes() | {"output.weight": (config.vocab, config.width)}
    places: dict[str, tuple[Path, str]] = {}
    for file in _weight_files(folder):
        with _opened(file) as weights, naming(file):
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                if name.endswith(BUFFERS):
                    continue
                known = names.get_name(name, (".weight", ".bias"))
                if known is None:
                    allowed = f"those of {architecture.model.__name__} with {config.layers} layers"
                    raise ValueError(f"unknown weight {name!r}, allowed: {allowed}")
                if known in places:
                    raise ValueError(f"{name} is in {places[known][0].name} as {places[known][1]}")
                stored = weights.get_slice(name)
                if (shape := tuple(stored.get_shape())) != (expected := shapes.get(known)):
                    raise ValueError(f"{name} has shape {shape}, by config.json: {expected or 'no such weight'}")
                if stored.get_dtype() not in _DTYPES:
                    raise ValueError(f"{name} has type {stored.get_dtype()}, allowed: {', '.join(_DTYPES)}")
                places[known] = file, name
    if tied:
        del shapes["output.weight"]
    if missing := shapes.keys() - places.keys():
        raise ValueError(f"{folder}: no weights for {listed(missing)}")
    found = GivenAway((known, architecture.arrange(config, known, weight)) for known, weight in _read_all(places))
    if tied and "output.weight" in found:  # as transformers 5: a head that was trained apart is not tied
        embedding, head = found["token_embd.weight"], found["output.weight"]
        if head.dtype == embedding.dtype and head.equal(embedding):
            del found["output.weight"]
    return found


def _read_all(places: dict[str, tuple[Path, str]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by their GGUF names, one by one."""
    for file in sorted({file for file, _ in places.values()}):
        with _opened(file) as weights, naming(file):
            for known, (where, name) in places.items():
                if where == file:
                    yield known, finite(name, weights.get_tensor(name))


def _weight_files(folder: Path) -> list[Path]:
    """The files of weights: one, or the shards that an index names. FileNotFoundError where one is missing, ValueError
    where the index leaves the folder or one has not what the index says. Links are followed: caches consist of them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{folder}: neither {whole.name} nor {index.name}")
    shards: dict[str, set[str]] = {}
    weight_map = json_object(index).get("weight_map")
    with naming(index):
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("no weight_map, from names of weights to names of files")
        for weight, name in weight_map.items():
            if not isinstance(name, str) or name in ("", "..") or "\0" in name or Path(name).name != name:
                raise ValueError(f"{weight} is in {name!r}, allowed: the name of a file in this folder")
            shards.setdefault(name, set()).add(weight)
    for name, weights in sorted(shards.items()):
        with _opened(folder / name) as file:
            if missing := weights - set(file.keys()):
                raise ValueError(f"{folder / name}: has not what {index.name} says: {listed(missing)}")
    return [folder / name for name in sorted(shards)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; FileNotFoundError, or ValueError where it is none."""
    try:
        with safe_open(ordinary_file(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
