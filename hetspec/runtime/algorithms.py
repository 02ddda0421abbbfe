"""The algorithms side by side: how candidates are proposed.

Every algorithm proposes candidate target tokens `t_1..t_n` together with the very laws `π_j` they were
drawn from (none = a guess, judged by exact match); `hetspec.runtime.verify` judges them.

Letters: `p` target, `q` drafter, `pi` proposal over the target's vocabulary; V_t, V_d their rows; n proposed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetspec.artifact import VocabularyMap
from hetspec.runtime import laws
from hetspec.runtime.boundaries import FirstTarget, LongerTokens
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.kernels import Proposer
from hetspec.runtime.laws import Warping
from hetspec.runtime.rng import Rng
from hetspec.runtime.verify import Proposal
from hetspec.segment import Segmenter, unfinished_utf8
from hetspec.vocab import Vocabulary

ALGORITHMS = ("none", "slem", "tli", "slrs", "rdk")
NEGLIGIBLE = 2e-4  # continuations less likely than this are not worth asking a tokenizer about
# A candidate drawn against all odds is accepted in three of ten cases, one that was certain always, others in between
# (SmolLM2-135M for Qwen2.5-Coder-1.5B, SLRS at temperature 1, 332 candidates: 0.3 + 0.7π(t) within 0.15).
LEAST_SURE = 0.3
BEHIND_TOKENS = 8  # committed target tokens that are re-tokenised with a SLEM draft to find its boundary


class Algorithm(Protocol):
    """Proposes candidates; stateless between steps, but for a `Stopping`."""

    name: str

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts up to `n` tokens after the committed text.

        Args:
            context: the drafter's row; drafted tokens are left in it.
            behind: the last few committed target ids.
            n: draft length; with a `Stopping` at most so many candidates.
            rng: the source of every draw.
        """


class Stopping(Protocol):
    """Ends drafts by how likely each of their tokens is to be accepted, as far as the drafter can tell.

    A draft may end after any candidate, which is then judged like others. Only guesses may be thrown away.
    """

    def goes_on(self, sure: Sequence[float]) -> bool:
        """Whether to draft another token after those of these probabilities."""

    def worth_reading(self, sure: Sequence[float]) -> bool:
        """Whether the target is to read guesses of these probabilities at all."""


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
        longer: the drafter's tokens by prefix.
        stopping: ends drafts early; None drafts what is asked for.
    """

    name = "slem"

    def __init__(
        self,
        mapping: VocabularyMap,
        target: Vocabulary,
        drafter: Vocabulary,
        segmenter: Segmenter,
        longer: LongerTokens,
        stopping: Stopping | None = None,
    ) -> None:
        self.mapping, self.target, self.drafter, self.segmenter = mapping, target, drafter, segmenter
        self.longer, self.stopping = longer, stopping

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts `n` drafter tokens and re-tokenises their bytes; see `Algorithm.propose`."""
        end: list[int] = []
        sure: list[float] = []
        for i in range(n):
            if i and self.stopping is not None and not self.stopping.goes_on(sure):
                break
            if not context.can_read():
                break
            d, probability = self._first(context, behind) if i == 0 else self._best(context.next_logits())
            sure.append(probability)
            if d < 0:  # the last committed token was replaced by a longer one, which is the first draft
                continue
            if d >= len(self.drafter.pieces) or not self.drafter.pieces[d]:
                role = int(self.mapping.d2t[d])
                end = [role] if role >= 0 else []
                break
            context.push(d)
        if self.stopping is not None and not self.stopping.worth_reading(sure):
            return Proposal()
        drafted = context.drafted
        whole = drafted[: len(drafted) - unfinished_utf8(drafted)]
        if len(whole) < len(drafted):
            end = []
        if not whole:
            return Proposal(end)
        started = time.perf_counter()
        candidates = self.segmenter.encode_after(self._bytes_behind(behind), whole) + end
        context.align_seconds += time.perf_counter() - started
        return Proposal(candidates if self.stopping is None else candidates[:n])

    def _best(self, logits: Tensor) -> tuple[int, float]:
        """The drafter's likeliest token after logits [V_d], and its probability (1 where nobody asks for it)."""
        d = int(laws.argmax(logits, "the drafter"))
        return d, 1.0 if self.stopping is None else float(torch.softmax(logits.float(), dim=-1)[d])

    def _first(self, context: DrafterContext, behind: list[int]) -> tuple[int, float]:
        """The first drafted token and its probability; −1 if it went into the place of the last committed one."""
        d = context.replaceable()
        healable = (
            d >= 0 and self.target.bytes_of(behind[-1]) and self.drafter.bytes_of(d) and context.can_read(2)
        )
        longer = self.longer.of(self.drafter.pieces[d]) if healable else ()
        if not len(longer):
            return self._best(context.next_logits())
        before, after = context.last_logits(2)
        best, where = before[longer].max(dim=0)
        e = int(longer[where])
        rest = self.drafter.pieces[e][len(self.drafter.pieces[d]) :]
        if best > before[d] and self.longer.following(behind[-1], rest) >= 0:
            context.replace(e)
            whole = torch.logsumexp(torch.cat((before[longer], before[d : d + 1])).float(), dim=0)
            return -1, float(torch.exp(best.float() - whole))
        return self._best(after)

    def _bytes_behind(self, behind: list[int]) -> bytes:
        """The bytes of the last few committed tokens, back to the last control token."""
        start = len(behind)
        while start > 0 and self.target.bytes_of(behind[start - 1]):
            start -= 1
        return self.target.spell(behind[start:])


# -- TLI, RDK, SLRS: candidates drawn from explicit laws ---------------------------------------------------------


@dataclass
class DraftSettings:
    """What every law-based algorithm needs to know about its pair and its generation."""

    mapping: VocabularyMap
    target: Vocabulary
    drafter: Vocabulary
    drafter_segmenter: Segmenter
    warping: Warping
    draft_warping: Warping
    eos_ids: frozenset[int]


class KernelDraft:
    """Candidates drawn from `π = normalise(q·K)` and judged by that very vector.

    - TLI (Timor et al. 2502.05202, Algorithm 4): K is the 0/1 intersection map, so `π = q/q(I)` on I.
    - SLRS-4b (reconstruction): K is the 0/1 map to the first target token of each drafter token's bytes.
    - RDK (Timor et al. 2506.03206, Algorithm 2 in spirit): `π` is a `Redistribution` of q' by a stored kernel.
    - SLRS-4d (reconstruction) adds a `LookAhead`, and a `Healing` of the boundary before each position.

    At temperature 0 the candidate is the mode of `π`, a guess.
    """

    def __init__(
        self,
        name: str,
        kernel: Proposer,
        settings: DraftSettings,
        look_ahead: LookAhead | None = None,
        healing: Healing | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self.name, self.kernel, self.settings = name, kernel, settings
        self.look_ahead, self.healing, self.stopping = look_ahead, healing, stopping
        self._spellings: dict[int, list[int]] = {}

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts `n` candidates; see `Algorithm.propose`."""
        s = self.settings
        ids: list[int] = []
        proposal_laws: list[Tensor] = []
        sure: list[float] = []
        before, logits = self._open(context, behind)
        while len(ids) < n:
            if logits is None:
                if not context.can_read():
                    break
                logits = context.next_logits()
            q = laws.law(logits, s.draft_warping, "the drafter")
            # 1. The law of the candidate; all of it is fixed before the candidate is drawn.
            ahead = self.look_ahead.read(context, q, s.draft_warping) if self.look_ahead else None
            pi = self.kernel.apply(q) if ahead is None else ahead.law(q, self.kernel)
            if self.healing is not None and before is not None:
                started = time.perf_counter()
                pi = self.healing.mix(pi, before)
                context.align_seconds += time.perf_counter() - started
            total = float(pi.sum())
            if not total > 0:
                break
            pi = laws.truncate(pi / total, s.warping)
            share = min(total, 1.0)  # of q that the kernel has a place for
            # 2. The candidate.
            t = int(pi.argmax()) if s.warping.greedy else rng.categorical(pi)
            ids.append(t)
            proposal_laws.append(pi)
            least = 0.0 if s.warping.greedy else LEAST_SURE
            sure.append(least + (1 - least) * share * float(pi[t]))
            if t in s.eos_ids or len(ids) == n:
                break
            if self.stopping is not None and not self.stopping.goes_on(sure):
                break
            # 3. The drafter's context for the next one: any that spells the candidate will do.
            d, logits = self._follow(context, t, ahead, before)
            if d is None:
                break
            before = Before(q, d, t) if d >= 0 else None
        if not s.warping.greedy:
            return Proposal(ids, proposal_laws)
        return Proposal(ids if self.stopping is None or self.stopping.worth_reading(sure) else [])

    def _open(self, context: DrafterContext, behind: list[int]) -> tuple[Before | None, Tensor | None]:
        """The law before the last committed token, where healing can use it; it comes with the first forward."""
        d = context.replaceable()
        if (
            self.healing is None
            or d < 0
            or not self.settings.target.bytes_of(behind[-1])
            or not context.can_read(2)
        ):
            return None, None
        rows = context.last_logits(2)
        return Before(laws.law(rows[0], self.settings.draft_warping, "the drafter"), d, behind[-1]), rows[1]

    def _follow(
        self, context: DrafterContext, t: int, ahead: Ahead | None, before: Before | None
    ) -> tuple[int | None, Tensor | None]:
        """Moves the context past candidate `t`.

        Returns:
            (drafter token that spells `t` alone, or −1 if several or another do, or None if none can;
            logits after it, if they are known already).
        """
        s = self.settings
        piece = s.target.bytes_of(t)
        if self.healing is not None and before is not None:
            longer = self.healing.replacement(before, t, piece)
            if longer is not None:
                if ahead is not None:
                    context.pop()
                context.replace(longer)
                return -1, None
        if ahead is not None:
            start = s.drafter.pieces[ahead.d]
            if start == piece:
                return ahead.d, ahead.logits
            if piece.startswith(start) and (rest := self._spell_bytes(piece[len(start) :])):
                for d in rest:
                    context.push(d)
                return -1, None
            context.pop()
        tokens = self._spelling(t, piece)
        for d in tokens:
            context.push(d)
        if not tokens:
            return None, None
        return (tokens[0] if len(tokens) == 1 else -1), None

    def _spelling(self, t: int, piece: bytes) -> list[int]:
        """Drafter tokens for a target token: its preimage, else its bytes re-encoded; [] if it cannot be spelled."""
        if t not in self._spellings:
            d = int(self.settings.mapping.t2d[t])
            self._spellings[t] = [d] if d >= 0 else self._spell_bytes(piece)
        return self._spellings[t]

    def _spell_bytes(self, piece: bytes) -> list[int]:
        ids = self.settings.drafter_segmenter.encode(piece) if piece else []
        return ids if self.settings.drafter.spell(ids) == piece else []


@dataclass(frozen=True)
class Before:
    """The position before: its law `q` [V_d], the drafter token `d` that was read there, the target token `t`."""

    q: Tensor
    d: int
    t: int


# -- SLRS-4d: look-ahead on the likeliest drafter token ------------------------------------------------------------


@dataclass(frozen=True)
class Ahead:
    """One look-ahead: drafter token `d`, logits after it, its continuations and what they make of it.

    Attributes:
        d: the likeliest drafter token; it stands in the context.
        logits: [V_d] after it.
        masses: q(e│c·d) of the top continuations.
        firsts: F(d, e) of each, int64.
        image: first target token of d's bytes alone, for the rest of the mass.
    """

    d: int
    logits: Tensor
    masses: Tensor
    firsts: Tensor
    image: int

    def law(self, q: Tensor, kernel: Proposer) -> Tensor:
        """`Σ_{d'≠d} q(d')K(d',·) + q(d)·[Σ_e q(e│c·d)·1[F(d,e) = ·] + rest·1[image]]`, [V_t] (ALGORITHMS §4d)."""
        others = q.clone()
        others[self.d] = 0
        pi = kernel.apply(others)
        mass = q[self.d]
        pi.index_add_(0, self.firsts, mass * self.masses)
        pi[self.image] += mass * (1 - self.masses.sum()).clamp(min=0)
        return pi


class LookAhead:
    """Decides whether the next drafter step can sharpen the kernel's row of the likeliest token, and takes it.

    Args:
        first: F and the target's trie.
        kernel_certainty: float[V_d], largest `K(d, ·)`; no look-ahead where it is at least `threshold`.
        threshold: 0.95 keeps nearly all of the gain with the look-ahead at a third of the positions.
        width: continuations kept.
    """

    def __init__(
        self, first: FirstTarget, kernel_certainty: np.ndarray, threshold: float = 0.95, width: int = 64
    ) -> None:
        self.first, self.certainty = first, kernel_certainty
        self.threshold, self.width = threshold, width

    def read(self, context: DrafterContext, q: Tensor, draft_warping: Warping) -> Ahead | None:
        """Looks ahead on the likeliest token; None where it cannot matter. Leaves the token in the context."""
        d = int(q.argmax())
        piece = context.vocabulary.bytes_of(d)
        image = int(self.first.image[d])
        if not piece or image < 0 or self.certainty[d] >= self.threshold or not self.first.extends(piece):
            return None
        if not context.can_read(2):
            return None
        context.push(d)
        logits = context.next_logits()
        following = laws.law(logits, draft_warping, "the drafter")
        masses, es = following.topk(min(self.width, len(following)))
        kept = max(1, int((masses > NEGLIGIBLE).sum()))  # the rest stays with the image
        masses, es = masses[:kept], es[:kept]
        started = time.perf_counter()
        firsts = torch.tensor(self.first.of(d, es.tolist()))
        context.align_seconds += time.perf_counter() - started
        return Ahead(d, logits, masses, firsts, image)


# -- SLRS: healing the boundary before a position --------------------------------------------------------------------


class Healing:
    """Gives back what the drafter knew before it read a token that it would rather have written longer.

    The target's token `t` may end inside what the drafter writes as one token (a line break before an indent).
    Having read `d = t`, the drafter takes the longer tokens for excluded. Its law before `d` still has them: given
    that the target's token was `t`, the next one is `F` of what remains of `e` with weight `q(e)`, for every longer
    `e` that the target would begin with `t`, and the law after `d` with weight `q(d)` (reconstruction).

    Args:
        longer: drafter tokens by prefix.
        drafter: its vocabulary.
        width: longer tokens looked at.
    """

    def __init__(self, longer: LongerTokens, drafter: Vocabulary, width: int = 16) -> None:
        self.longer, self.drafter, self.width = longer, drafter, width

    def mix(self, pi: Tensor, before: Before) -> Tensor:
        """The healed law, [V_t], from the law after `d`."""
        entries = self._longer(before)
        if not entries:
            return pi
        total = pi.sum()
        healed = pi * (before.q[before.d] / total) if float(total) > 0 else torch.zeros_like(pi)
        for _, x, mass in entries:
            healed[x] += mass
        return healed

    def replacement(self, before: Before, t: int, piece: bytes) -> int | None:
        """A longer token that spells the last two target tokens at once, if the drafter finds it likelier."""
        whole = self.drafter.pieces[before.d] + piece
        for e, x, mass in self._longer(before):
            if x == t and self.drafter.pieces[e] == whole and mass > float(before.q[before.d]):
                return e
        return None

    def _longer(self, before: Before) -> list[tuple[int, int, float]]:
        """(longer drafter token, target token that follows `t` in it, its mass)."""
        piece = self.drafter.bytes_of(before.d)
        ids = self.longer.of(piece) if piece else ()
        if not len(ids):
            return []
        masses, where = before.q[ids].topk(min(self.width, len(ids)))
        floor = 1e-3 * max(float(before.q[before.d]), float(masses[0]))
        entries = []
        for mass, e in zip(masses.tolist(), ids[where].tolist(), strict=True):
            if mass <= floor:
                break
            x = self.longer.following(before.t, self.drafter.pieces[e][len(piece) :])
            if x >= 0:
                entries.append((e, x, mass))
        return entries
