"""Priors that need a model: covariance, embedding and mean; mixtures of kernels; the weights they are shipped with.

Kernels over the target's vocabulary are stored composed with the map, one row per drafter id (ALGORITHMS §5).
Letters: p target, q drafter, μ the target's mean law, Ω the covariance of its probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from hetspec.artifact import Calibration, Contexts, Kernel, PairArtifact, VocabularyMap
from hetspec.errors import InvalidInput
from hetspec.prep.fit import acceptances, as_csr, fit_mixture, interval, map_csr, proposal
from hetspec.runtime.kernels import cold_law

BLOCK = 512  # rows computed at a time; N² is never held
TOP = 64  # entries kept per row
SCALES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # s_i = c·Ω_ii is tried with these c
FEWEST_DOCUMENTS = 8  # held-out texts below which an interval over texts says nothing
TEMPERATURES = (0.02, 0.05, 0.1, 0.2)  # of the softmax over cosines


# -- covariance ------------------------------------------------------------------------------------------------


def covariance_rows(
    P: sparse.csr_array,
    mean: np.ndarray,
    rows: np.ndarray,
    *,
    top: int = TOP,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The largest entries of `Ω = PᵀP/n − μμᵀ` in some rows.

    Args:
        P: [n, V_t], target probabilities of n contexts, small ones left out.
        mean: float[V_t], μ.
        rows: int[m], target ids.
        top: entries kept per row; the diagonal is always among them.
        progress: is told the rows done.

    Returns:
        (columns int64[m, top], −1 where there are fewer; Ω float64[m, top]), the diagonal first.
    """
    n = P.shape[0]
    columns = np.full((len(rows), top), -1, dtype=np.int64)
    values = np.zeros((len(rows), top))
    by_token = P.tocsc().astype(np.float64)
    for at in range(0, len(rows), BLOCK):
        block = rows[at : at + BLOCK]
        product = sparse.csr_array(by_token[:, block].T @ P)
        product.sum_duplicates()
        _largest(
            product.indptr.astype(np.int64),
            product.indices.astype(np.int64),
            product.data / n,
            block.astype(np.int64),
            mean.astype(np.float64),
            columns[at : at + BLOCK],
            values[at : at + BLOCK],
        )
        progress(at + len(block))
    return columns, values


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _largest(
    indptr: np.ndarray,
    indices: np.ndarray,
    second: np.ndarray,
    rows: np.ndarray,
    mean: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
) -> None:
    """Writes, for each row, the diagonal and the largest positive covariances in descending order."""
    top = columns.shape[1]
    for r in range(len(rows)):
        x = rows[r]
        size = 1
        columns[r, 0] = x
        for k in range(indptr[r], indptr[r + 1]):
            y = indices[k]
            omega = second[k] - mean[x] * mean[y]
            if y == x:
                values[r, 0] = max(omega, 0.0)
                continue
            if top == 1 or omega <= 0 or (size == top and omega <= values[r, top - 1]):
                continue
            place = size if size < top else top - 1
            while place > 1 and values[r, place - 1] < omega:
                values[r, place] = values[r, place - 1]
                columns[r, place] = columns[r, place - 1]
                place -= 1
            values[r, place] = omega
            columns[r, place] = y
            size = min(size + 1, top)


def covariance_rows_plain(
    P: sparse.csr_array, mean: np.ndarray, rows: np.ndarray, *, top: int = TOP
) -> tuple[np.ndarray, np.ndarray]:
    """The slow twin of `covariance_rows`: the whole matrix, then a sort."""
    dense = P.toarray().astype(np.float64)
    omega = dense.T @ dense / len(dense) - np.outer(mean, mean)
    columns = np.full((len(rows), top), -1, dtype=np.int64)
    values = np.zeros((len(rows), top))
    for r, x in enumerate(rows):
        row = omega[x].copy()
        columns[r, 0], values[r, 0] = x, max(row[x], 0.0)
        row[x] = 0
        order = [y for y in np.argsort(-row, kind="stable") if row[y] > 0][: top - 1]
        columns[r, 1 : 1 + len(order)], values[r, 1 : 1 + len(order)] = order, row[order]
    return columns, values


def covariance_kernel(columns: np.ndarray, values: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """`exp(Ω_ij/s_i)` with `s_i = c·Ω_ii`, normalised over each row's stored entries (reconstruction).

    A row without any variance becomes the identity.

    Returns:
        (columns, weights), as the arguments; weights of missing entries are 0.
    """
    diagonal = values[:, :1]
    largest = values.max(1, keepdims=True)  # the covariance with a commoner token can exceed the diagonal
    scaled = np.divide(values - largest, c * diagonal, out=np.zeros_like(values), where=diagonal > 0)
    weights = np.where(columns >= 0, np.exp(scaled), 0.0)
    weights[(diagonal == 0).ravel(), 1:] = 0
    return columns, weights / weights.sum(1, keepdims=True)


# -- embedding cosine ------------------------------------------------------------------------------------------


def embedding_rows(
    embedding: Tensor,
    rows: np.ndarray,
    *,
    top: int = TOP,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest tokens of some rows by cosine, blocked: N×N is never held.

    Args:
        embedding: [V_t, width], the target's embeddings.
        rows: int[m], target ids.
        top: entries kept per row; the row itself is the first.
        progress: is told the rows done.

    Returns:
        (columns int64[m, top], cosines float64[m, top]).
    """
    unit = torch.nn.functional.normalize(embedding.detach().to("cpu", torch.float32), dim=1)
    top = min(top, len(unit))
    columns = np.zeros((len(rows), top), dtype=np.int64)
    cosines = np.zeros((len(rows), top))
    for at in range(0, len(rows), BLOCK):
        block = torch.from_numpy(rows[at : at + BLOCK].astype(np.int64))
        near = unit[block] @ unit.T
        near[torch.arange(len(block)), block] = 2.0  # first, even among equals
        values, ids = near.topk(top, dim=1)
        columns[at : at + len(block)] = ids.numpy()
        cosines[at : at + len(block)] = values.clamp(max=1.0).numpy()
        progress(at + len(block))
    return columns, cosines


def embedding_kernel(
    columns: np.ndarray, cosines: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of the cosines over each row's stored entries; (columns, weights)."""
    weights = np.exp((cosines - cosines[:, :1]) / temperature)
    return columns, weights / weights.sum(1, keepdims=True)


# -- from rows over T to a kernel over D -------------------------------------------------------------------------


def composed(
    prior: str,
    mapping: VocabularyMap,
    rows: np.ndarray,
    columns: np.ndarray,
    weights: np.ndarray,
    mu: np.ndarray | None,
) -> Kernel:
    """A kernel over the target's vocabulary, composed with the map; rows not computed are the identity.

    Args:
        prior: its name.
        mapping: of the pair.
        rows: int[m], target ids.
        columns, weights: [m, top] of each; columns of −1 are empty.
        mu: the mean law to store with it.
    """
    place = np.full(len(mapping.t2d), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    drafter_ids = np.flatnonzero(mapping.d2t >= 0)
    images = mapping.d2t[drafter_ids]
    computed = place[images] >= 0
    known, others = drafter_ids[computed], drafter_ids[~computed]
    picked = place[images[computed]]
    full = (columns[picked] >= 0) & (weights[picked] > 1e-7)
    triples = (
        np.concatenate([weights[picked][full], np.ones(len(others))]),
        (
            np.concatenate([np.repeat(known, full.sum(1)), others]),
            np.concatenate([columns[picked][full], images[~computed]]),
        ),
    )
    matrix = sparse.csr_array(triples, shape=(len(mapping.d2t), len(mapping.t2d)))
    return as_kernel(prior, matrix, mu)


def as_kernel(prior: str, matrix: sparse.csr_array, mu: np.ndarray | None) -> Kernel:
    """A stored kernel from a sparse matrix, its rows normalised."""
    matrix = sparse.csr_array(matrix)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    sums = np.asarray(matrix.sum(axis=1)).ravel()
    data = matrix.data / np.repeat(sums, np.diff(matrix.indptr))
    return Kernel(
        prior=prior,
        indptr=matrix.indptr.astype(np.int64),
        indices=matrix.indices.astype(np.int32),
        weights=data.astype(np.float32),
        mu=None if mu is None else mu.astype(np.float32),
    )


def mean_kernel(mapping: VocabularyMap, mu: np.ndarray) -> Kernel:
    """The first-order prior: no matrix, only the mean law (O(N) to apply)."""
    empty = sparse.csr_array((len(mapping.d2t), len(mapping.t2d)), dtype=np.float64)
    return as_kernel("mean", empty, mu)


# -- weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitResult:
    """How a kernel was weighted, and what that is worth on texts it has never seen.

    Attributes:
        theta, lam: as shipped; both 0 where the held-out gain is not positive beyond doubt (or the held-out texts
            are too few to tell).
        fitted_theta, fitted_lam: as fitted.
        fit_value, fit_bound: acceptance on the fitted contexts, and proof that no weights do better.
        held_out_rate, held_out_tli_rate: mean acceptance on held-out contexts with the shipped weights, and of TLI.
        gain, gain_low, gain_high: held-out difference of the fitted weights to TLI, 95 % interval over texts.
    """

    theta: float
    lam: float
    fitted_theta: float
    fitted_lam: float
    fit_value: float
    fit_bound: float
    held_out_rate: float
    held_out_tli_rate: float
    gain: float
    gain_low: float
    gain_high: float

    @property
    def helps(self) -> bool:
        """Whether the kernel is worth using."""
        return self.theta + self.lam > 0


def components(
    contexts: Contexts, mapping: VocabularyMap, kernel: Kernel, kept: np.ndarray | None = None
) -> list[np.ndarray]:
    """The laws a kernel is mixed from, at the entries of p: TLI, `q'K` and the cold mean law."""
    width = len(mapping.t2d)
    tli = map_csr(mapping.d2t, width, kept)
    laws = [proposal(contexts, tli, kept)]
    zero = np.zeros_like(laws[0])
    laws.append(proposal(contexts, as_csr(kernel, width), kept) if len(kernel.indices) else zero)
    reached = np.zeros(width, dtype=bool)
    reached[tli.indices] = True
    cold = None if kernel.mu is None else cold_law(kernel.mu, reached)
    laws.append(zero if cold is None else cold.numpy()[contexts.p.ids])
    return laws


def fit_kernel(pair: PairArtifact, kernel: Kernel, kept: np.ndarray | None = None) -> FitResult:
    """Fits `(θ, λ)` of a kernel on the pair's calibration contexts and tests them on the held-out ones.

    Args:
        pair: with a calibration that ran the drafter.
        kernel: as it will be stored.
        kept: drafter ids of a pruned head.

    Raises:
        InvalidInput: the pair has no such calibration.
    """
    calibration = require_contexts(pair)
    mixture = fit_mixture(calibration.fit.p, components(calibration.fit, pair.map, kernel, kept))
    test = np.stack(components(calibration.held_out, pair.map, kernel, kept))
    p, documents = calibration.held_out.p, calibration.held_out.documents
    tli, mixed = acceptances(p, test[0]), acceptances(p, mixture.weights @ test)
    gain = interval(mixed - tli, documents)
    helps = gain.low > 0 and len(np.unique(documents)) >= FEWEST_DOCUMENTS
    _, lam, theta = mixture.weights.tolist()
    return FitResult(
        theta=theta if helps else 0.0,
        lam=lam if helps else 0.0,
        fitted_theta=theta,
        fitted_lam=lam,
        fit_value=mixture.value,
        fit_bound=mixture.bound,
        held_out_rate=float((mixed if helps else tli).mean()),
        held_out_tli_rate=float(tli.mean()),
        gain=gain.mean,
        gain_low=gain.low,
        gain_high=gain.high,
    )


def require_calibration(pair: PairArtifact) -> Calibration:
    """The pair's calibration.

    Raises:
        InvalidInput: there is none.
    """
    if pair.calibration is None:
        raise InvalidInput(
            "the pair has no calibration.",
            f"Make one: hetspec-prep calibrate {pair.target.name} {pair.drafter.name}.",
        )
    return pair.calibration


def require_contexts(pair: PairArtifact) -> Calibration:
    """The pair's calibration, with drafter laws.

    Raises:
        InvalidInput: there is none.
    """
    calibration = require_calibration(pair)
    if not len(calibration.fit.q) or not len(calibration.held_out.q):
        raise InvalidInput(
            "the pair's calibration has no drafter laws.",
            f"Make one with the drafter: hetspec-prep calibrate {pair.target.name} {pair.drafter.name}.",
        )
    return calibration


def weighted(kernel: Kernel, fit: FitResult, *, head: bool = False) -> Kernel:
    """The kernel with the weights of a fit."""
    weights = np.array([fit.theta, fit.lam])
    return dataclasses.replace(kernel, head_fit=weights) if head else dataclasses.replace(kernel, fit=weights)


def best_covariance(
    pair: PairArtifact, P: sparse.csr_array, *, top: int, progress: Callable[[int], None] = lambda _: None
) -> tuple[Kernel, dict[str, float]]:
    """The covariance kernel with the scale c that fits best; (kernel, its knobs)."""
    calibration = require_contexts(pair)
    images = np.unique(pair.map.d2t[pair.map.d2t >= 0])
    rows = images[np.asarray(P.sum(axis=0)).ravel()[images] > 0]
    columns, values = covariance_rows(P, calibration.mean, rows, top=top, progress=progress)
    return _best(pair, "covariance", SCALES, "c", rows, lambda c: covariance_kernel(columns, values, c))


def best_embedding(
    pair: PairArtifact,
    embedding: Tensor,
    *,
    top: int,
    temperature: float | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Kernel, dict[str, float]]:
    """The embedding-cosine kernel; its temperature is fitted where there is a calibration. (kernel, its knobs)"""
    rows = np.unique(pair.map.d2t[pair.map.d2t >= 0])
    embedding = embedding[: pair.target.tokens]  # padding rows stand for nothing
    rows = rows[rows < len(embedding)]
    calibration = pair.calibration
    if calibration is not None and len(
        calibration.fit.q
    ):  # rows the drafter never proposes stay the identity
        used = np.zeros(len(pair.map.d2t), dtype=bool)
        used[calibration.fit.q.ids] = True
        rows = np.intersect1d(rows, pair.map.d2t[used & (pair.map.d2t >= 0)])
    columns, cosines = embedding_rows(embedding, rows, top=top, progress=progress)
    fitted = temperature is None and calibration is not None and len(calibration.fit.q) > 0
    tried = TEMPERATURES if fitted else (temperature or 0.1,)
    return _best(
        pair, "embedding", tried, "temperature", rows, lambda tau: embedding_kernel(columns, cosines, tau)
    )


def _best(
    pair: PairArtifact,
    prior: str,
    knobs: Sequence[float],
    name: str,
    rows: np.ndarray,
    make: Callable[[float], tuple[np.ndarray, np.ndarray]],
) -> tuple[Kernel, dict[str, float]]:
    """The kernel whose knob gives the best fitted acceptance on the contexts for fitting."""
    mu = None if pair.calibration is None else pair.calibration.mean
    found: list[tuple[float, Kernel, float]] = []
    for knob in knobs:
        kernel = composed(prior, pair.map, rows, *make(knob), mu)
        value = 0.0
        if len(knobs) > 1:
            fit = require_contexts(pair).fit
            value = fit_mixture(fit.p, components(fit, pair.map, kernel)).value
        found.append((value, kernel, knob))
    value, kernel, knob = max(found, key=lambda item: item[0])
    return kernel, {name: knob}


def mixture_kernel(pair: PairArtifact) -> tuple[Kernel, dict[str, float]]:
    """All of the pair's kernels in one, each row a mixture of theirs with fitted weights; (kernel, weights by prior).

    Rows that some kernels lack are shared by the others.
    """
    calibration = require_contexts(pair)
    width = len(pair.map.t2d)
    parts = {
        prior: as_csr(kernel, width)
        for prior, kernel in pair.kernels.items()
        if len(kernel.indices) and prior != "mixture"
    }
    if len(parts) < 2:
        raise InvalidInput(
            f"a mixture needs two kernels, the pair has {len(parts)}.", "Build others with --prior first."
        )
    fit = calibration.fit
    laws = [proposal(fit, map_csr(pair.map.d2t, width)), *(proposal(fit, part) for part in parts.values())]
    weights = fit_mixture(fit.p, laws).weights[1:]
    if not weights.sum() > 0:
        weights = np.full(len(parts), 1.0)
    weights = weights / weights.sum()
    total = sparse.csr_array((len(pair.map.d2t), width), dtype=np.float64)
    for weight, part in zip(weights, parts.values(), strict=True):
        total = total + weight * part
    kernel = as_kernel("mixture", total, calibration.mean)
    return kernel, {f"weight_{prior}": float(w) for prior, w in zip(parts, weights, strict=True)}


# -- rows ------------------------------------------------------------------------------------------------------


def fit_rows(
    contexts: Contexts, matrix: sparse.csr_array, *, iterations: int = 60, rate: float = 0.5, seed: int = 0
) -> tuple[sparse.csr_array, list[float]]:
    """Fits the entries of K itself: exponentiated gradients on the concave mean `Σ min(p, normalise(q·K))`.

    A fifth of the texts is set aside, and the iteration that does best on them is returned, so that rows with
    few contexts are not bent to them.

    Args:
        contexts: for fitting.
        matrix: K, [V_d, V_t], rows of sum 1 or empty; its zeros stay zeros.
        iterations: passes over the contexts.
        rate: step size.
        seed: of the split.

    Returns:
        (K, acceptance on the texts set aside after each pass; the first is that of the given K).
    """
    names = np.unique(contexts.documents)
    aside = np.random.default_rng(seed).permutation(names)[: max(1, len(names) // 5)]
    test = np.isin(contexts.documents, aside)
    K = sparse.csr_array(matrix, copy=True).astype(np.float64)
    K.sort_indices()
    rows = np.repeat(np.arange(K.shape[0]), np.diff(K.indptr))
    seen = np.zeros(K.shape[0])
    np.add.at(
        seen, contexts.q.ids, np.where(np.repeat(test, np.diff(contexts.q.indptr)), 0, contexts.q.masses)
    )
    best, curve = K.copy(), []
    for _ in range(iterations + 1):
        pi = proposal(contexts, K)
        rates = acceptances(contexts.p, pi)
        curve.append(float(rates[test].mean()))
        if curve[-1] >= max(curve):
            best = K.copy()
        under = pi < contexts.p.masses
        under[np.repeat(test, np.diff(contexts.p.indptr))] = False
        K.data = K.data * np.exp(rate * _slopes(contexts, under, K) / np.maximum(seen[rows], 1e-3))
        sums = np.asarray(K.sum(axis=1)).ravel()
        K.data = K.data / sums[rows]
    return best, curve


def _slopes(contexts: Contexts, under: np.ndarray, K: sparse.csr_array) -> np.ndarray:
    """`Σ_c q_c(d)·1[π_c(x) < p_c(x)]` at the places of K's entries (d, x), float64[nnz]."""
    out = np.zeros(len(K.indices))
    _add_slopes(
        contexts.p.indptr,
        contexts.p.ids,
        under,
        contexts.q.indptr,
        contexts.q.ids,
        contexts.q.masses.astype(np.float64),
        K.indptr.astype(np.int64),
        K.indices.astype(np.int64),
        K.shape[1],
        out,
    )
    return out


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _add_slopes(
    p_indptr: np.ndarray,
    p_ids: np.ndarray,
    under: np.ndarray,
    q_indptr: np.ndarray,
    q_ids: np.ndarray,
    q_masses: np.ndarray,
    k_indptr: np.ndarray,
    k_columns: np.ndarray,
    columns: int,
    out: np.ndarray,
) -> None:
    wanted = np.zeros(columns, dtype=np.bool_)
    for c in range(len(p_indptr) - 1):
        for entry in range(p_indptr[c], p_indptr[c + 1]):
            wanted[p_ids[entry]] = under[entry]
        for i in range(q_indptr[c], q_indptr[c + 1]):
            for k in range(k_indptr[q_ids[i]], k_indptr[q_ids[i] + 1]):
                if wanted[k_columns[k]]:
                    out[k] += q_masses[i]
        for entry in range(p_indptr[c], p_indptr[c + 1]):
            wanted[p_ids[entry]] = False


def slopes_plain(contexts: Contexts, under: np.ndarray, K: sparse.csr_array) -> np.ndarray:
    """The slow twin of the gradient: one dense outer product per context."""
    total = np.zeros(K.shape)
    for c in range(len(contexts.p)):
        q, wanted = np.zeros(K.shape[0]), np.zeros(K.shape[1])
        at = slice(contexts.q.indptr[c], contexts.q.indptr[c + 1])
        q[contexts.q.ids[at]] = contexts.q.masses[at]
        at = slice(contexts.p.indptr[c], contexts.p.indptr[c + 1])
        wanted[contexts.p.ids[at]] = under[at]
        total += np.outer(q, wanted)
    rows = np.repeat(np.arange(K.shape[0]), np.diff(K.indptr))
    return np.asarray(total[rows, K.indices])


def with_fitted_rows(pair: PairArtifact, kernel: Kernel) -> tuple[Kernel, list[float]]:
    """The kernel with its entries fitted to the pair's calibration; (kernel, acceptance after each pass)."""
    calibration = require_contexts(pair)
    matrix, curve = fit_rows(calibration.fit, as_csr(kernel, len(pair.map.t2d)))
    return dataclasses.replace(as_kernel(kernel.prior, matrix, kernel.mu), counts=kernel.counts), curve
