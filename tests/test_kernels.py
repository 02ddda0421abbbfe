"""Redistributed laws and pruned heads against their slow, obvious twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetspec.errors import UnsupportedModel
from hetspec.runtime.kernels import Redistribution, TargetKernel, cold_law
from hetspec.runtime.models import CachedModel, with_pruned_head
from tests.toys import tiny_model

V_D, V_T = 7, 9


def dense(kernel: TargetKernel) -> np.ndarray:
    matrix = np.zeros((V_D, V_T))
    np.add.at(matrix, (kernel.rows.numpy(), kernel.columns.numpy()), kernel.weights.double().numpy())
    return matrix


@given(seed=st.integers(0, 1 << 30), theta=st.floats(0, 0.5), lam=st.floats(0, 0.5))
def test_redistribution_is_the_formula(seed: int, theta: float, lam: float) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(-1, V_T, V_D)
    images[0] = 0
    intersection = TargetKernel.from_map(images, V_T)
    filled = random.random((V_D, V_T)) * (random.random((V_D, V_T)) < 0.4)
    filled[0, 0] = 0.5
    kernel = TargetKernel(*np.nonzero(filled), filled[np.nonzero(filled)], V_T)
    reached = np.zeros(V_T, dtype=bool)
    reached[images[images >= 0]] = True
    cold = cold_law(random.dirichlet(np.ones(V_T)), reached)
    q = random.dirichlet(np.ones(V_D))

    pi = Redistribution(intersection, kernel, cold, theta, lam).apply(torch.from_numpy(q)).numpy()

    tli, through = q @ dense(intersection), q @ filled
    expected = lam * through / through.sum()
    if cold is None:
        expected += (1 - lam) * tli / tli.sum()
    else:
        expected += (1 - theta - lam) * tli / tli.sum() + theta * cold.numpy()
        assert not (cold.numpy() * reached).any()
    assert np.allclose(pi, expected, atol=1e-14)
    assert abs(pi.sum() - 1) < 1e-12


def test_a_part_without_mass_leaves_it_to_the_others() -> None:
    intersection = TargetKernel.from_map(np.array([2, -1, -1, -1, -1, -1, -1]), V_T)
    empty = TargetKernel(np.array([1]), np.array([3]), np.array([1.0]), V_T)
    q = torch.zeros(V_D, dtype=torch.float64)
    q[0] = 1
    pi = Redistribution(intersection, empty, None, 0.0, 0.4).apply(q)
    assert torch.equal(pi / pi.sum(), torch.eye(V_T, dtype=torch.float64)[2])


KEPT = np.array([0, 3, 7, 8, 20, 31])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pruned_head_gives_the_kept_logits(kind: str, tied: bool) -> None:
    model = tiny_model(kind, 40, seed=1)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if kind == "gemma3":
        model.config.final_logit_softcapping = 3.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, pruned = CachedModel(model).new_row(), CachedModel(model, KEPT).new_row()
    for ids, keep in (([1, 2, 39, 5], 2), ([30], 1)):
        expected, logits = whole.forward(ids, keep), pruned.forward(ids, keep)
        assert logits.shape == (keep, 40)
        assert torch.allclose(logits[:, KEPT], expected[:, KEPT], atol=1e-12)
        others = np.setdiff1d(np.arange(40), KEPT)
        assert torch.isneginf(logits[:, others]).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model(torch.tensor([[1]])).logits.shape[-1] == 40
    assert CachedModel(model, KEPT).weight_bytes == CachedModel(model).weight_bytes - 34 * 32 * 8


def test_a_quantised_head_is_refused_by_name() -> None:
    model = tiny_model("llama", 40, seed=1).float()
    model.set_output_embeddings(torch.ao.nn.quantized.dynamic.Linear(32, 40))
    with pytest.raises(UnsupportedModel, match="not a plain linear layer"):
        with_pruned_head(model, torch.from_numpy(KEPT))
