"""Predicting, before anything is served, what a pair gains; ranking drafters (ALGORITHMS §8).

A text x drawn from the target's own law is walked through once. Given that text, the first m candidates of a step
are accepted *and* equal to it with probability `G_m = Π_j r_j · w_m`, where `r_j = π_j(x_j)/p_j(x_j)` and
`w_m = min(1, w_{m−1}/r_m)` (block verification), or `Π_j min(1, r_j)` (token verification; a guess: 1 or 0). What
follows then has the target's law again, so the expected number of target passes over the whole text follows exactly,
for every draft length at once (reconstruction). One drafter step per position tells all.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetspec.prep.documents import Document
from hetspec.prep.fit import RESAMPLES, Interval
from hetspec.runtime import laws
from hetspec.runtime.algorithms import BEHIND_TOKENS
from hetspec.runtime.bench import Contestant
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import CachedModel
from hetspec.runtime.options import plain_law
from hetspec.runtime.rng import TorchRng

LENGTHS = tuple(range(1, 9))
SHORT_DRAFT = 3  # drafter tokens of a guess at first: mostly enough to see where it goes wrong
FULL_DRAFT_EVERY = 8  # positions between two whole drafts, which tell the forwards per candidate


# -- walking through a text ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """One text, one algorithm.

    Attributes:
        ratio: float64[L], r_i for laws.
        run: int64[L], for guesses: how many candidates of the draft that begins at i equal the text.
        offered: int64[L], for guesses: how many there were.
        guesses: whether `run` counts, not `ratio`.
    """

    ratio: np.ndarray
    run: np.ndarray
    offered: np.ndarray
    guesses: bool


@dataclass(frozen=True)
class ScoredTexts:
    """Texts the target wrote, and what it thinks of them; the same for every drafter.

    Attributes:
        documents: from `sample_documents`.
        temperature: they were written at; 0 for greedy.
        probabilities: float64[L] by text, `p_i(x_i)`; ones at temperature 0.
        verify_seconds: of one law of the target and a draw from it.
    """

    documents: tuple[Document, ...]
    temperature: float
    probabilities: tuple[np.ndarray, ...]
    verify_seconds: float


def score(engine: Engine, documents: Sequence[Document], temperature: float) -> ScoredTexts:
    """Reads texts with the target once.

    Args:
        engine: of which only the target is used.
        documents: that it wrote at this temperature.
        temperature: 0 for greedy.
    """
    assert engine.target.model is not None
    rng, seconds, probabilities = TorchRng(0), [], []
    for document in documents:
        text = document.ids[document.start :]
        p = np.ones(len(text))
        if temperature > 0:
            rows = engine.target.model.new_row().forward(list(document.ids), keep=len(text) + 1)[:-1]
            for i, (x, row) in enumerate(zip(text, rows, strict=True)):
                started = time.perf_counter()
                law = laws.law(row, Warping(temperature))
                rng.categorical(law)
                seconds.append(time.perf_counter() - started)
                p[i] = float(law[x])
        probabilities.append(p)
    typical = statistics.median(seconds) if seconds else 0.0
    return ScoredTexts(tuple(documents), temperature, tuple(probabilities), typical)


@dataclass(frozen=True)
class Probe:
    """What walking through texts with one algorithm told.

    Attributes:
        walks: by text.
        forwards_per_candidate: f, of whole drafts.
        draft_length: n of the guesses, in drafter tokens.
        overhead_seconds: per candidate, outside the drafter.
        verify_seconds: per candidate, for the target's law and the verdict.
    """

    walks: tuple[Walk, ...]
    forwards_per_candidate: float
    draft_length: int
    overhead_seconds: float
    verify_seconds: float


def probe(
    engine: Engine,
    contestant: Contestant,
    texts: ScoredTexts,
    *,
    draft_length: int = LENGTHS[-1],
    progress: Callable[[int], None] = lambda _: None,
) -> Probe:
    """Walks through texts that the target wrote; only the drafter runs.

    Args:
        engine: models and pair.
        contestant: the algorithm and its options.
        texts: from `score`.
        draft_length: of whole drafts.
        progress: is told the target tokens done.
    """
    sampling = plain_law(texts.temperature)
    walks, done = [], 0
    forwards = candidates = drafted = 0
    outside = 0.0
    for document, p in zip(texts.documents, texts.probabilities, strict=True):
        prompt, text = list(document.ids[: document.start]), document.ids[document.start :]
        decoder = engine.decoder(prompt, seed=0, max_new_tokens=len(text), **sampling, **contestant.options)
        context, rng, ids = decoder.context, TorchRng(0), prompt
        assert context is not None
        ratio, run, offered = (
            np.zeros(len(text)),
            np.zeros(len(text), np.int64),
            np.zeros(len(text), np.int64),
        )
        guesses = decoder.algorithm.name == "slem"
        for i, x in enumerate(text):
            whole = i % FULL_DRAFT_EVERY == 0
            if guesses and not whole and i > 0 and 0 < run[i - 1] < offered[i - 1]:
                # The draft before this one went wrong further on, and would again.
                run[i], offered[i] = run[i - 1] - 1, max(run[i - 1], offered[i - 1] - 1)
            else:
                before, spent, started = context.row.forwards, context.row.seconds, time.perf_counter()
                n = draft_length if whole else SHORT_DRAFT if guesses else 1
                n = min(n, len(text) - i)
                proposal = decoder.algorithm.propose(context, ids[-BEHIND_TOKENS:], n, rng)
                agreed = _equal(proposal.ids, text[i:])
                if (
                    guesses and not whole and agreed == len(proposal.ids)
                ):  # too short to see where it goes wrong
                    context.commit(b"")
                    n = min(draft_length, len(text) - i)
                    proposal = decoder.algorithm.propose(context, ids[-BEHIND_TOKENS:], n, rng)
                    agreed = _equal(proposal.ids, text[i:])
                drafted += len(proposal.ids)
                outside += time.perf_counter() - started - (context.row.seconds - spent)
                if whole and i > 0:  # the first draft also reads the prompt
                    forwards += context.row.forwards - before
                    candidates += len(proposal.ids)
                if guesses:
                    asked = min(draft_length, len(text) - i)
                    run[i], offered[i] = agreed, max(len(proposal.ids), round(len(proposal.ids) * asked / n))
                elif decoder.warping.greedy:
                    ratio[i] = float(agreed > 0)
                elif proposal.laws:
                    ratio[i] = float(proposal.laws[0][x]) / p[i] if p[i] > 0 else 0.0
            ids = [*ids, x]
            context.commit_ids([x], engine.target.vocabulary)
        walks.append(Walk(ratio, run, offered, guesses))
        done += len(text)
        progress(done)
    return Probe(
        walks=tuple(walks),
        forwards_per_candidate=forwards / max(1, candidates),
        draft_length=draft_length,
        overhead_seconds=outside / max(1, drafted),
        verify_seconds=texts.verify_seconds,
    )


def _equal(candidates: Sequence[int], text: Sequence[int]) -> int:
    m = 0
    while m < min(len(candidates), len(text)) and candidates[m] == text[m]:
        m += 1
    return m


def expected_steps(
    walk: Walk, n: int, draft_length: int, method: str = "block"
) -> tuple[float, np.ndarray, np.ndarray]:
    """Expected target passes over one text with draft length n.

    Args:
        walk: the text.
        n: draft length.
        draft_length: that of the whole drafts the walk was made with.
        method: "block" or "token" verification.

    Returns:
        (passes; expected candidates judged and accepted by place in the draft, float64[n at most] each).
    """
    length = len(walk.ratio)
    chances = [_accepted(walk, i, n, draft_length, method) for i in range(length)]
    places = max((len(c) - 1 for c in chances), default=0)
    visits = np.zeros(length + places + 2)  # expected number of steps that begin at i
    judged, accepted = np.zeros(places), np.zeros(places)
    if length:
        visits[0] = 1
    for i in range(length):
        tail = np.cumsum(chances[i][::-1])[::-1]  # Pr[at least m accepted]
        for m, chance in enumerate(chances[i]):
            visits[i + m + 1] += visits[i] * chance
            if m < len(tail) - 1:
                judged[m] += visits[i] * tail[m]
                accepted[m] += visits[i] * tail[m + 1]
    return float(visits[:length].sum()), judged, accepted


def _accepted(walk: Walk, i: int, n: int, draft_length: int, method: str) -> list[float]:
    """Pr[m candidates accepted] of a step that begins at i, m = 0, 1, …"""
    room = len(walk.ratio) - i - 1
    if walk.guesses:
        # A draft of n drafter tokens holds that share of the candidates of the whole draft.
        asked = min(draft_length, room + 1)  # the walk's own drafts were cut there
        offered = min(room, round(int(walk.offered[i]) * min(1.0, n / asked)))
        m = min(int(walk.run[i]), offered)
        return [0.0] * m + [1.0] + [0.0] * (offered - m)
    reached, product, w = [1.0], 1.0, 1.0  # Pr[at least m accepted]
    for r in walk.ratio[i : i + min(n, room)].tolist():
        product *= r
        w = min(1.0, w / r) if r > 0 else 1.0
        reached.append(product * w if method == "block" else reached[-1] * min(1.0, r))
    return [*(a - b for a, b in itertools.pairwise(reached)), reached[-1]]


# -- costs -------------------------------------------------------------------------------------------------------


def step_seconds(
    models: Sequence[CachedModel], sizes: Sequence[int], *, context: int = 128, repeats: int = 7
) -> list[list[float]]:
    """Median seconds of a forward on some numbers of new tokens, the models and sizes taking turns.

    Args:
        models: to be timed.
        sizes: numbers of new tokens.
        context: tokens before them.
        repeats: rounds; the first is a warm-up and does not count.

    Returns:
        by model, by size.
    """
    context = max(1, min(context, *(model.max_length - max(sizes) for model in models)))
    rows = [model.new_row() for model in models]
    for row in rows:
        row.forward([1] * context, keep=1)
    times: list[list[list[float]]] = [[[] for _ in sizes] for _ in models]
    for _ in range(repeats + 1):
        for row, by_size in zip(rows, times, strict=True):
            for size, seen in zip(sizes, by_size, strict=True):
                started = time.perf_counter()
                row.forward([1] * size, keep=size)
                seen.append(time.perf_counter() - started)
                row.crop(context)
    return [[statistics.median(seen[1:]) for seen in by_size] for by_size in times]


@dataclass(frozen=True)
class Costs:
    """What steps take, measured on this machine.

    Attributes:
        target_seconds: of a target forward on 1, 2, …, longest + 1 tokens.
        drafter_seconds: of a drafter forward on one token.
    """

    target_seconds: tuple[float, ...]
    drafter_seconds: float

    @property
    def c(self) -> float:
        """A drafter forward in target forwards."""
        return self.drafter_seconds / self.target_seconds[0]

    def v(self, n: int) -> float:
        """A target forward on n + 1 tokens, in forwards on one."""
        return self.target_seconds[n] / self.target_seconds[0]


def measure_costs(engine: Engine, longest: int = LENGTHS[-1]) -> Costs:
    """Times both models of an engine, taking turns."""
    assert engine.target.model is not None
    assert engine.drafter is not None
    assert engine.drafter.model is not None
    both = step_seconds([engine.target.model, engine.drafter.model], [1, *range(2, longest + 2)])
    return Costs(tuple(both[0]), both[1][0])


# -- the prediction ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What one algorithm should bring on this pair.

    Attributes:
        name: of the contestant.
        acceptance_by_position: at the best draft length, given that all before were accepted.
        forwards_per_candidate: f.
        tokens_per_pass: by draft length, 95 % interval over texts.
        speedup: the same, over plain decoding.
        best_length: the draft length with the largest speed-up; 0 where plain decoding is faster.
    """

    name: str
    acceptance_by_position: tuple[float, ...]
    forwards_per_candidate: float
    tokens_per_pass: dict[int, Interval]
    speedup: dict[int, Interval]
    best_length: int

    @property
    def best_speedup(self) -> float:
        """At the best draft length; 1 for plain decoding."""
        return self.speedup[self.best_length].mean if self.best_length else 1.0

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "best_speedup": self.best_speedup}


def predict(name: str, found: Probe, costs: Costs, *, seed: int = 0) -> Prediction:
    """Tokens per pass and speed-up of one algorithm for every draft length.

    Args:
        name: of the algorithm.
        found: what walking through texts told.
        costs: of the two models.
        seed: of the bootstrap over texts.
    """
    sizes = np.array([len(walk.ratio) for walk in found.walks], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(sizes), (RESAMPLES, len(sizes)))
    tokens: dict[int, Interval] = {}
    speedups: dict[int, Interval] = {}
    positions: dict[int, tuple[float, ...]] = {}
    for n in range(1, len(costs.target_seconds)):
        steps, judged, accepted = zip(
            *(expected_steps(walk, n, found.draft_length) for walk in found.walks), strict=True
        )
        per_text = np.array(steps)
        low, high = np.quantile(sizes[picks].sum(1) / per_text[picks].sum(1), [0.025, 0.975])
        tokens[n] = Interval(float(sizes.sum() / per_text.sum()), float(low), float(high))
        places = max(map(len, judged))
        j, a = (
            np.sum([np.pad(v, (0, places - len(v))) for v in values], axis=0) for values in (judged, accepted)
        )
        positions[n] = tuple(float(x / y) for x, y in zip(a, j, strict=True) if y > 1e-9)
        offered = float(sum(_offered(w, n, found.draft_length) for w in found.walks) / sizes.sum())
        cost = (
            offered
            * (found.forwards_per_candidate * costs.c + found.overhead_seconds / costs.target_seconds[0])
            + costs.v(n)
            + (n + 1) * found.verify_seconds / costs.target_seconds[0]
        )
        speedups[n] = Interval(*(x / cost for x in (tokens[n].mean, tokens[n].low, tokens[n].high)))
    best = max(speedups, key=lambda n: speedups[n].mean)
    return Prediction(
        name=name,
        acceptance_by_position=positions[best],
        forwards_per_candidate=found.forwards_per_candidate,
        tokens_per_pass=tokens,
        speedup=speedups,
        best_length=best if speedups[best].mean > 1 else 0,
    )


def _offered(walk: Walk, n: int, draft_length: int) -> float:
    """Candidates offered by a draft at every position of a text, summed."""
    if walk.guesses:
        return float(walk.offered.sum() * min(1.0, n / draft_length))
    return float(len(walk.ratio) * n)


# -- what really happens -----------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    contestant: Contestant,
    prompts: Sequence[Any],
    *,
    draft_length: int,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Interval:
    """Tokens per target pass while generating, 95 % interval over prompts.

    Args:
        engine: models and pair.
        contestant: the algorithm and its options.
        prompts: others than those predicted from.
        draft_length: fixed.
        temperature: 0 for greedy.
        max_new_tokens: per prompt.
        seed: of the first prompt.
        progress: is told the finished prompts.
    """
    sampling = plain_law(temperature)
    tokens, steps = [], []
    for number, prompt in enumerate(prompts):
        stats = engine.generate(
            prompt,
            num_draft_tokens=draft_length,
            max_new_tokens=max_new_tokens,
            seed=seed + number,
            **sampling,
            **contestant.options,
        ).stats
        tokens.append(stats.new_tokens)
        steps.append(stats.steps)
        progress(number + 1)
    t, s = np.array(tokens, dtype=np.float64), np.array(steps, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(t), (RESAMPLES, len(t)))
    low, high = np.quantile(t[picks].sum(1) / s[picks].sum(1), [0.025, 0.975])
    return Interval(float(t.sum() / s.sum()), float(low), float(high))
