"""Tokens are drawn from the distribution that was asked for, and depend on the request alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.flover.sampling import Sampler, Sampling, uniform

VOCAB, DRAWS = 12, 40_000


def drawn(sampling: Sampling, logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` tokens of one request whose logits stay the same."""
    sampler = Sampler(count)
    for slot in range(count):
        sampler.put(slot, sampling)
    sampler.given[:] = range(count)
    return sampler(logits.expand(count, -1), range(count))


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


ASKED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=8), start=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_draw_does_not_depend_on_the_batch(asked, start, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, given = (
        torch.randn(len(asked), 400, generator=generator).bfloat16(),  # with many ties
        torch.randint(0, 99, (len(asked),), generator=generator),
    )
    sampler = Sampler(start + len(asked))
    for slot, sampling in enumerate(asked, start):
        sampler.put(slot, sampling)
    sampler.given[start:] = given.tolist()
    together = sampler(logits, range(start, start + len(asked)))
    assert sampler.given[start:] == (given + 1).tolist()
    for row, sampling in enumerate(asked):
        alone = Sampler(1)
        alone.put(0, sampling)
        alone.given[0] = int(given[row])
        assert alone(logits[row : row + 1], [0]) == together[row]
        if sampling.temperature == 0:
            assert together[row] == logits[row].argmax()


def test_the_coldest_draw_is_the_most_likely_and_large_logits_do_not_overflow():
    logits = torch.tensor([1.0, 2.0, 3e4, 5.0])
    for sampling in (Sampling(1e-6), Sampling(1e-6, top_k=3), Sampling(1.0, top_p=0.5)):
        assert (drawn(sampling, logits, 50) == 2).all()


def test_parameters_and_draws_move_with_their_request():
    logits = torch.randn(20, VOCAB)
    stays, moves = Sampler(3), Sampler(3)
    for sampler in (stays, moves):
        sampler.put(2, Sampling(1.0, top_k=5, seed=9))
    for step, row in enumerate(logits):
        slot = 2 if step < 10 else 0
        if step == 10:
            moves.move([(2, 0)])
            moves.put(2, Sampling(1.0, seed=1))
        assert stays(row[None], [2]) == moves(row[None], [slot])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
)
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
