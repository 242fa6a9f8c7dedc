"""The queue model against stepping iteration by iteration, and against what the paper published."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.experiments.flover_queue import QueuePoint, run
from repro.flover.queueing import QueueModel, fixed_arrivals, poisson_arrivals, serial_seconds

# Published, arXiv 2305.13484 v1 Fig. 8 (GPT-J, 32 requests, 512 iterations each): mean interval ms: (iterations, overlap %).
FIG8 = {20: (557, 91.3), 50: (616, 81.8), 100: (748, 67.3), 150: (888, 62.1), 200: (911, 60.3), 300: (1174, 45.2)}
FIG8 |= {400: (1366, 36.7), 500: (1537, 31.0), 750: (2239, 23.2), 1000: (2621, 20.0), 2000: (5483, 9.3)}
FIG8 |= {3000: (7738, 6.7), 4000: (8902, 5.7), 5000: (10694, 4.8)}
# Published, v2 Fig. 4(a), Flover's seconds for 1, 2, 4 … 32 requests, and how far T1 + 0.5 (n - 1) is from them at most.
FIG4A = {
    "GPT-J": ((5.6, 6.1, 7.1, 9.2, 13.2, 21.2), 0.1),
    "13B": ((9.1, 9.6, 10.6, 12.7, 16.9, 24.9), 0.4),
    "33B": ((13.6, 14.1, 15.6, 17.7, 21.9, 30.3), 1.2),
    "65B": ((10.8, 11.4, 12.5, 14.4, 18.7, 27.2), 1.2),
}


def stepped(model: QueueModel, arrivals: list[float]) -> tuple[list[float], int]:
    """Finish times and iterations, one iteration at a time."""
    waiting, live, finish = list(enumerate(arrivals)), {}, [0.0] * len(arrivals)
    now, iterations = 0.0, 0
    while waiting or live:
        if not live:
            now = max(now, waiting[0][1])
        admitted = 0
        while (
            waiting
            and waiting[0][1] <= now
            and (not model.admit_per_iteration or admitted < model.admit_per_iteration)
            and (not model.slots or len(live) < model.slots)
        ):
            live[waiting.pop(0)[0]] = model.iterations
            admitted += 1
        now += model.single_request_s / model.iterations * (1 + model.batch_cost * (len(live) - 1))
        iterations += 1
        for request in list(live):
            live[request] -= 1
            if not live[request]:
                finish[request] = now
                del live[request]
    return finish, iterations


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_jumping_between_events_equals_stepping(gaps, iterations, admit, slots, cost):
    # π keeps an arrival off an iteration's edge, where the rounding of two ways of adding would decide.
    arrivals = (np.cumsum(gaps) * np.pi / 100).tolist()
    model = QueueModel(1.0, iterations, cost, admit, slots)
    result, (finish, total) = model.run(arrivals), stepped(model, arrivals)
    assert result.iterations == total
    np.testing.assert_allclose(result.finish_s, finish, rtol=1e-9)
    assert np.all(result.latency_s > 0.999)  # nobody is faster than alone


def test_a_lone_request_takes_its_own_time():
    result = QueueModel(5.6).run([0.0])
    assert result.total_seconds == pytest.approx(5.6)
    assert result.iterations == 512 and result.overlap_fraction == 1.0


def test_serial_reference():
    assert serial_seconds([0.0] * 32, 5.6) == pytest.approx(32 * 5.6)
    assert serial_seconds([0.0, 10.0, 11.0], 2.0) == pytest.approx(14.0)


def test_poisson_gaps_have_the_mean_and_start_at_zero():
    arrivals = poisson_arrivals(20_000, 0.5, seed=3)
    assert arrivals[0] == 0 and np.all(np.diff(arrivals) >= 0)
    assert np.diff(arrivals).mean() == pytest.approx(0.5, rel=0.03)
    assert np.diff(arrivals).std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("model", FIG4A)
def test_flover_column_of_figure_4a(model):
    published, error = FIG4A[model]
    for count, seconds in zip((1, 2, 4, 8, 16, 32), published, strict=True):
        result = QueueModel(published[0], batch_cost=0.0).run(fixed_arrivals(count, 0.5))
        formula = published[0] + 0.5 * (count - 1)
        assert result.total_seconds == pytest.approx(formula, abs=0.03)  # one iteration: a token boundary
        assert result.total_seconds == pytest.approx(seconds, abs=error)


def test_iterations_of_figure_8_are_within_one_deviation():
    for interval_ms, (iterations, _) in FIG8.items():
        metrics = run(QueuePoint(interval_ms=interval_ms)).metrics
        assert abs(metrics["iterations"].value - iterations) < metrics["iterations_sd"].value


def test_experiment_series_and_metrics():
    outcome = run(QueuePoint(table="fig4a", single_request_s=9.1, batch_cost=0.0))
    assert outcome.evidence == "modelled"
    assert outcome.series.requests.tolist() == [1, 2, 4, 8, 16, 32]
    assert outcome.metrics["total_seconds"].value == outcome.series.total_seconds.iloc[-1]
    assert outcome.metrics["speedup_vs_serial"].value == pytest.approx(32 * 9.1 / (9.1 + 15.5), rel=0.02)
    assert outcome.metrics["iterations_sd"].value == 0
    assert len(run(QueuePoint(seeds=7)).series) == 7


@pytest.mark.parametrize("wrong", [{"single_request_s": 0}, {"single_request_s": 1, "batch_cost": -1}])
def test_model_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match="must"):
        QueueModel(**wrong)


@pytest.mark.parametrize("arrivals", [[], [2.0, 1.0], [-1.0]])
def test_arrivals_are_checked(arrivals):
    with pytest.raises(ValueError, match="arrivals"):
        QueueModel(1.0).run(arrivals)
