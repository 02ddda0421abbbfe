"""Choosing the algorithm while generating: a few steps with each, then the one that is fastest.

Every step of every algorithm is lossless, and the choice is made before a step from finished steps only, so
mixing them leaves the output's law as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetspec.runtime.algorithms import Algorithm
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.plan import DraftLength, Step
from hetspec.runtime.rng import Rng
from hetspec.runtime.verify import Proposal

WARM_UP_STEPS = 3  # with each algorithm
PROBE_EVERY = 32  # steps between two looks at the algorithm tried least
FORGET = 0.9  # weight kept by the past at each step of an algorithm


@dataclass
class Record:
    """What an algorithm has done: committed tokens and their cost, older steps fading."""

    steps: int = 0
    tokens: float = 0.0
    cost: float = 0.0

    def add(self, tokens: int, cost: float) -> None:
        """Adds a step."""
        self.steps += 1
        self.tokens = FORGET * self.tokens + tokens
        self.cost = FORGET * self.cost + cost

    @property
    def rate(self) -> float:
        """Tokens per unit of cost."""
        return self.tokens / self.cost if self.cost else 0.0


class AutoChoice:
    """An algorithm and a draft length in one: tries the candidates in turn, then stays with the best.

    Args:
        algorithms: the candidates.
        plans: a draft length for each.
        cost: drafter step in target steps, the declared unit when times are not to be used.
        measure: judge by the clock; off where a seed must give the same tokens.
        records: what is known already, by name; updated (an engine keeps it across prompts).
    """

    name = "auto"

    def __init__(
        self,
        algorithms: list[Algorithm],
        plans: list[DraftLength],
        *,
        cost: float,
        measure: bool,
        records: dict[str, Record],
    ) -> None:
        self.algorithms = {a.name: a for a in algorithms}
        self.plans = {a.name: plan for a, plan in zip(algorithms, plans, strict=True)}
        self.cost, self.measure, self.records = cost, measure, records
        for name in self.algorithms:
            self.records.setdefault(name, Record())
        self.current = next(iter(self.algorithms))
        self._steps = 0

    def choose(self) -> int:
        """Picks the algorithm of the coming step and returns its draft length."""
        self._steps += 1
        fewest = min(self.algorithms, key=lambda name: self.records[name].steps)
        if self.records[fewest].steps < WARM_UP_STEPS or self._steps % PROBE_EVERY == 0:
            self.current = fewest
        else:
            self.current = max(self.algorithms, key=lambda name: self.records[name].rate)
        return self.plans[self.current].choose()

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts with the picked algorithm."""
        return self.algorithms[self.current].propose(context, behind, n, rng)

    def observe(self, step: Step) -> None:
        """Takes note of a finished step."""
        if not step.drafted:  # a plain pass, whose time is of use to all
            for plan in self.plans.values():
                plan.observe(step)
            return
        self.plans[self.current].observe(step)
        if not step.first:
            spent = step.seconds if self.measure else 1 + self.cost * step.drafter_forwards
            self.records[self.current].add(step.accepted + 1, spent)

    def pays(self, prompt_seconds: float, tokens: int) -> bool:
        """Whether it pays for any of the algorithms."""
        return any(plan.pays(prompt_seconds, tokens) for plan in self.plans.values())

    @property
    def reason(self) -> str:
        """What was picked, and the measured figures that decided it."""
        unit = "tokens/s" if self.measure else "tokens per target step"
        seen = [f"{name} {record.rate:.2f}" for name, record in self._seen()]
        return (
            f"{self.current}: {unit} {', '.join(seen)}" if seen else f"{self.current}: nothing measured yet"
        )

    def _seen(self) -> list[tuple[str, Record]]:
        known = [(name, self.records[name]) for name in self.algorithms if self.records[name].steps]
        return sorted(known, key=lambda item: -item[1].rate)
