"""Verification: committing tokens with exactly the target's law, whatever was proposed (ALGORITHMS §1).

Letters: `p` target, `pi` proposal over the target's vocabulary; V_t its rows; n candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hetspec.errors import GenerationError
from hetspec.runtime import laws
from hetspec.runtime.laws import Warping
from hetspec.runtime.rng import Rng


class PointwiseLaw(Protocol):
    """A law that is known token by token, not as a vector; judged by token verification only."""

    def __getitem__(self, t: int) -> float:
        """π(t); all of them may sum to less than 1."""


@dataclass(frozen=True)
class Proposal:
    """Candidates of one step.

    Attributes:
        ids: candidate target ids t_1..t_n; may be empty.
        laws: π_1..π_n, each [V_t] or a `PointwiseLaw`; None where the candidates are guesses (exact match).
        none: the law after t_n, if *none* was drawn from it: a candidate that is certainly rejected.
    """

    ids: list[int] = field(default_factory=list)
    laws: Sequence[Tensor | PointwiseLaw] | None = None
    none: PointwiseLaw | None = None

    def __post_init__(self) -> None:
        assert self.none is None or self.laws is not None
        if self.laws is not None:
            assert len(self.laws) == len(self.ids)
            assert all(float(pi[t]) > 0 for t, pi in zip(self.ids, self.laws, strict=True))


@dataclass(frozen=True)
class Verdict:
    """What a step commits: `accepted` candidates, then one token of the target's own."""

    ids: list[int]
    accepted: int

    def __post_init__(self) -> None:
        assert len(self.ids) == self.accepted + 1


METHODS = ("block", "token")
Rows: TypeAlias = Tensor | Sequence[Tensor]  # of logits, one per position


def verify(proposal: Proposal, logits: Rows, warping: Warping, rng: Rng, method: str = "block") -> Verdict:
    """Commits tokens with exactly the target's law.

    Args:
        proposal: n candidates.
        logits: n+1 rows [V_t] of the target, after the committed text and after each candidate. Row j is asked for
            only once candidates 1..j stand, except by block verification, which reads them all.
        warping: the target's.
        rng: the source of every draw.
        method: "block" or "token"; the same law, block verification accepts at least as many in expectation. At
            temperature 0, and for guesses, there is no difference.
    """
    if warping.greedy:
        return _verify_greedy(proposal.ids, logits)
    if proposal.laws is None:
        return _verify_exact_match(proposal.ids, logits, warping, rng)
    vectors = all(isinstance(pi, Tensor) for pi in proposal.laws) and proposal.none is None
    judge = _verify_block if method == "block" and vectors else _verify_token
    return judge(proposal.ids, proposal.laws, logits, warping, rng, proposal.none)


def _verify_greedy(candidates: list[int], logits: Rows) -> Verdict:
    """Accepts candidates as long as they are the target's own argmax."""
    accepted = 0
    while True:
        best = int(laws.argmax(logits[accepted]))
        if accepted == len(candidates) or candidates[accepted] != best:
            return Verdict([*candidates[:accepted], best], accepted)
        accepted += 1


def _verify_exact_match(candidates: list[int], logits: Rows, warping: Warping, rng: Rng) -> Verdict:
    """Commits the target's own draws, and goes on while they equal the guesses (2502.05202, Algorithm 2)."""
    ids: list[int] = []
    for j in range(len(candidates) + 1):
        x = rng.categorical(laws.law(logits[j], warping))
        ids.append(x)
        if j == len(candidates) or x != candidates[j]:
            break
    return Verdict(ids, len(ids) - 1)


def _verify_token(
    candidates: list[int],
    proposal_laws: Sequence[Tensor | PointwiseLaw],
    logits: Rows,
    warping: Warping,
    rng: Rng,
    none: PointwiseLaw | None = None,
) -> Verdict:
    """Token verification (Leviathan et al. 2211.17192, Algorithm 1)."""
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t]) / float(pi[t])):
            return Verdict([*candidates[:j], _residual_draw(p, pi, rng)], j)
    p = laws.law(logits[len(candidates)], warping)
    bonus = rng.categorical(p) if none is None else _residual_draw(p, none, rng)
    return Verdict([*candidates, bonus], len(candidates))


def _residual_draw(p: Tensor, pi: Tensor | PointwiseLaw, rng: Rng) -> int:
    """Draws from `∝ max(0, p − π)`; where π is known token by token, by rejection (ALGORITHMS §4; reconstruction).

    `x ~ p` is kept with probability `max(0, 1 − π(x)/p(x))`, else drawn again. What was refused once weighs only its
    residual from then on, which changes nothing in the law of what is kept: any weights between residual and p do for
    the draws. So no token is asked for twice, and the draws end.

    Args:
        p: [V] the target's law.
        pi: [V], or known token by token.
        rng: the source of every draw.

    Raises:
        GenerationError: no residual is left (then a rejection had probability 0 but for rounding).
    """
    if isinstance(pi, Tensor):
        return rng.categorical(laws.residual(p, pi))
    weights = p.to(torch.float64, copy=True)
    asked: set[int] = set()
    while bool((weights > 0).any()):
        x = rng.categorical(weights)
        if x in asked:
            return x
        rest = max(0.0, float(weights[x]) - pi[x])
        if rng.accept(rest / float(weights[x])):
            return x
        weights[x] = rest
        asked.add(x)
    raise GenerationError(
        "a candidate was rejected although its law covers the target's.", "Generate with another seed."
    )


def _verify_block(
    candidates: list[int],
    proposal_laws: Sequence[Any],
    logits: Rows,
    warping: Warping,
    rng: Rng,
    none: Any = None,
) -> Verdict:
    """Block verification (Sun et al. 2403.10444, Algorithm 2): the draft is judged as a whole.

    `w_i = min(1, w_{i−1}·p_i(t_i)/π_i(t_i))` is the chance that at least i candidates are kept. The last i whose own
    draw succeeds wins, so the draws are made from the end.
    """
    n = len(candidates)
    p = [laws.law(logits[j], warping) for j in range(n + 1)]
    w = [1.0]
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        w.append(min(1.0, w[-1] * float(p[j][t]) / float(pi[t])))
    if n and rng.accept(w[n]):
        return Verdict([*candidates, rng.categorical(p[n])], n)
    for i in range(n - 1, 0, -1):
        rest = laws.surplus(w[i], p[i], proposal_laws[i])
        s = float(rest.sum())
        if s > 0 and rng.accept(s / (s + 1 - w[i])):
            return Verdict([*candidates[:i], rng.categorical(rest)], i)
    first = laws.residual(p[0], proposal_laws[0]) if n else p[0]
    return Verdict([rng.categorical(first)], 0)
