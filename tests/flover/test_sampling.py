"""Tokens are drawn from the distribution that was asked for, and depend on the request alone."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.flover.sampling import Sampling, next_tokens, uniform

VOCAB, DRAWS = 12, 40_000
choose = partial(next_tokens, argmax=partial(torch.argmax, dim=-1))


def drawn(sampling: Sampling, logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` tokens of one request whose logits stay the same."""
    return choose(logits.expand(count, -1), [(sampling, given) for given in range(count)])


def transformers_shares(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """What `generate` in Hugging Face transformers would draw from."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7, seed=3),
        Sampling(1.3, top_k=4, seed=4),
        Sampling(1.0, top_p=0.6, seed=5),
        Sampling(2.0, top_k=7, top_p=0.8, seed=6),
        Sampling(1.0, top_k=1, seed=7),
        Sampling(1.0, top_k=50, top_p=1e-6, seed=8),
    ],
)
def test_frequencies_are_those_of_transformers(sampling):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    expected = transformers_shares(sampling, logits)
    found = torch.bincount(drawn(sampling, logits, DRAWS), minlength=VOCAB) / DRAWS
    assert (found[expected == 0] == 0).all()
    assert ((found - expected).abs() < 5 * (expected / DRAWS).sqrt() + 1e-9).all()  # five standard deviations


def test_uniform_numbers_are_uniform_and_unrelated():
    numbers = torch.tensor([[uniform(seed, count) for count in range(300)] for seed in range(300)], dtype=torch.float64)
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 90_000
    bins = torch.histc(numbers, 20, 0, 1) / 4500
    assert ((bins - 1).abs() < 5 / 4500**0.5).all()
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 5 / 300
    assert uniform(2**63 - 1, 10**6) < 1
    first = numbers[:, 0]  # the first token of requests with the smallest seeds, 0 (the default) among them
    assert 0.01 < uniform(0, 0) < 0.99 and abs(first.mean() - 0.5) < 5 / (12 * 300) ** 0.5


ASKED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=8), seed=st.integers(0, 99))
def test_a_draw_does_not_depend_on_the_batch(asked, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), 400, generator=generator).bfloat16()  # with many ties
    pairs = list(zip(asked, torch.randint(0, 99, (len(asked),), generator=generator).tolist(), strict=True))
    together = choose(logits, pairs)
    for row, pair in enumerate(pairs):
        assert choose(logits[row : row + 1], [pair]) == together[row]
        if pair[0].temperature == 0:
            assert together[row] == logits[row].argmax()


def test_the_coldest_draw_is_the_most_likely_and_large_logits_do_not_overflow():
    logits = torch.tensor([1.0, 2.0, 3e4, 5.0])
    for sampling in (Sampling(1e-6), Sampling(1e-6, top_k=3), Sampling(1.0, top_p=0.5)):
        assert (drawn(sampling, logits, 50) == 2).all()
