"""Decoding by recorded steps (`hetspec.runtime.static_step`): who has which buffers, and the text around the steps.

Where a whole step cannot be recorded, the ordinary `Decoder` runs on the fixed buffers.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import Tensor

from hetspec.errors import InvalidInput
from hetspec.runtime.algorithms import KernelDraft
from hetspec.runtime.decode import Decoder
from hetspec.runtime.laws import Warping
from hetspec.runtime.plan import LONGEST, FixedLength
from hetspec.runtime.rng import TorchRng
from hetspec.runtime.sides import Side
from hetspec.runtime.static import StaticModel, StaticRow
from hetspec.runtime.static_step import CATCH_UP, LENGTHS, Draft, StaticStep, StepSettings
from hetspec.runtime.tools import PairTools
from hetspec.runtime.verify import Proposal, Rows, Verdict

# The tables of an algorithm on the device, by its kernel and whether it looks ahead; the algorithm is kept beside them,
# so that its kernel's id stays its own.
Drafts = dict[tuple[int, bool], tuple[KernelDraft, Draft]]


class StaticPool:
    """The buffers of an engine's models: a set of them for every decoding that is under way at the same time."""

    def __init__(self) -> None:
        self._pairs: list[StaticPair] = []
        self._drafts: Drafts = {}

    def take(self, target: Side, drafter: Side | None, prompt: list[int], new_tokens: int) -> StaticPair:
        """Buffers in which a text of this prompt and so many new tokens has room.

        Args:
            target, drafter: the models; None to decode plainly.
            prompt: target ids.
            new_tokens: at most.
        """
        assert target.model is not None
        total = len(prompt) + new_tokens
        drafted = 0
        if drafter is not None:
            # As many drafter tokens as the prompt takes, in proportion, and a half more; a full window only slides.
            spelled = len(drafter.segmenter.encode(target.vocabulary.spell(prompt)))
            drafted = int(1.5 * total * max(1.0, spelled / len(prompt)))
        for pair in self._pairs:
            if pair.free and pair.holds(total, drafted):
                return pair
        self._pairs = [pair for pair in self._pairs if not pair.free]  # the others are too small
        pair = StaticPair(
            StaticModel(target.model, _rounded(total)),
            None
            if drafter is None or drafter.model is None
            else StaticModel(drafter.model, _rounded(drafted)),
            self._drafts,
        )
        self._pairs.append(pair)
        return pair


def _rounded(length: int) -> int:
    """The next power of two, so that texts of similar lengths share buffers and recorded steps."""
    return max(256, 1 << (length - 1).bit_length())


class StaticPair:
    """The buffers of a target and a drafter and the steps recorded on them; serves one decoding at a time.

    Args:
        target, drafter: the buffers; None to decode plainly.
        drafts: known tables, shared by all pairs of a pool; added to.
    """

    def __init__(self, target: StaticModel, drafter: StaticModel | None, drafts: Drafts) -> None:
        self.target, self.drafter = target, drafter
        self.steps: dict[Any, StaticStep] = {}
        self._drafts = drafts
        self._user: weakref.ref[Decoder] | None = None

    @property
    def free(self) -> bool:
        """Whether no unfinished decoding uses it."""
        user = None if self._user is None else self._user()
        return user is None or user.done

    def holds(self, target_length: int, drafter_length: int) -> bool:
        """Whether texts of these lengths fit."""
        models = [(self.target, target_length)]
        if self.drafter is not None:
            models.append((self.drafter, drafter_length))
        return all(m.capacity >= min(n, m.model.max_length) for m, n in models)

    def rows(self, *, drafting: bool) -> tuple[StaticRow, StaticRow | None]:
        """A new text in the buffers."""
        drafter = self.drafter if drafting else None
        return StaticRow(self.target), None if drafter is None else StaticRow(drafter)

    def decoder(self, options: dict[str, Any], draft_warping: Warping, tools: PairTools | None) -> Decoder:
        """The decoding: by recorded steps where the algorithm and the options allow it, else on fixed buffers only.

        Args:
            options: of `Decoder`, its rows made by `rows`.
            draft_warping: the drafter's.
            tools: of the pair; None to decode plainly.
        """
        algorithm, plan, rng = options["algorithm"], options["plan"], options["rng"]
        whole = (
            (algorithm.name == "none" or isinstance(algorithm, KernelDraft))
            and not options["processing"].processors
            and not options["keep_scores"]
            and not options["keep_logits"]
            and isinstance(rng, TorchRng)
            and (tools is None or self.drafter is None or self.drafter.device == self.target.device)
        )
        if not whole:
            decoder = Decoder(**options)
        else:
            if isinstance(plan, FixedLength) and plan.n > LONGEST:
                raise InvalidInput(
                    f"num_draft_tokens is {plan.n}, a recorded step drafts at most {LONGEST}.", "Draft fewer."
                )
            draft = None
            if tools is not None and isinstance(algorithm, KernelDraft):
                draft = self._draft(algorithm, tools)
            # A generator of its own on the device, seeded by one draw from the request's.
            seed = int(torch.randint(2**62, (), generator=rng.generator))
            decoder = StaticDecoder(
                static=self,
                draft=draft,
                draft_warping=draft_warping,
                seed=seed,
                **options,
            )
        self._user = weakref.ref(decoder)
        return decoder

    def _draft(self, algorithm: KernelDraft, tools: PairTools) -> Draft:
        """Its tables on the device, made once."""
        key = (id(algorithm.kernel), algorithm.look_ahead is not None)
        if key not in self._drafts:
            assert self.drafter is not None
            model = self.drafter.model.model
            dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
            self._drafts[key] = algorithm, Draft(algorithm, tools, self.target.device, dtype)
        return self._drafts[key][1]


class StaticDecoder(Decoder):
    """A decoding by static steps.

    Args:
        static: the buffers; the rows of the decoding must be made of them.
        draft: how to draft; None to decode plainly.
        draft_warping: the drafter's.
        seed: of the draws.
        options: of `Decoder`.
    """

    def __init__(
        self,
        *,
        static: StaticPair,
        draft: Draft | None,
        draft_warping: Warping,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        assert not self.processing.processors
        self.static, self.draft, self._draft_warping = static, draft, draft_warping
        self.generator = None
        if not self.warping.greedy:
            self.generator = torch.Generator(static.target.device)
            self.generator.manual_seed(seed)

    def _judged(self, room: int, drafted: bool) -> tuple[Proposal, Verdict, Rows, Tensor]:
        target = self.target
        assert isinstance(target, StaticRow)
        wanted = self.plan.choose() if self.draft is not None else 0
        if not isinstance(self.plan, FixedLength):
            wanted = next(n for n in reversed(LENGTHS) if n <= wanted)
        pending = self._catch_up(wanted)
        k = wanted if pending else 0
        target.feed(self.ids[target.length : -1])
        started = time.perf_counter()
        draft_start = 0 if self.context is None else self.context.row.length
        step = self._step(k, draft_start + len(pending))
        ids, accepted = step(
            pending, draft_start, self.ids[-1], target.length, min(k, room - 1), self.generator
        )
        candidates = ids[:-1]
        verdict = Verdict([*candidates[:accepted], ids[-1]], accepted)
        target.seconds += time.perf_counter() - started
        target.forwards += 1
        target.tokens_fed += k + 1
        target.length = len(self.ids) + accepted
        if k:
            self._follow(candidates, len(pending), k)
        nothing = torch.empty(0)
        return Proposal(candidates), verdict, nothing, nothing

    def _catch_up(self, k: int) -> list[int]:
        """Drafter ids that the step has to read before it drafts; [] if it cannot draft."""
        if self.context is None or self.draft is None or k < 1:
            return []
        if not self.context.can_read(self.draft.positions(k)):
            return []
        row, ids = self.context.row, self.context.ids
        assert isinstance(row, StaticRow)
        row.crop(len(ids) - 1)
        if len(ids) - row.length > CATCH_UP:
            row.feed(ids[row.length : len(ids) - CATCH_UP])
        return ids[row.length :]

    def _follow(self, candidates: list[int], read: int, k: int) -> None:
        """Brings the drafter's context to where the step has left its buffers."""
        assert self.context is not None
        assert self.draft is not None
        row = self.context.row
        assert isinstance(row, StaticRow)
        row.length += read
        row.forwards += self.draft.reads(k)
        row.tokens_fed += read + self.draft.width * (k - 1) + (k if self.draft.ahead is not None else 0)
        for t in candidates[: k - 1]:
            count = int(self.draft.counts[t])
            if not count or t in self.eos_ids:
                break
            for d in self.draft.tokens[t, :count].tolist():
                self.context.push(d)
            row.length += count

    def _step(self, k: int, draft_length: int) -> StaticStep:
        """The step for this draft length and what the reads must see."""
        static = self.static
        static.target.see(self.target.length + k + 1)
        if static.drafter is not None and k:
            assert self.draft is not None
            static.drafter.see(draft_length + max(CATCH_UP, self.draft.positions(k)))
        visible = (static.target.visible, static.drafter.visible if static.drafter is not None and k else 0)
        settings = StepSettings(k, self.warping, self._draft_warping, self.method, self.eos_ids, visible)
        key = (id(self.draft) if k else 0, settings)
        if key not in static.steps:
            static.steps[key] = StaticStep(
                static.target,
                static.drafter if k else None,
                self.draft if k else None,
                settings,
            )
        return static.steps[key]
