"""A whole step on the device: draft, read with the target, judge; the host waits once, for what was committed.

The same step as `hetspec.runtime.decode` with the algorithms none, tli, rdk and slrs (its look-ahead, without healing),
in fixed shapes: a draft that ends early is padded, and how much of it counts is a number on the device. Draws are
exponential races with a generator of the request's own.

Letters: `p` target, `q` drafter, `pi` proposal; V the target's rows, H the target ids a proposal can reach, k drafted.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetspec.errors import GenerationError
from hetspec.runtime import laws
from hetspec.runtime.algorithms import KernelDraft
from hetspec.runtime.kernels import Redistribution, TargetKernel
from hetspec.runtime.laws import Warping
from hetspec.runtime.plan import LONGEST
from hetspec.runtime.static import SLACK, Captured, StaticModel
from hetspec.runtime.static_ahead import FixedAhead, looked_ahead_on, spellings
from hetspec.runtime.tools import PairTools

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
        wanted = looked_ahead_on(algorithm)
        self.ahead = FixedAhead(algorithm, wanted, tools.kept, device) if wanted.any() else None
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


assert CATCH_UP <= SLACK
assert LENGTHS[-1] == LONGEST < SLACK
