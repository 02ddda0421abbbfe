"""How many tokens to draft: fixed, or chosen before each step from past steps (never from drawn candidates).

The length is fixed before anything of the step is drawn, so it cannot bias the output (ALGORITHMS §1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

LONGEST = 16
PRIOR_ACCEPTANCE, PRIOR_COUNT = 0.6, 8.0  # what is assumed before anything was seen, and its weight
FORGET = 0.95  # weight kept by the past at each step
PROBE_EVERY = 16  # plain steps between two looks at whether drafting has begun to pay


@dataclass(frozen=True)
class Step:
    """What one finished step did and took.

    Attributes:
        first: whether it also read the prompts.
        drafted: whether drafting was asked for at all (not at the very end of a generation).
        proposed, accepted: candidates.
        seconds, target_seconds, drafter_seconds: of the whole step and of the models in it.
        drafter_forwards: in it.
    """

    first: bool
    drafted: bool
    proposed: int
    accepted: int
    seconds: float
    target_seconds: float
    drafter_seconds: float
    drafter_forwards: int


class DraftLength(Protocol):
    """Chooses the draft length of each step."""

    def choose(self) -> int:
        """Tokens to draft in the coming step; 0 decodes plainly."""

    def observe(self, step: Step) -> None:
        """Takes note of a finished step."""

    @property
    def reason(self) -> str:
        """Why it chose as it did; "" if there is nothing to tell."""


class FixedLength:
    """Always the same draft length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def choose(self) -> int:
        """The fixed length."""
        return self.n

    def observe(self, step: Step) -> None:
        """Nothing to learn."""

    reason = ""


class AutoLength:
    """Maximises predicted tokens per second from a running acceptance and a running cost.

    Expected tokens of a step with draft length n and acceptance a are `(1 − a^{n+1})/(1 − a)`, its cost
    `n·f·c + 1` target steps (ALGORITHMS §8 with v(n) = 1).

    Args:
        cost: c, a drafter forward in target steps, as declared (ratio of the weights read).
        measure: use measured times instead; off where a seed must give the same tokens every time.
    """

    reason = ""

    def __init__(self, cost: float, measure: bool) -> None:
        self.cost, self.measure = cost, measure
        self.accepted = PRIOR_ACCEPTANCE * PRIOR_COUNT
        self.judged = PRIOR_COUNT
        self.proposed = 0.0  # candidates, and what they and the target's passes took, older steps fading
        self.drafting = 0.0
        self.passes = 0.0
        self.passing = 0.0
        self.plain_steps = 0

    def choose(self) -> int:
        """The best length for the present estimates."""
        a = min(self.accepted / self.judged, 0.99)
        cost = self._cost_per_candidate()
        best = max(range(LONGEST + 1), key=lambda n: ((1 - a ** (n + 1)) / (1 - a)) / (n * cost + 1))
        if best == 0:
            self.plain_steps += 1
            return 1 if self.plain_steps % PROBE_EVERY == 0 else 0
        return best

    def _cost_per_candidate(self) -> float:
        """f·c: drafting time of one candidate in target passes."""
        if self.proposed < 4 or self.passing <= 0:
            return self.cost
        return (self.drafting / self.proposed) / (self.passing / self.passes)

    def observe(self, step: Step) -> None:
        """Updates acceptance and costs; a first step, which reads the prompts, has no usable times."""
        if step.proposed:
            self.accepted = self.accepted * FORGET + step.accepted
            self.judged = self.judged * FORGET + min(step.accepted + 1, step.proposed)
        if step.first:
            return
        drafting, passing = step.drafter_forwards * self.cost, 1.0
        if self.measure:
            drafting, passing = step.drafter_seconds, step.target_seconds
        self.proposed = self.proposed * FORGET + step.proposed
        self.drafting = self.drafting * FORGET + (drafting if step.proposed else 0.0)
        self.passes = self.passes * FORGET + 1
        self.passing = self.passing * FORGET + passing
