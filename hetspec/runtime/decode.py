"""The decoding loop of one row: draft, one target pass, verify, commit.

Knows nothing about prompts as text, files or devices; everything it needs is handed to it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetspec.runtime.algorithms import BEHIND_TOKENS, Algorithm
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import Row
from hetspec.runtime.plan import DraftLength, Step
from hetspec.runtime.processors import NO_PROCESSING, ProcessedLogits, Processing
from hetspec.runtime.rng import Rng
from hetspec.runtime.verify import Proposal, Rows, Verdict, verify
from hetspec.vocab import Vocabulary

UNREAD = "plain: reading the prompt with the drafter would not pay"
REREAD = 64  # more tokens than forwards: the drafter has read what a full window keeps once more
LONG_PROMPT = 512  # tokens; reading a shorter one with the drafter costs no more than a few steps


@dataclass
class DecodeStats:
    """What a generation did.

    Attributes:
        steps: target passes that committed something.
        proposed, accepted: candidates.
        proposed_by_position, accepted_by_position: the same by place in the draft (first = 0); a candidate
            counts as proposed at its place only if all before it were accepted.
        new_tokens: committed ids.
        target_forwards, drafter_forwards: calls of the models.
        drafter_tokens: ids the drafter has read; only the last few of its context are ever read again.
        unspelled_bytes: length of the stretches of text that the drafter's tokenizer spells differently.
        seconds: of "target", "drafter", "verify", "align" (text between the two tokenizers) and "other".
        stop_reason: "eos", "length", "context", "stop string", "time" or "criterion".
        choice: what "auto" picked, and why.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    new_tokens: int = 0
    target_forwards: int = 0
    drafter_forwards: int = 0
    drafter_tokens: int = 0
    unspelled_bytes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("target", "drafter", "verify", "align", "other"), 0.0)
    )
    total_seconds: float = 0.0
    stop_reason: str = ""
    choice: str = ""

    @property
    def drafter_forwards_per_candidate(self) -> float:
        """Drafter forwards spent on each candidate."""
        return self.drafter_forwards / self.proposed if self.proposed else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the candidates up to the first that was not kept, which counts as judged."""
        judged = sum(self.proposed_by_position)
        return self.accepted / judged if judged else 0.0

    @property
    def tokens_per_target_pass(self) -> float:
        """Committed tokens per step."""
        return self.new_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole generation, the prompt's pass included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Share of the time spent inside the two models: measured speed against what the models' times allow."""
        models = self.seconds["target"] + self.seconds["drafter"]
        return models / self.total_seconds if self.total_seconds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share accepted at each place, given that all before were."""
        return [a / p for a, p in zip(self.accepted_by_position, self.proposed_by_position, strict=True) if p]

    def count(self, proposal: Proposal, verdict: Verdict) -> None:
        """Adds one step."""
        n = len(proposal.ids)
        while len(self.proposed_by_position) < n:
            self.proposed_by_position.append(0)
            self.accepted_by_position.append(0)
        for j in range(min(verdict.accepted + 1, n)):
            self.proposed_by_position[j] += 1
            self.accepted_by_position[j] += j < verdict.accepted
        self.steps += 1
        self.proposed += n
        self.accepted += verdict.accepted

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_target_pass": self.tokens_per_target_pass,
            "acceptance_by_position": self.acceptance_by_position,
            "new_tokens": self.new_tokens,
            "target_forwards": self.target_forwards,
            "drafter_forwards": self.drafter_forwards,
            "drafter_forwards_per_candidate": self.drafter_forwards_per_candidate,
            "drafter_tokens": self.drafter_tokens,
            "unspelled_bytes": self.unspelled_bytes,
            "seconds": {**self.seconds, "total": self.total_seconds},
            "tokens_per_second": self.tokens_per_second,
            "efficiency": self.efficiency,
            "stop_reason": self.stop_reason,
            "choice": self.choice,
        }


class Decoder:
    """One prompt being continued.

    Args:
        target: the target's row, empty.
        vocabulary: the target's.
        prompt: target ids, at least one.
        context: the drafter's row, already holding the prompt; None to decode plainly.
        algorithm: proposes candidates.
        warping: the target's.
        plan: chooses the draft length before each step.
        rng: the source of every draw.
        eos_ids: ids that end the generation.
        max_new_tokens: at least one.
        method: of verification, "block" or "token".
        processing: logits processors and stopping criteria.
        prompt_alone: read the prompt without candidates, as plain decoding does: its bits depend on the pass's length.
        keep_scores, keep_logits: whether each token's processed scores and raw logits are kept. Scores are what the
            processors leave: to be transformers' own, they must hold the warpers too, and the warping be neutral.
    """

    def __init__(
        self,
        *,
        target: Row,
        vocabulary: Vocabulary,
        prompt: list[int],
        context: DrafterContext | None,
        algorithm: Algorithm,
        warping: Warping,
        plan: DraftLength,
        rng: Rng,
        eos_ids: frozenset[int],
        max_new_tokens: int,
        method: str = "block",
        processing: Processing = NO_PROCESSING,
        prompt_alone: bool = False,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.target, self.vocabulary, self.context = target, vocabulary, context
        self.algorithm, self.warping, self.plan, self.rng = algorithm, warping, plan, rng
        self.eos_ids, self.max_new_tokens, self.method = eos_ids, max_new_tokens, method
        self.processing, self.prompt_alone = processing, prompt_alone
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self._prompt_seconds = math.inf  # until it is read
        self._unread = False  # whether the drafter was kept from the prompt
        self.stats = DecodeStats()
        if context is not None:
            self.stats.total_seconds = context.align_seconds  # of the prompt

    @property
    def done(self) -> bool:
        """Whether the generation has ended."""
        return bool(self.stats.stop_reason)

    @property
    def new_ids(self) -> list[int]:
        """The ids generated so far."""
        return self.ids[self.prompt_length :]

    def step(self) -> list[int]:
        """Drafts, verifies and commits once; returns the committed ids."""
        started = time.perf_counter()
        before = self._readings()
        room = min(
            self.max_new_tokens - len(self.new_ids), self.target.max_length - len(self.ids)
        )  # tokens that may still be committed
        drafted = self._drafts(room)
        proposal, verdict, rows, logits = self._judged(room, drafted)
        committing = time.perf_counter()
        committed = self._commit(verdict.ids, rows, logits, room)
        self.stats.seconds["verify"] += time.perf_counter() - committing
        self.stats.count(proposal, verdict)
        self.stats.new_tokens += len(committed)
        if not self.done and self.context is not None:
            self.context.commit_ids(committed, self.vocabulary)
        seconds = time.perf_counter() - started
        self.stats.total_seconds += seconds
        self._settle_times()
        after = self._readings()
        self.plan.observe(
            Step(
                first=self.stats.steps == 1
                or (drafted and not before[2])
                or after[3] - before[3] > after[2] - before[2] + REREAD,
                drafted=drafted,
                proposed=len(proposal.ids),
                accepted=verdict.accepted,
                seconds=seconds,
                target_seconds=after[0] - before[0],
                drafter_seconds=after[1] - before[1],
                drafter_forwards=int(after[2] - before[2]),
            )
        )
        if self.stats.steps == 1:
            self._prompt_seconds = self.target.seconds
        self.stats.choice = UNREAD if self._unread else self.plan.reason
        return committed

    def _drafts(self, room: int) -> bool:
        """Whether this step may draft: after a long prompt only if it is worth reading for the drafter, too."""
        if self.context is None or room <= 1 or (self.prompt_alone and not self.target.length):
            return False
        if self.context.row.length or self.prompt_length < LONG_PROMPT:
            return True
        share = self.context.unread / self.prompt_length
        self._unread = not self.plan.pays(self._prompt_seconds * share, room)
        return not self._unread

    def _judged(self, room: int, drafted: bool) -> tuple[Proposal, Verdict, Rows, Tensor]:
        """Drafts, reads with the target and judges; (candidates, verdict, processed rows, raw logits)."""
        proposal = self._propose(room - 1) if drafted else Proposal()
        feed = self.ids[self.target.length :] + proposal.ids
        logits = self.target.forward(feed, keep=len(proposal.ids) + 1)
        verifying = time.perf_counter()
        rows: Rows = logits
        if self.processing.processors:
            rows = ProcessedLogits(logits, self.processing, self.ids, proposal.ids, self.eos_ids, self.scores)
        verdict = verify(proposal, rows, self.warping, self.rng, self.method)
        self.target.crop(len(self.ids) + verdict.accepted)
        self.stats.seconds["verify"] += time.perf_counter() - verifying
        return proposal, verdict, rows, logits

    def _readings(self) -> tuple[float, float, int, int]:
        """Seconds of the target and of the drafter so far, and the drafter's forwards and tokens."""
        if self.context is None:
            return self.target.seconds, 0.0, 0, 0
        row = self.context.row
        return self.target.seconds, row.seconds, row.forwards, row.tokens_fed

    def _propose(self, most: int) -> Proposal:
        """Candidates for this step, at most `most` of them."""
        assert self.context is not None
        n = min(self.plan.choose(), most)
        if n < 1:
            return Proposal()
        proposal = self.algorithm.propose(self.context, self.ids[-BEHIND_TOKENS:], n, self.rng)
        # Cutting by count, not by value, is harmless: it is known before anything is drawn.
        if len(proposal.ids) <= most:
            return proposal
        kept = None if proposal.laws is None else proposal.laws[:most]
        return Proposal(proposal.ids[:most], kept)

    def _commit(self, ids: list[int], rows: Rows, logits: Tensor, room: int) -> list[int]:
        """Appends ids one by one, as plain decoding would, up to the first that ends the text."""
        for i, t in enumerate(ids):
            self.ids.append(t)
            if self.scores is not None:
                self.scores.append(rows[i].to(torch.float32, copy=True))
            if self.logits is not None:
                self.logits.append(logits[i].to(torch.float32, copy=True))
            said = rows.said.get(i) if isinstance(rows, ProcessedLogits) else None
            self.stats.stop_reason = self._end(t, i + 1 >= room, said)
            if self.done:
                return ids[: i + 1]
        return ids

    def _end(self, t: int, full: bool, said: str | None) -> str:
        """Why the text ends with its last id `t`; "" if it goes on. `said`: by the criteria, if they were asked."""
        if said is None and self.processing.criteria:
            scores = None if self.scores is None else tuple(s[None] for s in self.scores)
            said = self.processing.stops(self.ids, scores)
        if t in self.eos_ids:
            return "eos"
        if said:
            return said
        if full:
            return "context" if len(self.new_ids) < self.max_new_tokens else "length"
        return ""

    def _settle_times(self) -> None:
        """Brings the counters of the rows into the stats."""
        stats = self.stats
        stats.target_forwards, stats.seconds["target"] = self.target.forwards, self.target.seconds
        if self.context is not None:
            row = self.context.row
            stats.drafter_forwards, stats.drafter_tokens = row.forwards, row.tokens_fed
            stats.seconds["drafter"] = row.seconds
            stats.seconds["align"] = self.context.align_seconds
            stats.unspelled_bytes = self.context.unspelled_bytes
        known = sum(v for k, v in stats.seconds.items() if k != "other")
        stats.seconds["other"] = max(0.0, stats.total_seconds - known)
