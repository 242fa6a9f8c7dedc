"""Expert-parallel decoding gives the tokens of one process, and sends what the accounting says."""

import numpy as np
import pytest
import torch
from moe_decoding import MODES, build, config, shared_memory

from repro import exflow
from repro.comm import Communicator
from repro.exflow.moe import Decoder
from repro.exflow.recording import record_routing
from repro.launch import launch
from repro.models.gpt_moe import generate
from repro.topology import Level, Topology

TOPOLOGY = Topology((Level("package", 2), Level("node", 1), Level("cluster", 2)))
RANKS, NEW = 4, 6


def prompts(count):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(40, (1 + int(torch.randint(9, (), generator=draw)),), generator=draw) for _ in range(count)]


def spread(sizes, ranks=RANKS, seed=3):
    """A random balanced placement."""
    rows = np.tile(np.arange(sizes.experts) * ranks // sizes.experts, (sizes.layers, 1))
    return np.random.default_rng(seed).permuted(rows, axis=1)


def decode(rank, world_size, sizes, gpu, mode, requests, memory, topology=TOPOLOGY, aligned=False):
    kind, keys_values = MODES[mode]
    decoder = Decoder(build(sizes), gpu, Communicator(topology), kind, keys_values, memory)
    decoder.meter.aligned = aligned
    tokens = decoder.generate(prompts(requests), NEW)
    experts = [len(block.experts.up) for block in decoder.model.blocks]
    return tokens, decoder.meter.iterations, experts, decoder.cache.nbytes


def run(sizes, mode="coherent", requests=6, gpu=None, aligned=False):
    memory = shared_memory(sizes, requests) if mode == "coherent_shared" else None
    gpu = spread(sizes) if gpu is None else gpu
    return launch(decode, RANKS, sizes, gpu, mode, requests, memory, TOPOLOGY, aligned, timeout_s=60)


def alone(sizes, requests):
    model = build(sizes)
    return torch.stack([generate(model, prompt, NEW) for prompt in prompts(requests)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_rank_gets_the_tokens_of_one_process(mode, top_k):
    sizes = config(top_k)
    expected = alone(sizes, 6)
    assert len({tuple(row.tolist()) for row in expected}) > 1  # not all requests say the same
    for tokens, *_ in run(sizes, mode):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_without_requests_or_experts_take_part(mode):
    sizes = config(top_k=2, kv_heads=1)
    gpu = np.where(spread(sizes) == 2, 3, spread(sizes))  # rank 2 has no expert
    for (tokens, _, experts, _), own in zip(
        run(sizes, mode, requests=2, gpu=gpu), ([2] * 3, [2] * 3, [0] * 3, [4] * 3), strict=True
    ):
        assert torch.equal(tokens, alone(sizes, 2))
        assert experts == own


def test_one_process_decodes_alone():
    def lonely(rank, world_size):
        one = Topology((Level("package", 1), Level("node", 1), Level("cluster", 1)))
        sizes = config(2)
        return decode(rank, world_size, sizes, np.zeros((3, 8), int), "coherent", 3, None, one)[0]

    assert torch.equal(launch(lonely, 1, timeout_s=60)[0], alone(config(2), 3))


def sent(results, *parts):
    """Bytes of all ranks and iterations in these parts."""
    return sum(
        sum(iteration.sent[part].values())
        for _, iterations, *_ in results
        for iteration in iterations
        for part in parts
    )


def rows(results, crossing=True):
    found = [iteration.rows for _, iterations, *_ in results for iteration in iterations]
    return sum(count for each in found for level, count in each.items() if level != "own" or not crossing)


def test_bytes_follow_the_paper_s_table():
    """Top-1: an all-to-all sends rows that leave, with labels; ids go to every rank; keys and values add the rest."""
    sizes, requests, iterations = config(), 8, NEW - 1
    two, one, shared = (run(sizes, mode, requests) for mode in MODES)
    hidden, label = 16 * 8, 4
    assert rows(two, False) == rows(one, False) == requests * iterations * sizes.layers
    assert rows(shared) == rows(one)
    headers = iterations * sizes.layers * RANKS * (RANKS - 1) * 8
    assert sent(two, "all_to_all") == rows(two) * (2 * hidden + label) + headers
    assert sent(one, "all_to_all") == rows(one) * (hidden + 8 + 2 * label) + headers  # and a weight, request, expert
    assert sent(two, "all_gather", "all_gather_kv") == 0
    assert sent(shared, "all_gather_kv") == 0
    keys_values = requests * iterations * sizes.layers * (RANKS - 1) * (2 * sizes.kv_width * 8 + 3 * label)
    numbers = iterations * RANKS * (RANKS - 1) * 8
    assert sent(one, "all_gather_kv") == keys_values + numbers
    assert (
        sent(one, "all_gather")
        == sent(shared, "all_gather")
        == requests * iterations * (RANKS - 1) * 2 * label + numbers
    )


def test_rows_that_stay_are_the_transitions_that_a_placement_keeps():
    """After the first layer, whose rows come from home, coherent rows cross exactly where the routing crosses GPUs."""
    sizes, requests = config(), 8
    model, gpu = build(sizes), spread(config())
    found = []
    for prompt in prompts(requests):
        text = torch.cat([prompt, generate(model, prompt, NEW)])[:-1]
        with record_routing(model) as recording, torch.no_grad():
            model(text[None])
        found.append(recording.trace().experts[len(prompt) :, :, 0])
    experts = np.concatenate(found)
    trace = exflow.Trace(experts, sizes.experts)
    cost = exflow.evaluate(exflow.Placement(gpu, RANKS, RANKS, "random"), trace)
    home = np.repeat(np.arange(requests) * RANKS // requests, NEW - 1)
    first = (gpu[0, experts[:, 0]] != home).sum()
    assert rows(run(sizes, "coherent", requests, gpu)) == first + round(cost.hops_per_token * len(experts))


def test_every_part_is_metered_and_coherence_multiplies_the_cache():
    sizes = config()
    two, one = run(sizes, "two_all_to_alls", 8), run(sizes, "coherent", 8, aligned=True)
    for _, iterations, *_ in (*two, *one):
        assert len(iterations) == NEW - 1
        assert all({"attention", "gate", "all_to_all", "expert", "head"} <= each.parts.keys() for each in iterations)
    assert all(
        "wait" in each.parts for _, iterations, *_ in one for each in iterations
    )  # aligned: apart from the exchange
    assert not any("wait" in each.parts for _, iterations, *_ in two for each in iterations)
    assert [nbytes for *_, nbytes in one] == [RANKS * nbytes for *_, nbytes in two]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": np.zeros((3, 7), int)}, "the model has 3 layers of 8 experts, and there are 4 ranks"),
        ({"gpu": np.full((3, 8), 4)}, "ranks 4 to 4: the model has"),
        ({"gpu": np.zeros((3, 8))}, r"a placement float64 \(3, 8\) on ranks"),
        ({"requests": 0}, "there are no prompts"),
        ({"memory": True}, "it belongs to coherent and shared"),
        ({"new": 40}, "at most 24 together"),
        ({"keys_values": "shared", "memory": True, "held": 3}, "4 requests of up to .* memory has room for 3 of 24"),
        ({"mode": "both"}, "mode is 'both', allowed: two_all_to_alls, coherent"),
        ({"dispatch": "far"}, "dispatch is 'far', allowed: nearest"),
    ],
)
def test_what_does_not_fit_is_refused(options, says):
    def refused(rank, world_size):
        memory = shared_memory(config(), options.get("held", 4), torch.float32) if "memory" in options else None
        said = {name: options[name] for name in ("mode", "keys_values", "dispatch") if name in options}
        placed, communicator = options.get("gpu", spread(config())), Communicator(TOPOLOGY)
        decoder = Decoder(build(config()), placed, communicator, memory=memory, **said)
        decoder.generate(prompts(options.get("requests", 4)), options.get("new", 2))

    with pytest.raises(RuntimeError, match=says):
        launch(refused, RANKS, timeout_s=60)
