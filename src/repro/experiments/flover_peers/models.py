"""The models that every server can load: a Hugging Face folder, and for llama.cpp a GGUF file with the same weights."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from repro.experiments.flover_serving.inputs import RANDOM, VOCAB
from repro.models import checkpoint
from repro.models.huggingface import read_huggingface

GGUF_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def folder_of(name: str, dtype: str, cache: Path) -> Path:
    """The Hugging Face folder of a model below `cache`, made on first use; complete or not there."""
    folder = cache / f"{name}-{dtype}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        model = random_model(name) if name in RANDOM else smollm2()
        model.to(getattr(torch, dtype)).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def gguf_of(folder: Path, dtype: str) -> Path:
    """The GGUF file beside such a folder, made on first use."""
    file = folder.with_name(f"{folder.name}.gguf")
    if not file.exists():
        unfinished = file.with_name(f"{file.name}.unfinished")
        write_gguf(unfinished, folder, dtype)
        unfinished.rename(file)
    return file


def random_model(name: str) -> LlamaForCausalLM:
    """With transformers' own initialisation."""
    torch.manual_seed(0)
    sizes = RANDOM[name]
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=sizes["width"],
        intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def smollm2() -> LlamaForCausalLM:
    """From the installed GGUF file, dequantised. transformers reads such a file itself, but only with `accelerate`."""
    sizes, weights = checkpoint.read_gguf(checkpoint.smollm2_path())
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context,
        rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_base},
        tie_word_embeddings="output.weight" not in weights,
    )
    model, named = LlamaForCausalLM(config), {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, sizes.layers)
    heads = {"attn_q.weight": sizes.heads, "attn_k.weight": sizes.kv_heads}
    for theirs in model.state_dict():
        ours = names.get_name(theirs, (".weight",))
        weight = weights.get(ours, weights["token_embd.weight"])  # no output head: it is the embedding
        part = ours.split(".", 2)[-1]
        named[theirs] = halves(weight, heads[part]) if part in heads else weight
    model.load_state_dict(named)
    return model


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads · dim, in] from GGUF's order, where neighbours rotate together, into
    that of transformers, where entry i rotates with entry i + dim/2."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def write_gguf(path: Path, folder: Path, dtype: str) -> None:
    """The weights of a Hugging Face folder for llama.cpp: matrices in `dtype`, norms in fp32 as it wants them. No
    tokenizer."""
    config, weights = read_huggingface(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("no_vocab")
    for name, weight in weights.items():
        kind = GGUF_TYPES[dtype] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, raw(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw(weight: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As the file holds it; bf16, which numpy lacks, as bytes."""
    if kind == gguf.GGMLQuantizationType.BF16:
        return weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return weight.to(torch.float32).contiguous().numpy()
