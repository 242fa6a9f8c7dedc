"""Times measured by driving the engine: on a clock that the model moves they are the model's own."""

import numpy as np
import pytest
from timed_model import Clock, TimedModel

from repro.flover.measured import measure, spread


class Uneven:
    """Depends on batch, context, chunk and start, each in its own way; linear between 4 and 32 in context."""

    floor_s = 0.001

    def decode(self, batch, context):
        return 0.001 * batch**2 + 1e-5 * np.asarray(context, float)

    def prefill(self, tokens, start=0):
        return 0.002 * tokens + 1e-4 * start


def test_measured_times_are_those_of_the_model():
    clock = Clock()
    times = measure(TimedModel(Uneven(), clock), [1, 2, 5], [4, 16, 32], [2, 3, 9], [0, 10], clock=clock)
    context = np.arange(4, 33)
    for batch in (1, 2, 5):
        np.testing.assert_allclose(times.decode(batch, context), Uneven().decode(batch, context))
    np.testing.assert_allclose(times.decode(4, context), (4 + 21 * 2 / 3) * 0.001 + 1e-5 * context)  # between 2 and 5
    for tokens in (2, 3, 7, 9):
        assert times.prefill(tokens) == pytest.approx(Uneven().prefill(tokens))
        assert times.prefill(tokens, 5) == pytest.approx(Uneven().prefill(tokens, 5))


def test_times_of_a_real_model_are_positive(model):
    times = measure(model, [1, 2], [8], [1, 6], repeats=1)
    assert times.decode(2, np.array([8])).item() > 0 and times.prefill(4) > 0


def test_a_grid_up_to_the_last_position_of_the_model(model):
    times = measure(model, [1, 2], [3, 255], [250], starts=[0, 249], repeats=3)
    assert times.decode(2, np.array([255])).item() > 0 and times.prefill(250, 249) > 0


def test_more_rows_than_a_queue_usually_holds():
    clock = Clock()
    times = measure(TimedModel(Uneven(), clock), [1, 1100], [8], [2], repeats=1, clock=clock)
    assert times.decode(1100, np.array([8])).item() == pytest.approx(0.001 * 1100**2 + 8e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contexts": [300]}, r"contexts is \[300\], .* from 0 to 255, for the model's 256 positions"),
        ({"prompts": [9, 257]}, r"prompts is \[9, 257\], .* from 1 to 256"),
        ({"starts": [0, 256]}, r"starts is \[0, 256\], .* from 0 to 255"),  # a step without a token took no time
        ({"prompts": [4, 2]}, r"prompts is \[4, 2\], must be at least one number, ascending"),
        ({"batches": []}, r"batches is \[\], must be at least one number"),
        ({"batches": [2]}, "batches begins with 2, repeats is 5"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(model, changes, words):
    with pytest.raises(ValueError, match=words):
        measure(model, **({"batches": [1], "contexts": [8], "prompts": [1]} | changes))


def test_spread_doubles_up_to_the_most():
    assert spread(1) == [1] and spread(8) == [1, 2, 4, 8] and spread(11) == [1, 2, 4, 8, 11]
    assert spread(20, 6) == [6, 12, 20] and spread(6, 6) == [6]
