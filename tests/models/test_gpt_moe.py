"""The GPT-MoE against a dense computation of every expert, and its routing as `record_routing` sees it."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from repro import exflow
from repro.exflow.recording import record_routing
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig, balance_loss, generate

SMALL = GPTMoEConfig(layers=3, hidden=32, heads=4, seq_len=24, vocab=50, experts=6, top_k=2, expert_hidden=16)


def build(**changes):
    torch.manual_seed(0)
    model = GPTMoE(dataclasses.replace(SMALL, **changes)).double()
    for block in model.blocks:
        torch.nn.init.normal_(block.router.weight)  # choices that differ between tokens
    return model


def tokens(batch=2, length=20, seed=0):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_block_weighs_the_chosen_experts(top_k):
    block = build(top_k=top_k).blocks[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    attended = x + block.attention.mix(*block.attention.project(block.norm1(x)))
    h = block.norm2(attended)
    every = torch.einsum(
        "ehf,btef->bteh", block.experts.down.transpose(1, 2), F.gelu(torch.einsum("bth,ehf->btef", h, block.experts.up))
    )
    probability = (h @ block.router.weight.T).softmax(dim=-1)
    kept = torch.where(probability >= probability.topk(top_k).values[..., -1:], probability, 0.0)
    if top_k > 1:
        kept = kept / kept.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(block(x)[0], attended + (kept.unsqueeze(-1) * every).sum(dim=2))


def test_a_token_sees_only_earlier_ones():
    model, text = build(), tokens()
    changed = text.clone()
    changed[:, 10:] = 1
    assert torch.allclose(model(text)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(text)[:, 10:], model(changed)[:, 10:])


def test_grouped_queries_share_keys_and_values():
    shared, model = build(kv_heads=1), build()
    for one, all_heads in zip(shared.blocks, model.blocks, strict=True):
        q, k, v = one.attention.qkv.weight.split([32, 8, 8])
        all_heads.attention.qkv.weight.data = torch.cat([q, k.repeat(4, 1), v.repeat(4, 1)])
        all_heads.attention.qkv.bias.data.zero_()
    rest = {name: value for name, value in shared.state_dict().items() if "qkv" not in name}
    model.load_state_dict(rest, strict=False)
    torch.testing.assert_close(shared(tokens()), model(tokens()))
    assert shared.config.kv_width == 8 and model.config.kv_width == 32


def test_balance_loss_is_one_for_even_routing_and_the_number_of_experts_for_one_expert():
    even = torch.eye(4).repeat(8, 1)
    assert balance_loss(even * 0, even.argmax(dim=1, keepdim=True)).item() == pytest.approx(1.0)
    one = F.one_hot(torch.zeros(32, dtype=torch.long), 4) * 100.0
    assert balance_loss(one, torch.zeros(32, 1, dtype=torch.long)).item() == pytest.approx(4.0)


def test_loss_is_cross_entropy_plus_balance_and_reaches_every_parameter():
    model, text = build(), tokens()
    plain = F.cross_entropy(model(text).flatten(0, 1).float(), text.flatten())
    model.config = dataclasses.replace(SMALL, balance=0.0)
    torch.testing.assert_close(model(text, text), plain)
    model.config = dataclasses.replace(SMALL, balance=0.5)
    loss = model(text, text)
    assert loss > plain + 0.4  # the balance loss of a layer is about 1 or more
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_training_lowers_the_loss():
    model, text = build().float(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        losses.append(model(text, text))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_its_routing_can_be_recorded():
    model, text = build(), tokens()
    with record_routing(model) as recording:
        model(text)
    trace = recording.trace()
    assert trace.experts.shape == (40, 3, 2) and trace.num_experts == 6
    x = model.embed(text, torch.arange(20))
    h = model.blocks[0].norm2(
        x + model.blocks[0].attention.mix(*model.blocks[0].attention.project(model.blocks[0].norm1(x)))
    )
    assert (trace.experts[:, 0] == model.blocks[0].router(h.flatten(0, 1))[2].numpy()).all()
    assert exflow.transitions(trace).sum() == pytest.approx(2 * 40)


def test_greedy_generation_follows_the_largest_logit():
    model, prompt = build(), tokens(batch=1)[0, :6]
    new = generate(model, prompt, 4)
    full = torch.cat([prompt, new])
    assert (model(full[None])[0, 5:-1].argmax(dim=-1) == new).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"top_k": 7}, "top_k is 7, allowed: 1 to 6"),
        ({"heads": 5}, "hidden 32 is not divisible by 5 heads"),
        ({"kv_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"layers": 0}, "layers is 0, allowed: a whole number from 1 to 1000"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(SMALL, **wrong)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="sequence of 25 tokens, the model has 24 positions"):
        build()(tokens(length=25))


@pytest.mark.parametrize("chosen", [[0, 5, 2, 2, 5, 0, 0], [3] * 7], ids=["some", "one"])
def test_grouped_products_are_those_of_one_expert_after_another(chosen):
    experts = build().blocks[0].experts
    torch.nn.init.normal_(experts.up, std=0.2)
    torch.nn.init.normal_(experts.down, std=0.2)
    experts = experts.bfloat16()
    choice = torch.tensor(chosen, dtype=torch.int64).sort().values
    x = torch.randn(len(choice), 32, dtype=torch.bfloat16, requires_grad=True)
    outs = experts(x, choice), experts._at_once(x, torch.bincount(choice, minlength=6), x.dtype)
    weight = torch.randn(x.shape, dtype=x.dtype)
    one_by_one, at_once = (
        [out, *torch.autograd.grad((out * weight).sum(), [x, experts.up, experts.down])] for out in outs
    )
    assert all(0.1 < part.abs().max() < 100 for part in one_by_one)
    torch.testing.assert_close(at_once, one_by_one, rtol=2e-2, atol=2e-2)
