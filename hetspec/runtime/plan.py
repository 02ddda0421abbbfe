"""How many tokens to draft: fixed, or chosen before each step from past steps (never from drawn candidates).

The length is fixed before anything of the step is drawn, so it cannot bias the output (ALGORITHMS §1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hetspec.runtime.decode import Decoder
    from hetspec.runtime.models import Row

LONGEST = 16
PRIOR_ACCEPTANCE, PRIOR_COUNT = 0.6, 8.0  # what is assumed before anything was seen, and its weight
FORGET = 0.95  # weight kept by the past at each step
PROBE_EVERY = 16  # plain steps between two looks at whether drafting has begun to pay


class DraftLength(Protocol):
    """Chooses the draft length of each step."""

    def choose(self) -> int:
        """Tokens to draft in the coming step; 0 decodes plainly."""

    def observe(self, decoder: Decoder, proposed: int, accepted: int) -> None:
        """Takes note of a finished step."""


class FixedLength:
    """Always the same draft length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def choose(self) -> int:
        """The fixed length."""
        return self.n

    def observe(self, decoder: Decoder, proposed: int, accepted: int) -> None:
        """Nothing to learn."""


class AutoLength:
    """Maximises predicted tokens per second from a running acceptance and the cost ratio of the models.

    Expected tokens of a step with draft length n and acceptance a are `(1 − a^{n+1})/(1 − a)`, its cost
    `n·c + 1` target steps (ALGORITHMS §8 with v(n) = 1).

    Args:
        cost: c, a drafter step in target steps, as declared (ratio of the weights read).
        measure: replace `cost` by measured times; off when a seed must give the same tokens every time.
    """

    def __init__(self, cost: float, measure: bool) -> None:
        self.cost, self.measure = cost, measure
        self.accepted = PRIOR_ACCEPTANCE * PRIOR_COUNT
        self.judged = PRIOR_COUNT
        self.plain_steps = 0
        self._start: tuple[int, float, int, float] | None = None

    def choose(self) -> int:
        """The best length for the present estimates."""
        a = min(self.accepted / self.judged, 0.99)
        best = max(range(LONGEST + 1), key=lambda n: ((1 - a ** (n + 1)) / (1 - a)) / (n * self.cost + 1))
        if best == 0:
            self.plain_steps += 1
            return 1 if self.plain_steps % PROBE_EVERY == 0 else 0
        return best

    def observe(self, decoder: Decoder, proposed: int, accepted: int) -> None:
        """Updates the acceptance, and the cost ratio if it is measured."""
        if proposed:
            self.accepted = self.accepted * FORGET + accepted
            self.judged = self.judged * FORGET + min(accepted + 1, proposed)
        if self.measure and decoder.context is not None:
            self._measure(decoder.context.row, decoder.target)

    def _measure(self, drafter: Row, target: Row) -> None:
        """Replaces the declared cost ratio by the mean times since the first step (that one reads the prompts)."""
        now = (drafter.forwards, drafter.seconds, target.forwards, target.seconds)
        if self._start is None:
            self._start = now
        forwards_d, seconds_d, forwards_t, seconds_t = (b - a for a, b in zip(self._start, now, strict=True))
        if forwards_d >= 4 and forwards_t >= 4 and seconds_t > 0:
            self.cost = (seconds_d / forwards_d) / (seconds_t / forwards_t)
