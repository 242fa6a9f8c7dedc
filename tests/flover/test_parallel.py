"""Tensor-parallel ranks give the tokens of one process, fuse alike, and are told when one is gone."""

import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deaths import die, tell, told

from repro import launch
from repro.baselines.batching import StaticScheduler, lone
from repro.experiments.flover_parallel import EXPERIMENT, ParallelPoint
from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine
from repro.flover.parallel import Leader, RankLost, follow
from repro.flover.request import Request
from repro.flover.sampling import Sampling
from repro.flover.scheduler import Scheduler
from repro.launch import RankError
from repro.models.gpt_j_neox import GPTJ, GPTJConfig, GPTNeoX, GPTNeoXConfig
from repro.models.kv_cache import KVCache
from repro.models.llama import Llama, LlamaConfig
from repro.models.parallel import Shard

# Half of up and gate are whole panels alone and on two ranks, not on four.
CONFIG = LlamaConfig(layers=2, width=32, heads=8, kv_heads=4, ffn=64, vocab=61, context=128)
CAPACITY = 100


def weights(tied: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = CONFIG.weight_shapes() | ({} if tied else {"output.weight": (CONFIG.vocab, CONFIG.width)})
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def requests() -> list[Request]:
    drawn = torch.Generator().manual_seed(3)
    result = []
    for number in range(9):
        prompt = torch.randint(0, CONFIG.vocab, (1 + 7 * number % 40,), generator=drawn).tolist()
        sampling = Sampling(0.8, top_k=7, seed=number) if number % 3 == 0 else Sampling()
        result.append(Request(number, tuple(prompt), 4 + 5 * number % 30, sampling=sampling))
    return result


def serve(rank: int, size: int, tied: bool, layout: str, scheduler: Scheduler) -> tuple[list[list[int]], str, int]:
    """Tokens by request, the digest of all passes, and slot moves; on followers the digest alone."""
    model = Llama(CONFIG, weights(tied), shard=Shard.of())
    if rank:
        return [], follow(model), 0
    with Leader(model) as leader:
        report = Engine(leader, scheduler, CAPACITY, layout=LAYOUTS[layout]).serve(requests())
    whole = Engine(Llama(CONFIG, weights(tied)), scheduler, CAPACITY, layout=LAYOUTS[layout]).buffers.cache.nbytes
    assert report.cache_bytes == whole and (report.moved_bytes > 0) == (report.slot_moves > 0 and layout != "paged")
    return [g.tokens for g in report.generations], leader.digest.hexdigest(), report.slot_moves


def test_a_part_of_a_model_is_not_served_without_its_leader():
    """Its all-reduces would wait for ranks that nobody tells of the pass."""
    for rank in (0, 1):
        model = Llama(CONFIG, weights(True), shard=Shard(rank, 2))
        with pytest.raises(ValueError, match=rf"served through parallel\.Leader, found rank {rank} of 2 alone"):
            Engine(model, Scheduler(2), 40)
    Engine(Llama(CONFIG, weights(True), shard=Shard(0, 1)), Scheduler(2), 40)


def test_a_model_that_is_whole_neither_leads_nor_follows():
    model = Llama(CONFIG, weights(tied=True))
    with pytest.raises(ValueError, match="a leader is rank 0 of a sharded model, found one that is whole"):
        Leader(model)
    with pytest.raises(ValueError, match="another rank than 0 of a sharded model, found one that is whole"):
        follow(model)


CASES = [(layout, Scheduler(4, prefill_tokens=20)) for layout in LAYOUTS] + [("window", StaticScheduler(4))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("layout", "scheduler"), CASES, ids=lambda value: getattr(value, "__name__", str(value)[:8]))
def test_tokens_are_those_of_one_process_and_ranks_fuse_alike(ranks, layout, scheduler):
    tied = ranks == 2
    (tokens, digest, moves), *others = launch.launch(serve, ranks, tied, layout, scheduler, timeout_s=60)
    alone = [g.tokens for g in lone(Llama(CONFIG, weights(tied)), requests(), CAPACITY)]
    assert tokens == alone
    assert all(other == digest for _, other, _ in others)
    assert moves > 0 or layout == "fixed" or isinstance(scheduler, StaticScheduler)


def caches_alive(rank: int, size: int) -> list[bool]:
    """When each cache is made, whether the one before it is still there."""
    model = Llama(CONFIG, weights(True), shard=Shard.of())
    made, seen, make = [], [], model.new_cache

    def counted(*sizes: int) -> KVCache:
        seen.append(any(cache() is not None for cache in made))
        made.append(weakref.ref(cache := make(*sizes)))
        return cache

    model.new_cache = counted
    if rank:
        follow(model)
    else:
        with Leader(model) as leader:
            for some in (requests()[:2], requests()):
                Engine(leader, Scheduler(4), CAPACITY).serve(some)
    return seen


def test_there_is_one_cache_at_a_time():
    """Two of 13B in the paper's lengths are more than a GPU of 80 GB holds."""
    assert launch.launch(caches_alive, 2, timeout_s=60) == [[False, False]] * 2


def test_the_plan_knows_what_a_rank_holds():
    point = ParallelPoint(layers=2, width=256, heads=8, kv_heads=4, ffn=688, vocab=512, packages=1, gcds=1, max_slots=4)
    config = LlamaConfig(layers=2, width=256, heads=8, kv_heads=4, ffn=688, vocab=512, context=72)
    whole = {name: shape for name, shape in config.weight_shapes().items()} | {"output.weight": (512, 256)}
    held = 4 * sum(math.prod(shape) for shape in whole.values())
    held += Llama(config, {name: torch.zeros(shape) for name, shape in whole.items()}).new_cache(4, 72).nbytes
    assert EXPERIMENT.memory(point) == pytest.approx(held, rel=0.01)  # norms are left out
    two = EXPERIMENT.memory(point.model_copy(update={"gcds": 2}))
    assert EXPERIMENT.timeout_s == 3600, "13B on one GPU took longer than 15 minutes"
    assert EXPERIMENT.memory(point) / 2 < two < EXPERIMENT.memory(point), "the embedding is on each"


def serve_gpt(rank: int, size: int, kind: type, config) -> list[list[int]]:
    model = kind(config, gpt_weights(config), shard=Shard.of())
    if rank:
        return follow(model)
    with Leader(model) as leader:
        return [g.tokens for g in Engine(leader, Scheduler(4), CAPACITY).serve(requests()).generations]


def gpt_weights(config) -> dict[str, torch.Tensor]:
    """Biases that are not 0: one that every rank adds would be seen."""
    generator = torch.Generator().manual_seed(6)
    return {n: torch.randn(s, generator=generator) / 4 for n, s in config.weight_shapes().items()}


SIZES = dict(layers=2, width=32, heads=8, rotary_dim=4, ffn=48, vocab=61, context=128)


QWEN = replace(CONFIG, head_dim=6, qkv_bias=True, head_norms=True)


@pytest.mark.parametrize(
    ("kind", "config"), [(GPTJ, GPTJConfig(**SIZES)), (GPTNeoX, GPTNeoXConfig(**SIZES)), (Llama, QWEN)]
)
def test_other_architectures_are_shared_alike(kind, config):
    tokens = launch.launch(serve_gpt, 4, kind, config, timeout_s=60)[0]
    assert tokens == [g.tokens for g in lone(kind(config, gpt_weights(config)), requests(), CAPACITY)]


def test_a_digest_tells_passes_apart():
    seen = {
        launch.launch(serve, 2, True, "window", Scheduler(4, prefill_tokens=chunk), timeout_s=60)[1][1]
        for chunk in (20, 21)
    }
    assert len(seen) == 2


def killed(rank: int, size: int, victim: int, folder: Path) -> str:
    """One rank kills itself in a pass; what the others raise."""
    model = Llama(CONFIG, weights(True), shard=Shard.of())
    passes = 0
    forward = model.forward

    def counted(*args):
        nonlocal passes
        passes += 1
        if passes == 5 and rank == victim:
            die(folder, size - 1)
        return forward(*args)

    model.forward = counted
    if rank:
        return follow(model)
    with Leader(model) as leader:
        Engine(leader, Scheduler(4), CAPACITY).serve(requests())
    return "served"


def survivors(rank: int, size: int, victim: int, folder: Path) -> None:
    try:
        found = killed(rank, size, victim, folder)
    except RankLost as error:
        found = str(error)
    tell(folder, rank, found)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_told_to_the_others_by_a_typed_error(tmp_path, victim):
    with pytest.raises(RankError, match=f"rank {victim} was killed by signal 9"):
        launch.launch(survivors, 4, victim, tmp_path, timeout_s=60)
    assert len(told(tmp_path)) == 3 and all("a tensor-parallel rank is gone" in each for each in told(tmp_path))


def fails_at_home(rank: int, size: int) -> str:
    """The leader's own part of a pass raises; what each rank sees."""
    model = Llama(CONFIG, weights(True), shard=Shard.of())
    try:
        if rank:
            return follow(model)
        with Leader(model) as leader:
            engine = Engine(leader, Scheduler(4), CAPACITY)
            model.forward = None
            engine.serve(requests())
    except (TypeError, RankLost) as error:
        return type(error).__name__
    return "served"


def test_an_error_of_the_leader_is_told_as_it_is_and_frees_the_others():
    assert launch.launch(fails_at_home, 4, timeout_s=60) == ["TypeError", "RankLost", "RankLost", "RankLost"]


def test_sizes_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="heads is 8, tensor-parallel ranks 3: a multiple is allowed"):
        Llama(CONFIG, weights(True), shard=Shard(0, 3))
