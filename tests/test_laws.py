"""laws and rng: against transformers' warpers, and against statistics with fixed seeds."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetspec.errors import GenerationError, InvalidInput
from hetspec.runtime import laws
from hetspec.runtime.laws import Warping
from hetspec.runtime.rng import TorchRng


def reference(logits, warping):
    """The slow twin: transformers' own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(warping.temperature)])
    if warping.top_k:
        warpers.append(TopKLogitsWarper(warping.top_k))
    if warping.top_p < 1:
        warpers.append(TopPLogitsWarper(warping.top_p))
    if warping.min_p:
        warpers.append(MinPLogitsWarper(warping.min_p))
    return torch.softmax(warpers(None, logits[None])[0], -1)


@pytest.mark.parametrize("size", [5, 1000, 5000])
@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    "warping",
    [
        Warping(1.0),
        Warping(0.7, top_k=3),
        Warping(1.5, top_k=4),
        Warping(1.0, top_p=0.9),
        Warping(2.0, top_p=0.999),
        Warping(1.0, top_p=0.05),
        Warping(1.0, min_p=0.1),
        Warping(0.8, 50, 0.9, 0.02),
    ],
)
def test_law_equals_transformers(size, spread, warping):
    logits = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) * spread
    assert torch.allclose(laws.law(logits, warping), reference(logits, warping), atol=1e-12)


def test_a_flat_law_needs_more_than_the_head():
    """top-p where the nucleus is larger than the partial sort: the slow path is taken and right."""
    logits = torch.linspace(0, 1e-3, 3 * laws.TOP_P_HEAD, dtype=torch.float64)
    assert torch.allclose(
        laws.law(logits, Warping(1.0, top_p=0.9)), reference(logits, Warping(1.0, top_p=0.9)), atol=1e-12
    )


def test_residual_and_acceptance():
    p, pi = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.6, 0.1, 0.1])
    assert torch.allclose(laws.residual(p, pi), torch.tensor([0.75, 0.0, 0.25, 0.0]))
    assert float(laws.acceptance(p, pi)) == pytest.approx(0.6)
    assert torch.equal(laws.residual(p, p), p)


def test_bfloat16_logits_become_float32_laws():
    p = laws.law(torch.randn(100).bfloat16(), Warping(1.0))
    assert p.dtype == torch.float32
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_refused(bad):
    with pytest.raises(GenerationError, match="the drafter"):
        laws.law(torch.tensor([0.0, bad]), Warping(1.0), "the drafter")
    with pytest.raises(GenerationError, match="the target"):
        laws.argmax(torch.tensor([0.0, bad]))


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.1}]
)
def test_warping_checks_its_values(bad):
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        Warping(**bad)


def chi_square(counts, law):
    expected = law.double() / law.double().sum() * counts.sum()
    keep = expected > 0
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()), int(keep.sum()) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_has_its_law(dtype):
    law = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.0, 0.15, 0.1, 0.0], dtype=dtype)
    rng, n = TorchRng(11), 100_000
    counts = torch.bincount(torch.tensor([rng.categorical(law) for _ in range(n)]), minlength=8)
    assert counts[law == 0].sum() == 0
    statistic, freedom = chi_square(counts.double(), law)
    assert statistic < chi2.isf(1e-6, freedom)
    wrong = torch.tensor([0.48, 0.0, 0.22, 0.05, 0.0, 0.15, 0.1, 0.0])
    assert chi_square(counts.double(), wrong)[0] > chi2.isf(1e-6, freedom)  # the test can fail


def test_accept_is_strict():
    rng, n = TorchRng(3), 100_000
    assert not any(rng.accept(0.0) for _ in range(n))
    assert all(rng.accept(1.0) for _ in range(n))
    hits = sum(rng.accept(0.3) for _ in range(n))
    assert abs(hits - 0.3 * n) < 5 * (0.3 * 0.7 * n) ** 0.5


def test_the_same_seed_gives_the_same_draws_and_leaves_the_global_state():
    law, before = torch.ones(50), torch.random.get_rng_state()
    draws = [[rng.categorical(law) for _ in range(20)] for rng in (TorchRng(1), TorchRng(1), TorchRng(2))]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(before, torch.random.get_rng_state())
