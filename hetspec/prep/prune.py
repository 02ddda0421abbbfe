"""Pruning the drafter's LM head: which rows to keep, what that costs in acceptance, what it saves in time.

A head of h rows proposes over the kept ids only; tied input embeddings stay whole, so the drafter still reads
every token (ALGORITHMS §7). Letters: p target, q drafter, H the kept ids, I = T ∩ D.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetspec.artifact import Calibration, Kernel, PairArtifact, PrunedHead
from hetspec.errors import InvalidInput
from hetspec.prep.fit import Interval, acceptances, map_csr, mass_on, proposal
from hetspec.prep.priors import mean_kernel
from hetspec.prep.weights import FitResult, fit_kernel, require_contexts, weighted
from hetspec.runtime.plan import LONGEST
from hetspec.vocab import Vocabulary

if TYPE_CHECKING:
    from hetspec.prep.predict import Costs
    from hetspec.runtime.engine import Engine

SCORES = ("frequency", "generated", "mean", "variance", "overlap", "random")


def scores(name: str, pair: PairArtifact, *, counts: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """How much each drafter id is worth keeping, float64[V_d].

    Args:
        name: "frequency" of drafter tokens in some text (FR-Spec, 2502.14856), "generated": in the calibration
            text where the target wrote that (VocabTrim, 2506.22694), "mean" or "variance" of the target's
            probability of the token's image, "overlap" `E[min(p, q')]` (reconstruction), or "random".
        pair: with a calibration, for all but "frequency" and "random".
        counts: int[V_d], the frequencies; by default those of the calibration text.
        seed: of "random".

    Raises:
        InvalidInput: an unknown name, or the pair lacks what is needed.
    """
    if name not in SCORES:
        raise InvalidInput(f"unknown score {name!r}.", f"Choose one of {', '.join(SCORES)}.")
    if name == "random":
        return np.random.default_rng(seed).random(pair.drafter.rows)
    if name == "frequency" and counts is not None:
        return counts.astype(np.float64)
    calibration: Calibration = require_contexts(pair)
    if name == "generated":
        source = pair.provenance.get("calibrate", {}).get("source")
        if source != "generated":
            raise InvalidInput(
                "the pair was calibrated on text that the target did not write.",
                "Use calibrate --generate, or the score frequency.",
            )
    if name in ("frequency", "generated"):
        return calibration.drafter_counts.astype(np.float64)
    images = pair.map.d2t
    if name == "overlap":
        tli = proposal(calibration.fit, map_csr(images, len(pair.map.t2d)))
        shared = np.bincount(
            calibration.fit.p.ids,
            np.minimum(calibration.fit.p.masses, tli),
            minlength=len(pair.map.t2d),
        )
        by_target = shared / max(1, len(calibration.fit.p))
    else:
        by_target = getattr(calibration, name).astype(np.float64)
    return np.where(images >= 0, by_target[np.maximum(images, 0)], 0.0)


def count_tokens(
    texts: Sequence[str], encode: Callable[[Sequence[bytes]], list[list[int]]], rows: int
) -> np.ndarray:
    """Frequency of each drafter id in texts, int64[rows]."""
    counts = np.zeros(rows, dtype=np.int64)
    for at in range(0, len(texts), 256):
        for ids in encode([text.encode() for text in texts[at : at + 256]]):
            np.add.at(counts, ids, 1)
    return counts


def always_kept(pair: PairArtifact, drafter: Vocabulary) -> np.ndarray:
    """bool[V_d]: end-of-text and end-of-turn ids and single bytes, as far as they lead to a target token."""
    must = np.zeros(pair.drafter.rows, dtype=bool)
    must[[*pair.drafter.eos_ids, *pair.drafter.turn_end_ids]] = True
    must[[d for d, piece in enumerate(drafter.pieces) if len(piece) == 1]] = True
    kept: np.ndarray = must & pair.reachable
    return kept


def choose(score: np.ndarray, size: int, must: np.ndarray, reachable: np.ndarray) -> PrunedHead:
    """The head of `size` rows with the best scores (ties: the lower id), the unavoidable ones among them.

    Args:
        score: float[V_d].
        size: h; raised to the number of unavoidable rows, lowered to that of reachable ones.
        must: bool[V_d], always kept.
        reachable: bool[V_d], ids that lead to a target token; no other is ever kept.
    """
    rank = np.where(must, np.inf, score)
    order = np.lexsort((np.arange(len(score)), -rank))
    order = order[reachable[order]]
    size = int(min(max(size, must.sum(), 1), len(order)))
    return PrunedHead(np.sort(order[:size]).astype(np.int32))


@dataclass(frozen=True)
class CurvePoint:
    """One head size: what it keeps, what it costs, what it should bring.

    Attributes:
        size, share: rows kept, and their share of the head.
        target_mass: mean p(I ∩ H), the ceiling of TLI, on held-out contexts. This and the acceptances leave out the
            tails that the stored laws leave out, so they err on the low side.
        tli: held-out acceptance of TLI.
        rdk: the same of each kernel with weights fitted to this head, by prior.
        gain: of the best of them over TLI, 95 % interval over texts.
        prior: the best kernel where its gain is beyond doubt, "" for TLI.
        head_bytes: of the kept rows; None without a model.
        step_seconds: of a drafter forward, measured; None without a model.
        speedup, draft_length: predicted for the best algorithm at its best length; None without a model.
    """

    size: int
    share: float
    target_mass: float
    tli: float
    rdk: dict[str, float]
    gain: Interval
    prior: str
    head_bytes: int | None
    step_seconds: float | None
    speedup: float | None
    draft_length: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def curve_point(
    pair: PairArtifact,
    head: PrunedHead | None,
    *,
    row_bytes: int,
    step_seconds: float | None = None,
    target_seconds: Sequence[float] = (),
) -> CurvePoint:
    """Measures one head on the held-out contexts.

    Args:
        pair: with a calibration that ran the drafter.
        head: the kept rows; None for the whole head.
        row_bytes: bytes of one row.
        step_seconds: of a drafter forward with this head.
        target_seconds: of a target forward on 1, 2, … tokens; empty without a model.
    """
    calibration = require_contexts(pair)
    kept = None if head is None else head.kept
    width = len(pair.map.t2d)
    tli = map_csr(pair.map.d2t, width, kept)
    reached = np.zeros(width, dtype=bool)
    reached[tli.indices] = True
    held_out = calibration.held_out
    fits = fits_for(pair, kept)
    best = max(fits, key=lambda prior: fits[prior].held_out_rate) if fits else ""
    fit = fits.get(best)
    base = float(acceptances(held_out.p, proposal(held_out, tli, kept)).mean())
    rate = base if fit is None else fit.held_out_rate
    size = pair.drafter.rows if kept is None else len(kept)
    speedup, length = None, None
    if step_seconds is not None and target_seconds:
        speedup, length = best_speedup(rate, step_seconds / target_seconds[0], target_seconds)
    return CurvePoint(
        size=size,
        share=size / pair.drafter.rows,
        target_mass=float(mass_on(held_out.p, reached).mean()),
        tli=base,
        rdk={prior: found.held_out_rate for prior, found in fits.items()},
        gain=Interval(0.0, 0.0, 0.0) if fit is None else Interval(fit.gain, fit.gain_low, fit.gain_high),
        prior=best if fit is not None and fit.helps else "",
        head_bytes=size * row_bytes if row_bytes else None,
        step_seconds=step_seconds,
        speedup=speedup,
        draft_length=length,
    )


def fits_for(pair: PairArtifact, kept: np.ndarray | None) -> dict[str, FitResult]:
    """Weights of every kernel of the pair, and of the mean prior, for one head."""
    return {prior: fit_kernel(pair, kernel, kept) for prior, kernel in _with_mean(pair).items()}


def _with_mean(pair: PairArtifact) -> dict[str, Kernel]:
    """The pair's kernels, and the mean prior of its calibration."""
    return {**pair.kernels, "mean": mean_kernel(pair.map, require_contexts(pair).mean)}


def best_speedup(rate: float, cost: float, target_seconds: Sequence[float]) -> tuple[float, int]:
    """Predicted speed-up over plain decoding at the best draft length (ALGORITHMS §8); (speed-up, length).

    Args:
        rate: acceptance, the same at every position.
        cost: c, a drafter forward in target forwards.
        target_seconds: of a target forward on 1, 2, … tokens.
    """
    best = (1.0, 0)
    for n in range(1, min(LONGEST, len(target_seconds) - 1) + 1):
        tokens = sum(rate**i for i in range(n + 1))
        best = max(best, (tokens / (n * cost + target_seconds[n] / target_seconds[0]), n))
    return best


def pruned_pair(pair: PairArtifact, head: PrunedHead | None) -> PairArtifact:
    """The pair with a pruned head, every kernel re-weighted for it and the mean prior added."""
    fits = fits_for(pair, None if head is None else head.kept)
    bare = {prior: dataclasses.replace(kernel, head_fit=None) for prior, kernel in _with_mean(pair).items()}
    whole = head is None
    if whole:
        bare = {prior: dataclasses.replace(kernel, fit=None) for prior, kernel in bare.items()}
    return dataclasses.replace(
        pair,
        head=head,
        kernels={prior: weighted(kernel, fits[prior], head=not whole) for prior, kernel in bare.items()},
    )


class HeadChooser:
    """Tries heads of several sizes on one pair.

    Args:
        pair: with a calibration that ran the drafter.
        drafter: its vocabulary.
        score: float[V_d], what each id is worth.
        row_bytes: bytes of one row of the head.
        engine: models to time, or None.
    """

    def __init__(
        self,
        pair: PairArtifact,
        drafter: Vocabulary,
        score: np.ndarray,
        *,
        row_bytes: int = 0,
        engine: Engine | None = None,
    ) -> None:
        self.pair, self.engine, self.row_bytes = pair, engine, row_bytes
        self.score = score
        self.must, self.reachable = always_kept(pair, drafter), pair.reachable
        self._points: dict[int, CurvePoint] = {}
        self._times: dict[int, float] = {}
        self._costs: Costs | None = None

    @classmethod
    def of(
        cls,
        pair: PairArtifact,
        *,
        score: str,
        texts: Sequence[str] = (),
        seed: int = 0,
        engine: Engine | None = None,
    ) -> HeadChooser:
        """A chooser with a score by name.

        Args:
            pair: with a calibration that ran the drafter.
            score: one of SCORES.
            texts: for "frequency"; by default the calibration text.
            seed: of "random".
            engine: models to time, or None.
        """
        from hetspec.prep.build import prepare
        from hetspec.sources import hub_commit, load_tokenizer

        if engine is None:
            side = prepare(load_tokenizer(pair.drafter.name, revision=hub_commit(pair.drafter.revision)))
            pair.drafter.require(side.vocabulary, "drafter")
            vocabulary, segmenter, row_bytes = side.vocabulary, side.segmenter, 0
        else:
            assert engine.drafter is not None
            assert engine.drafter.model is not None
            vocabulary, segmenter = engine.drafter.vocabulary, engine.drafter.segmenter
            head = engine.drafter.model.model.get_output_embeddings().weight
            row_bytes = head.shape[1] * head.element_size()
        counts = count_tokens(texts, segmenter.encode_batch, pair.drafter.rows) if texts else None
        values = scores(score, pair, counts=counts, seed=seed)
        return cls(pair, vocabulary, values, row_bytes=row_bytes, engine=engine)

    def sizes(self, listed: str, wanted: str) -> list[int]:
        """Head sizes of the curve, ascending, the whole head last.

        Args:
            listed: sizes with commas; "" halves from the whole head down to a 256th.
            wanted: a size or share to be among them, or "auto".
        """
        rows = self.pair.drafter.rows
        if listed:
            found = [_size(part, rows) for part in listed.split(",")]
        else:
            found = [rows >> shift for shift in range(1, 9)]
        if wanted != "auto":
            found.append(_size(wanted, rows))
        smallest = int(self.must.sum())
        return [*sorted({min(max(size, smallest), rows - 1) for size in found}), rows]

    def head(self, size: int) -> PrunedHead | None:
        """The head of this size; None for the whole one."""
        whole = size >= self.pair.drafter.rows
        return None if whole else choose(self.score, size, self.must, self.reachable)

    def curve(
        self, sizes: Sequence[int], progress: Callable[[int], None] = lambda _: None
    ) -> list[CurvePoint]:
        """A point for every size."""
        points = []
        for done, size in enumerate(sizes, 1):
            points.append(self.point(size))
            progress(done)
        return points

    def point(self, size: int) -> CurvePoint:
        """One point, computed once."""
        if size not in self._points:
            if self.engine is not None and size not in self._times:
                self._time(size)
            self._points[size] = curve_point(
                self.pair,
                self.head(size),
                row_bytes=self.row_bytes,
                step_seconds=self._times.get(size),
                target_seconds=() if self._costs is None else self._costs.target_seconds,
            )
        return self._points[size]

    def pick(self, sizes: Sequence[int], wanted: str) -> int:
        """The size asked for, or that of those tried which predicts the most tokens per second (ties: the smaller)."""
        if wanted != "auto":
            return min(
                max(_size(wanted, self.pair.drafter.rows), int(self.must.sum())), self.pair.drafter.rows
            )
        return max(sizes, key=lambda size: (self.point(size).speedup or 0.0, -size))

    def pair_with(self, size: int) -> PairArtifact:
        """The pair with that head; without one, if all rows are kept."""
        return pruned_pair(self.pair, self.head(size))

    def _time(self, size: int) -> None:
        """Times a head as the decoder reads it, the whole drafter taking turns with it: one copy of it at a time."""
        from hetspec.prep.predict import measure_costs, step_seconds
        from hetspec.runtime.models import CachedModel

        if self.engine is None:
            return
        assert self.engine.drafter is not None
        drafter = self.engine.drafter.model
        assert drafter is not None
        if self._costs is None:
            self._costs = measure_costs(self.engine)
        share = 1.0
        if head := self.head(size):
            pruned = CachedModel(drafter.model, head.kept, weights="auto", role="drafter")
            (whole,), (seconds,) = step_seconds([drafter, pruned], [1], repeats=15)
            share = seconds / whole
        self._times[size] = share * self._costs.drafter_seconds


def _size(text: str, rows: int) -> int:
    """A number of rows, or a share of them ("12.5%")."""
    try:
        size = round(float(text[:-1]) / 100 * rows) if text.endswith("%") else int(text)
    except ValueError:
        raise InvalidInput(
            f"{text!r} is no head size.", "Give rows, a share such as 12.5%, or auto."
        ) from None
    if not 0 < size <= rows:
        raise InvalidInput(f"a head of {size:,} rows, expected 1 to {rows:,}.")
    return size
