"""Int8 weights for the drafter: the fast kernel against its twin, and the target's text untouched."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from hetspec.errors import UnsupportedModel
from hetspec.runtime.generate import Engine
from hetspec.runtime.models import CachedModel
from hetspec.runtime.quantise import Int8Linear, int8_view
from tests.test_runtime import PROMPTS, TinyPair, plain
from tests.toys import tiny_model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 32), (1, 7, 64), (3, 5, 48)])
def test_the_kernel_is_its_twin(shape, bias):
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(shape[-1], 40, bias=bias)
    linear.weight.data[3] = 0  # a row of zeros has a scale all the same
    linear = linear.bfloat16()
    layer = Int8Linear(linear)
    x = torch.randn(shape, generator=generator).bfloat16()
    fast, twin = layer(x).float(), layer.dequantised(x)
    assert fast.shape == twin.shape == (*shape[:-1], 40)
    assert torch.allclose(fast, twin, atol=0.05, rtol=0.02)
    assert torch.allclose(twin, linear.float()(x.float()), atol=0.06)  # a 127th of the largest weight, summed


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "neox"])
def test_a_view_reads_nearly_what_the_model_reads_and_leaves_it_alone(kind):
    model = tiny_model(kind, 96, seed=3).bfloat16()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    if kind == "gpt2":  # its layers are Conv1D; only the head is linear
        assert int8_view(model).lm_head.packed.dtype == torch.int8
    view = int8_view(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    ours, theirs = view(ids).logits.float(), model(ids).logits.float()
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.97
    assert not torch.equal(ours, theirs)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert CachedModel(model, int8=True).weight_bytes < CachedModel(model).weight_bytes


@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_an_int8_drafter_changes_no_token(algorithm):
    pair = TinyPair()
    pair.drafter = pair.drafter.bfloat16()
    options = {"target_tokenizer": pair.target_tokenizer, "drafter_tokenizer": pair.drafter_tokenizer}
    engine = Engine(pair.target, pair.drafter, pair.pair, draft_int8=True, **options)
    assert engine.drafter.model.reader is not pair.drafter
    for prompt in PROMPTS[:3]:
        ids = pair.target_tokenizer.encode(prompt).ids
        out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=20)
        assert out.new_ids == plain(pair.target, ids, 20)


def test_a_pruned_head_in_int8():
    model = tiny_model("llama", 96, seed=3).bfloat16()
    kept = np.arange(3, 60)
    row = CachedModel(model, kept, int8=True).new_row()
    logits = row.forward([5, 6, 7], 1)[0]
    assert torch.isinf(logits[:3]).all()
    assert torch.isinf(logits[60:]).all()
    assert torch.isfinite(logits[3:60]).all()


def test_what_int8_is_not_for():
    for model in (tiny_model("llama", 96, seed=3), copy.deepcopy(tiny_model("llama", 96, seed=3)).float()):
        with pytest.raises(UnsupportedModel, match="int8 weights pay for bfloat16 on the CPU"):
            CachedModel(model, int8=True)
