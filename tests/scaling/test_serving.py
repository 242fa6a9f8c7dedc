"""Serving predicted from sizes and rates: closed forms in every limit, real models' sizes, and the queue."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.flover.queueing import Fused, Instances, LinearTimes, MeasuredTimes
from repro.flover.queueing.times import pass_s
from repro.models.gpt_j_neox import GPTJConfig
from repro.models.llama import LlamaConfig
from repro.scaling import serving
from repro.scaling.machines import Machine, hardware
from repro.scaling.network import network_of
from repro.topology import Level, Topology

WILKES3 = hardware("wilkes3")
SIZES = GPTJConfig(layers=3, width=8, heads=4, rotary_dim=2, ffn=20, vocab=50)
SMALL = serving.Dense(SIZES, kernels=5)
FLOVER = Fused(prefill_apart=True, admit_per_iteration=1)
GPT_J_6B, LLAMA_33B, LLAMA_65B = (serving.PAPER[name][0] for name in ("gpt-j-6b", "llama-33b", "llama-65b"))


def _machine(gpus=1, rate=math.inf, latency=0.0, **values):
    """Free unless said otherwise."""
    topology = Topology((Level("node", gpus, rate, latency), Level("cluster", 1)))
    rest = {"flops_per_s": math.inf, "hbm_bytes_per_s": math.inf, "launch_s": 0.0, "overlap": 0.0}
    return Machine(network=network_of(topology), **{**rest, **values})


def _iteration(model, machine, batch, context):
    """Seconds of one token for each of `batch` requests with `context` tokens stored each."""
    return serving.PredictedTimes(model, machine).decode(batch, np.array([context])).item()


def test_weights_are_those_of_the_real_models():
    matrices = {name: math.prod(shape) for name, shape in GPT_J_6B.config.weight_shapes().items() if len(shape) == 2}
    assert GPT_J_6B.weights == sum(matrices.values()) - matrices["token_embd.weight"]  # one row of it is looked up
    llamas = [model for name, (model, _) in serving.PAPER.items() if name.startswith("llama")]
    for model in llamas:
        norms = (2 * model.config.layers + 1) * model.config.width
        assert model.weights == model.config.parameters - norms  # tied there: the embedding is the output
    assert [round(model.weights / 1e9) for model in llamas] == [13, 32, 65, 43]


def test_grouped_queries_store_fewer_keys():
    few = serving.Dense(LlamaConfig(layers=3, width=8, heads=4, kv_heads=2, ffn=20, vocab=50), kernels=5)
    assert (few.kv_bytes, few.layer_weights) == (SMALL.kv_bytes / 2, 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 20)


def test_bound_by_memory_an_iteration_reads_weights_once_and_every_cache():
    found = _iteration(SMALL, _machine(hbm_bytes_per_s=10.0), 6, 7)
    weights = 3 * (4 * 64 + 2 * 160) + 50 * 8
    cache = 6 * 7 * 3 * 2 * 8
    assert found == pytest.approx(2 * (weights + cache) / 10.0)


def test_bound_by_products_it_multiplies_every_weight_with_every_token():
    found = _iteration(SMALL, _machine(flops_per_s=10.0), 6, 7)
    assert found == pytest.approx(2 * 6 * SMALL.weights / 10.0)
    times = serving.PredictedTimes(SMALL, _machine(flops_per_s=10.0))
    layers = 3 * (4 * 64 + 2 * 160)
    assert times.prefill(6) == pytest.approx(2 * (6 * layers + 400) / 10.0)  # logits of the last token only


def test_without_limits_only_launches_are_left():
    per_request, per_pass = serving.REQUEST_KERNELS, 3 * 5 + serving.PASS_KERNELS
    machine = _machine(launch_s=2.0)
    assert _iteration(SMALL, machine, 6, 7) == 2.0 * (per_pass + 6 * per_request)
    assert serving.PredictedTimes(SMALL, machine).prefill(40, 30) == 2.0 * (per_pass + per_request)


def test_a_later_part_of_a_prompt_reads_the_cache_of_the_earlier_ones():
    times = serving.PredictedTimes(SMALL, _machine(hbm_bytes_per_s=10.0))
    assert times.prefill(6) == times.floor_s == pytest.approx(2 * SMALL.weights / 10.0)
    assert times.prefill(6, 30) - times.prefill(6) == pytest.approx(30 * SMALL.kv_bytes / 10.0)


def test_two_gpus_halve_what_is_read_and_pay_for_their_messages():
    alone, shared = (_iteration(SMALL, _machine(n, hbm_bytes_per_s=10.0), 6, 7) for n in (1, 2))
    assert shared == pytest.approx(alone / 2)
    found = _iteration(SMALL, _machine(2, rate=4.0, latency=3.0), 6, 7)
    all_reduce = 2 * 3.0 + 6 * 8 * 2 / 4.0  # there and back, half of the tensor each
    logits = 3.0 + 6 * 50 * 2 / 2 / 4.0
    assert found == pytest.approx(2 * 3 * all_reduce + logits)


def test_inside_a_node_a_tree_is_a_chain_and_the_ring_has_less_to_carry():
    late = _iteration(SMALL, _machine(4, latency=3.0), 6, 7)
    assert late == pytest.approx(2 * 3 * 6 * 3.0 + 3 * 3.0)  # three hops up and three down; a ring of three rounds
    slow = _iteration(SMALL, _machine(4, rate=4.0), 6, 7)
    assert slow == pytest.approx(2 * 3 * (2 * 0.75 * 6 * 8 * 2 / 4.0) + 0.75 * 6 * 50 * 2 / 4.0)


# Without limits on bandwidth an iteration takes launches alone, t1 (1 + c (b - 1)): what the paper's formula says.
_LAUNCHES = 3 * 5 + serving.PASS_KERNELS + serving.REQUEST_KERNELS
_CONSTANT = _machine(launch_s=0.01 / _LAUNCHES)
_LINEAR = LinearTimes(0.01, serving.REQUEST_KERNELS / _LAUNCHES, prefill_s_per_token=0.01 / 8)


@pytest.mark.parametrize("policy", [FLOVER, Fused(slots=1), Instances(), Instances(2)])
@pytest.mark.parametrize("requests", [1, 2, 5, 12])
def test_constant_times_give_what_linear_times_give(policy, requests):
    shapes = [serving.RequestShape(0.13 * number, 8, 60) for number in range(requests)]
    found = policy.run(shapes, serving.PredictedTimes(SMALL, _CONSTANT))
    expected = policy.run(shapes, _LINEAR)
    assert found.finish_s == pytest.approx(expected.finish_s)
    assert found.iterations == expected.iterations
    total = serving.total_seconds(SMALL, _CONSTANT, policy, requests, 0.13, new_tokens=60)
    assert isinstance(total, float) and total == pytest.approx(expected.total_seconds)


def test_requests_that_never_meet_take_the_last_arrival_and_one_alone():
    total = serving.total_seconds(SMALL, _CONSTANT, FLOVER, 4, interval_s=9.0)
    assert total == pytest.approx(
        3 * 9.0 + 504 * 0.01
    )  # a prompt, whose last token gives the first new one, and 503 iterations


def test_the_cache_is_read_as_long_as_it_is():
    machine = _machine(hbm_bytes_per_s=1e3)
    stored = sum(range(8, 8 + 503))  # before each iteration, the prompt's and those added
    expected = (504 * 2 * SMALL.weights + stored * SMALL.kv_bytes) / 1e3
    for policy in (FLOVER, Fused(slots=1), Instances()):
        assert serving.total_seconds(SMALL, machine, policy, 1) == pytest.approx(expected)


def test_a_measured_grid_of_the_prediction_gives_the_same_totals():
    """The same times through the other implementation of the protocol."""
    times = serving.PredictedTimes(SMALL, _machine(hbm_bytes_per_s=1e6, launch_s=1e-5))
    batches, contexts = np.arange(1, 9), np.arange(8, 40)
    grid = MeasuredTimes(
        batches,
        contexts,
        np.array([times.decode(int(batch), contexts) for batch in batches]),
        np.array([8]),
        np.array([0]),
        np.array([[times.prefill(8)]]),
    )
    shapes = [serving.RequestShape(0.005 * number, 8, 30) for number in range(8)]
    assert FLOVER.run(shapes, times).finish_s == pytest.approx(FLOVER.run(shapes, grid).finish_s)


def test_draws_are_what_each_of_them_is_alone():
    machine = serving.machine_of(2, draws=3)
    totals = serving.total_seconds(LLAMA_33B, machine, FLOVER, 3, new_tokens=40)
    assert totals.shape == (3,) and np.ptp(totals) > 0
    assert np.array_equal(totals, serving.total_seconds(LLAMA_33B, machine, FLOVER, 3, new_tokens=40))
    fixed = {name: machine_value(machine) for name, machine_value in _PARAMETERS.items()}
    for draw in range(3):
        values = {name: float(value[draw]) for name, value in fixed.items()}
        alone = serving.machine_of(2, WILKES3.at(**values))
        assert serving.total_seconds(LLAMA_33B, alone, FLOVER, 3, new_tokens=40) == pytest.approx(totals[draw])


_PARAMETERS = {
    "gemm": lambda machine: machine.flops_per_s / WILKES3.peak_flops,
    "hbm": lambda machine: machine.hbm_bytes_per_s,
    "launch_s": lambda machine: machine.launch_s,
    "node achieved": lambda machine: machine.network.links[0].protocols[0].bytes_per_s / 300e9,
    "node latency_s": lambda machine: machine.network.links[0].protocols[0].latency_s,
}


def test_an_array_of_contexts_is_each_of_them():
    machine = serving.machine_of(1)
    one = [_iteration(GPT_J_6B, machine, 5, context) for context in (8, 100, 511)]
    times = serving.PredictedTimes(GPT_J_6B, machine)
    assert times.decode(5, np.array([8, 100, 511])) == pytest.approx(one)


SETUPS = st.sampled_from(list(serving.PAPER.values()))


@settings(deadline=None, max_examples=60)
@given(SETUPS, st.integers(1, 512), st.integers(1, 2000))
def test_more_work_never_takes_less_time(setup, batch, context):
    model, gpus = setup
    machine = serving.machine_of(gpus)

    def seconds(batch=batch, context=context, machine=machine):
        return _iteration(model, machine, batch, context)

    assert seconds(batch=batch + 1) > seconds() and seconds(context=context + 1) > seconds()
    assert seconds(batch=2 * batch) < 2 * seconds()  # weights are read once for all: why requests are fused
    assert seconds(machine=replace(machine, hbm_bytes_per_s=machine.hbm_bytes_per_s * 0.9)) > seconds()
    assert seconds(machine=replace(machine, launch_s=machine.launch_s * 1.1)) > seconds()


@settings(deadline=None, max_examples=40)
@given(
    SETUPS, st.integers(0, 64), st.lists(st.tuples(st.integers(1, 600), st.integers(0, 600)), min_size=1, max_size=4)
)
def test_what_shares_a_pass_takes_no_longer_than_apart_and_no_less_than_its_parts(setup, batch, pieces):
    model, gpus = setup
    times = serving.PredictedTimes(model, serving.machine_of(gpus))
    parts = [times.prefill(*piece) for piece in pieces]
    if batch:
        parts.append(float(times.decode(batch, np.array([100]))[0]))
    together = pass_s(times, batch, 100, pieces)
    assert max(parts) * (1 - 1e-12) <= together <= sum(parts) * (1 + 1e-12)
    assert 0 < times.floor_s < min(parts)


def test_rows_beside_a_chunk_are_multiplied_too():
    """As many tokens take as many products, however a pass divides them into chunks and rows that decode."""
    layers = 3 * (4 * 64 + 2 * 160)
    machine = _machine(flops_per_s=10.0, hbm_bytes_per_s=100.0)  # products of five tokens take as long as reading
    times = serving.PredictedTimes(SMALL, machine)
    read, cache = 2 * SMALL.weights / 100.0, 4 * 9 * SMALL.kv_bytes / 100.0
    assert pass_s(times, 4, 9, []) == pytest.approx(times.decode(4, np.array([9]))[0])
    assert pass_s(times, 0, 0, [(20, 6)]) == pytest.approx(times.prefill(20, 6))
    assert pass_s(times, 4, 9, [(20, 0)]) == pytest.approx(2 * (24 * layers + 5 * 400) / 10.0 + cache)
    assert pass_s(serving.PredictedTimes(SMALL, _machine(hbm_bytes_per_s=100.0)), 4, 9, [(20, 0)]) == pytest.approx(
        read + cache  # bound by memory: the weights are read once, and the rest is free
    )


def test_launches_and_messages_of_a_pass_are_those_of_all_its_tokens():
    machine = _machine(2, rate=4.0, latency=3.0, launch_s=2.0)
    times = serving.PredictedTimes(SMALL, machine)
    kernels = 3 * 5 + serving.PASS_KERNELS + 3 * serving.REQUEST_KERNELS
    all_reduce, logits = 2 * 3.0 + 8 * 8 * 2 / 4.0, 3.0 + 3 * 50 * 2 / 2 / 4.0
    assert pass_s(times, 2, 9, [(6, 0)]) == pytest.approx(2.0 * kernels + 2 * 3 * all_reduce + logits)


@pytest.mark.parametrize("setup", serving.PAPER.values(), ids=list(serving.PAPER))
def test_at_the_papers_sizes_fusing_beats_sharing_beats_nothing(setup):
    model, gpus = setup
    machine = serving.machine_of(gpus)
    alone = serving.total_seconds(model, machine, FLOVER, 1)
    fused, shared, serial = (
        serving.total_seconds(model, machine, policy, 32) for policy in (FLOVER, Instances(), Fused(slots=1))
    )
    assert 31 * 0.5 + alone <= fused < shared / 4
    assert shared == pytest.approx(serial) == pytest.approx(32 * alone)  # the GPU is never idle


def test_gpus_of_the_same_draws_differ_in_number_only():
    one, four = serving.machine_of(1, draws=4, seed=3), serving.machine_of(4, draws=4, seed=3)
    assert np.array_equal(one.hbm_bytes_per_s, four.hbm_bytes_per_s)
    assert (one.topology.world_size, four.topology.world_size) == (1, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: serving.machine_of(5), "gpus is 5, allowed: 1 to 4"),
        (lambda: serving.machine_of(3, hardware("frontier")), r"gpus is 3, allowed: 1 to 2 \(package of frontier\)"),
        (
            lambda: _iteration(SMALL, _machine(3), 1, 7),
            "4 heads and ffn 20 cannot be shared evenly by 3",
        ),
        (lambda: _iteration(LLAMA_65B, serving.machine_of(1), 1, 7), "allowed: 8e.10"),
        (lambda: serving.PredictedTimes(SMALL, _machine(), 1), "draw is 1, allowed: 0 to 0"),
        (lambda: serving.total_seconds(SMALL, _machine(), FLOVER, 0), "no request to serve"),
        (lambda: replace(SMALL, config=replace(SIZES, layers=0)), "layers is 0, allowed: a whole number from 1"),
        (lambda: replace(SMALL, kernels=0), "at least 1"),
        (
            lambda: serving.PredictedTimes(SMALL, _machine(launch_s=np.ones(2), hbm_bytes_per_s=np.ones(3))),
            r"could not be broadcast together with shapes \(3,\) \(2,\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
