"""Decoding with experts spread over GPUs: closed forms in every limit, the volumes of the paper's table, real sizes."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.models.gpt_moe import GPTMoEConfig, MoEBlock
from repro.scaling import collectives, decode
from repro.scaling.machines import Machine, hardware
from repro.scaling.network import network_of
from repro.topology import Level, Topology

WILKES3 = hardware("wilkes3")
MODEL = GPTMoEConfig(layers=3, hidden=8, heads=4, vocab=50, experts=8, expert_hidden=20, kv_heads=2)
HERE = decode.Routing(0.0)
MODES = ("two_all_to_alls", "coherent", "placed")


def _machine(nodes=1, per_node=1, rates=(math.inf, math.inf), latency=0.0, **values):
    """Free unless said otherwise."""
    topology = Topology((Level("node", per_node, rates[0], latency), Level("cluster", nodes, rates[1], latency)))
    rest = {"flops_per_s": math.inf, "hbm_bytes_per_s": math.inf, "launch_s": 0.0, "overlap": 0.0}
    return Machine(network=network_of(topology), **{**rest, **values})


def _flat(gpus, bytes_per_s):
    """GPUs that are nodes of their own."""
    return _machine(gpus, 1, (math.inf, bytes_per_s))


def _table_1(mode, gpus, tokens_per_gpu, layers, crossing_fraction, kv_share=0.0):
    """Hidden vectors sent per iteration by the paper's Table I: 2 G N L p, or G N (L p* + G), with a GPU's own copy.

    kv_share   width of keys over the hidden size, where keys and values are sent: 2 L kv_share (G - 1) more per token
    """
    sent = gpus * tokens_per_gpu
    if mode == "two_all_to_alls":
        return 2 * sent * layers * crossing_fraction
    return sent * (layers * crossing_fraction + gpus + 2 * layers * kv_share * (gpus - 1))


def test_one_gpu_bound_by_memory_reads_every_byte_once():
    machine = _machine(hbm_bytes_per_s=10.0)
    found = decode.iteration(MODEL, machine, 1, 7, "coherent", HERE)
    attention = 8 * 8 + 2 * (8 * 4) + 8 * 8  # Q, K and V of half the heads, output
    matrices = 3 * (attention + 8 * 8 + 8 * 20 + 20 * 8) + 50 * 8  # a token visits one expert
    cache = 7 * 3 * (4 + 4)
    assert found.seconds == found.compute_s == pytest.approx(2 * (matrices + cache) / 10.0)
    assert found.tokens_per_s == pytest.approx(1 / found.seconds)


def test_compute_bound_by_products_is_two_operations_per_weight_and_token():
    machine = _machine(flops_per_s=100.0)
    found = decode.iteration(replace(MODEL, top_k=2), machine, 5, 7, "two_all_to_alls", HERE)
    weights = 3 * (192 + 64 + 2 * 320) + 400
    assert found.seconds == pytest.approx(2 * 5 * weights / 100.0)


def test_the_slower_of_reading_and_multiplying_counts():
    one = replace(MODEL, experts=1)  # everything in it is read once and multiplied with every token
    reads = decode.iteration(one, _machine(hbm_bytes_per_s=1.0), 1, 0, "coherent", HERE).seconds
    many = decode.iteration(one, _machine(hbm_bytes_per_s=1.0, flops_per_s=1.0), 10, 0, "coherent", HERE).seconds
    few = decode.iteration(one, _machine(hbm_bytes_per_s=1.0, flops_per_s=10.0), 10, 0, "coherent", HERE).seconds
    assert few == pytest.approx(reads) and many == pytest.approx(10 * reads)


def test_without_bandwidth_limits_only_launches_are_left():
    found = decode.iteration(replace(MODEL, experts=1), _machine(launch_s=2.0), 9, 7, "coherent", HERE)
    kernels = 3 * (decode.ATTENTION_KERNELS + decode.ROUTER_KERNELS + decode.EXPERT_KERNELS)
    assert found.seconds == 2.0 * (kernels + decode.HEAD_KERNELS)


@pytest.mark.parametrize(("experts", "tokens"), [(1, 3), (2, 1), (2, 5), (3, 4), (4, 3)])
def test_touched_experts_are_the_mean_over_all_ways_to_visit_them(experts, tokens):
    ways = list(itertools.product(range(experts), repeat=tokens))
    mean = sum(len(set(way)) for way in ways) / len(ways)
    assert decode.touched_experts(experts, tokens) == pytest.approx(mean)


@pytest.mark.parametrize("mode", MODES)
def test_time_on_plain_links_is_the_volume_of_table_1(mode):
    gpus, tokens = 4, 6
    found = decode.iteration(MODEL, _flat(gpus, 2.0), tokens, 7, mode, decode.Routing(0.4, 0.4))
    vectors = (found.all_to_all_s + found.gather_s) * 2.0 * gpus / (8 * 2)
    own = 0 if mode == "two_all_to_alls" else gpus * tokens  # the table gathers a GPU's tokens to itself too
    assert vectors == pytest.approx(_table_1(mode, gpus, tokens, MODEL.layers, 0.4) - own)


def test_full_buffers_are_as_long_as_the_fullest_expert_of_any_gpu():
    even = np.full((1, 2), 0.5)
    assert decode.full_buffers(np.array([[0.0, 1.0, 0.0]]), 3, 5) == 3  # all tokens in one of three buffers
    assert decode.full_buffers(even, 1, 2, draws=4000) == pytest.approx(1.5, rel=0.02)  # 2 or 1 of 2, as often
    assert decode.full_buffers(even, 2, 2, draws=4000) == pytest.approx(1.75, rel=0.02)  # 1 only if on both GPUs
    both = np.concatenate([even, [[0.0, 1.0]]])
    assert decode.full_buffers(both, 1, 2, draws=4000) == pytest.approx((1.5 + 2) / 2, rel=0.02)
    assert decode.full_buffers(even, 4, 10**6, draws=3) == pytest.approx(1, abs=0.01)


def test_dropping_buffers_are_an_even_share_and_at_least_four():
    assert decode.dropping_buffers(16, 512) == 1 and decode.dropping_buffers(16, 16) == 4
    assert decode.dropping_buffers(16, 100) == 7 * 16 / 100


def test_padding_is_sent_and_computed_like_tokens_but_does_not_attend():
    machine = _machine(2, 2, rates=(3.0, 1.0), hbm_bytes_per_s=math.inf, flops_per_s=10.0)
    one, two = (
        decode.iteration(MODEL, machine, 8, 7, "two_all_to_alls", decode.padded(machine, factor)) for factor in (1, 2)
    )
    assert (
        one.all_to_all_s
        == decode.iteration(MODEL, machine, 8, 7, "two_all_to_alls", decode.uniform(machine)).all_to_all_s
    )
    assert two.all_to_all_s == pytest.approx(2 * one.all_to_all_s)
    assert two.compute_s - one.compute_s == pytest.approx(8 * 3 * 2 * (8 * 20 + 20 * 8) / 10.0)
    assert one.all_to_all_share == one.all_to_all_s / (one.compute_s + one.all_to_all_s)


def test_keys_and_values_add_their_width_for_every_other_gpu():
    machine, routing = _flat(4, 2.0), decode.Routing(0.4, 0.4)
    ids, sent = (
        decode.iteration(MODEL, machine, 6, 7, "placed", routing, kv_sent=kv_sent) for kv_sent in (False, True)
    )
    assert (sent.gather_s - ids.gather_s) * 2.0 == pytest.approx(
        6 * 2 * 3 * 4 * 3 * 2
    )  # tokens, K and V, L, width, GPUs, bytes
    assert sent.all_to_all_s == ids.all_to_all_s
    more = _table_1("placed", 4, 6, 3, 0.4, 0.5) - _table_1("placed", 4, 6, 3, 0.4)
    assert (sent.gather_s - ids.gather_s) * 2.0 * 4 / (8 * 2) == pytest.approx(more)


def test_volumes_of_table_1():
    assert _table_1("two_all_to_alls", 8, 32, 24, 0.875) == 2 * 8 * 32 * 24 * 0.875 == 10752
    assert _table_1("placed", 8, 32, 24, 0.5) == 8 * 32 * (24 * 0.5 + 8) == 5120
    assert _table_1("coherent", 8, 32, 24, 0.5, 1.0) == 5120 + 2 * 24 * 7 * 8 * 32


def test_uniform_routing_is_the_collective_itself():
    machine = _machine(4, 4, rates=(3.0, 1.0), latency=5.0)
    expected = collectives.seconds("all_to_all", 64.0, machine.network, "direct")
    found = decode.all_to_all_seconds(64.0, machine, decode.uniform(machine))
    assert found == pytest.approx(expected) == pytest.approx(5.0 + 64.0 * 12 / 16)


def test_the_slower_part_of_an_exchange_counts():
    inside, between = decode.Routing(0.5, 0.0), decode.Routing(0.5, 0.5)
    machine = _machine(2, 4, rates=(8.0, 1.0))
    assert decode.all_to_all_seconds(64.0, machine, inside) == pytest.approx(0.5 * 64 / 8)
    assert decode.all_to_all_seconds(64.0, machine, between) == pytest.approx(0.5 * 64 / 1)
    assert decode.all_to_all_seconds(64.0, machine, decode.Routing(0.9, 0.01)) == pytest.approx(0.89 * 64 / 8)


def test_processors_that_carry_all_bytes_carry_both_parts():
    machine = _machine(2, 2)
    machine = replace(machine, network=replace(machine.network, host_bytes_per_s=10.0))
    assert decode.all_to_all_seconds(50.0, machine, decode.Routing(0.6, 0.2)) == pytest.approx(0.6 * 50 * 4 / 10)


def test_experts_that_nobody_visits_are_neither_read_nor_launched():
    touched = 8 * (1 - (7 / 8) ** 2)
    one = replace(MODEL, layers=1)
    rest = 192 + 64 + 400
    read = decode.compute_seconds(one, _machine(hbm_bytes_per_s=1.0), 2, 0, "coherent")
    assert read == pytest.approx(2 * (rest + touched * 320))
    launched = decode.compute_seconds(one, _machine(launch_s=1.0), 2, 0, "coherent")
    fixed = decode.ATTENTION_KERNELS + decode.ROUTER_KERNELS + decode.HEAD_KERNELS
    assert launched == pytest.approx(fixed + touched * decode.EXPERT_KERNELS)


def test_a_gather_in_one_ring_leaves_a_node_by_one_link():
    topology = Topology((Level("node", 4), Level("cluster", 2, 1.0)))
    machine = replace(_machine(2, 4), network=network_of(topology, {"cluster": 4}))
    times = [
        decode.iteration(MODEL, replace(machine, channels=channels), 6, 0, "coherent", HERE).gather_s
        for channels in (1, 4)
    ]
    assert times[0] == pytest.approx(4 * times[1]) and times[1] > 0


def test_the_busiest_gpu_receives_more_and_a_coherent_one_attends_more():
    even, skewed = decode.Routing(0.4, 0.4), decode.Routing(0.4, 0.4, 1.5)
    machine = _flat(4, 2.0)
    times = [decode.iteration(MODEL, machine, 6, 7, "coherent", routing).all_to_all_s for routing in (even, skewed)]
    assert times[1] == pytest.approx(1.5 * times[0])
    cache_only = replace(machine, hbm_bytes_per_s=1.0)
    longer = {
        mode: decode.compute_seconds(MODEL, cache_only, 6, 10, mode, 1.5)
        - decode.compute_seconds(MODEL, cache_only, 6, 0, mode, 1.5)
        for mode in MODES
    }
    home = 6 * 10 * 3 * 8 * 2
    assert longer == pytest.approx({"two_all_to_alls": home, "coherent": 1.5 * home, "placed": 1.5 * home})


@pytest.mark.parametrize("k", [1, 2, 3])
def test_copies_of_a_token_go_to_every_expert_and_their_parts_come_back(k):
    machine, routing = _flat(4, 2.0), decode.Routing(0.4, 0.4)
    once = decode.all_to_all_seconds(6 * 8 * 2, machine, routing)
    times = {
        mode: decode.iteration(replace(MODEL, top_k=k), machine, 6, 7, mode, routing).all_to_all_s for mode in MODES[:2]
    }
    assert times == pytest.approx({"two_all_to_alls": 3 * once * 2 * k, "coherent": 3 * once * (2 * k - 1)})


def test_latency_halves_with_the_all_to_alls_and_the_ring_pays_its_rounds():
    machine = _machine(4, 1, latency=3.0)
    two, one = (decode.iteration(MODEL, machine, 6, 7, mode, decode.Routing(0.5, 0.5)) for mode in MODES[:2])
    assert (two.all_to_all_s, one.all_to_all_s) == (3 * 2 * 3.0, 3 * 3.0)
    assert (two.gather_s, one.gather_s) == (0.0, 3 * 3.0)
    emulated = decode.iteration(MODEL, replace(machine, native=False), 6, 7, "coherent", decode.Routing(0.5, 0.5))
    assert emulated.gather_s == 3.0


def test_bands_carry_how_far_all_to_alls_among_a100s_are_off():
    """By Leonardo's measured ones, as docs/scaling.md says: most of an error belongs to the number of nodes."""
    shared, own = decode.exchange_errors()
    assert (shared, own) == (pytest.approx(0.29, abs=0.01), pytest.approx(0.10, abs=0.01))
    one, other = (np.log(decode.exchange_error(mode, 20_000)) for mode in ("placed", "deepspeed"))
    assert [np.std(one), np.std(other)] == pytest.approx([math.hypot(shared, own)] * 2, rel=0.05)
    assert np.std(one - other) == pytest.approx(math.sqrt(2) * own, rel=0.05)
    first, same, another = (decode.exchange_error("placed", 9, seed) for seed in (0, 0, 1))
    assert (first == same).all() and (first != another).all()


def test_an_error_of_the_exchanges_leaves_computing_as_it_is():
    machine = replace(_flat(4, 2.0), hbm_bytes_per_s=1.0)
    found = decode.iteration(MODEL, machine, 6, 7, "coherent", decode.Routing(0.4, 0.4))
    slow = found.with_exchanges(np.array([1.0, 3.0]))
    assert slow.compute_s == found.compute_s > 0 and found.gather_s > 0
    assert list(slow.routing_s) == pytest.approx([found.routing_s, 3 * found.routing_s])


def _one_of(machine, draw):
    """The machine of numbers that a draw is."""

    def number(value):
        return float(value[draw]) if np.ndim(value) else value

    def protocol(p):
        return replace(p, latency_s=number(p.latency_s), bytes_per_s=number(p.bytes_per_s))

    links = tuple(replace(level, protocols=tuple(map(protocol, level.protocols))) for level in machine.network.links)
    costs = {name: number(getattr(machine.network, name)) for name in ("overhead_s", "peer_s")}
    net = replace(machine.network, links=links, **costs)
    names = ("flops_per_s", "hbm_bytes_per_s", "launch_s", "overlap")
    return replace(machine, network=net, **{name: number(getattr(machine, name)) for name in names})


@pytest.mark.parametrize("mode", MODES)
def test_draws_are_what_each_of_them_is_alone(mode):
    machine, model, routing = WILKES3.machine(2, draws=5), decode.paper_model(16), decode.Routing(0.5, 0.2, 1.3)
    kv_sent = mode != "two_all_to_alls"
    many = decode.iteration(model, machine, 32, 200, mode, routing, kv_sent=kv_sent)
    assert np.shape(many.seconds) == np.shape(many.tokens_per_s) == (5,) and np.ptp(many.seconds) > 0
    for draw in range(5):
        one = decode.iteration(model, _one_of(machine, draw), 32, 200, mode, routing, kv_sent=kv_sent)
        for part in ("compute_s", "all_to_all_s", "seconds", "tokens_per_s"):
            assert getattr(many, part)[draw] == pytest.approx(getattr(one, part), rel=1e-12)
        assert np.broadcast_to(many.gather_s, 5)[draw] == pytest.approx(one.gather_s, rel=1e-12)


def test_a_message_begins_once_to_every_other_gpu_of_all_nodes():
    quiet = _machine(4, 8, (100.0, 10.0))
    busy = replace(quiet, network=replace(quiet.network, peer_s=2.0))
    times = [decode.all_to_all_seconds(1e3, machine, decode.uniform(machine)) for machine in (quiet, busy)]
    assert times[1] - times[0] == pytest.approx(30 * 2.0)


SIZES = st.integers(1, 2000)


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, st.floats(0, 1), st.floats(0, 1), st.floats(1, 3), st.sampled_from(MODES))
def test_more_work_never_takes_less_time(tokens, context, crossing, share, load, mode):
    machine, model = WILKES3.machine(4), decode.paper_model(16)

    def seconds(tokens=tokens, context=context, crossing=crossing, load=load, machine=machine):
        routing = decode.Routing(crossing, share * crossing, load)
        return decode.iteration(model, machine, tokens, context, mode, routing).seconds

    base = seconds() * (1 - 1e-12)
    assert seconds(tokens=tokens + 1) >= base and seconds(context=context + 1) > base
    assert seconds(crossing=(1 + crossing) / 2) >= base and seconds(load=load + 0.1) >= base
    assert seconds(machine=replace(machine, hbm_bytes_per_s=machine.hbm_bytes_per_s / 2)) > base
    assert seconds(machine=replace(machine, launch_s=machine.launch_s * 2)) > base


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from([2, 4, 8, 16]), st.floats(0.1, 1))
def test_one_all_to_all_is_half_of_two_and_placement_saves_the_rest(tokens, nodes, kept):
    machine, model = WILKES3.machine(nodes), decode.paper_model(64)
    rank_order = decode.uniform(machine)
    nearer = decode.Routing(rank_order.crossing_fraction * kept, rank_order.node_crossing_fraction * kept)
    two = decode.iteration(model, machine, tokens, 100, "two_all_to_alls", rank_order)
    coherent = decode.iteration(model, machine, tokens, 100, "coherent", rank_order)
    placed = decode.iteration(model, machine, tokens, 100, "placed", nearer)
    assert coherent.all_to_all_s == pytest.approx(two.all_to_all_s / 2)
    assert kept / 2 * two.all_to_all_s <= placed.all_to_all_s * (1 + 1e-12)  # bytes are saved, latencies are not
    assert placed.all_to_all_s <= coherent.all_to_all_s * (1 + 1e-12)
    assert placed.gather_s == coherent.gather_s > two.gather_s == 0


def test_a_token_reads_the_weights_of_the_real_block():
    """Its matrices, with all experts as every one is visited."""
    one = replace(MODEL, layers=1)
    block = MoEBlock(one)
    matrices = sum(part.weight.numel() for part in (block.attention.qkv, block.attention.out, block.router))
    matrices += sum(matrix.numel() for matrix in block.experts.parameters())
    read = decode.compute_seconds(one, _machine(hbm_bytes_per_s=1.0), 10**6, 0, "coherent")
    assert read == pytest.approx(2 * (matrices + 400))


def test_the_papers_models_differ_in_their_experts_only():
    models = [decode.paper_model(experts) for experts in (8, 16, 32, 64)]
    assert {replace(model, experts=8) for model in models} == {models[0]}
    assert (models[0].layers, models[0].hidden, models[0].expert_hidden) == (24, 1024, 4096)
    assert decode.paper_model(8, hidden=2048).expert_hidden == 8192


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "both"}, "mode is 'both', allowed: two_all_to_alls, coherent, placed"),
        ({"mode": "two_all_to_alls", "kv_sent": True}, "allowed: coherent, placed"),
        ({"tokens_per_gpu": 0}, "tokens_per_gpu is 0"),
        ({"context": -1}, "context -1"),
        ({"model": replace(MODEL, experts=6)}, "6 experts cannot be shared evenly by 4 GPUs"),
        ({"machine": _machine(1, 4)}, "node_crossing_fraction is 0.2: on one node only 0"),
        ({"machine": _machine(4, 1)}, "crossing_fraction is 0.5: with one GPU a node only 0.2"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    asked = {"model": MODEL, "machine": _machine(2, 2), "tokens_per_gpu": 4, "context": 7, "mode": "coherent"}
    asked["routing"] = decode.Routing(0.5, 0.2)
    assert decode.iteration(**asked).tokens == 16
    with pytest.raises(ValueError, match=message):
        decode.iteration(**{**asked, **wrong})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decode.Routing(0.2, 0.5), "crossing_fraction is 0.2 and node_crossing_fraction 0.5"),
        (lambda: decode.Routing(1.1), "crossing_fraction is 1.1"),
        (lambda: decode.Routing(0.5, max_load=0.9), "max_load is 0.9"),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
