"""A fused iteration as a graph, where there is no GPU: the recorder is one that keeps its result in one place, as a graph does."""

import pytest
import torch

from repro.baselines.batching import lone
from repro.flover import captured
from repro.flover.buffers import LAYOUTS
from repro.flover.captured import Captured
from repro.flover.engine import Engine
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler


@pytest.fixture
def recorded(model, monkeypatch):
    """Sizes of all graphs that were recorded."""
    sizes = []

    def record(run):
        result = run().clone()
        sizes.append(len(result))
        return lambda: result.copy_(run())

    monkeypatch.setattr(model.kernels, "capturable", True, raising=False)
    monkeypatch.setattr("repro.flover.engine.Captured", lambda *args: Captured(*args, record=record))
    return sizes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_of_lone_requests_from_few_graphs(model, recorded, layout):
    """Requests come and go, prompts in pieces among them, so that windows begin anywhere."""
    requests = [Request(n, tuple(range(1 + n, 5 + 3 * n)), 5 + 7 * (n % 4)) for n in range(12)]
    alone = {g.request.id: g.tokens for g in lone(model, requests, 100)}
    recorded.clear()
    engine = Engine(model, Scheduler(11, prefill_tokens=30), 100, layout=layout)
    answers = {g.request.id: g.tokens for g in engine.serve(requests).generations}
    assert answers == alone
    assert recorded and len(recorded) == len(set(recorded)) and set(recorded) <= {1, 2, 4, 8, 16}


def test_sizes():
    assert [captured.size(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 100)] == [1, 2, 4, 8, 8, 16, 16, 24, 104]


def test_nothing_is_captured_on_a_cpu(model):
    assert Engine(model, Scheduler(2), 10)._captured is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_graphs_on_a_gpu_give_the_logits_of_a_pass(layout, monkeypatch):
    """Of the same rows, launch by launch and in torch: equal up to rounding, since rows that fill up change the shape of products."""
    from repro.models.llama import Llama, LlamaConfig

    config = LlamaConfig(layers=3, width=256, heads=8, kv_heads=2, ffn=512, vocab=300)
    model = Llama.random(config, dtype=torch.float16, device="cuda", kernels="triton")
    plain = Llama.random(config, dtype=torch.float16, device="cuda", kernels="torch")
    engine = Engine(model, Scheduler(7), 600, layout=layout)
    compared = []
    whole = Captured.__call__

    def both(self, rows):
        held = whole(self, rows).clone()
        for other in (model, plain):
            torch.testing.assert_close(held, other.forward(rows, engine.buffers.cache), atol=0.05, rtol=0.02)
        compared.append(len(rows.tokens))
        return held

    monkeypatch.setattr(Captured, "__call__", both)
    requests = [Request(n, tuple(range(1 + n, 5 + 40 * n)), 5 + 7 * (n % 4)) for n in range(12)]
    assert len(engine.serve(requests).generations) == 12
    assert len(set(compared)) > 2
