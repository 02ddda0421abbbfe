"""Acceptance on stored contexts, and the weights of a mixture of proposal laws that maximise it exactly.

Mean `Σ_x min(p, Σ_k w_k π_k)` is concave in the weights (ALGORITHMS §5), so cutting planes find the maximum
over the simplex together with a bound on what is missing. Letters: p target, q drafter, π proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from hetspec.artifact import Contexts, Kernel, LawTable

TOLERANCE = 1e-6  # of the acceptance, proved by the cutting planes
RESAMPLES = 2000


# -- proposal laws on stored contexts --------------------------------------------------------------------------


def as_csr(kernel: Kernel, columns: int) -> sparse.csr_array:
    """A stored kernel as a sparse matrix [V_d, V_t]."""
    shape = (len(kernel.indptr) - 1, columns)
    return sparse.csr_array((kernel.weights.astype(np.float64), kernel.indices, kernel.indptr), shape=shape)


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


def map_csr(images: np.ndarray, columns: int, kept: np.ndarray | None = None) -> sparse.csr_array:
    """The 0/1 matrix of a partial map (−1: none), over the kept drafter ids only if given."""
    rows = np.flatnonzero(images >= 0)
    if kept is not None:
        rows = rows[np.isin(rows, kept)]
    return sparse.csr_array(
        (np.ones(len(rows)), (rows, images[rows])), shape=(len(images), columns), dtype=np.float64
    )


def proposal(contexts: Contexts, matrix: sparse.csr_array, kept: np.ndarray | None = None) -> np.ndarray:
    """`π = normalise(q·K)` at the entries of the target's stored laws, float64[nnz of p].

    What a stored `q` leaves out (its tail) is taken to go nowhere, so acceptances err on the low side.

    Args:
        contexts: with drafter laws.
        matrix: K, [V_d, V_t].
        kept: drafter ids of a pruned head, to which q is restricted and normalised first.
    """
    q = restricted(contexts.q, kept) if kept is not None else contexts.q
    tails = 1 - _row_sums(contexts.q)
    pi: np.ndarray = _proposal(
        contexts.p.indptr,
        contexts.p.ids,
        q.indptr,
        q.ids,
        q.masses.astype(np.float64),
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int64),
        matrix.data,
        np.maximum(tails, 0.0),
        matrix.shape[1],
    )
    return pi


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _proposal(
    p_indptr: np.ndarray,
    p_ids: np.ndarray,
    q_indptr: np.ndarray,
    q_ids: np.ndarray,
    q_masses: np.ndarray,
    k_indptr: np.ndarray,
    k_columns: np.ndarray,
    k_weights: np.ndarray,
    tails: np.ndarray,
    columns: int,
) -> np.ndarray:
    pi = np.zeros(len(p_ids))
    place = np.full(columns, -1, dtype=np.int64)  # target id -> entry of this context's p
    for c in range(len(p_indptr) - 1):
        for entry in range(p_indptr[c], p_indptr[c + 1]):
            place[p_ids[entry]] = entry
        total = 0.0
        for i in range(q_indptr[c], q_indptr[c + 1]):
            for k in range(k_indptr[q_ids[i]], k_indptr[q_ids[i] + 1]):
                mass = q_masses[i] * k_weights[k]
                total += mass
                if place[k_columns[k]] >= 0:
                    pi[place[k_columns[k]]] += mass
        for entry in range(p_indptr[c], p_indptr[c + 1]):
            place[p_ids[entry]] = -1
            if total > 0:
                pi[entry] /= total + tails[c]
    return pi


def proposal_plain(
    contexts: Contexts, matrix: sparse.csr_array, kept: np.ndarray | None = None
) -> np.ndarray:
    """The slow twin of `proposal`: one dense product per context."""
    pi = np.zeros(len(contexts.p.ids))
    for c in range(len(contexts.p)):
        a, b = contexts.q.indptr[c], contexts.q.indptr[c + 1]
        q = np.zeros(matrix.shape[0])
        q[contexts.q.ids[a:b]] = contexts.q.masses[a:b]
        tail = max(0.0, 1 - q.sum())
        if kept is not None:
            outside = np.ones(len(q), dtype=bool)
            outside[kept] = False
            q[outside] = 0
        dense = q @ matrix
        if dense.sum() > 0:
            dense = dense / (dense.sum() + tail)
        a, b = contexts.p.indptr[c], contexts.p.indptr[c + 1]
        pi[a:b] = dense[contexts.p.ids[a:b]]
    return pi


def restricted(law: LawTable, kept: np.ndarray) -> LawTable:
    """Only the entries of these ids; rows are not normalised."""
    inside = np.isin(law.ids, kept)
    sizes = np.concatenate([[0], np.cumsum(inside)])
    return LawTable(sizes[law.indptr].astype(np.int64), law.ids[inside], law.masses[inside])


def _row_sums(law: LawTable) -> np.ndarray:
    running = np.concatenate([[0.0], np.cumsum(law.masses, dtype=np.float64)])
    sums: np.ndarray = running[law.indptr[1:]] - running[law.indptr[:-1]]
    return sums


def mass_on(law: LawTable, inside: np.ndarray) -> np.ndarray:
    """Mass that each law puts on a set of ids, float64[n]; `inside` is bool[V]."""
    kept = np.where(inside[law.ids], law.masses, 0).astype(np.float64)
    running = np.concatenate([[0.0], np.cumsum(kept)])
    return np.asarray(running[law.indptr[1:]] - running[law.indptr[:-1]])


# -- acceptance ----------------------------------------------------------------------------------------------


def acceptances(p: LawTable, pi: np.ndarray) -> np.ndarray:
    """`Σ_x min(p, π)` of every context, float64[n]; `pi` at the entries of p."""
    running = np.concatenate([[0.0], np.cumsum(np.minimum(p.masses, pi), dtype=np.float64)])
    return np.asarray(running[p.indptr[1:]] - running[p.indptr[:-1]])


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def interval(values: np.ndarray, documents: np.ndarray, seed: int = 0) -> Interval:
    """Mean over contexts with a bootstrap over documents (contexts of one text are not independent).

    Args:
        values: float64[n].
        documents: int[n].
        seed: of the resampling.
    """
    if not len(values):
        return Interval(0.0, 0.0, 0.0)
    _, index = np.unique(documents, return_inverse=True)
    sums, sizes = np.bincount(index, values), np.bincount(index)
    if len(sums) < 2:  # one text does not tell how texts differ: the range of its contexts stands in
        return Interval(float(values.mean()), float(values.min()), float(values.max()))
    picks = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[picks].sum(1) / sizes[picks].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


# -- weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Weights of a mixture of laws and the acceptance they reach.

    Attributes:
        weights: float64[K], on the simplex.
        value: mean acceptance with them.
        bound: no other weights reach more than this.
    """

    weights: np.ndarray
    value: float
    bound: float


def fit_mixture(p: LawTable, components: Sequence[np.ndarray], *, tolerance: float = TOLERANCE) -> Mixture:
    """The weights that maximise mean acceptance, by Kelley's cutting planes.

    Args:
        p: target laws of n contexts.
        components: K proposal laws at the entries of p.
        tolerance: largest difference between `bound` and `value` at the end.
    """
    laws = np.stack(components)
    n, size = max(1, len(p)), len(components)

    def value_and_slope(weights: np.ndarray) -> tuple[float, np.ndarray]:
        pi = weights @ laws
        under = pi < p.masses
        return float(np.minimum(p.masses, pi).sum() / n), (laws @ under) / n

    planes: list[tuple[float, np.ndarray]] = []  # acceptance ≤ offset + slope·w
    best = Mixture(np.eye(size)[0], -1.0, 1.0)
    weights = np.full(size, 1 / size)
    starts = [*np.eye(size), weights]
    bound = 1.0
    for step in range(len(starts) + 200):
        weights = starts[step] if step < len(starts) else weights
        value, slope = value_and_slope(weights)
        planes.append((value - float(slope @ weights), slope))
        if value > best.value + 1e-12:  # ties keep the earlier, simpler weights
            best = Mixture(weights, value, bound)
        if step + 1 < len(starts):
            continue
        found = linprog(
            np.concatenate([np.zeros(size), [-1.0]]),
            A_ub=np.array([np.concatenate([-slope, [1.0]]) for _, slope in planes]),
            b_ub=np.array([offset for offset, _ in planes]),
            A_eq=np.array([[1.0] * size + [0.0]]),
            b_eq=[1.0],
            bounds=[(0, None)] * size + [(None, None)],
        )
        bound = min(bound, float(-found.fun))
        if bound - best.value <= tolerance:
            break
        weights = np.clip(found.x[:size], 0, None)
        weights = weights / weights.sum()
    return Mixture(best.weights, best.value, max(bound, best.value))
