"""Small models as files: valid ones, the ways to spoil them, and the parsers that are fuzzed with them.

What was read is used: a file that is accepted runs a few tokens through the kernels in C++, which read by pointers.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attack.fuzz import Parser
from safetensors.torch import save_file

from repro.models import checkpoint, gpt_moe_checkpoint
from repro.models.decoder import Decoder
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig
from repro.models.huggingface import load_huggingface
from repro.models.llama import Llama, LlamaConfig
from repro.models.rows import Rows

SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 19, "context": 48}
TOKENS = [chr(ord("a") + i) for i in range(15)] + ["ab", "abc", "<s>", "</s>"]
MOE = GPTMoEConfig(layers=1, hidden=8, heads=2, seq_len=8, vocab=11, experts=3, top_k=2, expert_hidden=4, kv_heads=1)

KEYS = {ours: f"llama.{theirs}" for ours, theirs in (checkpoint._SIZES | {"vocab": "vocab_size"}).items()}

# Types of values and tensors by their numbers in GGUF.
U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
T_F32, T_F16, T_Q4_1, T_Q8_0 = 0, 1, 3, 8


def use(model: Decoder) -> torch.Tensor:
    """Logits after a prompt in two chunks and a token that is decoded beside another, in a pool of blocks."""
    cache = model.new_paged_cache(2, min(model.config.longest, 16), 4, 8)
    for slot in (0, 1):
        cache.reserve(slot, cache.capacity)
    tokens = torch.arange(7) % model.config.vocab
    length = min(cache.capacity, 5)
    for slot in (0, 1):
        model.prefill(tokens[:2][:length], cache, slot)
        if length > 2:
            model.prefill(tokens[2:length], cache, slot, start=2)
    last = torch.full((2,), length - 1)
    logits = model.forward(Rows.decode(tokens[:2] % model.config.vocab, last, slice(0, 2), length - 1), cache)
    assert logits.shape == (2, model.config.vocab)
    chosen = model.kernels.argmax(logits)
    assert chosen.min() >= -1 and chosen.max() < model.config.vocab  # -1: huge weights make logits that are not finite
    return logits


# GGUF, written by hand: the attacks need headers that no library writes.


def packed(kind: int, value: Any) -> bytes:
    """A value of the metadata; bytes stand for themselves."""
    if isinstance(value, bytes):
        return value
    if kind == STRING:
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(packed(inner, each) for each in values)
    return struct.pack(f"<{'BbHhIif?  Qqd'[kind]}", value)


def stored(weight: torch.Tensor, kind: int) -> bytes:
    """A tensor's numbers; blocks are made up, with scales of 1."""
    if kind == T_F16:
        return weight.half().numpy().tobytes()
    if kind in (T_Q4_1, T_Q8_0):
        scales = struct.pack("<ee", 0.01, -0.07) if kind == T_Q4_1 else struct.pack("<e", 0.01)
        rest = bytes(range(16 if kind == T_Q4_1 else 32))
        return (scales + rest) * (weight.numel() // 32)
    return weight.numpy().tobytes()


def fields(config: LlamaConfig) -> dict[str, tuple[int, Any]]:
    """Metadata of a LLaMA: type and value by key."""
    sizes = {KEYS[name]: (U32, getattr(config, name)) for name in KEYS}
    sizes |= {KEYS[name]: (F32, getattr(config, name)) for name in ("rope_base", "norm_eps")}
    text = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b", "ab c"])),
        "tokenizer.ggml.token_type": (ARRAY, (U32, [1] * 17 + [3] * 2)),
        "tokenizer.chat_template": (STRING, "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"),
    }
    return {"general.architecture": (STRING, "llama")} | sizes | text


def weights(config: LlamaConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in config.weight_shapes().items()}


def gguf_bytes(
    meta: Mapping[str, tuple[int, Any]],
    tensors: Mapping[str, torch.Tensor],
    kinds: Mapping[str, int] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
) -> bytes:
    """A GGUF file. `kinds`: types of tensors by name, else F32. `changed`: by tensor what its header says instead:
    `name`, `shape`, `kind`, `offset`, `dimensions`; `counts`: of tensors and keys."""
    infos, data = b"", b""
    for name, weight in tensors.items():
        says = {"name": name, "shape": weight.shape, "kind": (kinds or {}).get(name, T_F32), "offset": len(data)}
        says |= (changed or {}).get(name, {})
        shape = list(says["shape"])[::-1]
        infos += packed(STRING, says["name"]) + struct.pack("<I", says.get("dimensions", len(shape)))
        infos += struct.pack(f"<{len(shape)}QIQ", *shape, says["kind"], says["offset"])
        data += stored(weight, (kinds or {}).get(name, T_F32))
        data += b"\0" * (-len(data) % alignment)
    keys = b"".join(
        packed(STRING, key) + struct.pack("<I", kind) + packed(kind, value) for key, (kind, value) in meta.items()
    )
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(meta)))) + keys + infos
    return head + b"\0" * (-len(head) % alignment) + data


def valid_gguf(kinds: Mapping[str, int] | None = None, **sizes: int) -> bytes:
    config = LlamaConfig(**(SIZES | sizes))
    return gguf_bytes(fields(config), weights(config), kinds)


def qwen3_gguf() -> bytes:
    """With heads wider than their share of the width, and scaled positions."""
    config = LlamaConfig(**(SIZES | {"layers": 1}), head_dim=16, head_norms=True)
    meta = {key.replace("llama.", "qwen3."): value for key, value in fields(config).items()}
    meta |= {"general.architecture": (STRING, "qwen3"), "qwen3.attention.key_length": (U32, 16)}
    meta |= {"qwen3.rope.scaling.type": (STRING, "yarn"), "qwen3.rope.scaling.factor": (F32, 4.0)}
    return gguf_bytes(meta, weights(config))


def gguf_seeds(folder: Path) -> Sequence[Path]:
    """In fp32, in the types that published files mix, with a head of its own, with LLaMA 3's scaling, and a Qwen3."""
    kinds = {"token_embd.weight": T_Q4_1, "blk.0.ffn_up.weight": T_Q8_0, "blk.0.attn_q.weight": T_F16}
    config = LlamaConfig(**(SIZES | {"layers": 1}))
    headed = weights(config) | {"output.weight": torch.ones(config.vocab, config.width)}
    scaled = weights(config) | {"rope_freqs.weight": torch.tensor([1.0, 1.0, 3.0, 8.0])}
    files = {"plain": valid_gguf(layers=1), "mixed": valid_gguf(kinds), "headed": gguf_bytes(fields(config), headed)}
    files |= {"scaled": gguf_bytes(fields(config), scaled), "qwen3": qwen3_gguf()}
    for name, data in files.items():
        (folder / f"{name}.gguf").write_bytes(data)
    return [folder / f"{name}.gguf" for name in files]


def parse_gguf(path: Path) -> None:
    use(Llama(*checkpoint.read_gguf(path)))
    checkpoint.tokenizer(path).encode("abcab")
    checkpoint.chat_prompt(path, "a")


# Folders of transformers.

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 24,
        "vocab_size": 19,
        "max_position_embeddings": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 32, "num_key_value_heads": 2, "head_dim": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "layer_types": None},
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
    },
    "gptj": {
        "model_type": "gptj",
        "n_embd": 32,
        "n_head": 4,
        "n_layer": 1,
        "rotary_dim": 4,
        "vocab_size": 19,
        "n_positions": 48,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "n_inner": 40,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 40,
        "vocab_size": 19,
        "max_position_embeddings": 48,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "hidden_act": "gelu",
    },
}
CONFIGS |= {kind: CONFIGS["llama"] | CONFIGS[kind] for kind in ("mistral", "qwen2", "qwen3")}
_LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_J = {"q_proj": (32, 32), "k_proj": (32, 32), "v_proj": (32, 32), "out_proj": (32, 32)}


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Weights of the models above by the names of transformers."""
    if kind in ("llama", "mistral", "qwen2", "qwen3"):
        q, kv = (64, 32) if kind == "qwen3" else (32, 16)
        block = dict(zip(_LLAMA, ((q, 32), (kv, 32), (kv, 32), (32, q)), strict=True))
        block |= {"mlp.gate_proj": (24, 32), "mlp.up_proj": (24, 32), "mlp.down_proj": (32, 24)}
        block |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        names = {f"model.layers.0.{name}": shape for name, shape in block.items()}
        names |= {"model.embed_tokens": (19, 32), "model.norm": (32,)}
        found = {f"{name}.weight": shape for name, shape in names.items()}
        attention = "model.layers.0.self_attn"
        if kind == "qwen2":
            found |= {f"{attention}.{name}_proj.bias": (32 if name == "q" else 16,) for name in "qkv"}
        if kind == "qwen3":
            found |= {f"{attention}.{name}_norm.weight": (16,) for name in "qk"}
        return found
    if kind == "gptj":
        found = {f"transformer.h.0.attn.{name}.weight": shape for name, shape in _J.items()}
        affine = {"transformer.h.0.ln_1": (32,), "transformer.ln_f": (32,), "lm_head": (19, 32)}
        affine |= {"transformer.h.0.mlp.fc_in": (40, 32), "transformer.h.0.mlp.fc_out": (32, 40)}
        outside = {"transformer.wte.weight": (19, 32)}
    else:
        found = {}
        affine = {"attention.query_key_value": (96, 32), "attention.dense": (32, 32), "input_layernorm": (32,)}
        affine |= {"mlp.dense_h_to_4h": (40, 32), "mlp.dense_4h_to_h": (32, 40), "post_attention_layernorm": (32,)}
        affine = {f"gpt_neox.layers.0.{name}": shape for name, shape in affine.items()}
        affine |= {"gpt_neox.final_layer_norm": (32,)}
        outside = {"gpt_neox.embed_in.weight": (19, 32), "embed_out.weight": (19, 32)}
    both = {
        f"{name}.{part}": shape[:1] if part == "bias" else shape
        for name, shape in affine.items()
        for part in ("weight", "bias")
    }
    return found | both | outside


def tensors(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: (0.3 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes(kind).items()}


def write_folder(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A valid folder; `changes` of `config.json`, where None removes a key."""
    folder.mkdir(exist_ok=True)
    found = CONFIGS[kind] | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    save_file(tensors(kind, dtype), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_shards(folder: Path, **changes: Any) -> Path:
    """A valid folder of two shards; `changes` of the index, by the names of weights; None removes one."""
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    found, weight_map = tensors("llama"), {}
    for number, names in enumerate((list(found)[:4], list(found)[4:])):
        shard = f"model-{number}.safetensors"
        save_file({name: found[name] for name in names}, folder / shard)
        weight_map |= dict.fromkeys(names, shard)
    weight_map = {name: file for name, file in (weight_map | changes).items() if file is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def config_seeds(folder: Path) -> Sequence[Path]:
    files = []
    for kind in CONFIGS:
        write_folder(folder / kind, kind)
        files.append(folder / f"{kind}.json")
        files[-1].write_bytes((folder / kind / "config.json").read_bytes())
    return files


def parse_config(path: Path) -> None:
    """`path` takes the place of `config.json` of the model that it names, if it names one."""
    data = path.read_bytes()
    kind = next((kind for kind in CONFIGS if f'"{kind}"'.encode() in data), "llama")
    (path.parent / kind / "config.json").write_bytes(data)
    use(load_huggingface(path.parent / kind))


def safetensors_seeds(folder: Path) -> Sequence[Path]:
    """A LLaMA in fp32 and in bf16, and a GPT-MoE."""
    write_folder(folder / "llama")
    files = [folder / f"{name}.safetensors" for name in ("fp32", "bf16", "moe")]
    save_file(tensors("llama"), files[0], {"format": "pt"})
    save_file(tensors("llama", torch.bfloat16), files[1])
    torch.manual_seed(0)
    gpt_moe_checkpoint.save(GPTMoE(MOE), files[2])
    return files


def parse_safetensors(path: Path) -> None:
    data = path.read_bytes()
    if b"gpt_moe" in data or b"experts" in data:
        model = gpt_moe_checkpoint.load(path)
        length = min(5, model.config.seq_len)
        model(torch.arange(length)[None] % model.config.vocab)
        return
    (path.parent / "llama" / "model.safetensors").write_bytes(data)
    use(load_huggingface(path.parent / "llama"))


REFUSALS = (ValueError, FileNotFoundError)
GGUF = Parser(gguf_seeds, parse_gguf, REFUSALS)
CONFIG = Parser(config_seeds, parse_config, REFUSALS)
SAFETENSORS = Parser(safetensors_seeds, parse_safetensors, REFUSALS)
