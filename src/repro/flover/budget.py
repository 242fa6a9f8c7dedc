"""How many prompt tokens a pass may process so that it takes no longer than somebody who decodes may wait."""

import math
import sys
from dataclasses import dataclass, field

from repro.flover.fields import number

FIRST = 64  # tokens, before any pass was timed
LEAST = 16  # tokens: prompts go on even where decoding alone takes too long
AIM = 0.8  # of the gap: passes that are alike differ by less than the rest of it, on a machine that does nothing else


@dataclass
class Budget:
    """`tokens` prompt tokens a pass, for passes of at most `gap_s` seconds (0: no limit), as the measured ones tell.

    Let a pass of n prompt tokens take s = a + b n seconds, a for the tokens that are decoded beside them. The number
    that meets the aim A is (A - a) / b, and n A / s lies between n and that: it is too small where s < A and too large
    where s > A. So each pass moves the budget towards it and none past it, and neither a nor b need be known. By chance
    a pass may be fast or slow, or its prompts short: so the budget is raised half way, and lowered by half at most.
    ValueError for a gap that is below 0 or infinite.
    """

    gap_s: float
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        allowed, finite = "at least 0 seconds, finite", lambda seconds: 0 <= seconds < math.inf
        self.gap_s = number(float, "token_gap_s", self.gap_s, allowed, finite, ValueError)
        self.tokens = FIRST if self.gap_s else sys.maxsize

    def timed(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a pass of so many prompt tokens."""
        if not self.gap_s or not prompt_tokens:
            return
        aim = AIM * self.gap_s
        met = int(min(prompt_tokens * aim / seconds, sys.maxsize)) if seconds > 0 else self.tokens
        if seconds > aim:
            self.tokens = max(LEAST, self.tokens // 2, min(self.tokens, met))
        elif met > self.tokens:
            self.tokens = (self.tokens + met + 1) // 2
