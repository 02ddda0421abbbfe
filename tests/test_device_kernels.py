"""The arithmetic of a static step against slow twins, word by word from the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from hetspec.runtime import device_kernels
from tests.kernel_cases import Case, case


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def given(request) -> Case:
    return case(request.param)


def test_redistribution_is_the_product_with_the_matrix(given):
    dense = np.zeros((len(given.q), len(given.columns)))
    for column in range(len(given.columns)):
        for entry in range(given.offsets[column], given.offsets[column + 1]):
            dense[given.rows[entry], column] += float(given.weights[entry])
    expected = given.q.double().numpy() @ dense
    found = device_kernels.redistribute(given.q, given.offsets, given.rows, given.weights)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-7)


def full(given: Case) -> torch.Tensor:
    """π over the whole vocabulary."""
    spread = torch.zeros(len(given.pi), given.p.shape[1], dtype=torch.float64)
    spread[:, given.columns] = given.pi.double()
    return spread


def test_surplus_masses_are_sums_over_the_whole_vocabulary(given):
    spread = full(given)
    k = len(given.pi)
    expected = [float((given.w[j] * given.p[j].double() - spread[j]).clamp(min=0).sum()) for j in range(k)]
    found = device_kernels.surplus_masses(given.p[:k], given.pi, given.columns, given.w[:k])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", range(5))
def test_surplus_race_draws_from_what_is_left(row):
    given = case(torch.float64)
    k = len(given.pi)
    left = given.p[row]
    if row < k:
        left = (given.w[row] * given.p[row] - full(given)[row]).clamp(min=0)
    draws = 4000
    generator = torch.Generator().manual_seed(row)
    counts = np.zeros(len(left))
    for _ in range(draws):
        noise = torch.empty(len(left), dtype=torch.float64).exponential_(generator=generator)
        token = device_kernels.surplus_race(
            given.p, given.pi, given.column_of, given.w, torch.tensor([row]), torch.tensor([k]), noise
        )
        counts[int(token)] += 1
    expected = (left / left.sum()).numpy() * draws
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    pooled = [*expected[common], expected[~common].sum()], [*counts[common], counts[~common].sum()]
    assert chisquare(pooled[1], pooled[0]).pvalue > 1e-4


def test_surplus_race_falls_back_to_the_law_where_nothing_is_left():
    given = case(torch.float64)
    k = len(given.pi)
    noise = torch.empty(given.p.shape[1], dtype=torch.float64).exponential_()
    expected = int((given.p[1] / noise).argmax())
    nothing = given.w * 0
    for w, count in ((nothing, k), (given.w, 1)):  # no surplus; a row that no candidate was proposed for
        token = device_kernels.surplus_race(
            given.p, given.pi, given.column_of, w, torch.tensor([1]), torch.tensor([count]), noise
        )
        assert token.tolist() == [expected]


def test_race_draws_by_the_weights():
    weights = torch.tensor([0.5, 0.0, 0.25, 1e-3, 0.249])
    generator = torch.Generator().manual_seed(3)
    noise = torch.empty(20_000, 5, dtype=torch.float64).exponential_(generator=generator)
    winners = device_kernels.race(weights.expand(20_000, 5), noise)
    counts = np.bincount(winners.numpy(), minlength=5)
    assert counts[1] == 0
    keep = [0, 2, 3, 4]
    assert (
        chisquare(counts[keep], weights.double().numpy()[keep] / float(weights.sum()) * 20_000).pvalue > 1e-4
    )
