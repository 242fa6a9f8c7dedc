"""Copies of experts share the rows, and experts move between ranks in mid-stream: tokens stay those of one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_decoding import MODES, build, config, shared_memory

from repro import paths
from repro.comm import Communicator
from repro.exflow.moe import Decoder
from repro.exflow.moe.hosting import Hosting, Layout, _moves
from repro.exflow.moe.rebalance import Rebalancer
from repro.exflow.recording import RoutingCounts, record_routing
from repro.exflow.search.portfolio import compile_kernels
from repro.exflow.serving import eplb
from repro.exflow.serving.policy import policy_for
from repro.exflow.serving.slots import Replicas, logical_to_physical
from repro.exflow.trace import transitions
from repro.experiments.common.texts import FILES, read
from repro.launch import launch
from repro.models import gpt_moe_checkpoint
from repro.models.gpt_moe import generate
from repro.topology import Level, Topology

NEW, REQUESTS = 8, 12
CONFIG = config()


def machine(ranks):
    return Topology((Level("package", 2), Level("node", ranks // 4), Level("cluster", 2)))


def prompts():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(40, (1 + number % 6,), generator=draw) for number in range(REQUESTS)]


def alone(top_k=1):
    return torch.stack([generate(build(config(top_k)), prompt, NEW) for prompt in prompts()])


def drawn_slots(seed, ranks, per_rank):
    """Every expert once, and copies in the other slots, all in random places."""
    rng = np.random.default_rng(seed)
    rows = [np.concatenate([np.arange(8), rng.integers(8, size=ranks * per_rank - 8)]) for _ in range(CONFIG.layers)]
    return Replicas(np.stack([rng.permutation(row) for row in rows]), ranks, ranks // 2)


def drawn_gpus(seed, ranks):
    """Experts on any rank, any number of them."""
    return np.random.default_rng(seed).integers(ranks, size=(CONFIG.layers, CONFIG.experts))


def decode(rank, ranks, mode, top_k, placements, dispatch, memory):
    """Decode, and take the next placement after each of the first iterations; tells what this rank holds at the end."""
    kind, keys_values = MODES[mode]
    model, communicator = build(config(top_k)), Communicator(machine(ranks))
    decoder = Decoder(model, placements[0], communicator, kind, keys_values, memory, dispatch)
    moved = []

    def after(iteration):
        if iteration + 1 < len(placements):
            moved.append(decoder.replace(placements[iteration + 1]))

    tokens = decoder.generate(prompts(), NEW, after)
    layout = decoder.hosting.layout
    own = [torch.from_numpy(expert[host == rank]) for expert, host in zip(layout.expert, layout.rank, strict=True)]
    for block, whole, experts in zip(decoder.blocks, build(config(top_k)).blocks, own, strict=True):
        assert torch.equal(block.experts.up, whole.experts.up[experts])
        assert torch.equal(block.experts.down, whole.experts.down[experts])
    return tokens, moved, own


def run(ranks, mode, top_k, placements, dispatch="nearest"):
    memory = shared_memory(CONFIG, REQUESTS) if mode == "coherent_shared" else None
    return launch(decode, ranks, mode, top_k, placements, dispatch, memory, timeout_s=120)


@pytest.mark.parametrize(("ranks", "mode", "top_k", "dispatch"), [
    (4, "two_all_to_alls", 2, "round_robin"),
    (4, "coherent", 2, "nearest"),
    (4, "coherent_shared", 1, "nearest"),
    (8, "coherent", 2, "round_robin"),
    pytest.param(8, "two_all_to_alls", 2, "nearest", marks=pytest.mark.exhaustive),
    pytest.param(8, "coherent_shared", 1, "round_robin", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_tokens_stay_the_same_while_experts_and_copies_move(ranks, mode, top_k, dispatch):
    placements = [
        drawn_slots(0, ranks, 3),
        drawn_gpus(1, ranks),
        drawn_slots(2, ranks, 8 // ranks),
        drawn_slots(3, ranks, 4),
    ]
    results = run(ranks, mode, top_k, placements, dispatch)
    expected = alone(top_k)
    for tokens, *_ in results:
        assert torch.equal(tokens, expected)
    row = 2 * 16 * 8 * 8  # bytes of an expert: `up` and `down` in fp64
    moved = [[moves[step] for _, moves, _ in results] for step in range(3)]
    assert all(sum(experts for experts, _ in step) > 0 for step in moved)
    for step in moved:
        assert sum(sum(sent.values()) for _, sent in step) == row * sum(experts for experts, _ in step)


def test_what_stays_does_not_move():
    placed = drawn_slots(0, 4, 3)
    results = run(4, "two_all_to_alls", 1, [placed, placed])
    assert [moves for _, moves, _ in results] == [[(0, {"package": 0, "node": 0, "cluster": 0})]] * 4


def test_a_refused_change_leaves_the_decoder_as_it_was():
    def refused(rank, ranks):
        decoder = Decoder(build(CONFIG), drawn_gpus(0, ranks), Communicator(machine(ranks)))
        for shares in (np.ones((CONFIG.layers, 9)), np.zeros((CONFIG.layers, 8))):
            with pytest.raises(ValueError, match="share"):
                decoder.replace(drawn_gpus(1, ranks), shares)
        return decoder.generate(prompts(), NEW)

    expected = alone()
    assert all(torch.equal(tokens, expected) for tokens in launch(refused, 4, timeout_s=60))


class Eplb:
    """The policy that vLLM has."""

    @classmethod
    def rebalance_experts(cls, weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None):
        assert old_global_expert_indices is None or old_global_expert_indices.shape == (len(weight), num_replicas)
        args = weight.numpy(), num_replicas, num_groups, num_nodes, num_ranks
        return torch.from_numpy(eplb.rebalance_experts(*args)[0])


def serve(rank, ranks, model, requests, placed, mode, ours, every, extra):
    """Decode with what re-places every so many iterations: vLLM's policy or ours, or with nothing (`ours` None)."""
    decoder = Decoder(model, placed, Communicator(machine(ranks)), *MODES[mode])
    routing, after = RoutingCounts(model.config.layers, model.config.experts), lambda iteration: None
    if ours is not None:
        after = Rebalancer(decoder, policy_for(routing) if ours else Eplb, routing, every, extra)
    tokens = decoder.generate(requests, NEW, after)
    return tokens, getattr(after, "history", []), decoder.meter.iterations


def served(ranks, model, requests, *args):
    """The tokens and the history of rank 0, and of the iterations the share of rows that left their rank, and the load
    of the busiest rank over the even share, mean over layers."""
    compile_kernels()  # once, and not in every rank
    results = launch(serve, ranks, model, requests, *args, timeout_s=300)
    assert all(torch.equal(tokens, results[0][0]) for tokens, *_ in results)
    expert = sum(each.data[0].nbytes for each in (model.blocks[0].experts.up, model.blocks[0].experts.down))
    for step in zip(*(history for _, history, _ in results), strict=True):
        assert sum(sum(one.sent.values()) for one in step) == expert * sum(one.experts for one in step)
    ranks_of = list(zip(*(iterations for *_, iterations in results), strict=True))
    left = [sum(n for one in each for level, n in one.rows.items() if level != "own") for each in ranks_of]
    computed = np.array([[[n for _, n in sorted(one.computed.items())] for one in each] for each in ranks_of])
    assert (computed.sum(axis=1) == len(requests)).all()
    busiest = (computed.max(axis=1) / computed.mean(axis=1)).mean(axis=1)
    return results[0][0], results[0][1], np.array(left) / computed.sum(axis=(1, 2)), busiest


@pytest.mark.parametrize(("mode", "ours"), [("two_all_to_alls", False), ("coherent", True)])
def test_a_policy_evens_the_load_while_the_decoder_serves(mode, ours):
    """At first two of four ranks have all experts."""
    tokens, history, _, busiest = served(4, build(CONFIG), prompts(), drawn_gpus(5, 4) // 2, mode, ours, 2, 1)
    assert torch.equal(tokens, alone())
    assert [one.iteration for one in history] == [1, 3, 5]
    assert busiest[2:].mean() < busiest[:2].mean()


@pytest.mark.exhaustive
def test_of_a_trained_model_ours_sends_fewer_rows_than_eplb_and_the_tokens_stay():
    """16 experts on 8 ranks, each with a slot for a copy, of which nobody knows the routing beforehand."""
    model = gpt_moe_checkpoint.load(paths.data("gpt_moe_16e.safetensors")).double()
    texts = [read(name).held_out for name in FILES]
    requests = [texts[number % 2][start : start + 16].long() for number, start in enumerate(range(0, 512 * 40, 40))]
    contiguous = np.tile(np.arange(16) // 2, (model.config.layers, 1))
    found = {ours: served(8, model, requests, contiguous, "coherent", ours, 2, 1) for ours in (None, False, True)}
    assert all(torch.equal(found[None][0], tokens) for tokens, *_ in found.values())
    for ours, (_, history, left, busiest) in found.items():
        numbers = f"left {left[:2].mean():.3f} then {left[2:].mean():.3f}, busiest {busiest[:2].mean():.2f} then"
        print(f"ours {ours}: {numbers} {busiest[2:].mean():.2f}, experts that came {[one.experts for one in history]}")
    left, busiest = ({ours: each[what][2:].mean() for ours, each in found.items()} for what in (2, 3))
    assert left[True] < 0.9 * left[False] and left[True] < 0.9 * left[None]
    assert busiest[True] < busiest[None]


def count(rank, ranks, mode, top_k):
    kind, keys_values = MODES[mode]
    decoder = Decoder(build(config(top_k)), drawn_slots(0, ranks, 3), Communicator(machine(ranks)), kind, keys_values)
    decoder.routing = RoutingCounts(CONFIG.layers, CONFIG.experts)
    decoder.generate(prompts(), NEW)
    found = decoder.routing.total()
    decoder.routing.clear()
    return *found, any(each.any() for each in decoder.routing.total())


@pytest.mark.parametrize("mode", ["two_all_to_alls", "coherent"])
def test_a_decoder_counts_the_transitions_of_its_tokens(mode):
    """Also where tokens move from rank to rank."""
    model = build(config(2))
    with record_routing(model) as recording, torch.no_grad():
        for prompt, new in zip(prompts(), alone(2), strict=True):
            model(torch.cat([prompt, new])[None, :-1])
    trace = recording.trace()
    chosen = trace.experts.reshape(trace.tokens, 3, 2)
    expected = [np.bincount(chosen[:, layer].ravel(), minlength=8) for layer in range(3)]
    for load, pairs, left in launch(count, 4, mode, 2, timeout_s=60):
        np.testing.assert_array_equal(load, expected)
        np.testing.assert_array_equal(pairs, transitions(trace))
        assert not left


def test_a_hook_leaves_padding_out_and_transitions_out_of_turn():
    counts = RoutingCounts(3, 4)
    hooks = [counts.hook(layer) for layer in range(3)]
    hooks[0](torch.tensor([[0], [1], [-1]], dtype=torch.int32))
    hooks[1](torch.tensor([[2], [2], [-1]], dtype=torch.int32))
    load, pairs = counts.total()
    assert load.tolist() == [[1, 1, 0, 0], [0, 0, 2, 0], [0] * 4]
    assert pairs[0, :, 2].tolist() == [1, 1, 0, 0] and pairs.sum() == 2
    hooks[1](torch.zeros(3, 1, dtype=torch.int32))  # a second batch, whose first layer came before ours
    hooks[2](torch.zeros(2, 1, dtype=torch.int32))  # of two tokens, after a layer of three
    assert counts.out_of_turn == 5
    after, same = counts.total()
    assert (after - load).tolist() == [[0] * 4, [3, 0, 0, 0], [2, 0, 0, 0]]
    np.testing.assert_array_equal(same, pairs)
    with pytest.raises(ValueError, match="layer 2 has top-2 routing, before it was top-1"):
        hooks[2](torch.zeros(3, 2, dtype=torch.int32))
    early = RoutingCounts(3, 4)
    early.hook(1)(torch.zeros(2, 1, dtype=torch.int32))  # hooked in the middle of a pass
    assert early.out_of_turn == 2 and not early.total()[1].any()


class Table(Hosting):
    """The part of a rank's hosting that chooses copies, without ranks."""

    def __init__(self, placed, rank, dispatch, shares=None):
        ranks, topology = placed.gpus, machine(placed.gpus)
        exchange = SimpleNamespace(rank=rank, ranks=ranks, communicator=SimpleNamespace(topology=topology))
        super().__init__(build(CONFIG).blocks, Layout.of(placed, CONFIG, ranks), exchange, dispatch)
        if shares is not None:
            self._look_up(self.layout, shares)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(0, 3), st.integers(0, 40), st.booleans())
def test_copies_share_the_rows_to_the_next_whole_row(seed, rank, rows, even):
    placed, rng = drawn_slots(seed, 4, 4), np.random.default_rng(seed)
    shares = None if even else rng.uniform(0.1, 5.0, (3, 16))
    table, experts = Table(placed, rank, "round_robin", shares), torch.from_numpy(rng.integers(8, size=(rows, 2)))
    weight = np.ones((3, 16)) if shares is None else shares
    for layer, slots in enumerate(placed.physical_to_logical):
        chosen = table.slots(layer, experts)
        assert (slots[chosen.numpy()] == experts.numpy()).all()
        took = np.bincount(chosen.flatten().numpy(), minlength=16)
        for expert in range(8):
            own = slots == expert
            due = took[own].sum() * weight[layer, own] / weight[layer, own].sum()
            assert (abs(took[own] - due) < 1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(0, 7))
def test_the_nearest_copy_is_taken(seed, rank):
    placed = drawn_slots(seed, 8, 3)
    table, experts = Table(placed, rank, "nearest"), torch.arange(8).repeat(9)
    unit = np.array([1, 2, 4, 8])  # ranks that share a rank, a package, a node, everything
    for layer, slots in enumerate(placed.physical_to_logical):
        host = np.arange(24) // 3
        away = (host[:, None] // unit != rank // unit).sum(axis=1)
        for expert, slot in zip(experts.tolist(), table.slots(layer, experts).tolist(), strict=True):
            assert slots[slot] == expert and away[slot] == away[slots == expert].min()


def test_equally_near_copies_take_turns():
    """Expert 0 is on ranks 2 and 3, both of another node than rank 0."""
    placed = Replicas(np.tile([1, 2, 3, 4, 5, 6, 0, 7, 1, 0, 2, 3], (3, 1)), 4, 2)
    took = Table(placed, 0, "nearest").slots(0, torch.zeros(10, 1, dtype=torch.long)).flatten().bincount(minlength=12)
    assert took[6] == took[9] == 5


def test_an_expert_comes_from_the_nearest_rank_that_has_sent_the_least():
    levels = Table(drawn_slots(0, 4, 4), 0, "nearest")
    assert _moves({(0, 1), (0, 2)}, {(0, 1), (0, 2), (0, 3)}, levels._away) == [(2, 3, 0)]
    assert _moves({(0, 0), (0, 1)}, {(0, rank) for rank in range(4)}, levels._away) == [(0, 2, 0), (1, 3, 0)]


def test_ranks_together_share_out_evenly_what_is_too_few_rows_for_one():
    """Four ranks with a row each for an expert of four copies: every copy gets one."""
    placed = Replicas(np.tile(np.r_[:8, 0, 0, 0, 1:6], (3, 1)), 4, 2)
    took = [int(Table(placed, rank, "round_robin").slots(0, torch.tensor([[0]]))) for rank in range(4)]
    assert sorted(took) == [0, 8, 9, 10]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.sampled_from([4, 8]), st.integers(2, 5))
def test_the_slots_of_an_expert_are_found_again(seed, ranks, per_rank):
    experts = drawn_slots(seed, ranks, per_rank).physical_to_logical
    slots, copies = logical_to_physical(experts)
    assert slots.shape == (3, 8, copies.max()) and (copies == (slots >= 0).sum(axis=2)).all()
    for layer, expert, copy in np.argwhere(slots >= 0):
        assert experts[layer, slots[layer, expert, copy]] == expert
    assert sorted(slots[0][slots[0] >= 0]) == list(range(ranks * per_rank))


def test_shares_that_leave_an_expert_without_a_copy_are_refused():
    placed = Replicas(np.tile(np.r_[:8, 0:8], (3, 1)), 4, 2)
    for shares, says in (
        (np.r_[0.0, np.ones(7), 0.0, np.ones(7)], "layer 0: no copy of expert 0 that may be taken has a share"),
        (np.r_[-1.0, np.ones(15)], r"must be \(3, 16\), finite and not negative"),
    ):
        with pytest.raises(ValueError, match=says):
            Table(placed, 0, "round_robin", np.tile(shares, (3, 1)))


@pytest.mark.parametrize(
    ("placed", "says"),
    [
        (drawn_slots(0, 8, 2), "slots for 3 layers of 8 experts on 8 ranks, must be for 3 layers of 8 experts on 4"),
        (drawn_gpus(0, 8) + 4, r"ranks 4 to 11: the model has 3 layers of 8 experts, and there are 4 ranks"),
    ],
)
def test_a_placement_of_another_machine_is_refused(placed, says):
    with pytest.raises(ValueError, match=says):
        Layout.of(placed, CONFIG, 4)
