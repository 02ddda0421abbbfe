"""Priors that need a model: covariance, embedding and mean; and mixtures of kernels.

Kernels over the target's vocabulary are stored composed with the map, one row per drafter id (ALGORITHMS §5).
Letters: p target, q drafter, μ the target's mean law, Ω the covariance of its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from hetspec.artifact import Kernel, PairArtifact, VocabularyMap
from hetspec.errors import InvalidInput
from hetspec.prep.fit import as_csr, as_kernel, fit_mixture, map_csr, proposal
from hetspec.prep.weights import components, require_contexts

BLOCK = 512  # rows computed at a time; N² is never held
TOP = 64  # entries kept per row
SCALES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # s_i = c·Ω_ii is tried with these c
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


def mean_kernel(mapping: VocabularyMap, mu: np.ndarray) -> Kernel:
    """The first-order prior: no matrix, only the mean law (O(N) to apply)."""
    empty = sparse.csr_array((len(mapping.d2t), len(mapping.t2d)), dtype=np.float64)
    return as_kernel("mean", empty, mu)


# -- the best knob ----------------------------------------------------------------------------------------------


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
