"""This package. Variants: `fused`; seconds (the same with this limit to the wait for a next token; 0: all prompts that
have come in one pass); and `serial` (one request after another on the same engine and model)."""

from collections.abc import Callable, Sequence

import protocol
import torch
from protocol import Answer, Job, Request

from repro import flover
from repro.baselines.batching import serial
from repro.flover import Engine, Scheduler
from repro.models.huggingface import load_huggingface


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    torch.set_num_threads(job.threads)
    model = load_huggingface(job.model, dtype=getattr(torch, job.dtype))

    def serve(requests: Sequence[Request]) -> list[Answer]:
        # An engine serves one list: the warm-up has one of its own.
        gap = {} if job.variant in ("fused", "serial") else {"token_gap_s": float(job.variant)}
        scheduler = serial() if job.variant == "serial" else Scheduler(slots=job.sequences, **gap)
        engine = Engine(model, scheduler, capacity=job.positions)
        asked = [flover.Request(r.id, tuple(r.prompt), r.output_tokens, arrival_s=r.arrival_s) for r in requests]
        report = engine.serve(asked)
        if report.rejected:
            raise ValueError(f"rejected: {report.rejected}")
        # Handed over when it arrived: the queue is the engine's own.
        return [
            Answer(g.request.id, g.request.arrival_s, g.first_token_s, g.finish_s, g.tokens, g.longest_gap_s)
            for g in report.generations
        ]

    return serve


if __name__ == "__main__":
    protocol.run(start, lambda: f"this package, torch {torch.__version__}")
