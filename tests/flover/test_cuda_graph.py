"""A fused iteration as a graph, where there is no GPU: the recorder is one that keeps its result in one place, as a
graph does."""

import pytest
import torch

from repro.baselines.batching import lone
from repro.flover import cuda_graph
from repro.flover.buffers import LAYOUTS
from repro.flover.cuda_graph import GraphedForward
from repro.flover.engine import Engine
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models.llama import Llama, LlamaConfig

REQUESTS = [Request(n, tuple(range(1 + n, 5 + 3 * n)), 5 + 7 * (n % 4)) for n in range(12)]


@pytest.fixture(params=[{}, {"head_dim": 6, "qkv_bias": True, "head_norms": True}], ids=["LLaMA", "Qwen"])
def model(request):
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "context": 256}
    return Llama.random(LlamaConfig(**sizes, **request.param), seed=7)


@pytest.fixture
def alone(model):
    return {g.request.id: g.tokens for g in lone(model, REQUESTS, 100)}


@pytest.fixture
def recorded(model, alone, monkeypatch):
    """Sizes of all graphs that were recorded; lone runs come before, without any."""
    if model.kernels.name != "C++":
        pytest.skip("kernels in torch look at spans of slots, which a graph does not know")
    sizes = []

    def record(run):
        result = run().clone()
        sizes.append(len(result))
        return lambda: result.copy_(run())

    monkeypatch.setattr(model.kernels, "capturable", True, raising=False)
    monkeypatch.setattr("repro.flover.engine.GraphedForward", lambda *args: GraphedForward(*args, record=record))
    return sizes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_of_lone_requests_from_few_graphs(model, alone, recorded, layout):
    """Requests come and go, chunked prefills among them, so that windows begin anywhere. All graphs are there before
    the first pass."""
    engine = Engine(model, Scheduler(11, prefill_tokens=30), 100, layout=layout)
    answers = {g.request.id: g.tokens for g in engine.serve(REQUESTS).generations}
    assert answers == alone and recorded == [1, 2, 4, 8, 16]


def test_a_step_records_what_it_needs_and_never_disturbs_what_is_stored(model, alone, recorded):
    engine, answers = Engine(model, Scheduler(11), 100), {}
    for request in REQUESTS:
        engine.submit(request)
        answers |= {g.request.id: g.tokens for g in engine.step()}
        engine.prepare()  # does nothing: requests are running
    while engine.ready:
        answers |= {g.request.id: g.tokens for g in engine.step()}
    assert answers == alone and set(recorded) == {1, 2, 4, 8, 16} and len(recorded) == 5


def test_large_batches_are_launched_kernel_by_kernel(model, recorded, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST", 2)
    Engine(model, Scheduler(11), 100).serve(REQUESTS)
    assert recorded == [1, 2]


def test_sizes():
    assert [cuda_graph.size(n) for n in (1, 2, 3, 5, 8, 9, 16, 17, 100)] == [1, 2, 4, 8, 8, 16, 16, 24, 104]


def test_nothing_is_recorded_on_a_cpu(model):
    assert Engine(model, Scheduler(2), 10)._graphs is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_graphs_on_a_gpu_give_the_logits_of_a_pass(layout, monkeypatch):
    """Of the same rows, launch by launch and in torch: equal up to rounding, since rows that fill up change the shape
    of products."""
    sizes = {"layers": 3, "width": 256, "heads": 8, "kv_heads": 2, "ffn": 512, "vocab": 500}
    config = LlamaConfig(**sizes, head_dim=64, qkv_bias=True, head_norms=True)
    model = Llama.random(config, dtype=torch.float16, device="cuda", kernels="triton")
    plain = Llama.random(config, dtype=torch.float16, device="cuda", kernels="torch")
    engine = Engine(model, Scheduler(7), 600, layout=layout)
    compared = []
    whole = GraphedForward.__call__

    def both(self, rows):
        held = whole(self, rows).clone()
        for other in (model, plain):
            torch.testing.assert_close(held, other.forward(rows, self._cache), atol=0.05, rtol=0.02)
        compared.append(len(rows.tokens))
        return held

    monkeypatch.setattr(GraphedForward, "__call__", both)
    requests = [Request(n, tuple(range(1 + n, 5 + 40 * n)), 5 + 7 * (n % 4)) for n in range(12)]
    assert len(engine.serve(requests).generations) == 12
    Engine(model, Scheduler(3), 1000).serve(requests[:3])  # another cache does not disturb the graphs of the first
    assert len(engine.serve(requests).generations) == 12
    assert len(set(compared)) > 2
