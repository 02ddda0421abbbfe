"""The algorithms side by side: how candidates are proposed, and how proposals are verified.

Every algorithm proposes candidate target tokens `t_1..t_n` together with the very laws `π_j` they were
drawn from (none = a guess, judged by exact match). A verifier then commits tokens so that the output has
exactly the target's law, whatever the drafter said (ALGORITHMS §1).

Letters: `p` target, `q` drafter, `pi` proposal over the target's vocabulary; V_t, V_d their rows; n proposed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetspec.artifact import VocabularyMap
from hetspec.runtime import laws
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.laws import Warping
from hetspec.runtime.rng import Rng
from hetspec.segment import Segmenter, unfinished_utf8
from hetspec.vocab import Vocabulary

ALGORITHMS = ("none", "slem", "tli")
BEHIND_TOKENS = 8  # committed target tokens that are re-tokenised with a SLEM draft to find its boundary


@dataclass(frozen=True)
class Proposal:
    """Candidates of one step.

    Attributes:
        ids: candidate target ids t_1..t_n; may be empty.
        laws: π_1..π_n, each [V_t], or None where the candidates are guesses (exact match).
    """

    ids: list[int] = field(default_factory=list)
    laws: list[Tensor] | None = None

    def __post_init__(self) -> None:
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


class Algorithm(Protocol):
    """Proposes candidates; stateless between steps."""

    name: str

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts up to `n` tokens after the committed text.

        Args:
            context: the drafter's row; drafted tokens are left in it.
            behind: the last few committed target ids.
            n: draft length.
            rng: the source of every draw.
        """


# -- none ----------------------------------------------------------------------------------------------------


class Plain:
    """Plain decoding through the same loop: no candidates."""

    name = "none"

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Proposes nothing."""
        return Proposal()


# -- SLEM ----------------------------------------------------------------------------------------------------


class SLEM:
    """String-level exact match (Timor et al. 2502.05202, Algorithm 2).

    The drafter continues the text greedily with its full vocabulary; the new bytes are tokenised by the
    target in context; the candidates are guesses, judged against the target's own draws. Guessing the mode
    maximises the chance of a match, so drafts are greedy at any temperature.

    Where the target's last token ends inside what the drafter would write as one token (a line break, where
    the drafter's tokens are line break plus indent), the drafter would read the break as "no indent follows".
    There the draft starts one token earlier, among the drafter tokens that the target would begin with that
    same last token (reconstruction: "healing").

    Args:
        mapping: for control tokens by role.
        target: the target's vocabulary.
        drafter: the drafter's vocabulary.
        segmenter: of the target's tokenizer.
    """

    name = "slem"

    def __init__(
        self, mapping: VocabularyMap, target: Vocabulary, drafter: Vocabulary, segmenter: Segmenter
    ) -> None:
        self.mapping, self.target, self.drafter, self.segmenter = mapping, target, drafter, segmenter
        self.longer = LongerTokens(drafter, segmenter)

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts `n` drafter tokens and re-tokenises their bytes; see `Algorithm.propose`."""
        end: list[int] = []
        for i in range(n):
            d = (
                self._first(context, behind)
                if i == 0
                else int(laws.argmax(context.next_logits(), "the drafter"))
            )
            if d < 0:  # the last committed token was replaced by a longer one, which is the first draft
                continue
            if d >= len(self.drafter.pieces) or not self.drafter.pieces[d]:
                role = int(self.mapping.d2t[d])
                end = [role] if role >= 0 else []
                break
            context.push(d)
        drafted = context.drafted
        whole = drafted[: len(drafted) - unfinished_utf8(drafted)]
        if len(whole) < len(drafted):
            end = []
        if not whole:
            return Proposal(end)
        return Proposal(self.segmenter.encode_after(self._bytes_behind(behind), whole) + end)

    def _first(self, context: DrafterContext, behind: list[int]) -> int:
        """The first drafted token; −1 if it went into the place of the last committed one."""
        d = context.replaceable()
        longer = (
            self.longer.of(self.drafter.pieces[d]) if d >= 0 and self.target.bytes_of(behind[-1]) else None
        )
        if longer is None or not len(longer):
            return int(laws.argmax(context.next_logits(), "the drafter"))
        before, after = context.last_logits(2)
        best, where = before[longer].max(dim=0)
        e = int(longer[where])
        if best > before[d] and self.longer.target_keeps(
            behind[-1], self.drafter.pieces[e][len(self.drafter.pieces[d]) :]
        ):
            context.replace_last(e)
            return -1
        return int(laws.argmax(after, "the drafter"))

    def _bytes_behind(self, behind: list[int]) -> bytes:
        """The bytes of the last few committed tokens, back to the last control token."""
        start = len(behind)
        while (
            start > 0
            and behind[start - 1] < len(self.target.pieces)
            and self.target.pieces[behind[start - 1]]
        ):
            start -= 1
        return self.target.spell(behind[start:])


class LongerTokens:
    """For a drafter token: the drafter tokens that begin with its bytes and are longer.

    Args:
        drafter: the drafter's vocabulary.
        segmenter: of the target's tokenizer.
    """

    def __init__(self, drafter: Vocabulary, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._sorted = sorted((piece, d) for d, piece in enumerate(drafter.pieces) if piece)
        self._ids = torch.tensor([d for _, d in self._sorted])
        self._kept: dict[tuple[int, bytes], bool] = {}

    def of(self, piece: bytes) -> Tensor:
        """Drafter ids whose bytes begin with `piece` and go on, int64."""
        start = bisect_left(self._sorted, (piece + b"\0", -1))
        end = bisect_left(self._sorted, (piece + b"\xff" * 64, -1))
        return self._ids[start:end]

    def target_keeps(self, t: int, rest: bytes) -> bool:
        """Whether the target, reading its token `t` followed by `rest`, begins with `t` all the same."""
        key = (t, rest)
        if key not in self._kept:
            text = self._segmenter.vocabulary.pieces[t] + rest
            self._kept[key] = self._segmenter.encode(text)[:1] == [t]
        return self._kept[key]


# -- TLI -----------------------------------------------------------------------------------------------------


class TLI:
    """Token-level intersection (Timor et al. 2502.05202, Algorithm 4).

    `q'(x) = q(x)/q(I)` on the intersection I of the two vocabularies, carried over to target ids with the
    masses of drafter ids that share a target id added. Candidates are drawn from that vector and judged by it.

    Args:
        mapping: the intersection map.
        warping: the target's; its truncation applies to the proposal too.
        draft_warping: the drafter's temperature and truncation.
        eos_ids: target ids that end the generation; drafting stops after one.
    """

    name = "tli"

    def __init__(
        self, mapping: VocabularyMap, warping: Warping, draft_warping: Warping, eos_ids: frozenset[int]
    ) -> None:
        shared = np.flatnonzero(mapping.d2t >= 0)
        self.shared = torch.from_numpy(shared)  # drafter ids in I, ascending
        self.image = torch.from_numpy(mapping.d2t[shared].astype(np.int64))  # their target ids
        self.t2d = mapping.t2d
        self.rows = len(mapping.t2d)
        self.warping, self.draft_warping, self.eos_ids = warping, draft_warping, eos_ids

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts `n` candidates; see `Algorithm.propose`."""
        ids: list[int] = []
        proposal_laws: list[Tensor] = []
        while len(ids) < n and len(self.shared):
            logits = context.next_logits()
            if self.warping.greedy:
                best = laws.argmax(logits[self.shared], "the drafter")
                t = int(self.image[best])
            else:
                pi = self.proposal_law(logits)
                if pi is None:
                    break
                t = rng.categorical(pi)
                proposal_laws.append(pi)
            ids.append(t)
            if t in self.eos_ids:
                break
            context.push(int(self.t2d[t]))
        return Proposal(ids, None if self.warping.greedy else proposal_laws)

    def proposal_law(self, logits: Tensor) -> Tensor | None:
        """`π` [V_t] from the drafter's logits [V_d]; None if `q(I) = 0`."""
        q = laws.law(logits, self.draft_warping, "the drafter")
        pi = torch.zeros(self.rows, dtype=q.dtype).index_add_(0, self.image, q[self.shared])
        total = float(pi.sum())
        if not total > 0:
            return None
        return laws.truncate(pi / total, self.warping)


# -- verification --------------------------------------------------------------------------------------------


def verify(proposal: Proposal, logits: Tensor, warping: Warping, rng: Rng) -> Verdict:
    """Commits tokens with exactly the target's law.

    Args:
        proposal: n candidates.
        logits: [n+1, V_t] of the target, after the committed text and after each candidate.
        warping: the target's.
        rng: the source of every draw.
    """
    if warping.greedy:
        return _verify_greedy(proposal.ids, logits)
    if proposal.laws is None:
        return _verify_exact_match(proposal.ids, logits, warping, rng)
    return _verify_token(proposal.ids, proposal.laws, logits, warping, rng)


def _verify_greedy(candidates: list[int], logits: Tensor) -> Verdict:
    """Accepts candidates as long as they are the target's own argmax."""
    best = laws.argmax(logits).tolist()
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == best[accepted]:
        accepted += 1
    return Verdict(best[: accepted + 1], accepted)


def _verify_exact_match(candidates: list[int], logits: Tensor, warping: Warping, rng: Rng) -> Verdict:
    """Commits the target's own draws, and goes on while they equal the guesses (2502.05202, Algorithm 2)."""
    ids: list[int] = []
    for j in range(len(candidates) + 1):
        x = rng.categorical(laws.law(logits[j], warping))
        ids.append(x)
        if j == len(candidates) or x != candidates[j]:
            break
    return Verdict(ids, len(ids) - 1)


def _verify_token(
    candidates: list[int], proposal_laws: list[Tensor], logits: Tensor, warping: Warping, rng: Rng
) -> Verdict:
    """Token verification (Leviathan et al. 2211.17192, Algorithm 1)."""
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t]) / float(pi[t])):
            return Verdict([*candidates[:j], rng.categorical(laws.residual(p, pi))], j)
    bonus = rng.categorical(laws.law(logits[len(candidates)], warping))
    return Verdict([*candidates, bonus], len(candidates))
