"""Models from files that a stranger may have written: GGUF, transformers folders, GPT-MoE checkpoints; and the entry
points of the kernels in C++. A refusal names the file, and the key or the tensor; it comes before memory is taken."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from attack import model_files as files
from attack.model_files import ARRAY, BOOL, F32, SIZES, STRING, T_F16, T_F32, T_Q4_1, T_Q8_0, U8, U32, U64
from attack.promises import refuses
from safetensors.torch import load_file, save_file

from repro.models import checkpoint, gpt_moe_checkpoint
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig
from repro.models.huggingface import load_huggingface, read_huggingface
from repro.models.kernels.cpp import BuildError, CppKernels
from repro.models.llama import Llama, LlamaConfig

NAN, INF = float("nan"), float("inf")
CONFIG = LlamaConfig(**(SIZES | {"layers": 1}))
META, WEIGHTS = files.fields(CONFIG), files.weights(CONFIG)
KEYS = sorted(files.KEYS.values())
OPTIONAL = ["llama.attention.key_length", "llama.attention.sliding_window", "llama.rope.scaling.factor"]
SHAPES = CONFIG.weight_shapes()


def gguf(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def made(tensors=WEIGHTS, meta=META, **options) -> bytes:
    return files.gguf_bytes(meta, tensors, **options)


def with_key(key: str, kind: int, value) -> bytes:
    return made(meta=META | {key: (kind, value)})


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def spoiled(name: str, number: float):
    """The weights with one number of one of them replaced."""
    weight = WEIGHTS[name].clone()
    weight.view(-1)[-1] = number
    return WEIGHTS | {name: weight}


# Headers.

VALID = made()
TENSORS_AT, KEYS_AT = 8, 16  # where the counts stand
HUGE = struct.pack("<Q", 2**63)


def edited(at: int, new: bytes) -> bytes:
    return VALID[:at] + new + VALID[at + len(new) :]


HEADERS = {
    "an empty file": (b"", ["should follow"]),
    "shorter than the magic": (b"GGU", ["should follow"]),
    "another magic": (made(magic=b"GGML"), ["not a GGUF file", "GGML"]),
    "a pickle": (b"\x80\x04" * 500, ["not a GGUF file"]),
    "version 1": (made(version=1), ["version is 1", "allowed: 2, 3"]),
    "a version to come": (made(version=4), ["version is 4"]),
    "big-endian": (edited(4, struct.pack(">I", 3)), ["version is 50331648"]),
    "2**63 tensors": (edited(TENSORS_AT, HUGE), ["dimensions"]),
    "2**63 keys": (edited(KEYS_AT, HUGE), ["should follow"]),
    "2**64 - 1 tensors": (edited(TENSORS_AT, b"\xff" * 8), ["dimensions"]),
    "fewer keys than there are": (made(counts=(len(WEIGHTS), 3)), []),
    "no tensors": (made(counts=(0, len(META))), ["no weights for", "blk.0.attn_k.weight", "output_norm.weight"]),
    "nothing": (made(counts=(0, 0)), ["general.architecture is None"]),
    "a key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (files.packed(STRING, "x") + struct.pack("<IB", U8, 1)),
        ["x is there twice"],
    ),
    "a key longer than the file": (edited(24, HUGE), ["9223372036854775808 bytes should follow at byte 32"]),
    "a text longer than the file": (with_key("x", STRING, HUGE + b"abc"), ["should follow"]),
    "2**63 texts": (with_key("x", ARRAY, struct.pack("<IQ", STRING, 2**63)), ["should follow"]),
    "2**63 bytes in an array": (with_key("x", ARRAY, struct.pack("<IQ", U8, 2**63)), ["should follow"]),
    "an array whose size wraps around": (with_key("x", ARRAY, struct.pack("<IQ", U64, 2**61)), ["should follow"]),
    "an array of a gigabyte": (with_key("x", ARRAY, struct.pack("<IQ", U8, 10**9)), ["1000000000 bytes"]),
    "an array of arrays": (with_key("x", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U8, 0)), ["type 9"]),
    "an array of an unknown type": (with_key("x", ARRAY, struct.pack("<IQ", 77, 1)), ["type 77"]),
    "an unknown type": (with_key("x", 13, b"1234"), ["type 13"]),
    "the largest type": (with_key("x", 2**32 - 1, b"1234"), ["type 4294967295"]),
    "a text that is not UTF-8": (with_key("x", STRING, struct.pack("<Q", 2) + b"\xff\xfe"), ["utf-8"]),
    "alignment 0": (made(meta=META | {"general.alignment": (U32, 0)}), ["general.alignment is 0"]),
    "alignment 24": (with_key("general.alignment", U32, 24), ["alignment is 24", "power of two"]),
    "alignment as text": (with_key("general.alignment", STRING, "32"), ["alignment is '32'"]),
    "alignment as a float": (with_key("general.alignment", F32, 32.0), ["alignment is 32.0"]),
    "alignment 2**63": (with_key("general.alignment", U64, 2**63), ["the file at"]),
    "an offset of 2**63": (
        made(changed={"output_norm.weight": {"offset": 2**63}}),
        ["output_norm.weight", "the file at"],
    ),
    "an offset that wraps around": (
        made(changed={"output_norm.weight": {"offset": 2**64 - 32}}),
        ["output_norm.weight"],
    ),
    "tensors that overlap": (made(changed={"output_norm.weight": {"offset": 32}}), ["overlaps"]),
    "two tensors at one place": (made(changed={"output_norm.weight": {"offset": 0}}), ["overlaps"]),
    "an offset that is not aligned": (made(changed={"output_norm.weight": {"offset": 2436}}), ["not aligned"]),
    "a tensor of 2**64 bytes": (
        made(changed={"output_norm.weight": {"shape": (2**62,)}}),
        ["output_norm.weight", "the file at"],
    ),
    "a shape whose product wraps around": (
        made(changed={"output_norm.weight": {"shape": (2**33, 2**33)}}),
        ["the file at"],
    ),
    "no dimensions": (made(changed={"output_norm.weight": {"shape": ()}}), ["0 dimensions"]),
    "nine dimensions": (made(changed={"output_norm.weight": {"dimensions": 9}}), ["9 dimensions", "1 to 4"]),
    "2**32 - 1 dimensions": (made(changed={"output_norm.weight": {"dimensions": 2**32 - 1}}), ["dimensions"]),
    "an unknown type of tensor": (
        made(changed={"output_norm.weight": {"kind": 999}}),
        ["output_norm.weight", "type 999"],
    ),
    "a type that was taken back": (made(changed={"output_norm.weight": {"kind": 4}}), ["type 4"]),
    "whole numbers as weights": (made(changed={"output_norm.weight": {"kind": 24}}), ["output_norm.weight", "I8"]),
    "rows that are no blocks": (
        made(changed={"output_norm.weight": {"kind": 12, "shape": (32,)}}),
        ["rows of 32", "Q4_K", "256"],
    ),
    "a tensor twice": (
        made(changed={"blk.0.ffn_up.weight": {"name": "output_norm.weight"}}),
        ["output_norm.weight", "twice"],
    ),
    "a name misspelt": (
        made(changed={"output_norm.weight": {"name": "output_norm.weigh"}}),
        ["no weights for output_norm.weight", "unknown weights output_norm.weigh"],
    ),
    "an empty name": (made(changed={"output_norm.weight": {"name": ""}}), ["no weights for output_norm.weight"]),
    "a tensor that changes what is computed": (
        made(WEIGHTS | {"rope_factors_long.weight": torch.ones(4)}),
        ["unknown weights rope_factors_long.weight"],
    ),
    "divisors of 0": (made(WEIGHTS | {"rope_freqs.weight": torch.zeros(4)}), ["rope_freqs.weight is 0.0, allowed"]),
    "divisors of NaN": (made(WEIGHTS | {"rope_freqs.weight": torch.full((4,), NAN)}), ["rope_freqs.weight is nan"]),
    "a divisor too many": (made(WEIGHTS | {"rope_freqs.weight": torch.ones(5)}), ["(5,), expected (4,)"]),
    "divisors of two dimensions": (made(WEIGHTS | {"rope_freqs.weight": torch.ones(4, 1)}), ["expected (4,)"]),
    "divisors of 2**62": (
        made(WEIGHTS | {"rope_freqs.weight": torch.ones(4)}, changed={"rope_freqs.weight": {"shape": (2**60,)}}),
        ["rope_freqs.weight ends at byte", "the file at"],
    ),
    "a layer too many": (
        made(WEIGHTS | {"blk.1.ffn_up.weight": torch.ones(32, 32)}),
        ["unknown weights blk.1.ffn_up.weight"],
    ),
    "a bias for some of a product": (
        made(WEIGHTS | {"blk.0.attn_q.bias": torch.ones(32)}),
        ["no weights for blk.0.attn_k.bias, blk.0.attn_v.bias"],
    ),
    "a bias for a norm": (
        made(WEIGHTS | {"blk.0.attn_norm.bias": torch.ones(32)}),
        ["unknown weights blk.0.attn_norm.bias"],
    ),
    **{f"cut after {i} twelfths": (VALID[: len(VALID) * i // 12], []) for i in range(12)},
    "cut by a byte": (VALID[:-1], ["the file at"]),
}


@pytest.mark.parametrize(("data", "words"), HEADERS.values(), ids=HEADERS)
def test_a_gguf_header_that_lies(tmp_path, data, words):
    path = gguf(tmp_path, data)
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, *words)


# Shapes: a kernel that reads a tensor by the sizes of the configuration would read what is beside it.

RESHAPED = {
    "of one number": lambda shape: (1,),
    "a row short": lambda shape: (shape[0] - 1, *shape[1:]),
    "a row more": lambda shape: (shape[0] + 1, *shape[1:]),
    "with a dimension more": lambda shape: (*shape, 1),
    "empty": lambda shape: (0, *shape[1:]),
}


@pytest.mark.parametrize("how", RESHAPED)
@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_of_another_shape(tmp_path, name, how):
    shape = RESHAPED[how](SHAPES[name])
    path = gguf(tmp_path, made(WEIGHTS | {name: torch.ones(shape)}))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, f"{name} has shape {shape}, expected {SHAPES[name]}")
    call = lambda: Llama(CONFIG, WEIGHTS | {name: torch.ones(shape)})  # noqa: E731
    refuses(call, ValueError, f"{name} has shape {shape}, expected {SHAPES[name]}")


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_is_missing(tmp_path, name):
    path = gguf(tmp_path, made(without(WEIGHTS, name)))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, f"no weights for {name}")
    refuses(lambda: Llama(CONFIG, without(WEIGHTS, name)), ValueError, f"no weights for {name}")


def test_all_problems_are_in_one_message(tmp_path):
    found = without(WEIGHTS, "output_norm.weight", "blk.0.ffn_up.weight") | {
        "a.weight": torch.ones(1),
        "b.weight": torch.ones(1),
    }
    found["token_embd.weight"] = torch.ones(3, 32)
    path = gguf(tmp_path, made(found))
    words = ("blk.0.ffn_up.weight, output_norm.weight", "a.weight, b.weight", "token_embd.weight has shape (3, 32)")
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, *words)
    path = gguf(tmp_path, made({}, META | {"llama.block_count": (U32, 900)}))
    said = refuses(lambda: checkpoint.read_gguf(path), ValueError, path, "and 8092 more")
    assert len(said) < 1000


# Sizes.

BAD_SIZES = {
    "0": (U32, 0, "0"),
    "2**32 - 1": (U32, 2**32 - 1, "4294967295"),
    "2**63": (U64, 2**63, str(2**63)),
    "negative": (5, -3, "-3"),
    "a fraction": (F32, 2.5, "2.5"),
    "NaN": (F32, NAN, "nan"),
    "infinite": (F32, INF, "inf"),
    "a truth value": (BOOL, True, "True"),
    "text": (STRING, "32", "'32'"),
    "an array": (ARRAY, (U32, [32, 32]), "array('I', [32, 32])"),
}


@pytest.mark.parametrize(("kind", "value", "found"), BAD_SIZES.values(), ids=BAD_SIZES)
@pytest.mark.parametrize("key", [*KEYS, *OPTIONAL])
def test_a_size_in_gguf_that_is_none(tmp_path, key, kind, value, found):
    most = {"llama.rope.freq_base": 1e30, "llama.rope.scaling.factor": 1e6}.get(key, 0)
    if isinstance(value, int | float) and 1 < value < most:
        pytest.skip("this is a base, or a factor")
    path = gguf(tmp_path, with_key(key, kind, value))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, f"{key} is {found}, allowed: a ")


SIZES_THAT_CLASH = {
    "heads that do not divide the width": (
        "llama.attention.head_count",
        U32,
        5,
        ["llama.embedding_length 32 must be", "llama.attention.head_count 5"],
    ),
    "heads of one number": ("llama.attention.head_count", U32, 32, ["even quotient"]),
    "KV heads that do not divide the heads": (
        "llama.attention.head_count_kv",
        U32,
        3,
        ["llama.attention.head_count_kv 3"],
    ),
    "more KV heads than heads": ("llama.attention.head_count_kv", U32, 8, ["llama.attention.head_count_kv 8"]),
    "KV heads that the weights have not": (
        "llama.attention.head_count_kv",
        U32,
        4,
        ["blk.0.attn_k.weight has shape (16, 32), expected (32, 32)"],
    ),
    "a layer that is not there": ("llama.block_count", U32, 2, ["no weights for blk.1.attn_k.weight"]),
    "a token that is not there": (
        "llama.vocab_size",
        U32,
        20,
        ["token_embd.weight has shape (19, 32), expected (20, 32)"],
    ),
    "scaled rotary positions": (
        "llama.rope.scaling.type",
        STRING,
        "longrope",
        ["llama.rope.scaling.type is 'longrope', allowed: 'none', 'linear', 'yarn'"],
    ),
    "a factor of positions that is missing": (
        "llama.rope.scaling.type",
        STRING,
        "linear",
        ["llama.rope.scaling.type is 'linear', but there is no llama.rope.scaling.factor"],
    ),
    "heads of 2**31 - 2 with scaled positions": (
        "llama.attention.key_length",
        U32,
        2**31 - 2,
        ["llama.context_length is 48, and 2147483646 entries of a head turn", "a product of at most 536870912"],
    ),
    "heads that the weights have not": (
        "llama.attention.key_length",
        U32,
        16,
        ["blk.0.attn_k.weight has shape (16, 32), expected (32, 32)"],
    ),
    "values narrower than keys": (
        "llama.attention.value_length",
        U32,
        4,
        ["llama.attention.value_length is 4, allowed: 8"],
    ),
    "another key of rotary positions": (
        "llama.rope.scale_linear",
        F32,
        2.0,
        ["llama.rope.scale_linear is 2.0, which is not computed"],
    ),
    "experts": ("llama.expert_count", U32, 8, ["llama.expert_count is 8, allowed: 0"]),
    "heads of which a part turns": (
        "llama.rope.dimension_count",
        U32,
        4,
        ["llama.rope.dimension_count is 4, allowed: 8"],
    ),
    "another architecture": (
        "general.architecture",
        STRING,
        "qwen2moe",
        ["general.architecture is 'qwen2moe', allowed: 'llama', 'qwen2', 'qwen3'"],
    ),
    "the architecture as an array": (
        "general.architecture",
        ARRAY,
        (STRING, ["llama"]),
        ["general.architecture is ['llama']"],
    ),
    "the architecture as a number": ("general.architecture", U32, 1, ["general.architecture is 1"]),
}


@pytest.mark.parametrize(("key", "kind", "value", "words"), SIZES_THAT_CLASH.values(), ids=SIZES_THAT_CLASH)
def test_sizes_in_gguf_that_do_not_fit(tmp_path, key, kind, value, words):
    path = gguf(tmp_path, with_key(key, kind, value))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, *words)


@pytest.mark.parametrize("key", ["general.architecture", *(key for key in KEYS if "vocab" not in key)])
def test_a_key_of_gguf_that_is_missing(tmp_path, key):
    path = gguf(tmp_path, made(meta=without(META, key)))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, key)


def test_all_missing_keys_are_named(tmp_path):
    path = gguf(tmp_path, made(meta=without(META, *KEYS)))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, *(key for key in KEYS if "vocab" not in key))
    path = gguf(tmp_path, made(without(WEIGHTS, "token_embd.weight"), without(META, "llama.vocab_size")))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, "no llama.vocab_size, and no weights for token_embd")


# Numbers.


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", [T_F32, T_F16])
@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.0.ffn_down.weight"])
def test_a_weight_that_is_not_finite(tmp_path, name, kind, number):
    path = gguf(tmp_path, made(spoiled(name, number), kinds={name: kind}))
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, f"{name} holds NaN or infinite")


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["infinite", "negative infinite", "NaN"])
@pytest.mark.parametrize(
    ("kind", "at"), [(T_Q4_1, 0), (T_Q4_1, 2), (T_Q8_0, 0)], ids=["Q4_1 scale", "Q4_1 least", "Q8_0 scale"]
)
def test_a_scale_that_is_not_finite(tmp_path, kind, at, bits):
    name, size = list(WEIGHTS)[-1], 20 if kind == T_Q4_1 else 34
    data = made(kinds={name: kind})
    start = len(data) - -(-SHAPES[name][0] * size // 32) * 32
    path = gguf(tmp_path, data[: start + at] + struct.pack("<H", bits) + data[start + at + 2 :])
    refuses(lambda: checkpoint.read_gguf(path), ValueError, path, f"{name} holds NaN or infinite")


def test_a_weight_that_is_not_finite_in_the_dtype_of_the_model():
    refuses(
        lambda: Llama(CONFIG, spoiled("output_norm.weight", 1e5), torch.float16),
        ValueError,
        "output_norm.weight in torch.float16 holds NaN or infinite",
    )
    whole = WEIGHTS | {"output_norm.weight": torch.ones(32, dtype=torch.int32)}
    refuses(lambda: Llama(CONFIG, whole), ValueError, "output_norm.weight has dtype torch.int32")


# What is no file.


def no_files(tmp_path: Path) -> dict[str, Path]:
    found = {
        name: tmp_path / name for name in ("folder", "fifo", "missing", "looped", "device", "x" * 300, "in/a/file")
    }
    found["folder"].mkdir()
    os.mkfifo(found["fifo"])
    found["looped"].symlink_to(found["looped"])
    found["device"].symlink_to("/dev/zero")
    return found


@pytest.mark.parametrize("what", ["folder", "fifo", "missing", "looped", "device", "x" * 300, "in/a/file"])
@pytest.mark.parametrize("read", [checkpoint.read_gguf, checkpoint.tokenizer, gpt_moe_checkpoint.load])
def test_what_is_no_file(tmp_path, what, read):
    path = no_files(tmp_path)[what]
    refuses(lambda: read(path), (ValueError, FileNotFoundError), path.name)


@pytest.mark.parametrize("what", ["folder", "fifo", "missing", "looped", "device"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "model-1.safetensors"]
)
def test_what_is_no_file_in_a_folder(tmp_path, what, name):
    (tmp_path / "odd").mkdir()
    folder = (
        files.write_shards(tmp_path / "model")
        if "index" in name or "-" in name
        else files.write_folder(tmp_path / "model")
    )
    (folder / name).unlink()
    if what != "missing":
        no_files(tmp_path / "odd")[what].rename(folder / name)
    refuses(lambda: load_huggingface(folder), (ValueError, FileNotFoundError), folder, name)


# The tokenizer and the template.

TOKENIZERS = {
    "another kind": ("tokenizer.ggml.model", STRING, "llama", ["tokenizer ('llama', 'smollm') is not supported"]),
    "a way to cut that is not known": (
        "tokenizer.ggml.pre",
        STRING,
        "tekken",
        ["('gpt2', 'tekken') is not supp", "qwen2"],
    ),
    "a kind that is a number": ("tokenizer.ggml.pre", U32, 7, ["('gpt2', 7)"]),
    "tokens as text": (
        "tokenizer.ggml.tokens",
        STRING,
        "abc",
        ["tokenizer.ggml.tokens is 'abc', allowed: an array of strings"],
    ),
    "tokens as numbers": (
        "tokenizer.ggml.tokens",
        ARRAY,
        (U32, [1, 2]),
        ["tokenizer.ggml.tokens is array('I', [1, 2])"],
    ),
    "no tokens": ("tokenizer.ggml.tokens", ARRAY, (STRING, []), ["token_type holds", "allowed: 0, one a token"]),
    "more tokens than the model has": (
        "tokenizer.ggml.tokens",
        ARRAY,
        (STRING, ["a"] * 20),
        ["20 tokens, but the model knows 19"],
    ),
    "too few types": ("tokenizer.ggml.token_type", ARRAY, (U32, [1]), ["token_type holds 1, allowed: "]),
    "types as a number": ("tokenizer.ggml.token_type", U32, 1, ["tokenizer.ggml.token_type is 1"]),
    "a merge of what is no token": ("tokenizer.ggml.merges", ARRAY, (STRING, ["a z"]), ["tokenizer.ggml.merges"]),
    "a merge of one part": ("tokenizer.ggml.merges", ARRAY, (STRING, ["ab"]), ["tokenizer.ggml.merges"]),
    "an empty merge": ("tokenizer.ggml.merges", ARRAY, (STRING, [""]), ["tokenizer.ggml.merges"]),
}


@pytest.mark.parametrize(("key", "kind", "value", "words"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_is_none(tmp_path, key, kind, value, words):
    path = gguf(tmp_path, with_key(key, kind, value))
    refuses(lambda: checkpoint.tokenizer(path), ValueError, path, *words)


@pytest.mark.parametrize("key", [key for key in META if key.startswith("tokenizer.ggml")])
def test_a_key_of_the_tokenizer_that_is_missing(tmp_path, key):
    path = gguf(tmp_path, made(meta=without(META, key)))
    refuses(lambda: checkpoint.tokenizer(path), ValueError, path, f"no {key}")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        pytest.param(STRING, "{% for %}", id="no template"),
        pytest.param(STRING, "{{ messages[7].content }}", id="a message that is not there"),
        pytest.param(STRING, "{{ 1 // 0 }}", id="a division by 0"),
        pytest.param(STRING, "{{ raise_exception('no') }}", id="a function that is not there"),
        pytest.param(STRING, "{{ ''.__class__.__mro__[1].__subclasses__() }}", id="Python's classes"),
        pytest.param(STRING, "{{ messages.append(1) }}", id="a change of what it was given"),
        pytest.param(STRING, "{% for i in range(10**9) %}x{% endfor %}", id="a loop of 10**9"),
        pytest.param(STRING, "{% include '/etc/passwd' %}", id="another file"),
        pytest.param(STRING, "{% import 'os' as os %}", id="a module"),
        pytest.param(U32, 7, id="a number"),
    ],
)
def test_a_chat_template_that_fails(tmp_path, kind, value):
    path = gguf(tmp_path, with_key("tokenizer.chat_template", kind, value))
    refuses(lambda: checkpoint.chat_prompt(path, "hello"), ValueError, path, "tokenizer.chat_template")


@pytest.mark.parametrize(
    ("kind", "value"), [(U32, 19), (U64, 2**63), (5, -1), (BOOL, True), (STRING, "<s>"), (F32, 0.0)]
)
def test_a_token_at_an_end_that_is_none(tmp_path, kind, value):
    path = gguf(tmp_path, with_key("tokenizer.ggml.bos_token_id", kind, value))
    refuses(lambda: checkpoint.chat_prompt(path, "a"), ValueError, path, f"bos_token_id is {value!r}, allowed: 0 to 18")


# Folders of transformers: config.json.

SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
SCALES = [*SCALED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]

NUMBERS = {
    "llama": (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
    ),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "gptj": ("n_layer", "n_embd", "n_head", "n_inner", "rotary_dim", "vocab_size", "n_positions", "layer_norm_epsilon"),
    "gpt_neox": (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "layer_norm_eps",
    ),
}
NO_NUMBERS = [0, -1, 10**40, True, "3", [3], {"a": 1}, NAN, INF, -0.5]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in NUMBERS.items() for key in keys])
def test_a_size_in_config_json_that_is_none(tmp_path, kind, key, value):
    folder = files.write_folder(tmp_path / "model", kind, **{key: value})
    refuses(lambda: load_huggingface(folder), ValueError, folder / "config.json", f"{key} is ", "allowed: ")


@pytest.mark.parametrize("value", [-1, 10**40, True, "3", [3], {"a": 1}, NAN, INF], ids=repr)
@pytest.mark.parametrize("key", SCALES)
def test_a_number_of_scaled_positions_that_is_none(tmp_path, key, value):
    folder = files.write_folder(tmp_path / "model", "qwen3", rope_scaling=SCALED | {key: value})
    refuses(lambda: load_huggingface(folder), ValueError, folder / "config.json", f"{key} is ", "allowed: ")


def llama(**changes):
    return "llama", changes


def qwen3(**changes):
    return "qwen3", changes


def neox(**changes):
    return "gpt_neox", changes


CONFIGS = {
    "two and a half layers": (
        *llama(num_hidden_layers=2.5),
        ["num_hidden_layers is 2.5, allowed: a whole number from 1 to 1000"],
    ),
    "10**12 layers": (*llama(num_hidden_layers=10**12), ["num_hidden_layers is 1000000000000"]),
    "1,001 layers": (*llama(num_hidden_layers=1001), ["num_hidden_layers is 1001"]),
    "100 layers": (*llama(num_hidden_layers=100), ["no weights for blk.1.", "more"]),
    "10**9 positions": (*llama(max_position_embeddings=10**9), ["max_position_embeddings is 1000000000"]),
    "a width that the weights have not": (
        *llama(hidden_size=2**31 - 2, num_attention_heads=2**30 - 1, num_key_value_heads=1),
        ["has shape"],
    ),
    "one head of 2**31 - 2": (
        *llama(hidden_size=2**31 - 2, num_attention_heads=1, num_key_value_heads=1),
        ["max_position_embeddings is 48, and 2147483646 entries of a head turn", "a product of at most 536870912"],
    ),
    "a table of positions of 16 GiB": (
        *llama(head_dim=2048, max_position_embeddings=2**22),
        ["max_position_embeddings is 4194304, and 2048 entries of a head turn", "at most 536870912"],
    ),
    "a table of positions of 16 GiB, of GPT-NeoX": (
        *neox(hidden_size=8192, max_position_embeddings=2**22, rotary_pct=1, rope_parameters=None),
        ["max_position_embeddings is 4194304, and 2048 entries of a head turn", "at most 536870912"],
    ),
    "heads that do not divide the width": (
        *llama(num_attention_heads=5),
        ["hidden_size 32 must be a multiple of num_attention_heads 5"],
    ),
    "more heads than width": (*llama(num_attention_heads=64), ["hidden_size 32 must be a multiple"]),
    "KV heads that do not divide the heads": (
        *llama(num_key_value_heads=3),
        ["num_attention_heads a multiple of num_key_value_heads 3"],
    ),
    "more KV heads than heads": (*llama(num_key_value_heads=8), ["num_key_value_heads 8"]),
    "heads wider than their share": (
        *llama(head_dim=16),
        ["has shape (16, 32), by config.json: (32, 32)"],
    ),
    "heads that cannot be halved": (*qwen3(head_dim=15), ["head_dim 15 must be even"]),
    "heads of 2**31 - 2 with scaled positions": (*qwen3(head_dim=2**31 - 2), ["rotary_dim is 2147483646, allowed"]),
    "a window of 0": ("mistral", {"sliding_window": 0}, ["sliding_window is 0, allowed: a whole number from 1"]),
    "a window as text": ("mistral", {"sliding_window": "32"}, ["sliding_window is '32'"]),
    "layers of an unknown kind": ("qwen2", {"layer_types": ["chunked_attention"]}, ["layer_types is ['chunked"]),
    "kinds of layers as text": ("qwen2", {"layer_types": "full_attention"}, ["layer_types is 'full_attention'"]),
    "a share of a head": (*llama(partial_rotary_factor=NAN), ["partial_rotary_factor is nan, allowed: 1"]),
    "head_dim as text": (*llama(head_dim="8"), ["head_dim is '8'"]),
    "head_dim 0": (*llama(head_dim=0), ["head_dim is 0"]),
    "rope_scaling as a list": (*llama(rope_scaling=[1, 2]), ["rope_scaling is [1, 2], allowed: an object"]),
    "rope_scaling as a number": (*llama(rope_scaling=2.0), ["rope_scaling is 2.0"]),
    "rope_scaling as text": (*llama(rope_scaling="linear"), ["rope_scaling is 'linear'"]),
    "rope_scaling of llama3": (
        *llama(rope_scaling={"rope_type": "llama3"}),
        ["rope_type is 'llama3', but there is no factor, low_freq_factor, high_freq_factor"],
    ),
    "rope_scaling of another kind": (
        *llama(rope_scaling={"rope_type": "longrope"}),
        ["rope_type is 'longrope', allowed: 'default', 'linear', 'dynamic', 'llama3', 'yarn'"],
    ),
    "frequencies that are high and low at once": (
        *llama(rope_scaling={"type": "llama3", "factor": 8, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ["high_freq_factor is 4.0, allowed: above low_freq_factor 4.0"],
    ),
    "a base of 1 under YaRN": (*qwen3(rope_theta=1), ["rope_theta is 1.0, allowed with rope_type 'yarn': above 1"]),
    "a rope type as a list": (*llama(rope_scaling={"type": ["default"]}), ["rope_type is ['default']"]),
    "rope_theta as text inside": (
        *llama(rope_parameters={"rope_theta": "x"}),
        ["rope_theta is 'x', allowed: a number"],
    ),
    "rope_theta 0 inside": (*llama(rope_parameters={"rope_theta": 0}), ["rope_theta is 0, allowed"]),
    "rope_theta NaN inside": (*llama(rope_parameters={"rope_theta": NAN}), ["rope_theta is nan, allowed"]),
    "an eps that is 0 in fp32": (*llama(rms_norm_eps=1e-300), ["rms_norm_eps is 1e-300"]),
    "an eps of 2": (*llama(rms_norm_eps=2), ["rms_norm_eps is 2, allowed: a number from 1e-30 to 1.0"]),
    "another architecture": (*llama(model_type="gpt2"), ["model_type is 'gpt2', allowed: 'llama', 'mistral', "]),
    "the architecture as a list": (*llama(model_type=["llama"]), ["model_type is ['llama']"]),
    "the architecture as an object": (*llama(model_type={}), ["model_type is {}"]),
    "the architecture as a number": (*llama(model_type=7), ["model_type is 7"]),
    "the activation as a list": (*llama(hidden_act=["silu"]), ["hidden_act is ['silu'], allowed: 'silu'"]),
    "an activation of a megabyte": (*llama(hidden_act="x" * 10**6), ["hidden_act is 'xxx", "allowed: 'silu'"]),
    "a truth value as text": (*llama(attention_bias="no"), ["attention_bias is 'no', allowed: False"]),
    "tied as text": (*llama(tie_word_embeddings="false"), ["tie_word_embeddings is 'false', allowed: False, True"]),
    "no head, and not tied": (*llama(tie_word_embeddings=False), ["no weights for output.weight"]),
    "no vocab_size": (*llama(vocab_size=None), ["no vocab_size"]),
    "two keys missing": (*llama(vocab_size=None, hidden_size=None), ["no hidden_size, vocab_size"]),
    "a token that is not there": (
        *llama(vocab_size=20),
        ["embed_tokens.weight has shape (19, 32), by config.json: (20, 32)"],
    ),
    "a share of NaN": (
        *neox(rope_parameters={"partial_rotary_factor": NAN}),
        ["partial_rotary_factor or rotary_pct is nan"],
    ),
    "a share as text": (
        *neox(rope_parameters={"partial_rotary_factor": "x"}),
        ["partial_rotary_factor or rotary_pct is 'x'"],
    ),
    "a share of 10**400": (
        *neox(rope_parameters={"partial_rotary_factor": 10**400}),
        ["partial_rotary_factor or rotary_pct is 1000"],
    ),
    "a share above 1": (*neox(rope_parameters={"partial_rotary_factor": 1.5}), ["is 1.5, allowed: above 0, at most 1"]),
    "a negative share": (*neox(rope_parameters=None, rotary_pct=-1), ["is -1, allowed"]),
    "an older base of 0": (*neox(rope_parameters=None, rotary_emb_base=0), ["rope_theta is 0"]),
    "a share of less than a pair": (*neox(rope_parameters={"partial_rotary_factor": 0.05}), ["rotary_dim is 0"]),
    "half a pair": ("gptj", {"rotary_dim": 5}, ["rotary_dim is 5, allowed: even, 2 to 8 (n_embd / n_head)"]),
    "more pairs than a head has": ("gptj", {"rotary_dim": 10}, ["rotary_dim is 10"]),
    "heads of GPT-J that do not divide the width": (
        "gptj",
        {"n_head": 5},
        ["n_embd 32 must be a multiple of n_head 5"],
    ),
}


@pytest.mark.parametrize(("kind", "changes", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_json_that_lies(tmp_path, kind, changes, words):
    folder = files.write_folder(tmp_path / "model", kind, **changes)
    refuses(lambda: load_huggingface(folder), ValueError, folder, *words)


JSON = {
    "empty": (b"", ["not JSON"]),
    "cut": (b"{", ["not JSON"]),
    "a list": (b"[]", ["holds a list, allowed: an object"]),
    "a number": (b"3", ["holds a int"]),
    "null": (b"null", ["holds a NoneType"]),
    "with a byte order mark": (b"\xef\xbb\xbf{}", ["not JSON", "BOM"]),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), ["not JSON"]),
    "not UTF-8": (b"\xff\xfe\x00", ["not JSON"]),
    "lists nested 100,000 deep": (b"[" * 100_000, ["not JSON"]),
    "objects nested 100,000 deep": (b'{"a":' * 100_000, ["not JSON"]),
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', ["'c' is there twice"]),
    "a number of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", ["not JSON"]),
    "two objects": (b'{"a": 1} {"a": 1}', ["not JSON", "Extra data"]),
    "YAML": (b"hidden_size: 32", ["not JSON"]),
    "zeros": (b"\0" * 4096, ["not JSON"]),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("data", "words"), JSON.values(), ids=JSON)
def test_what_is_no_json_object(tmp_path, name, data, words):
    folder = files.write_shards(tmp_path / "model")
    (folder / name).write_bytes(data)
    refuses(lambda: load_huggingface(folder), ValueError, folder / name, *words)


def test_a_json_file_of_gigabytes_is_not_read(tmp_path):
    folder = files.write_folder(tmp_path / "model")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    refuses(
        lambda: load_huggingface(folder), ValueError, folder / "config.json", "1099511627776 bytes, allowed: at most"
    )


# The index of shards.

FIRST, OTHER = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
INDEXES = {
    "beside the folder": (
        "../other/model.safetensors",
        ["'../other/model.safetensors', allowed: the name of a file in this folder"],
    ),
    "an absolute path": ("/etc/passwd", ["'/etc/passwd', allowed"]),
    "in a folder of it": ("sub/model.safetensors", ["'sub/model.safetensors', allowed"]),
    "with a dot before it": ("./model-0.safetensors", ["'./model-0.safetensors', allowed"]),
    "the folder above": ("..", ["'..', allowed"]),
    "the folder": (".", ["'.', allowed"]),
    "an empty name": ("", ["'', allowed"]),
    "a zero byte": ("a\0b", ["allowed: the name of a file"]),
    "a number": (7, ["is in 7, allowed"]),
    "a list": (["model-0.safetensors"], ["allowed: the name of a file"]),
    "an object": ({"a": 1}, ["allowed: the name of a file"]),
    "a name of 5,000 letters": ("x" * 5000, ["too long"]),
    "a file without the tensor": (
        "model-1.safetensors",
        ["model-1.safetensors: has not what model.safetensors.index.json says", FIRST],
    ),
    "a file that is none": ("config.json", ["config.json: not a safetensors file"]),
}


@pytest.mark.parametrize(("place", "words"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_lies(tmp_path, place, words):
    folder = files.write_shards(tmp_path / "model", **{FIRST: place})
    (tmp_path / "other").mkdir()
    save_file(files.tensors("llama"), tmp_path / "other/model.safetensors")
    refuses(lambda: load_huggingface(folder), ValueError, folder, *words)


@pytest.mark.parametrize("value", [None, [], "x", 7, {}], ids=repr)
def test_a_weight_map_that_is_none(tmp_path, value):
    folder = files.write_shards(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": value}))
    refuses(lambda: load_huggingface(folder), ValueError, index, "no weight_map")


def test_an_index_that_names_a_file_that_is_not_there(tmp_path):
    folder = files.write_shards(tmp_path / "model", **{FIRST: "model-7.safetensors"})
    refuses(lambda: load_huggingface(folder), FileNotFoundError, folder / "model-7.safetensors")


def test_an_index_leaves_a_tensor_out(tmp_path):
    """What is read is what the files hold."""
    files.use(load_huggingface(files.write_shards(tmp_path / "model", **{OTHER: None})))


def test_a_tensor_in_two_shards(tmp_path):
    folder = files.write_shards(tmp_path / "model")
    shard = folder / "model-1.safetensors"
    save_file(load_file(shard) | {FIRST: files.tensors("llama")[FIRST]}, shard)
    refuses(lambda: load_huggingface(folder), ValueError, shard, FIRST, "model-0.safetensors")


def test_shards_behind_links_are_read(tmp_path):
    """Hugging Face's cache consists of links to files beside the folder."""
    folder = files.write_shards(tmp_path / "model")
    expected = files.use(load_huggingface(folder))
    for path in list(folder.iterdir()):
        path.rename(tmp_path / f"blob-{path.name}")
        path.symlink_to(tmp_path / f"blob-{path.name}")
    assert torch.equal(files.use(load_huggingface(folder)), expected)


# Safetensors.


def safetensors(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(dtype: str = "F32", shape=(1,), offsets=(0, 4)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


BROKEN = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "a header of nothing": b"\0" * 8,
    "a header of 2**63 bytes": safetensors({}, size=2**63),
    "a header of 100 MB": safetensors({}, size=10**8),
    "a header that is no JSON": safetensors(b"{"),
    "a header that is a list": safetensors([]),
    "a header nested 10,000 deep": safetensors(b"[" * 10_000),
    "no data": safetensors(tensor()),
    "data beyond the end": safetensors(tensor(offsets=(0, 2**63)), b"1234"),
    "data that ends before it begins": safetensors(tensor(offsets=(4, 0)), b"1234"),
    "a shape whose product wraps around": safetensors(tensor(shape=(2**62, 2**62)), b"1234"),
    "a shape larger than the data": safetensors(tensor(shape=(2,)), b"1234"),
    "an unknown type": safetensors(tensor(dtype="F33"), b"1234"),
    "data that no tensor has": safetensors(tensor(), b"12345678"),
    "tensors that overlap": safetensors(tensor() | {"b": tensor()["a"]}, b"1234"),
    "metadata that are no text": safetensors({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_safetensors_file(tmp_path, data):
    folder = files.write_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(data)
    refuses(lambda: load_huggingface(folder), ValueError, path)
    refuses(lambda: gpt_moe_checkpoint.load(path), ValueError, path)


LLAMA = files.shapes("llama")


@pytest.mark.parametrize("how", RESHAPED)
@pytest.mark.parametrize("name", LLAMA)
def test_a_tensor_of_another_shape_in_a_folder(tmp_path, name, how):
    folder, shape = files.write_folder(tmp_path / "model"), RESHAPED[how](LLAMA[name])
    path = folder / "model.safetensors"
    save_file(files.tensors("llama") | {name: torch.ones(shape)}, path)
    refuses(
        lambda: load_huggingface(folder), ValueError, path, f"{name} has shape {shape}, by config.json: {LLAMA[name]}"
    )


@pytest.mark.parametrize("kind", files.CONFIGS)
def test_every_tensor_of_a_folder_is_needed(tmp_path, kind):
    folder = files.write_folder(tmp_path / "model", kind)
    for name in files.shapes(kind):
        save_file(without(files.tensors(kind), name), folder / "model.safetensors")
        refuses(lambda: load_huggingface(folder), ValueError, folder, "no weights for ")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_tensor_of_another_type(tmp_path, name, dtype):
    folder = files.write_folder(tmp_path / "model")
    save_file(files.tensors("llama") | {name: torch.ones(LLAMA[name]).to(dtype)}, folder / "model.safetensors")
    refuses(lambda: load_huggingface(folder), ValueError, "model.safetensors", f"{name} has type ", "allowed: F64, F32")


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_in_a_folder_that_is_not_finite(tmp_path, name, dtype, number):
    folder = files.write_folder(tmp_path / "model")
    found = files.tensors("llama", dtype)
    found[name].view(-1)[5] = number
    save_file(found, folder / "model.safetensors")
    refuses(lambda: load_huggingface(folder), ValueError, "model.safetensors", f"{name} holds NaN or infinite")


def test_two_names_of_one_weight(tmp_path):
    folder = files.write_folder(tmp_path / "model", "gpt_neox")
    found = files.tensors("gpt_neox")
    save_file(found | {"lm_head.weight": found["embed_out.weight"].clone()}, folder / "model.safetensors")
    refuses(lambda: load_huggingface(folder), ValueError, "model.safetensors", "lm_head.weight", "embed_out.weight")


# GPT-MoE.

MOE_SIZES = [
    *(
        (key, value)
        for key in ("layers", "hidden", "heads", "seq_len", "vocab", "experts", "top_k", "expert_hidden", "kv_heads")
        for value in (0, -1, 2.5, True, "2", [2], 2**40)
    ),
    *(("balance", value) for value in (-0.1, NAN, INF, "0", None, [])),
    ("layers", 10**12),
    ("layers", None),
]


def moe(tmp_path: Path, sizes: object = None, **changes) -> Path:
    """A GPT-MoE checkpoint whose metadata or weights are changed; None leaves a weight out."""
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    gpt_moe_checkpoint.save(GPTMoE(files.MOE), path)
    found = {name: weight for name, weight in (load_file(path) | changes).items() if weight is not None}
    text = sizes if isinstance(sizes, str) else json.dumps(vars(files.MOE) | (sizes or {}))
    save_file(found, path, {"gpt_moe_config": text})
    return path


@pytest.mark.parametrize(("key", "value"), MOE_SIZES)
def test_a_size_of_a_gpt_moe_that_is_none(tmp_path, key, value):
    path = moe(tmp_path, {key: value})
    refuses(lambda: gpt_moe_checkpoint.load(path), ValueError, path, f"{key} is ", "allowed: a ")


MOES = {
    "no JSON": ("", {}, ["gpt_moe_config"]),
    "a list": ("[]", {}, ["gpt_moe_config"]),
    "nested 10,000 deep": ("[" * 10_000, {}, ["gpt_moe_config"]),
    "an unknown size": ({"width": 3}, {}, ["width"]),
    "experts of 10**28 numbers": ({"hidden": 2**31 - 2, "experts": 2**31 - 1, "expert_hidden": 2**31 - 1}, {}, []),
    "2**31 - 1 tokens": ({"vocab": 2**31 - 1}, {}, ["tokens.weight"]),
    "100 layers": ({"layers": 100}, {}, ["Missing key"]),
    "heads that do not divide the width": ({"heads": 3}, {}, ["hidden 8 is not divisible by 3 heads"]),
    "more experts than there are": ({"top_k": 4}, {}, ["top_k is 4, allowed: 1 to 3"]),
    "a weight that is missing": ({}, {"norm.bias": None}, ["norm.bias"]),
    "a weight that is unknown": ({}, {"norm.scale": torch.ones(1)}, ["norm.scale"]),
    "a weight of one number": ({}, {"norm.bias": torch.ones(1)}, ["norm.bias"]),
    "whole numbers": ({}, {"norm.bias": torch.ones(8, dtype=torch.int32)}, ["norm.bias has dtype torch.int32"]),
    "NaN": ({}, {"norm.bias": torch.full((8,), NAN)}, ["norm.bias holds NaN"]),
    "negative infinite": ({}, {"blocks.0.experts.up": torch.full((3, 8, 4), -INF)}, ["blocks.0.experts.up holds NaN"]),
}


@pytest.mark.parametrize(("sizes", "weights", "words"), MOES.values(), ids=MOES)
def test_a_gpt_moe_that_lies(tmp_path, sizes, weights, words):
    path = moe(tmp_path, sizes, **weights)
    refuses(lambda: gpt_moe_checkpoint.load(path), ValueError, path, *words)


# Sizes in Python.


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "2", None, 10**12])
@pytest.mark.parametrize("name", ["layers", "width", "heads", "kv_heads", "ffn", "vocab", "context"])
def test_a_size_that_is_none(name, value):
    refuses(lambda: LlamaConfig(**(SIZES | {name: value})), ValueError, f"{name} is {value!r}, allowed: a whole number")


# What is right stays right.


@pytest.mark.parametrize("kind", files.CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_valid_folders_are_read(tmp_path, kind, dtype):
    folder = files.write_folder(tmp_path / "model", kind, dtype)
    _, found = read_huggingface(folder)
    assert all(weight.dtype == dtype for weight in found.values())
    assert files.use(load_huggingface(folder)).isfinite().all()


def test_a_file_of_the_official_writer_is_read_as_its_reader_does(tmp_path):
    import gguf as official

    path = tmp_path / "model.gguf"
    writer = official.GGUFWriter(path, "llama")
    for key, (kind, value) in without(META, "general.architecture").items():
        if kind == ARRAY:
            writer.add_array(key, value[1])
        else:
            {U32: writer.add_uint32, F32: writer.add_float32, STRING: writer.add_string}[kind](key, value)
    for name, weight in WEIGHTS.items():
        kind = official.GGMLQuantizationType.Q8_0 if weight.dim() > 1 else official.GGMLQuantizationType.F32
        writer.add_tensor(name, official.quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, found = checkpoint.read_gguf(path)
    assert (config.width, config.rope_base) == (32, 10_000.0)
    for tensor in official.GGUFReader(path).tensors:
        theirs = official.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(found[tensor.name], torch.from_numpy(theirs.copy())), tensor.name
    assert checkpoint.tokenizer(path).encode("abc</s>").ids == [16, 18]


def test_biases_and_a_head_are_read(tmp_path):
    """llama.cpp's LLaMA may have them; an attention's biases change what is computed."""
    extra = {f"blk.0.attn_{name}.bias": torch.ones(32 if name == "q" else 16) for name in "qkv"}
    extra["output.weight"] = torch.ones(19, 32)
    plain, more = (Llama(*checkpoint.read_gguf(gguf(tmp_path, made(WEIGHTS | each)))) for each in ({}, extra))
    assert not torch.equal(files.use(plain), files.use(more))


# The kernels' entry points.

try:
    CppKernels()
    OPS = torch.ops.repro_models
    (WIDTH, DEEP), BUILT = OPS.panel_shape(torch.zeros(2, 8)), pytest.mark.skipif(False, reason="")
except BuildError as error:
    (WIDTH, DEEP), BUILT = (32, 1), pytest.mark.skip(str(error))

KV = torch.zeros(3, 2, 4, 8)  # blocks, kv_heads, block, dim
PLACE = torch.tensor([0, 1])
ROTATE = {
    "qkv": torch.zeros(2, 64),
    "cosine": torch.zeros(2, 4),
    "sine": torch.zeros(2, 4),
    "slots": PLACE,
    "positions": PLACE,
    "keys": KV,
    "values": KV.clone(),
    "table": None,
}
ATTEND = {"q": torch.zeros(2, 4, 8), "keys": KV, "values": KV, "slots": PLACE, "positions": PLACE, "table": None}
ATTEND["prompt"] = torch.tensor([True, False])
TABLE = torch.tensor([[0, 2], [1, 0]])
NORMED = {"x": torch.zeros(2, 16), "y": torch.zeros(2, 16), "weight": torch.zeros(16), "eps": 1e-5}
OUT = WIDTH + 8  # of two panels
PRODUCT = {"x": torch.zeros(2, 8), "panels": torch.zeros(2, 8, WIDTH, DEEP), "out": OUT, "bias": torch.zeros(OUT)}
PRODUCT["after"] = ""
CALLS = {
    "rotate_store": ROTATE,
    "attend": ATTEND,
    "add_norm": NORMED,
    "product": PRODUCT,
    "silu_multiply": {"gate_up": torch.zeros(2, 8)},
    "argmax": {"x": torch.zeros(2, 8)},
    "take": {"table": torch.zeros(3, 8), "index": torch.tensor([2, 0])},
    "panel_shape": {"weight": torch.zeros(2, 8)},
}


def ints(*numbers):
    return torch.tensor(numbers)


ENTRIES = {
    "a slot beyond the cache": ("rotate_store", {"slots": ints(0, 3)}, "slot 3, allowed: 0 to 2"),
    "a negative slot": ("rotate_store", {"slots": ints(-1, 0)}, "slot -1"),
    "a slot of 2**62": ("rotate_store", {"slots": ints(2**62, 0)}, "slot 46"),
    "a position beyond the block": ("rotate_store", {"positions": ints(0, 4)}, "position 4, allowed: 0 to 3"),
    "a negative position": ("rotate_store", {"positions": ints(0, -1)}, "position -1"),
    "fewer slots than rows": ("rotate_store", {"slots": ints(0)}, "2 rows, but 1 slots"),
    "more positions than rows": ("rotate_store", {"positions": ints(0, 1, 2)}, "3 positions"),
    "slots in int32": ("rotate_store", {"slots": PLACE.int()}, "expected scalar type Long"),
    "positions in fp32": ("rotate_store", {"positions": PLACE.float()}, "expected scalar type Long"),
    "qkv that is no multiple of a head": ("rotate_store", {"qkv": torch.zeros(2, 63)}, "qkv [2, 63]"),
    "qkv without queries": ("rotate_store", {"qkv": torch.zeros(2, 32)}, "qkv [2, 32]"),
    "qkv of one head": ("rotate_store", {"qkv": torch.zeros(2, 8)}, "qkv [2, 8]"),
    "qkv of one dimension": ("rotate_store", {"qkv": torch.zeros(64)}, "qkv [64]"),
    "qkv of three dimensions": ("rotate_store", {"qkv": torch.zeros(2, 8, 8)}, "qkv [2, 8, 8]"),
    "qkv that is not contiguous": ("rotate_store", {"qkv": torch.zeros(64, 2).T}, "contiguous"),
    "qkv of another dtype than the cache": (
        "rotate_store",
        {"qkv": torch.zeros(2, 64).bfloat16()},
        "expected scalar type BFloat16",
    ),
    "qkv in fp16": ("rotate_store", {"qkv": torch.zeros(2, 64).half()}, "Half"),
    "qkv in fp64": ("rotate_store", {"qkv": torch.zeros(2, 64).double()}, "Double"),
    "qkv that is nowhere": (
        "rotate_store",
        {"qkv": torch.zeros(2, 64, device="meta")},
        "on the CPU, found Strided on meta",
    ),
    "more pairs than a head has": (
        "rotate_store",
        {"cosine": torch.zeros(2, 5), "sine": torch.zeros(2, 5)},
        "at most 4",
    ),
    "cosines in fp64": ("rotate_store", {"cosine": torch.zeros(2, 4).double()}, "expected scalar type Float"),
    "cosines of fewer rows": (
        "rotate_store",
        {"cosine": torch.zeros(1, 4), "sine": torch.zeros(1, 4)},
        "cosine [1, 4]",
    ),
    "fewer sines than cosines": ("rotate_store", {"sine": torch.zeros(2, 3)}, "sine [2, 3]"),
    "cosines of one dimension": ("rotate_store", {"cosine": torch.zeros(4), "sine": torch.zeros(4)}, "cosine [4]"),
    "fewer values than keys": ("rotate_store", {"values": torch.zeros(2, 2, 4, 8)}, "values [2, 2, 4, 8]"),
    "values of another dtype": ("rotate_store", {"values": KV.bfloat16()}, "expected scalar type"),
    "heads of nothing": (
        "rotate_store",
        {"keys": torch.zeros(3, 2, 4, 0), "values": torch.zeros(3, 2, 4, 0)},
        "not empty",
    ),
    "blocks of nothing": (
        "rotate_store",
        {"keys": torch.zeros(3, 2, 0, 8), "values": torch.zeros(3, 2, 0, 8)},
        "not empty",
    ),
    "a cache of three dimensions": (
        "rotate_store",
        {"keys": torch.zeros(6, 4, 8), "values": torch.zeros(6, 4, 8)},
        "Dimension out of range",
    ),
    "a cache that is not contiguous": (
        "rotate_store",
        {"keys": KV.transpose(0, 1), "values": KV.transpose(0, 1)},
        "contiguous",
    ),
    "a table of one dimension": ("rotate_store", {"table": ints(0, 1)}, "Dimension out of range"),
    "a table of three dimensions": ("rotate_store", {"table": TABLE[None]}, "[slots, blocks]"),
    "a table in int32": ("rotate_store", {"table": TABLE.int()}, "expected scalar type Long"),
    "a block beyond the pool": (
        "rotate_store",
        {"table": ints(3, 0, 1, 1).view(2, 2)},
        "block 3 of slot 0, allowed: 0 to 2",
    ),
    "a negative block": ("rotate_store", {"table": ints(0, 0, -1, 1).view(2, 2)}, "block -1 of slot 1"),
    "a slot beyond the table": ("rotate_store", {"table": TABLE, "slots": ints(0, 2)}, "slot 2, allowed: 0 to 1"),
    "a position beyond the table": (
        "rotate_store",
        {"table": TABLE, "positions": ints(0, 8)},
        "position 8, allowed: 0 to 7",
    ),
    "an empty table": ("rotate_store", {"table": torch.zeros(2, 0, dtype=torch.int64)}, "not empty"),
    "attend: a slot beyond the cache": ("attend", {"slots": ints(0, 3)}, "slot 3"),
    "attend: a position beyond the block": ("attend", {"positions": ints(4, 0)}, "position 4"),
    "attend: an earlier block beyond the pool": (
        "attend",
        {"table": ints(0, 0, 7, 1).view(2, 2), "positions": ints(0, 5)},
        "block 7 of slot 1",
    ),
    "attend: wider heads than the cache": ("attend", {"q": torch.zeros(2, 4, 9)}, "q [2, 4, 9]"),
    "attend: heads that do not share evenly": (
        "attend",
        {"q": torch.zeros(2, 3, 8)},
        "q [2, 3, 8] must be [n, a multiple of 2, 8]",
    ),
    "attend: queries of two dimensions": ("attend", {"q": torch.zeros(2, 32)}, "q [2, 32]"),
    "attend: more queries than places": ("attend", {"q": torch.zeros(3, 4, 8)}, "3 rows, but 2 slots"),
    "attend: queries of another dtype": (
        "attend",
        {"q": torch.zeros(2, 4, 8).bfloat16()},
        "expected scalar type BFloat16",
    ),
    "attend: narrower values": ("attend", {"values": torch.zeros(3, 2, 4, 7)}, "values [3, 2, 4, 7]"),
    "attend: no KV heads": (
        "attend",
        {"keys": torch.zeros(3, 0, 4, 8), "values": torch.zeros(3, 0, 4, 8)},
        "not empty",
    ),
    "attend: keys that are nowhere": ("attend", {"keys": KV.to("meta")}, "meta"),
    "attend: marks of fewer rows": ("attend", {"prompt": torch.tensor([True])}, "2 rows, but for 1 it is known"),
    "attend: marks that are numbers": ("attend", {"prompt": ints(1, 0)}, "expected scalar type Bool"),
    "attend: marks that are not contiguous": ("attend", {"prompt": torch.ones(4).bool()[::2]}, "contiguous"),
    "attend: a prompt in a block beyond the pool": (
        "attend",
        {"table": ints(0, 7, 0, 1).view(2, 2), "positions": ints(5, 0)},
        "block 7 of slot 0",
    ),
    "attend: a prompt in another dtype than the cache": (
        "attend",
        {"q": torch.zeros(2, 4, 8).bfloat16(), "prompt": torch.ones(2).bool()},
        "expected scalar type BFloat16",
    ),
    "a row beyond the table": ("take", {"index": ints(3, 0)}, "row 3 of a table, allowed: 0 to 2"),
    "a negative row": ("take", {"index": ints(0, -1)}, "row -1"),
    "rows in int32": ("take", {"index": ints(0, 1).int()}, "expected scalar type Long"),
    "rows of three dimensions": ("take", {"table": torch.zeros(3, 2, 4)}, "a table [3, 2, 4]"),
    "a table that is not contiguous": ("take", {"table": torch.zeros(8, 3).T}, "contiguous"),
    "a table of whole numbers": ("take", {"table": torch.zeros(3, 8).int()}, "Int"),
    "a norm of one number": ("add_norm", {"weight": torch.zeros(1)}, "the weight [width], found [1]"),
    "a norm of a number more": ("add_norm", {"weight": torch.zeros(17)}, "found [17]"),
    "a norm of another dtype": ("add_norm", {"weight": torch.zeros(16).bfloat16()}, "expected scalar type"),
    "a branch of fewer rows": ("add_norm", {"y": torch.zeros(1, 16)}, "y of the same shape"),
    "a branch of another dtype": ("add_norm", {"y": torch.zeros(2, 16).double()}, "expected scalar type"),
    "a residual of one dimension": ("add_norm", {"x": torch.zeros(16), "y": None}, "x must be [n, width], found [16]"),
    "a residual that is not contiguous": ("add_norm", {"x": torch.zeros(16, 2).T, "y": None}, "contiguous"),
    "a residual of whole numbers": ("add_norm", {"x": torch.zeros(2, 16).int(), "y": None}, "Int"),
    "a sparse residual": ("add_norm", {"x": torch.zeros(2, 16).to_sparse(), "y": None}, ""),
    "a gate without its up": ("silu_multiply", {"gate_up": torch.zeros(2, 7)}, "found [2, 7]"),
    "gates of one dimension": ("silu_multiply", {"gate_up": torch.zeros(8)}, "found [8]"),
    "gates that are nowhere": ("silu_multiply", {"gate_up": torch.zeros(2, 8, device="meta")}, "meta"),
    "the largest of nothing": ("argmax", {"x": torch.zeros(2, 0)}, "found [2, 0]"),
    "logits of one dimension": ("argmax", {"x": torch.zeros(5)}, "found [5]"),
    "logits of whole numbers": ("argmax", {"x": torch.zeros(2, 5).long()}, "Long"),
    "more inputs than the weight": ("product", {"x": torch.zeros(2, 9)}, "does not fit panels"),
    "more outputs than panels": ("product", {"out": 2 * WIDTH + 1}, "does not fit panels"),
    "fewer outputs than panels": ("product", {"out": WIDTH}, "does not fit panels"),
    "negative outputs": ("product", {"out": -1}, "does not fit panels"),
    "2**63 - 1 outputs": ("product", {"out": 2**63 - 1}, "does not fit panels"),
    "a bias that is too short": ("product", {"bias": torch.zeros(OUT - 1)}, f"the bias {OUT} entries"),
    "a bias of another dtype": ("product", {"bias": torch.zeros(OUT).bfloat16()}, "one dtype"),
    "panels that are too narrow": ("product", {"panels": torch.zeros(2, 8, WIDTH - 1, DEEP)}, "does not fit panels"),
    "panels that are too deep": ("product", {"panels": torch.zeros(2, 4, WIDTH, 2)}, "not for this processor"),
    "panels of three dimensions": ("product", {"panels": torch.zeros(2, 8, WIDTH)}, "does not fit panels"),
    "inputs of another dtype": ("product", {"x": torch.zeros(2, 8).bfloat16()}, "one dtype"),
    "inputs that are nowhere": ("product", {"x": torch.zeros(2, 8, device="meta")}, "meta"),
    "another activation": ("product", {"after": "relu"}, "after is relu"),
    "a gate of a panel and a half": (
        "product",
        {"panels": torch.zeros(3, 8, WIDTH, DEEP), "after": "silu", "out": WIDTH * 3 // 2, "bias": None},
        f"multiple of {WIDTH}",
    ),
    "a gate with a bias": ("product", {"after": "silu", "out": WIDTH, "bias": torch.zeros(WIDTH)}, "without a bias"),
    "a gate without its half": ("product", {"after": "silu", "out": 2 * WIDTH}, "does not fit panels"),
    "no inputs": ("product", {"x": torch.zeros(2, 0), "panels": torch.zeros(2, 0, WIDTH, DEEP)}, "does not fit panels"),
    "2**62 gates": ("product", {"after": "silu", "out": 2**62}, "does not fit panels"),
    "a weight of one dimension": ("panel_shape", {"weight": torch.zeros(8)}, "[out, in], found [8]"),
}


@BUILT
@pytest.mark.parametrize(("name", "changes", "words"), ENTRIES.values(), ids=ENTRIES)
def test_an_entry_point_checks_what_it_is_given(name, changes, words):
    refuses(lambda: getattr(OPS, name)(*(CALLS[name] | changes).values()), (RuntimeError, IndexError), words)


@BUILT
@pytest.mark.parametrize("name", CALLS)
def test_an_entry_point_takes_what_is_right(name):
    """What the table above changes."""
    getattr(OPS, name)(*CALLS[name].values())


@BUILT
def test_entry_points_take_no_rows():
    none, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    q = OPS.rotate_store(torch.zeros(0, 64), empty, empty, none, none, KV, KV.clone(), TABLE)
    assert OPS.attend(q, KV, KV, none, none, TABLE).shape == (0, 32)
    assert OPS.argmax(torch.zeros(0, 5)).shape == (0,)


def test_a_gpt_moe_config_takes_what_was_legal():
    assert GPTMoEConfig(kv_heads=None, balance=0).kv_width == 128
