"""LLaMA 3, Mistral, Qwen2 and Qwen3 as transformers has them: from a folder that it saved, and from a GGUF file of the
same weights, logits are its logits, and greedy answers of the whole engine its answers. What we would get wrong is
refused."""

import json
import weakref

import pytest
import torch
from kernel_inputs import decode
from saved_models import save

from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models import checkpoint
from repro.models.huggingface import load_huggingface, read_huggingface
from repro.models.llama import Llama, LlamaConfig
from repro.models.rotary import scaling

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 96,
    "eos_token_id": None,
    "head_dim": 16,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def rope(kind: str, **numbers) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0} | numbers}


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48)
YARN = rope("yarn", original_max_position_embeddings=24)
MODELS = {
    "LLaMA": ("llama", {}),
    "LLaMA 3": ("llama", LLAMA3),
    "LLaMA 3, tied, narrow heads": ("llama", LLAMA3 | {"tie_word_embeddings": True, "head_dim": 8}),
    "linear": ("llama", rope("linear")),
    "dynamic": ("llama", rope("dynamic")),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with a window": ("mistral", {"sliding_window": 64}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2, shards": ("qwen2", {"shard": "20KB"}),
    "Qwen3": ("qwen3", {}),
    "Qwen3, YaRN": ("qwen3", YARN | {"tie_word_embeddings": True}),
    "Qwen3, YaRN to the letter": (
        "qwen3",
        rope("yarn", original_max_position_embeddings=24, beta_fast=4, mscale=0.7, mscale_all_dim=0.3, truncate=False),
    ),
}


def saved(folder, kind: str, shard: str = "1GB", **options):
    name, sizes = CLASSES[kind], SIZES | options
    if kind == "qwen2":  # which has no such key
        del sizes["head_dim"]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return save(getattr(transformers, f"{name}ForCausalLM")(config).eval(), folder, shard)


TOKENS = torch.randint(0, 61, (60,), generator=torch.Generator().manual_seed(1))


def expected_logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0, 39:].float()


def found_logits(ours):
    """Of the last 21 tokens: of a prompt in two chunks, then token by token over the same cache."""
    cache = ours.new_cache(2, 64)
    found = [ours.prefill(TOKENS[:25], cache, 1), ours.prefill(TOKENS[25:40], cache, 1, start=25)]
    for n in range(40, 60):
        found.append(decode(ours, TOKENS[n : n + 1], torch.tensor([n]), cache, slice(1, 2), n)[0])
    return torch.stack(found[1:]).float()


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize(("kind", "options"), MODELS.values(), ids=MODELS)
def test_logits_are_those_of_transformers(tmp_path, kind, options, kernels):
    expected = expected_logits(saved(tmp_path, kind, **options))
    torch.testing.assert_close(
        found_logits(load_huggingface(tmp_path, kernels=kernels)), expected, atol=5e-5, rtol=1e-4
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or "shard" not in options


@pytest.mark.parametrize("kind", CLASSES)
def test_bfloat16_is_as_near_as_that_of_transformers(tmp_path, kind):
    model = saved(tmp_path, kind, **(LLAMA3 if kind == "llama" else {}))
    expected = expected_logits(model)
    ours, theirs = found_logits(load_huggingface(tmp_path, dtype=torch.bfloat16)), expected_logits(model.bfloat16())
    assert (ours - expected).norm() < 1.3 * (theirs - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("layout", ["window", "paged"])
@pytest.mark.parametrize("name", ["LLaMA 3", "Mistral with a window", "Qwen2", "Qwen3"])
def test_greedy_answers_of_the_engine_are_those_of_transformers(tmp_path, name, layout):
    """Prompts in chunks beside others' tokens, requests that come and go."""
    kind, options = MODELS[name]
    model = saved(tmp_path, kind, **options)
    prompts = [TOKENS[n : n + 3 + 7 * n].tolist() for n in range(5)]
    requests = [Request(n, tuple(prompt), 8 + 5 * (n % 3)) for n, prompt in enumerate(prompts)]
    engine = Engine(load_huggingface(tmp_path), Scheduler(3, prefill_tokens=12), 64, layout=LAYOUTS[layout])
    for request, answer in zip(requests, engine.serve(requests).generations, strict=True):
        inputs = {"inputs": torch.tensor(request.prompt)[None], "attention_mask": torch.ones(1, len(request.prompt))}
        greedy = model.generate(**inputs, do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0)
        assert answer.request.id == request.id and answer.tokens == greedy[0, len(request.prompt) :].tolist()


def written(path, folder, kind: str, model, **changes):
    """The model as a GGUF file of the architecture: of LLaMA, as converters write it, rows of queries and keys so that
    rotary pairs are neighbours, and LLaMA 3's scaling as a tensor."""
    config = model.config
    name = "llama" if kind == "mistral" else kind
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    scaled = config.rope_parameters
    if scaled["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaled["rope_type"]))
        writer.add_rope_scaling_factor(scaled["factor"])
    if scaled["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaled["original_max_position_embeddings"])
    if scaled["rope_type"] == "llama3":
        rotary = model.model.rotary_emb
        plain, _ = rotary.compute_default_rope_parameters(config)
        writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq).numpy())
    for key, value in changes.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for theirs, weight in model.state_dict().items():
        known = names.get_name(theirs, (".weight", ".bias"))
        if known == "output.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and ("attn_q." in known or "attn_k." in known):
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(known, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


IN_GGUF = [name for name, (_, options) in MODELS.items() if "letter" not in name and "shard" not in options]


@pytest.mark.parametrize("name", [name for name in IN_GGUF if name != "dynamic"])
def test_logits_from_gguf_are_those_of_transformers(tmp_path, name):
    kind, options = MODELS[name]
    model = saved(tmp_path, kind, **options)
    config, weights = checkpoint.read_gguf(written(tmp_path / "model.gguf", tmp_path, kind, model))
    assert config.vocab == 61 and ("output.weight" in weights) != options.get("tie_word_embeddings", False)
    torch.testing.assert_close(found_logits(Llama(config, weights)), expected_logits(model), atol=5e-5, rtol=1e-4)


def test_a_qwen3_in_gguf_is_the_one_in_a_folder(tmp_path):
    path = written(tmp_path / "model.gguf", tmp_path, "qwen3", saved(tmp_path, "qwen3"))
    (config, weights), (other, others) = checkpoint.read_gguf(str(path)), read_huggingface(tmp_path)
    assert config.weight_shapes() == other.weight_shapes() and config.rope_base == other.rope_base
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_weights_of_a_file_leave_memory_as_layers_are_made(tmp_path, monkeypatch, source):
    """A model that keeps its own in another dtype; 9 weights a layer, counted before each."""
    model, refs, alive = saved(tmp_path, "llama"), [], []
    load = load_huggingface if source == "folder" else checkpoint.load_gguf
    path = tmp_path if source == "folder" else written(tmp_path / "model.gguf", tmp_path, "llama", model)
    init, block = Llama.__init__, Llama._block

    def begun(self, config, weights, **options):
        refs.extend(weakref.ref(weight) for weight in weights.values())
        init(self, config, weights, **options)

    def counted(self, name):
        alive.append(sum(ref() is not None for ref in refs))
        return block(self, name)

    monkeypatch.setattr(Llama, "__init__", begun)
    monkeypatch.setattr(Llama, "_block", counted)
    assert load(path, dtype=torch.bfloat16, kernels="torch").blocks
    assert alive == [27, 18, 9] and all(ref() is None for ref in refs)


def test_weights_that_a_caller_holds_stay_his(tmp_path):
    saved(tmp_path, "qwen2", tie_word_embeddings=True)
    config, weights = read_huggingface(tmp_path)
    first, second = (found_logits(Llama(config, weights)) for _ in range(2))
    assert len(weights) == 2 + 3 * 12 and torch.equal(first, second)


def test_a_context_beyond_the_window_is_refused(tmp_path):
    saved(tmp_path, "mistral", sliding_window=64)
    model = load_huggingface(tmp_path)
    for make in (lambda n: model.new_cache(2, n), lambda n: Engine(model, Scheduler(2), n)):
        make(64)
        with pytest.raises(ValueError, match=r"capacity is 65, allowed: 1 to the model's sliding window, .* 64$"):
            make(65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_normed_heads_does_not_depend_on_the_rows_beside_it(dtype):
    """Bit for bit: what makes fused answers equal lone ones."""
    sizes = dict(layers=2, width=60, heads=6, kv_heads=2, ffn=100, vocab=61, context=96, head_dim=20, head_norms=True)
    model = Llama.random(LlamaConfig(**sizes), seed=3, dtype=dtype)
    lengths, caches = torch.tensor([3, 64, 17, 90, 1]), [model.new_cache(5, 96) for _ in range(2)]
    for cache in caches:
        for slot, length in enumerate(lengths.tolist()):
            model.prefill(torch.arange(length) % 61, cache, slot)
    together = decode(model, torch.arange(5), lengths, caches[0], slice(0, 5), 90)
    for slot in range(5):
        row = slice(slot, slot + 1)
        assert torch.equal(decode(model, torch.arange(5)[row], lengths[row], caches[1], row, 90), together[row])
    assert torch.equal(caches[0].keys, caches[1].keys)


def test_scaling_of_a_published_llama_3():
    """Of 3.2-1B (heads of 64, base 500000): the ends stay as they are or are divided by 32, three pairs are between."""
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = scaling(rope | {"original_max_position_embeddings": 8192}, 500_000.0, 64, 131_072)
    divisors = found["rope_divisors"]
    assert divisors[0] == 1 and divisors[-1] == 32 and list(divisors) == sorted(divisors) and len(divisors) == 32
    assert sum(1 < divisor < 32 for divisor in divisors) == 3 and found["rope_magnitude"] == 1


TEXT = "It's 2024:  naïve\n\n\tcafe\u0301 12345 <think>don't</think> \u4f60\u597d<|im_end|> "


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_a_tokenizer_in_gguf_cuts_texts_as_that_of_transformers(tmp_path, pre):
    """All bytes, merges of two or three letters, digits too, and tokens that are never cut; LLaMA 3 by its pattern."""
    letters = sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    merges = [
        ("1", "2"),
        ("12", "3"),
        ("2", "0"),
        ("2", "4"),
        ("a", "f"),
        ("\u0120", "c"),
        ("d", "o"),
        ("t", "'"),
        ("4", "5"),
    ]
    tokens = [*letters, *map("".join, merges), "345", "<|im_end|>", "<think>", "</think>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 3) + [gguf.TokenType.CONTROL] + [gguf.TokenType.USER_DEFINED] * 2
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = checkpoint.tokenizer(tmp_path / "model.gguf")
    assert checkpoint.chat_prompt(tmp_path / "model.gguf", "hello") == "<|im_end|>hello"
    theirs = transformers.Qwen2Tokenizer({token: i for i, token in enumerate(tokens)}, merges, eos_token="<|im_end|>")
    theirs.add_tokens(["<think>", "</think>"])
    if pre == "qwen2":
        assert ours.encode(TEXT).ids == theirs(TEXT)["input_ids"]
    else:  # three digits at most are one piece, which is not merged from parts if it is a token
        assert ours.encode("12345 2024345").tokens == ["123", "45", "Ġ", "20", "2", "4", "3", "4", "5"]
        assert ours.encode("12\n345").tokens == ["12", "Ċ", "345"]
        assert ours.decode(ours.encode(TEXT).ids, skip_special_tokens=False) == TEXT


REFUSED = [
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5, allowed: a number from 1.0"),
    ("llama", {"num_key_value_heads": None}, r"k_proj\.weight has shape \(32, 48\), by config\.json: \(96, 48\)"),
    ("mistral", {"num_key_value_heads": None}, "no num_key_value_heads"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes', allowed: True, False"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, r"layer_types is \['sliding_.* a list of 'full_attention'$"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True, allowed: False"),
    ("qwen3", {"head_dim": None}, "no head_dim"),
    ("qwen3", {"model_type": "llama"}, r"[qk]_norm\.weight|unknown weight"),
    ("qwen2", {"model_type": "llama"}, r"_proj\.bias has shape .* by config\.json: no such weight"),
    ("llama", {"model_type": "qwen2"}, r"no weights for blk\.0\.attn_k\.bias"),
    ("llama", {"model_type": "qwen3"}, r"no weights for blk\.0\.attn_k_norm\.weight"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_a_folder_that_we_would_get_wrong_is_refused(tmp_path, kind, changes, message):
    saved(tmp_path, kind)
    path = tmp_path / "config.json"
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    with pytest.raises(ValueError, match=message) as error:
        read_huggingface(tmp_path)
    assert str(tmp_path) in str(error.value)


REFUSED_IN_GGUF = [
    ("qwen3", {"qwen3.rope.scaling.attn_factor": 2}, "qwen3.rope.scaling.attn_factor is 2, which is not computed"),
    ("mistral", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2, "freqs": 1}, "rope_freqs.weight"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED_IN_GGUF)
def test_a_gguf_that_we_would_get_wrong_is_refused(tmp_path, kind, changes, message):
    options = LLAMA3 if "freqs" in changes else {}
    model = saved(tmp_path, "llama" if options else kind, **options)
    changes = {key: value for key, value in changes.items() if key != "freqs"}
    path = written(tmp_path / "model.gguf", tmp_path, kind, model, **changes)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.read_gguf(path)
    assert str(path) in str(error.value)
