"""Other layouts of the weights: fast kernels against their twins, and the target's text untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetspec.errors import InvalidInput, UnsupportedModel
from hetspec.runtime import weights as weights_module
from hetspec.runtime.engine import Engine
from hetspec.runtime.models import CachedModel
from hetspec.runtime.weights import (
    WIDE,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    Relaid,
    available_memory,
    lacks_room,
    relaid_view,
)
from tests.test_runtime import PROMPTS, TinyPair, plain
from tests.toys import tiny_model

# What storing the weights may cost a product of unit vectors: their steps, a share of the largest weight.
KINDS = {PackedLinear: 0.0, Int8Linear: 1 / 127, Int4Linear: 1 / 7.5}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (1, 7, 64), (3, 5, 96), (1, WIDE - 1, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_is_its_twin(kind, shape, bias):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(shape[-1], 48, bias=bias)
    linear.weight.data[3] = 0  # a row of zeros has a scale all the same
    linear.weight.data[5] = linear.weight.data[5].abs()  # a row of one sign has its middle elsewhere
    linear = linear.bfloat16()
    layer = kind(linear)
    x = torch.randn(shape, generator=generator).bfloat16()
    stored = layer.dequantised()
    twin = x.float() @ stored.T + (0 if linear.bias is None else linear.bias.float())
    fast = layer(x)
    assert fast.dtype == torch.bfloat16
    assert fast.shape == (*shape[:-1], 48)
    assert torch.allclose(fast.float(), twin, atol=0.03, rtol=0.02)
    largest = float(linear.weight.detach().abs().max())
    assert (stored - linear.weight.float()).abs().max() <= KINDS[kind] * largest + 0.01 * largest * bool(
        KINDS[kind]
    )
    assert layer.packed_bytes <= linear.weight.numel() * 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1536, 1536), (256, 1536), (576, 192), (96, 32)])
def test_packed_weights_give_the_bits_of_the_plain_layer(shape, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(shape[1], shape[0], bias=bias).bfloat16()
    for n in (1, 1, 1, 1, 2, 5, WIDE - 1):
        x = torch.randn(n, shape[1]).bfloat16()
        assert torch.equal(PackedLinear(linear)(x), linear(x))


def test_long_reads_use_the_models_own_layer():
    linear = torch.nn.Linear(64, 48).bfloat16()
    x = torch.randn(1, WIDE, 64).bfloat16()
    for kind in KINDS:
        assert torch.equal(kind(linear)(x), linear(x))


@pytest.mark.parametrize("weights", ["packed", "int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "neox"])
def test_a_view_reads_nearly_what_the_model_reads_and_leaves_it_alone(kind, weights):
    model = tiny_model(kind, 96, seed=3).bfloat16()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    view = relaid_view(model, weights)
    changed = {type(m) for m in view.modules()} & set(KINDS)
    if kind == "gpt2":  # its layers are Conv1D; only the head is linear
        assert changed == {PackedLinear if weights == "packed" else Int8Linear}
    elif weights == "int4":
        assert changed == {Int4Linear, Int8Linear}  # the head stays at eight bits
    ids = torch.tensor([[5, 6, 7, 8]])
    ours, theirs = view(ids).logits.float(), model(ids).logits.float()
    least = 0.95 if weights == "int4" else 0.97
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > least
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    own, relaid = CachedModel(model).weight_bytes, CachedModel(model, weights=weights).weight_bytes
    assert relaid <= own if weights == "packed" else relaid < own


def test_what_a_step_reads_is_counted_once():
    model = tiny_model("llama", 96, seed=3).bfloat16()
    assert CachedModel(model, weights="packed").weight_bytes == CachedModel(model).weight_bytes


@pytest.mark.parametrize("weights", ["own", "packed", "int8", "int4"])
@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_a_relaid_drafter_changes_no_token(algorithm, weights):
    pair = TinyPair()
    pair.drafter = pair.drafter.bfloat16()
    options = {"target_tokenizer": pair.target_tokenizer, "drafter_tokenizer": pair.drafter_tokenizer}
    engine = Engine(pair.target, pair.drafter, pair.pair, draft_weights=weights, **options)
    relaid = any(isinstance(m, Relaid) for m in engine.drafter.model.reader.modules())
    assert relaid == (weights != "own")
    for prompt in PROMPTS[:2]:
        ids = pair.target_tokenizer.encode(prompt).ids
        out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=20)
        assert out.new_ids == plain(pair.target, ids, 20)


@pytest.mark.parametrize("weights", ["packed", "int8", "int4"])
def test_a_pruned_head_is_relaid_too(weights):
    model = tiny_model("llama", 96, seed=3).bfloat16()
    row = CachedModel(model, np.arange(3, 60), weights=weights).new_row()
    logits = row.forward([5, 6, 7], 1)[0]
    assert torch.isinf(logits[:3]).all()
    assert torch.isinf(logits[60:]).all()
    assert torch.isfinite(logits[3:60]).all()


def test_auto_packs_what_can_be_packed():
    wide, half = tiny_model("llama", 96, seed=3), tiny_model("llama", 96, seed=3).bfloat16()
    assert relaid_view(wide, "auto") is wide
    assert any(type(m) is PackedLinear for m in relaid_view(half, "auto").modules())


def test_auto_leaves_a_model_alone_that_would_fill_the_memory(monkeypatch):
    model = tiny_model("llama", 64, seed=1).bfloat16()
    if relaid_view(model, "auto") is model:
        pytest.skip("this processor packs nothing")
    monkeypatch.setattr(
        weights_module, "available_memory", lambda: 2.0 * sum(p.numel() for p in model.parameters())
    )
    assert lacks_room(model)
    assert relaid_view(model, "auto") is model
    assert relaid_view(model, "packed") is not model


def test_available_memory_is_what_linux_says(monkeypatch, tmp_path):
    assert available_memory() > 2**20
    monkeypatch.setattr(weights_module, "Path", lambda name: tmp_path / "nowhere")
    assert available_memory() == float("inf")


@pytest.mark.parametrize("change", ["in place", "storage", "loaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_change_are_laid_out_again(kind, change):
    linear = torch.nn.Linear(64, 48).bfloat16()
    layer, x = kind(linear), torch.ones(1, 64).bfloat16()
    before = layer(x)
    with torch.no_grad():
        if change == "in place":
            linear.weight.mul_(2)
        elif change == "storage":
            linear.weight.data = linear.weight.data * 2
        else:
            linear.load_state_dict({"weight": linear.weight * 2, "bias": linear.bias})
    with torch.inference_mode():
        after = layer(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, kind(linear)(x))


@pytest.mark.parametrize("weights", ["packed", "int8", "int4"])
def test_what_they_are_not_for(weights):
    with pytest.raises(UnsupportedModel, match=f"{weights} weights pay for bfloat16 on the CPU"):
        CachedModel(tiny_model("llama", 96, seed=3), weights=weights)


def test_unknown_weights_and_a_coarse_target_are_refused():
    pair = TinyPair()
    options = {"target_tokenizer": pair.target_tokenizer, "drafter_tokenizer": pair.drafter_tokenizer}
    with pytest.raises(InvalidInput, match="unknown weights 'int3'"):
        Engine(pair.target, pair.drafter, pair.pair, draft_weights="int3", **options)
    with pytest.raises(InvalidInput, match="target_weights is 'int8', which could change the target's law"):
        Engine(pair.target, pair.drafter, pair.pair, target_weights="int8", **options)
