"""A language model that takes known times on a clock of its own, for the real engine to serve."""

import torch

from repro.flover.queueing import Times
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
    """Says token 0 for ever. A prompt and an iteration move the clock by what `times` tells."""

    def __init__(self, times: Times, clock: Clock) -> None:
        self.config = LlamaConfig(layers=1, width=2, heads=1, kv_heads=1, ffn=2, vocab=2, context=4096)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.times, self.clock = times, clock

    def prefill(self, tokens, cache, slot=0, start=0):
        self.clock.now += self.times.prefill(len(tokens), start)
        return torch.zeros(self.config.vocab)

    def decode(self, tokens, lengths, cache, slots, longest):
        self.clock.now += float(self.times.decode(len(tokens), torch.tensor([longest]).numpy())[0])
        return torch.zeros(len(tokens), self.config.vocab)
