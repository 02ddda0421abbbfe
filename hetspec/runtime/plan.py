"""How many tokens to draft: fixed, or chosen from past steps and from how sure the drafter is of its tokens.

Neither can bias the output (ALGORITHMS §1): what is known before a step says nothing of its draws, and where a draft
ends *after* a candidate, that is still judged.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LONGEST = 16  # that can be asked of a recorded step
LONGEST_AUTO = 15  # chosen by itself: its pass is still a short read (`attention.MOST`, `weights.WIDE`)
PRIOR_ACCEPTANCE, PRIOR_COUNT = 0.6, 8.0  # what is assumed before anything was seen, and its weight
POSITION_COUNT = 8.0  # weight of the mean acceptance in that of each position
FORGET = 0.95  # weight kept by the past at each step
# Plain steps between two looks at whether drafting pays; doubled while it does not.
FIRST_PROBE, LAST_PROBE = 16, 64
PROMPT_COST = 2.0  # what a small model takes for a prompt over c: more of its time is attention, and waiting
NEW_TEXT = 0.3  # weight that acceptance in one text has in the next
PRIOR_SLOPE = 0.02  # what each candidate is taken to add to a pass before the target's times can tell
PRIOR_TOKENS = 2.0  # that a step with as many candidates is taken to commit before any was seen
PRIOR_STEPS = 3.0  # that this assumption counts as
LAST_TIMES = 16  # that a median is taken of
PRIOR_READING = 1.15  # a pass over candidates in plain ones, before the two were seen
TIME_COUNT = 1.0  # weight of the other lengths' times in that of each
PROBE_FORGET = 0.7  # the past counts less at a look: many steps lie between two


@dataclass(frozen=True)
class Step:
    """What one finished step did and took.

    Attributes:
        first: whether it also read the target's or the drafter's prompt, or what a full window keeps, once more.
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

    def pays(self, prompt_seconds: float, tokens: int) -> bool:
        """Whether drafting is worth the drafter's reading of the prompt.

        Args:
            prompt_seconds: that the target took for as much of it as the drafter reads; infinite before it has.
            tokens: still to come, at most.
        """

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

    def pays(self, prompt_seconds: float, tokens: int) -> bool:
        """It is what was asked for."""
        return True

    reason = ""


class AutoLength:
    """Maximises predicted tokens per second from a running acceptance of each position and running costs.

    Expected tokens of a step with draft length n are `1 + Σ_i Π_{j≤i} a_j`, its cost `n·f·c + v(n)` target steps
    (ALGORITHMS §8), with v(n) from running means of the target's times. Where no length beats plain decoding it decodes
    plainly, and looks again after 16 steps, 32, then every 64.

    Args:
        cost: c, a drafter forward in target steps, as declared (ratio of the weights read).
        measure: use measured times instead; off where a seed must give the same tokens every time.
        longest: candidates at most.
    """

    reason = ""

    def __init__(self, cost: float, measure: bool, longest: int = LONGEST_AUTO) -> None:
        self.cost, self.measure, self.longest = cost, measure, longest
        self.accepted = [0.0] * LONGEST  # by position, older steps fading
        self.judged = [0.0] * LONGEST
        self.proposed = 0.0  # candidates, and what they took
        self.drafting = 0.0
        self.passes = _PassTimes()
        self.looks = _Looks()

    def next_text(self) -> AutoLength:
        """A plan for another text: the costs are known already, the acceptance is a guess."""
        plan = AutoLength(self.cost, self.measure, self.longest)
        plan.accepted = [NEW_TEXT * x for x in self.accepted]
        plan.judged = [NEW_TEXT * x for x in self.judged]
        plan.proposed, plan.drafting, plan.passes = self.proposed, self.drafting, copy.deepcopy(self.passes)
        return plan

    def choose(self) -> int:
        """The best length for the present estimates."""
        best = max(range(self.longest + 1), key=self.rate)
        if best:
            self.looks = _Looks()
            return best
        return int(
            self.cost < 1 and self.looks.due()
        )  # beyond, not even a draft that is always right would pay

    def pays(self, prompt_seconds: float, tokens: int) -> bool:
        """Whether what the tokens can save by the clock is more than the prompt costs; no, before it is known."""
        if not self.measure:
            return True
        if not self.passes.seen:
            return False
        saved = self.passes(0) - 1 / max(map(self.rate, range(1, self.longest + 1)))
        return tokens * saved > PROMPT_COST * self.cost * prompt_seconds

    def rate(self, n: int) -> float:
        """Expected tokens per unit of time with draft length n."""
        tokens, kept = 1.0, 1.0
        mean = self._mean()
        for j in range(n):
            kept *= min((self.accepted[j] + POSITION_COUNT * mean) / (self.judged[j] + POSITION_COUNT), 0.99)
            tokens += kept
        return tokens / (n * self._cost_per_candidate() * self.passes(0) + self.passes(n))

    def _mean(self) -> float:
        return (sum(self.accepted) + PRIOR_ACCEPTANCE * PRIOR_COUNT) / (sum(self.judged) + PRIOR_COUNT)

    def _cost_per_candidate(self) -> float:
        """f·c: drafting time of one candidate in target passes."""
        if self.proposed < 4:
            return self.cost
        return (self.drafting / self.proposed) / self.passes(0)

    def observe(self, step: Step) -> None:
        """Updates acceptance and costs; a first step, which reads the prompts, has no usable times."""
        if step.proposed:
            keep = self.looks.memory
            for j in range(min(step.accepted + 1, step.proposed, LONGEST)):
                self.accepted[j] = self.accepted[j] * keep + (j < step.accepted)
                self.judged[j] = self.judged[j] * keep + 1
        if step.first:
            return
        drafting, passing = step.drafter_forwards * self.cost, 1.0
        if self.measure:
            drafting, passing = step.drafter_seconds, step.target_seconds
        if step.proposed:
            self.proposed = self.proposed * FORGET + step.proposed
            self.drafting = self.drafting * FORGET + drafting
        self.passes.add(step.proposed, passing)


class ConfidentLength:
    """Drafts on while the drafter is sure enough of its tokens.

    The probability that a drafter gives to its likeliest token is close to the probability that the target agrees
    (SmolLM2-135M for Qwen2.5-Coder-1.5B, greedy: within 0.1 in most tenths). With tokens coming at R per unit of time,
    another candidate is drafted if it is worth its time, `ā · Π_j a_j / R > c`, a_j the probability that candidate j is
    accepted, ā the mean; guesses are read by the target if `Σ_i Π_{j≤i} a_j / R` is more than what reading them takes
    over a plain pass. A draft may end *after* any candidate, which is then judged like others (ALGORITHMS §1); only
    guesses, which have no law, may be thrown away.

    Args:
        cost: c, a drafter forward in target passes, as declared (ratio of the weights read).
        measure: use measured times instead; off where a seed must give the same tokens every time.
    """

    reason = ""

    def __init__(self, cost: float, measure: bool) -> None:
        self.cost, self.measure = cost, measure
        self.plain, self.reading, self.candidate = _Times(), _Times(), _Times()
        self.accepted, self.judged = 0.0, 0.0  # candidates, older ones fading
        # Of steps that drafted, older ones fading: committed tokens, candidates, passes over some and plain passes.
        self.done: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self.looks = _Looks()
        self.looking = False  # whether the coming step is a look at whether drafting pays by now

    def next_text(self) -> ConfidentLength:
        """A plan for another text: what was seen is a guess there, the costs a good one."""
        plan = copy.deepcopy(self)
        plan.done = _scaled(NEW_TEXT, self.done)
        plan.accepted, plan.judged = NEW_TEXT * self.accepted, NEW_TEXT * self.judged
        return plan

    def choose(self) -> int:
        """As many as may be, where drafting has paid; else none, with looks at whether it does by now."""
        self.looking = False
        if self._drafting_rate * self._plain_time >= 1:
            self.looks = _Looks()
            return LONGEST_AUTO
        self.looking = (
            self.cost < 1 and self.looks.due()
        )  # beyond, not even a draft that is always right would pay
        return LONGEST_AUTO if self.looking else 0

    def goes_on(self, sure: Sequence[float]) -> bool:
        """Whether another candidate is worth drafting after some of these probabilities."""
        mean = (self.accepted + PRIOR_COUNT * PRIOR_ACCEPTANCE) / (self.judged + PRIOR_COUNT)
        time = self._candidate_time + PRIOR_SLOPE * self._plain_time
        return mean * math.prod(sure) > self._rate * time

    def worth_reading(self, sure: Sequence[float]) -> bool:
        """Whether a draft of these probabilities is worth more than a plain pass is faster; a look always is."""
        if self.looking:
            return True
        expected = sum(math.prod(sure[: i + 1]) for i in range(len(sure)))
        return expected >= self._rate * (self._reading_time - self._plain_time)

    def pays(self, prompt_seconds: float, tokens: int) -> bool:
        """As `AutoLength.pays`."""
        if not self.measure:
            return True
        if not self.plain.seen:
            return False
        saved = self._plain_time - 1 / self._drafting_rate
        return tokens * saved > PROMPT_COST * self.cost * prompt_seconds

    def observe(self, step: Step) -> None:
        """Updates times and rates; a first step, which reads the prompts, has no usable times."""
        judged = min(step.accepted + 1, step.proposed)
        keep = FORGET**judged
        self.accepted, self.judged = keep * self.accepted + step.accepted, keep * self.judged + judged
        if step.first:
            return
        drafting, passing = step.drafter_forwards * self.cost, 1.0
        if self.measure:
            drafting, passing = step.drafter_seconds, step.target_seconds
        read = float(step.proposed > 0)
        (self.reading if read else self.plain).add(passing)
        if step.drafter_forwards:
            candidates = step.proposed or step.drafter_forwards
            self.candidate.add(drafting / candidates)
            past = _scaled(self.looks.memory, self.done)
            now = (step.accepted + 1.0, candidates, read, 1 - read)
            self.done = tuple(x + y for x, y in zip(past, now, strict=True))

    @property
    def _plain_time(self) -> float:
        known = self.plain.seen or not self.measure
        return self.plain.usual(1.0) if known else self.reading.usual(1.0) / PRIOR_READING

    @property
    def _reading_time(self) -> float:
        known = self.reading.seen or not self.measure
        return self.reading.usual(1.0) if known else PRIOR_READING * self._plain_time

    @property
    def _candidate_time(self) -> float:
        return self.candidate.usual(self.cost * self._plain_time)

    @property
    def _drafting_rate(self) -> float:
        """R while drafting: counts at what they usually take, so that no interruption is remembered."""
        tokens, candidates, passes, plain = self.done
        candidates, passes = candidates + PRIOR_STEPS * PRIOR_TOKENS, passes + PRIOR_STEPS
        spent = candidates * self._candidate_time + passes * self._reading_time + plain * self._plain_time
        return (tokens + PRIOR_STEPS * PRIOR_TOKENS) / spent

    @property
    def _rate(self) -> float:
        """R: tokens per unit of time."""
        return max(self._drafting_rate, 1 / self._plain_time)


def _scaled(factor: float, values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * x for x in values)


class _Looks:
    """While drafting does not pay: plain steps, with looks at whether it does by now."""

    def __init__(self) -> None:
        self.steps, self.patience = 0, FIRST_PROBE

    def due(self) -> bool:
        """Whether the coming step is a look; they become rarer."""
        self.steps += 1
        if self.steps < self.patience:
            return False
        self.steps, self.patience = 0, min(2 * self.patience, LAST_PROBE)
        return True

    @property
    def memory(self) -> float:
        """Weight that the past keeps at a step which drafts; less at a look."""
        return FORGET if self.patience == FIRST_PROBE else PROBE_FORGET


class _Times:
    """The last few times of something; what is usual is their median, which no interruption moves."""

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=LAST_TIMES)

    def add(self, seconds: float) -> None:
        """One more."""
        self.seen.append(seconds)

    def usual(self, prior: float) -> float:
        """Their median, the lower of two in the middle; what is assumed, before anything was seen."""
        return statistics.median_low(self.seen) if self.seen else prior


class _PassTimes:
    """Running means of the target's times by draft length, older passes fading.

    A processor may read four tokens faster than two: lengths are told apart, no line is drawn through them. One that
    was not seen lately is taken to cost what the others did, a little more or less by its length, and so gets its turn.
    """

    def __init__(self) -> None:
        self.count = [0.0] * (LONGEST + 1)
        self.total = [0.0] * (LONGEST + 1)

    def add(self, n: int, t: float) -> None:
        """One more pass, with n candidates."""
        self.count = [FORGET * x for x in self.count]
        self.total = [FORGET * x for x in self.total]
        n = min(n, LONGEST)
        self.count[n] += 1
        self.total[n] += t

    @property
    def seen(self) -> float:
        """Passes, older ones counting less."""
        return sum(self.count)

    def __call__(self, n: int) -> float:
        """The time of a pass with n candidates; around 1 before anything was seen."""
        if not self.seen:
            return 1 + PRIOR_SLOPE * n
        others = sum(t / (1 + PRIOR_SLOPE * m) for m, t in enumerate(self.total)) / self.seen
        return (self.total[n] + TIME_COUNT * others * (1 + PRIOR_SLOPE * n)) / (self.count[n] + TIME_COUNT)
