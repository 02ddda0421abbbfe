"""The weights a kernel is shipped with, fitted and tested on a pair's calibration; and its entries, fitted too.

Letters: p target, q drafter, π proposal, θ and λ the weights of the cold mean law and of the kernel (ALGORITHMS §5).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numba
import numpy as np
from scipy import sparse

from hetspec.artifact import Calibration, Contexts, Kernel, PairArtifact, VocabularyMap
from hetspec.errors import InvalidInput
from hetspec.prep.fit import acceptances, as_csr, as_kernel, fit_mixture, interval, map_csr, proposal
from hetspec.runtime.kernels import cold_law

FEWEST_DOCUMENTS = 8  # held-out texts below which an interval over texts says nothing


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
