"""A language model that takes known times on a clock of its own, for the real engine to serve."""

import torch

from repro.flover.queueing.times import Times, pass_s
from repro.models.kernels.torch_kernels import Kernels
from repro.models.llama import Llama, LlamaConfig


class Clock:
    """Time passes where it is told to, and while sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedModel(Llama):
    """Says token 0 for ever. A pass moves the clock by what `times` tells. `running`: the scheduler's, which tells
    prompts of one token from tokens that are decoded."""

    def __init__(self, times: Times, clock: Clock) -> None:
        self.config = LlamaConfig(layers=1, width=2, heads=1, kv_heads=1, ffn=2, vocab=2, context=4096)
        self.device, self.dtype, self.shard, self.kernels = torch.device("cpu"), torch.float32, None, Kernels()
        self.times, self.clock, self.running = times, clock, {}

    def forward(self, rows, cache, wanted=slice(None)):
        prompts = [span for span in rows.spans if span.tokens > 1 or self._begins(span.slots.start)]
        decoding = [span for span in rows.spans if span not in prompts]
        chunks = [(span.tokens, span.longest + 1 - span.tokens) for span in prompts]
        longest = max((span.longest for span in decoding), default=0)
        self.clock.now += pass_s(self.times, sum(span.rows for span in decoding), longest, chunks)
        return torch.zeros(len(rows.tokens), self.config.vocab)[wanted]

    def _begins(self, slot: int) -> bool:
        return slot in self.running and self.running[slot].prompt_left > 0
