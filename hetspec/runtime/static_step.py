"""A whole step on the device: draft, read with the target, judge; the host waits once, for what was committed.

The same step as `hetspec.runtime.decode` with the algorithms none, tli, rdk and slrs (its look-ahead, without healing),
in fixed shapes: a draft that ends early is padded, and how much of it counts is a number on the device. Draws are
exponential races with a generator of the request's own.

Letters: `p` target, `q` drafter, `pi` proposal; V the target's rows, H the target ids a proposal can reach, k drafted.
"""

from __future__ import annotations

import functools
import importlib
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetspec.errors import GenerationError, InvalidInput
from hetspec.runtime import laws
from hetspec.runtime.algorithms import KernelDraft
from hetspec.runtime.decode import Decoder
from hetspec.runtime.kernels import Redistribution, TargetKernel
from hetspec.runtime.laws import Warping
from hetspec.runtime.plan import LONGEST, FixedLength
from hetspec.runtime.rng import TorchRng
from hetspec.runtime.sides import Side
from hetspec.runtime.static import SLACK, Captured, StaticModel, StaticRow
from hetspec.runtime.static_ahead import FixedAhead, spellings
from hetspec.runtime.tools import PairTools
from hetspec.runtime.verify import Proposal, Rows, Verdict

CATCH_UP = 8  # drafter tokens that a step reads before it drafts; more are read ahead of it
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)  # draft lengths that steps are recorded for
TINY = 1e-30


def arithmetic(device: torch.device) -> Any:
    """The functions of `device_kernels`: Triton's on a GPU that has it, else torch's."""
    from hetspec.runtime import device_kernels

    if device.type != "cuda":
        return device_kernels
    try:
        return importlib.import_module("hetspec.runtime.triton_kernels")
    except ImportError:
        return device_kernels


# -- proposal laws -------------------------------------------------------------------------------------------


class Reach:
    """A proposal law on the target ids it can reach, [H]: the `Redistribution` or 0/1 map it is made of, on a device.

    Args:
        proposer: what `KernelDraft` uses.
        kept: ids of a pruned LM head, ascending, or None: q then holds only these.
        device: where q is.
        dtype: of q.
        also: target ids that have a column although the kernel does not reach them.
    """

    def __init__(
        self,
        proposer: TargetKernel | Redistribution,
        kept: np.ndarray | None,
        device: torch.device,
        dtype: torch.dtype,
        also: np.ndarray | None = None,
    ) -> None:
        self.width = proposer.width
        mixed = isinstance(proposer, Redistribution)
        parts: list[tuple[float, TargetKernel]] = [(1.0, proposer)] if not mixed else []  # type: ignore[list-item]
        cold: Tensor | None = None
        if isinstance(proposer, Redistribution):
            identity = max(0.0, 1 - proposer.theta - proposer.lam)
            parts = [(identity, proposer.intersection)] if identity > 0 else []
            if proposer.lam > 0 and proposer.kernel is not None:
                parts.append((proposer.lam, proposer.kernel))
            cold = proposer.cold if proposer.theta > 0 else None
        entries = [_entries(kernel, kept) for _, kernel in parts]
        reached = [columns for _, columns, _ in entries] + ([] if also is None else [also])
        if cold is not None:
            reached.append(np.flatnonzero(cold.numpy() > 0))
        columns = np.unique(np.concatenate(reached))
        self.columns = torch.from_numpy(columns).to(device)
        places = torch.full((self.width,), len(columns), dtype=torch.int64)
        places[torch.from_numpy(columns)] = torch.arange(len(columns))
        self.column_of = places.to(device)
        self._weights = [weight for weight, _ in parts]
        self._entries = [tuple(x.to(device) for x in _by_columns(e, columns, dtype)) for e in entries]
        self._normalise = mixed
        self._cold = None
        if cold is not None and isinstance(proposer, Redistribution):
            self._cold = (proposer.theta * cold[torch.from_numpy(columns)]).to(device, dtype)
        self._arithmetic = arithmetic(device)

    def __call__(self, q: Tensor) -> Tensor:
        """π up to a factor, [H]; as `Proposer.apply`, without a look at a value."""
        pi = torch.zeros_like(self.columns, dtype=q.dtype)
        for weight, entries in zip(self._weights, self._entries, strict=True):
            part: Tensor = self._arithmetic.redistribute(q, *entries)
            pi = pi + part * (weight / part.sum().clamp(min=TINY) if self._normalise else weight)
        return pi if self._cold is None else pi + self._cold


def _entries(kernel: TargetKernel, kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places in q, columns, weights) of the non-zero entries."""
    rows, columns = kernel.rows.numpy(), kernel.columns.numpy()
    weights = kernel.weights.double().numpy()
    inside = weights > 0
    if kept is not None:
        inside &= np.isin(rows, kept)
        rows = np.searchsorted(kept, rows)
    return rows[inside], columns[inside], weights[inside]


def _by_columns(
    entries: tuple[np.ndarray, np.ndarray, np.ndarray], columns: np.ndarray, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, rows, weights): the entries sorted by column."""
    rows, at, weights = entries
    order = np.argsort(at, kind="stable")
    offsets = np.searchsorted(at[order], np.append(columns, np.iinfo(np.int64).max))
    return (
        torch.from_numpy(offsets),
        torch.from_numpy(rows[order].astype(np.int64)),
        torch.from_numpy(weights[order]).to(dtype),
    )


class Draft:
    """What a step needs to draft: a proposal law, and the drafter tokens that spell a candidate.

    Args:
        algorithm: tli, rdk or slrs.
        tools: of the pair.
        device: where the drafter is.
        dtype: of q.
    """

    def __init__(
        self, algorithm: KernelDraft, tools: PairTools, device: torch.device, dtype: torch.dtype
    ) -> None:
        s, kernel = algorithm.settings, algorithm.kernel
        assert isinstance(kernel, TargetKernel | Redistribution)
        self.ahead = None if algorithm.look_ahead is None else FixedAhead(algorithm, tools.kept, device)
        also = None if self.ahead is None else self.ahead.targets
        self.reach = Reach(kernel, tools.kept, device, dtype, also)
        columns = self.reach.columns.cpu().numpy()
        t2d = tools.map.t2d.astype(np.int64)
        self.tokens, self.counts = spellings(t2d, columns, s.target, s.drafter, s.drafter_segmenter)
        self.device_tokens = torch.from_numpy(self.tokens).to(device)
        self.device_counts = torch.from_numpy(self.counts).to(device)

    @property
    def width(self) -> int:
        """Most drafter tokens of a candidate."""
        return int(self.tokens.shape[1])

    def positions(self, k: int) -> int:
        """Most drafter positions that k candidates take, what is looked ahead on included."""
        return k * self.width + (self.ahead is not None)

    def reads(self, k: int) -> int:
        """Drafter forwards for k candidates."""
        return k * (1 if self.ahead is None else 2)


# -- judging -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """The draws of one step, float64: exponential for tokens, uniform for acceptance.

    Attributes:
        drafts: [k, H].
        last: [V].
        uniforms: [k].
    """

    drafts: Tensor
    last: Tensor
    uniforms: Tensor

    def refill(self, generator: torch.Generator) -> None:
        """New draws, in place."""
        for tensor in (self.drafts, self.last):
            # float64: a float32 exponential is 0 once in 2^24 draws and cannot see probabilities below that.
            tensor.exponential_(generator=generator).clamp_(min=1e-300)
        self.uniforms.uniform_(generator=generator)


def judge_greedy(logits: Tensor, ids: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """How many candidates are the target's own argmax, and its token after them.

    Args:
        logits: [k+1, V].
        ids: int64[k].
        count: int64[1], candidates that count.

    Returns:
        int64[1], int64[1].
    """
    best = logits.argmax(dim=-1)
    k = len(ids)
    right = (best[:k] == ids) & (torch.arange(k, device=ids.device) < count)
    accepted = right.long().cumprod(0).sum(0, keepdim=True)
    return accepted, best.index_select(0, accepted)


def judge(
    p: Tensor,
    pi: Tensor,
    places: Tensor,
    count: Tensor,
    reach: Reach,
    noise: Noise,
    method: str,
) -> tuple[Tensor, Tensor]:
    """Token or block verification (`hetspec.runtime.verify`) without a look at a value.

    Args:
        p: [k+1, V], the target's laws.
        pi: [k, H], the laws the candidates were drawn from.
        places: int64[k], the candidates among the columns.
        count: int64[1], candidates that count.
        reach: of the proposal.
        noise: the draws.
        method: "token" or "block".

    Returns:
        int64[1] accepted, int64[1] the token after them.
    """
    k = len(pi)
    steps = torch.arange(k, device=p.device)
    functions = arithmetic(p.device)
    ids = reach.columns[places]
    ratios = p[steps, ids] / pi[steps, places]
    counts = steps < count
    if method == "token":
        w = torch.ones(k + 1, dtype=p.dtype, device=p.device)
        accepted = ((noise.uniforms < ratios) & counts).long().cumprod(0).sum(0, keepdim=True)
    else:
        chain = [torch.ones(1, dtype=p.dtype, device=p.device)]
        for j in range(k):
            chain.append((chain[-1] * ratios[j]).clamp(max=1))
        w = torch.cat(chain)
        # Level i (1..k) wins with probability w_i at the end of the draft, s/(s + 1 − w_i) before it.
        surplus = torch.cat([functions.surplus_masses(p[1:k], pi[1:], reach.columns, w[1:k]), w.new_zeros(1)])
        chance = torch.where(steps + 1 == count, w[1:], surplus / (surplus + 1 - w[1:]))
        wins = (noise.uniforms < chance) & counts
        accepted = torch.where(wins, steps + 1, 0).amax(0, keepdim=True)
    token = functions.surplus_race(p, pi, reach.column_of, w, accepted, count, noise.last)
    return accepted, token


# -- the step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSettings:
    """What a step was recorded for.

    Attributes:
        k: drafted tokens.
        warping, draft_warping: of target and drafter.
        method: of verification.
        ends: ids that end a draft.
        visible: positions that the target's and the drafter's reads see.
    """

    k: int
    warping: Warping
    draft_warping: Warping
    method: str
    ends: frozenset[int]
    visible: tuple[int, int]


class StaticStep:
    """One recorded step.

    Args:
        target: the target's buffers.
        drafter: the drafter's, on the same device; None with k = 0.
        draft: how to draft; None with k = 0.
        settings: what it is recorded for.
    """

    def __init__(
        self,
        target: StaticModel,
        drafter: StaticModel | None,
        draft: Draft | None,
        settings: StepSettings,
    ) -> None:
        self.target, self.drafter, self.draft = target, drafter, draft
        self.settings = settings
        device, k = target.device, settings.k
        self._given = torch.zeros(CATCH_UP + 5, dtype=torch.int64)
        self._answer = torch.zeros(k + 4, dtype=torch.int64)
        if device.type == "cuda":
            self._given, self._answer = self._given.pin_memory(), self._answer.pin_memory()
        self._inputs = self._given.to(device)
        self._output = self._answer.to(device)
        self.noise: Noise | None = None
        if not settings.warping.greedy:
            columns = 0 if draft is None else len(draft.reach.columns)
            sizes = ((k, columns), (target.model.rows,), (k,))
            self.noise = Noise(*(torch.ones(size, dtype=torch.float64, device=device) for size in sizes))
        ends = torch.zeros(target.model.rows, dtype=torch.bool)
        ends[list(settings.ends)] = True
        self._ends = ends.to(device)
        self._call = Captured(self._body, device)

    def __call__(
        self,
        pending: list[int],
        draft_start: int,
        last: int,
        target_start: int,
        limit: int,
        generator: torch.Generator | None,
    ) -> tuple[list[int], int]:
        """Makes the step; the one place where the host waits.

        Args:
            pending: 1 to CATCH_UP drafter ids to read first; [] with k = 0.
            draft_start: position of the first of them.
            last: the last committed target id, not read yet.
            target_start: its position.
            limit: candidates that may count.
            generator: of the draws.

        Returns:
            The candidates that counted and then the token after the accepted ones; how many were accepted.

        Raises:
            GenerationError: logits that are not finite.
        """
        if self.noise is not None:
            assert generator is not None
            self.noise.refill(generator)
        padded = (pending or [0]) + (pending[-1:] or [0]) * (CATCH_UP - max(1, len(pending)))
        self._given.copy_(
            torch.tensor([*padded, max(1, len(pending)), draft_start, last, target_start, limit])
        )
        self._inputs.copy_(self._given, non_blocking=True)
        self._call()
        self._answer.copy_(self._output, non_blocking=True)
        if self.target.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            done.synchronize()
        accepted, proposed, finite, *ids, token = self._answer.tolist()
        for whose, bit in (("the target", 1), ("the drafter", 2)):
            if not finite & bit:
                raise GenerationError(
                    f"the logits of {whose} are not finite (NaN or infinity).",
                    "Check the weights, or load the model in float32.",
                )
        return [*ids[:proposed], token], accepted

    def _body(self) -> None:
        """Draft, read, judge: nothing here asks a tensor for a value."""
        s = self.settings
        if self.drafter is not None:
            self.drafter.visible = s.visible[1]
        self.target.visible = s.visible[0]
        pending = self._inputs[:CATCH_UP]
        count, draft_start, last, target_start, limit = self._inputs[CATCH_UP:, None]
        with torch.inference_mode():
            ids, places, pi, proposed, drafter_finite = self._draft(pending, count, draft_start, limit)
            tokens = torch.cat([last, ids])
            positions = target_start + torch.arange(s.k + 1, device=self.target.device)
            logits = self.target.read(tokens, positions, s.k + 1)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            if s.warping.greedy:
                accepted, token = judge_greedy(wide, ids, proposed)
            else:
                p = self._law(wide, s.warping)
                assert self.noise is not None
                if s.k:
                    assert self.draft is not None
                    accepted, token = judge(p, pi, places, proposed, self.draft.reach, self.noise, s.method)
                else:
                    token = arithmetic(p.device).race(p, self.noise.last)
                    accepted = torch.zeros_like(token)
            judged = torch.arange(s.k + 1, device=wide.device) <= accepted
            finite = (wide.amax(dim=-1).isfinite() | ~judged).all()[None].long()
            self._output.copy_(torch.cat([accepted, proposed, finite + 2 * drafter_finite, ids, token]))

    def _draft(
        self, pending: Tensor, count: Tensor, start: Tensor, limit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """k candidates; (ids [k], their columns [k], laws [k, H], how many count [1], drafter's logits finite [1])."""
        s, device = self.settings, self.target.device
        one = torch.ones(1, dtype=torch.int64, device=device)
        if self.drafter is None or self.draft is None or not s.k:
            nothing = one[:0]
            return nothing, nothing, torch.zeros(0, 0, device=device), one * 0, one
        drafter, draft, reach = self.drafter, self.draft, self.draft.reach
        going, proposed, finite = limit > 0, one * 0, one.bool()
        ids, places, rows = [], [], []

        def law(tokens: Tensor, at: Tensor, last: Tensor) -> Tensor:
            """q after one of the tokens, which stand at `at` and on."""
            nonlocal finite
            logits = drafter.read(tokens, at + torch.arange(len(tokens), device=device), last)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            finite = finite & (wide.amax().isfinite() | ~going)
            return self._law(wide, s.draft_warping)[0]

        tokens, at = pending, start
        for j in range(s.k):
            q = law(tokens, at, count - 1)
            at = at + count
            if draft.ahead is None:
                pi = reach(q)
            else:
                # What is looked ahead on is overwritten by the spelling of the candidate, often the same token.
                following = functools.partial(law, at=at, last=one * 0)
                pi = draft.ahead.law(q, following, reach, reach.column_of)
            total = pi.sum()
            pi = laws.truncate(pi / total.clamp(min=TINY), s.warping, head=len(pi))
            place = self._drawn(pi, j)
            t = reach.columns[place]
            going = going & (total > 0) & (j < limit)
            proposed = proposed + going
            tokens, count = draft.device_tokens[t].view(-1), draft.device_counts[t]
            going = going & (count > 0) & ~self._ends[t]
            count = count.clamp(min=1)
            ids.append(t)
            places.append(place)
            rows.append(pi)
        return torch.cat(ids), torch.cat(places), torch.stack(rows), proposed, finite.long()

    def _drawn(self, pi: Tensor, j: int) -> Tensor:
        """The place of candidate j, int64[1]."""
        if self.noise is None:
            return pi.argmax(dim=0, keepdim=True)
        drawn: Tensor = arithmetic(pi.device).race(pi, self.noise.drafts[j])
        return drawn.view(1)

    @staticmethod
    def _law(wide: Tensor, warping: Warping) -> Tensor:
        """As `laws.law`, without its look at the values."""
        law = torch.softmax(wide / warping.temperature, dim=-1)
        return laws.truncate(law, warping, head=law.shape[-1])


# -- decoding ------------------------------------------------------------------------------------------------


class StaticPool:
    """The buffers of an engine's models: a set of them for every decoding that is under way at the same time."""

    def __init__(self) -> None:
        self._pairs: list[StaticPair] = []

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
        )
        self._pairs.append(pair)
        return pair


def _rounded(length: int) -> int:
    """The next power of two, so that texts of similar lengths share buffers and recorded steps."""
    return max(256, 1 << (length - 1).bit_length())


class StaticPair:
    """The buffers of a target and a drafter and the steps recorded on them; serves one decoding at a time."""

    def __init__(self, target: StaticModel, drafter: StaticModel | None) -> None:
        self.target, self.drafter = target, drafter
        self.steps: dict[Any, StaticStep] = {}
        self._drafts: dict[tuple[int, bool], tuple[KernelDraft, Draft]] = {}
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
        """Its tables on the device, made once; the algorithm is kept beside them, so that its kernel's id stays its."""
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


assert CATCH_UP <= SLACK
assert LENGTHS[-1] == LONGEST < SLACK
