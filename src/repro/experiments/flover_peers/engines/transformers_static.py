"""transformers, static batching as a server that calls `generate` does it: all who wait become one padded batch, first
come first served, and get their answers when the longest of it is done."""

from collections.abc import Callable, Sequence
from functools import partial

import protocol
import torch
import transformers
from protocol import Answer, Event, Job, Request

PAD = 0


class Static:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        model = transformers.LlamaForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None  # nothing ends an answer but its length
        self.model.generation_config.pad_token_id = PAD
        self.most = job.sequences
        self.waiting: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self, seconds: float) -> list[Event]:
        """One batch, from its prompts to its last token."""
        batch, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
        width = max(len(request.prompt) for request in batch)
        prompts = torch.tensor([[PAD] * (width - len(r.prompt)) + r.prompt for r in batch])
        real = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        longest = max(request.output_tokens for request in batch)
        tokens = self.model.generate(prompts, attention_mask=real, max_new_tokens=longest, do_sample=False)
        answers = tokens[:, width:].tolist()
        return [Event(r.id, a[: r.output_tokens], True, streamed=False) for r, a in zip(batch, answers, strict=True)]


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    return partial(protocol.serve, Static(job))


if __name__ == "__main__":
    protocol.run(start, lambda: transformers.__version__)
