"""Acceptance on stored contexts and fitted weights, against slow twins and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from hetspec.artifact import Contexts, LawTable
from hetspec.prep import fit, priors, weights
from hetspec.prep.calibrate import as_matrix, table

V_D, V_T = 11, 13


def law_table(random: np.random.Generator, n: int, size: int, entries: int) -> LawTable:
    rows = []
    for _ in range(n):
        ids = np.sort(random.choice(size, entries, replace=False)).astype(np.int32)
        rows.append((ids, (random.dirichlet(np.ones(entries)) * random.uniform(0.8, 1)).astype(np.float32)))
    return table(rows)


def contexts(seed: int, n: int = 12) -> Contexts:
    random = np.random.default_rng(seed)
    return Contexts(
        law_table(random, n, V_T, 8), law_table(random, n, V_D, 6), np.arange(n, dtype=np.int32) // 3
    )


def kernel(seed: int, fill: float = 0.4) -> sparse.csr_array:
    random = np.random.default_rng(seed)
    dense = random.random((V_D, V_T)) * (random.random((V_D, V_T)) < fill)
    dense[2] = 0
    sums = dense.sum(1, keepdims=True)
    return sparse.csr_array(np.divide(dense, sums, out=np.zeros_like(dense), where=sums > 0))


@given(seed=st.integers(0, 1 << 30), pruned=st.booleans())
@settings(max_examples=40)
def test_the_fast_proposal_is_the_plain_one(seed: int, pruned: bool) -> None:
    kept = np.array([0, 3, 4, 9]) if pruned else None
    here, K = contexts(seed), kernel(seed)
    assert np.allclose(fit.proposal(here, K, kept), fit.proposal_plain(here, K, kept), atol=1e-12)


def test_acceptance_is_the_sum_of_minima() -> None:
    here, K = contexts(1), kernel(1)
    pi = fit.proposal_plain(here, K)
    a = fit.acceptances(here.p, pi)
    for c in range(len(here.p)):
        at = slice(here.p.indptr[c], here.p.indptr[c + 1])
        assert a[c] == pytest.approx(np.minimum(here.p.masses[at], pi[at]).sum(), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_cutting_planes_find_the_maximum(seed: int) -> None:
    here = contexts(seed, n=20)
    laws = [fit.proposal(here, kernel(s)) for s in (seed, seed + 100, seed + 200)]
    found = fit.fit_mixture(here.p, laws)

    def value(w: np.ndarray) -> float:
        return float(fit.acceptances(here.p, w @ np.stack(laws)).mean())

    grid = [np.array([a, b, 100 - a - b]) / 100 for a in range(101) for b in range(101 - a)]  # brute force
    best = max(map(value, grid))
    assert found.value == pytest.approx(value(found.weights), abs=1e-9)
    assert found.value >= best - 1e-9
    assert found.bound - found.value <= fit.TOLERANCE
    assert best <= found.bound + 1e-9


def test_a_useless_component_gets_no_weight() -> None:
    here = contexts(3)
    good = fit.proposal(here, kernel(3))
    found = fit.fit_mixture(here.p, [good, np.zeros_like(good)])
    assert found.weights.tolist() == [1.0, 0.0]


def test_the_interval_resamples_documents() -> None:
    # One text of a thousand equal contexts and one other: contexts are not a thousand independent observations.
    values = np.array([1.0] * 1000 + [0.0])
    documents = np.array([0] * 1000 + [1])
    found = fit.interval(values, documents)
    assert found.low == 0.0
    assert found.high == 1.0
    assert fit.interval(np.zeros(0), np.zeros(0, dtype=int)).mean == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_covariances_are_those_of_the_whole_matrix(seed: int) -> None:
    random = np.random.default_rng(seed)
    P = as_matrix(law_table(random, 40, V_T, 6), V_T)
    mean = P.toarray().mean(0)
    rows = np.array([0, 3, 5, 12])
    fast, slow = (
        priors.covariance_rows(P, mean, rows, top=4),
        priors.covariance_rows_plain(P, mean, rows, top=4),
    )
    assert np.allclose(fast[1], slow[1], atol=1e-9)
    assert all(set(a) == set(b) for a, b in zip(fast[0].tolist(), slow[0].tolist(), strict=True))


def test_one_entry_per_row_is_the_diagonal() -> None:
    P = as_matrix(law_table(np.random.default_rng(1), 40, V_T, 6), V_T)
    rows = np.arange(V_T)
    columns, _ = priors.covariance_rows(P, P.toarray().mean(0), rows, top=1)
    assert columns[:, 0].tolist() == rows.tolist()


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=30)
def test_the_fast_gradient_is_the_plain_one(seed: int) -> None:
    here, K = contexts(seed), kernel(seed)
    under = np.random.default_rng(seed).random(len(here.p.ids)) < 0.5
    assert np.allclose(weights._slopes(here, under, K), weights.slopes_plain(here, under, K), atol=1e-12)


def test_a_covariance_row_is_a_softmax_over_its_support() -> None:
    columns, values = np.array([[2, 5, -1], [1, -1, -1]]), np.array([[0.4, 0.1, 0.0], [0.0, 0.0, 0.0]])
    _, shares = priors.covariance_kernel(columns, values, c=0.5)
    e = np.exp(np.array([2.0, 0.5]))
    assert np.allclose(shares[0], [*(e / e.sum()), 0])
    assert shares[1].tolist() == [1, 0, 0]  # no variance: the identity
    commoner = priors.covariance_kernel(np.array([[0, 1, 2]]), np.array([[1e-6, 1e-4, 5e-5]]), c=0.02)[1]
    assert np.allclose(commoner[0], [0, 1, 0])  # covariances above the diagonal are not clipped to a tie
    sharp = priors.covariance_kernel(columns, values, c=1e-4)[1]
    assert np.allclose(sharp[0], [1, 0, 0])  # and no overflow on the way


def test_embedding_rows_are_the_nearest() -> None:
    import torch

    embedding = torch.randn(V_T, 5, generator=torch.Generator().manual_seed(1))
    rows = np.array([4, 0, 12])
    columns, cosines = priors.embedding_rows(embedding, rows, top=3)
    unit = (embedding / embedding.norm(dim=1, keepdim=True)).numpy()
    for x, found, values in zip(rows, columns, cosines, strict=True):
        near = unit @ unit[x]
        assert found[0] == x
        assert found.tolist() == np.argsort(-near)[:3].tolist()
        assert np.allclose(values, np.sort(near)[::-1][:3], atol=1e-6)


def test_fitted_rows_never_do_worse_on_the_texts_set_aside() -> None:
    here, K = contexts(8, n=60), kernel(8)
    found, curve = weights.fit_rows(here, K, iterations=25)
    assert max(curve) > curve[0] + 0.005
    assert np.allclose(found.sum(axis=1)[np.diff(found.indptr) > 0], 1)
    names = np.unique(here.documents)
    aside = np.random.default_rng(0).permutation(names)[: max(1, len(names) // 5)]
    rates = fit.acceptances(here.p, fit.proposal(here, found))
    assert rates[np.isin(here.documents, aside)].mean() == pytest.approx(max(curve))
