"""The requests of the serving benchmark: prompts of random tokens, lengths and answers of very different length."""

import random

from engines.protocol import Request

TOKENS = range(10, 32_000)  # in every model's vocabulary; the first few are control tokens


def requests(interval_s: float, count: int = 32, seed: int = 0) -> list[Request]:
    """Prompts of 8 … 64 tokens, answers of 16 … 256, one every `interval_s` (0: all at once). The same whatever the
    interval is."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [draw.randrange(TOKENS.start, TOKENS.stop) for _ in range(draw.randint(8, 64))]
        made.append(Request(i, i * interval_s, prompt, draw.randint(16, 256)))
    return made
