"""In-flight batching after Flover (arXiv 2305.13484): every running request decodes in one fused iteration.

    import torch
    from repro.flover import Engine, Request, Scheduler
    from repro.models.huggingface import load_huggingface

    engine = Engine(load_huggingface("path/to/model", dtype=torch.bfloat16), Scheduler(slots=8), capacity=1024)
    engine.submit(Request(0, prompt, max_new_tokens=100))  # token ids
    while engine.ready:
        for answer in engine.step():
            print(answer.request.id, answer.tokens)

Read in this order: `request` (what is asked and answered), `scheduler` (who runs: the policy), `buffers` (where keys
and values lie), `sampling` (the next token), `engine` (the iteration), `queueing` (the policy as a model).
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

for _package in ("pandas", "psutil", "scipy"):  # looked up, not imported: the queue model loads none but scipy
    if find_spec(_package) is None:
        raise ImportError(f"repro.flover needs {_package}: pip install 'repro-papers[flover]'", name=_package)

if TYPE_CHECKING:
    from repro.flover.engine import Engine, EngineTorn
    from repro.flover.fields import RequestError
    from repro.flover.parallel import RankLost
    from repro.flover.report import ServingReport
    from repro.flover.request import Generation, QueueFull, Request
    from repro.flover.sampling import Sampling
    from repro.flover.scheduler import Scheduler

__all__ = [
    "Engine",
    "EngineTorn",
    "Generation",
    "QueueFull",
    "RankLost",
    "Request",
    "RequestError",
    "Sampling",
    "Scheduler",
    "ServingReport",
]
_HOME = {
    "Engine": "engine",
    "EngineTorn": "engine",
    "RankLost": "parallel",
    "RequestError": "fields",
    "Sampling": "sampling",
    "Scheduler": "scheduler",
    "ServingReport": "report",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the queue model needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'request')}"), name)
