"""Run by test_wheel in an environment that holds the wheel and no checkout: `python outside.py base` or `python outside.py engines`.

`base`: training works with torch, numpy and numba alone; the other engines name the extra that they need.
`engines`: experts are placed, requests served, a step predicted.
"""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import torch


def train() -> None:
    from repro.topology import frontier
    from repro.zero import ZeroOptimizer, plan

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    machine = frontier(nodes=1, packages=1, gcds=1)
    optimizer = ZeroOptimizer(model, plan.hierarchical(machine), torch.optim.AdamW, lr=1e-2)
    data = torch.randn(64, 16, dtype=torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = (model(data) - data.sum(1, keepdim=True)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.distributed.destroy_process_group()
    assert losses[-1] < 0.7 * losses[0], losses


def extras_are_named() -> None:
    for name in ("exflow", "flover", "scaling"):
        try:
            importlib.import_module(f"repro.{name}")
        except ImportError as error:
            assert f"repro-papers[{name}]" in str(error), error
        else:
            raise AssertionError(f"repro.{name} was imported without its extra")


def place() -> None:
    from repro import exflow

    rng = np.random.default_rng(0)
    chain = [rng.integers(8, size=500)]
    for _ in range(5):  # the next expert is mostly the same
        chain.append(np.where(rng.random(500) < 0.8, chain[-1], rng.integers(8, size=500)))
    trace = exflow.Trace(np.stack(chain, axis=1), num_experts=8)
    placement = exflow.place(exflow.transitions(trace), gpus=4)
    assert exflow.evaluate(placement, trace).crossing_fraction < 0.5


def serve() -> None:
    from repro.flover import Engine, Request, Scheduler
    from repro.models.llama import Llama, LlamaConfig

    model = Llama.random(LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=64), seed=7)
    engine = Engine(model, Scheduler(slots=2), capacity=32)
    for number in range(3):
        engine.submit(Request(number, [1 + number, 2, 3], max_new_tokens=5))
    answers = {}
    while engine.ready:
        answers |= {answer.request.id: answer.tokens for answer in engine.step()}
    assert {number: len(tokens) for number, tokens in answers.items()} == {0: 5, 1: 5, 2: 5}


def predict() -> None:
    from repro import scaling

    step = scaling.predict("hierarchical", scaling.gpt(1e9), scaling.hardware("frontier"), nodes=2)
    assert step.tflops_per_rank.mean() > 0
    from repro.scaling import measured

    assert len(measured.slingshot11()) > 0


if __name__ == "__main__":
    import repro

    assert Path(repro.__file__).is_relative_to(sys.prefix), repro.__file__
    if sys.argv[1] == "base":
        train()
        extras_are_named()
    else:
        place()
        serve()
        predict()
