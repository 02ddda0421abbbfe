"""Passes of several tokens against single steps: in half precision the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hetspec.runtime import attention
from hetspec.runtime.attention import MOST, STEPWISE, target_view
from hetspec.runtime.models import CachedModel
from tests.toys import tiny_model

TEXT = [(7 * i) % 90 + 3 for i in range(205)]
NEW = [5, 9, 17, 33, 44, 55]
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def llama() -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **SHAPE))


def windowed() -> torch.nn.Module:
    config = Gemma3TextConfig(num_hidden_layers=7, head_dim=64, sliding_window=50, **SHAPE)
    return Gemma3ForCausalLM(config)


def pass_and_steps(model: CachedModel) -> tuple[torch.Tensor, torch.Tensor]:
    row = model.new_row()
    row.forward(TEXT, 1)
    steps = torch.cat([row.forward([t], 1) for t in NEW])
    row.crop(len(TEXT))
    return row.forward(NEW, len(NEW)), steps


@pytest.mark.parametrize("make", [llama, windowed])
def test_a_pass_gives_the_bits_of_single_steps(make):
    usual = 0
    for seed in range(3):
        torch.manual_seed(seed)
        model = make().bfloat16().eval()
        together, steps = pass_and_steps(CachedModel(model))
        usual += int((together != steps).sum())
        for weights in ("own", "packed"):
            together, steps = pass_and_steps(CachedModel(model, role="target", weights=weights))
            assert torch.equal(together, steps)
    assert usual  # what there is to mend


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_in_float32_it_computes_what_the_usual_attention_computes(kind, monkeypatch):
    model = tiny_model(kind, 96, seed=3)
    expected, _ = pass_and_steps(CachedModel(model))
    assert target_view(model) is model  # float32 products of several rows differ from single ones anyway
    monkeypatch.setattr(type(model), "dtype", torch.bfloat16)
    view = target_view(model)
    monkeypatch.undo()
    assert view.config._attn_implementation == STEPWISE
    found = CachedModel(model)
    found.reader = view
    assert torch.allclose(pass_and_steps(found)[0], expected, atol=1e-5)


def test_the_model_and_its_configuration_stay_as_they_are():
    model = tiny_model("llama", 96, seed=3).bfloat16()
    view = target_view(model)
    assert model.config._attn_implementation == "sdpa"
    assert view.config is not model.config
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "config"))
    assert view.get_input_embeddings().weight is model.get_input_embeddings().weight


def test_long_passes_are_prompts():
    model = tiny_model("llama", 96, seed=3).bfloat16()
    usual, ours = CachedModel(model).new_row(), CachedModel(model, role="target").new_row()
    for row in (usual, ours):
        row.forward(TEXT, 1)
    new = TEXT[: MOST + 1]
    assert torch.equal(usual.forward(new, len(new)), ours.forward(new, len(new)))


def test_eager_attention_is_left_alone():
    model = tiny_model("llama", 96, seed=3).bfloat16()
    model.set_attn_implementation("eager")
    assert target_view(model) is model


class Rounds(torch.nn.Module):
    """A layer that computes each row by itself, but may change a bit of one output where there are several."""

    def __init__(self, splits):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        )
        self.splits = splits

    def forward(self, x):
        product = torch.stack([(self.weight.double() * row.double()).sum(dim=1) for row in x]).bfloat16()
        if self.splits and len(x) > 1:
            product.view(torch.int16)[0, 0] ^= 1
        return product


def test_layers_that_depend_on_the_rows_beside_are_seen():
    assert not attention.depends_on_rows(Rounds(False), 64, 64)
    assert attention.depends_on_rows(Rounds(True), 64, 64)


def test_such_layers_take_rows_one_by_one_if_all_are_small(monkeypatch):
    model = tiny_model("llama", 96, seed=3).bfloat16()
    down = model.model.layers[0].mlp.down_proj
    shape = (down.in_features, down.out_features, False)
    monkeypatch.setattr(attention, "depends_on_rows", lambda layer, *size: size == shape[:2])
    assert attention.exceptions(model) == {shape}
    view = attention.target_view(model)
    assert type(view.model.layers[0].mlp.down_proj) is attention.RowByRow
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    calls = []
    view.model.layers[0].mlp.down_proj.layer.register_forward_hook(lambda *call: calls.append(call))
    ids = torch.arange(20)[None] % 96
    for n, times in ((1, 1), (5, 5), (20, 1)):
        calls.clear()
        found = view(ids[:, :n]).logits
        assert len(calls) == times
        torch.testing.assert_close(found, model(ids[:, :n]).logits, rtol=0.02, atol=0.02)
    monkeypatch.setattr(attention, "CACHED_BYTES", 16)
    assert attention.exceptions(model) is None


@pytest.mark.parametrize("make", [llama, windowed])
def test_where_bits_cannot_be_had_passes_are_grouped_and_steps_stay(make, monkeypatch):
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    _, plain_steps = pass_and_steps(CachedModel(model))
    monkeypatch.setattr(attention, "exceptions", lambda model: None)
    ours = CachedModel(model, role="target")
    calls = []
    honest = attention.grouped
    monkeypatch.setattr(attention, "grouped", lambda *a: calls.append(a[0].shape[2]) or honest(*a))
    together, steps = pass_and_steps(ours)
    assert torch.equal(steps, plain_steps)
    assert set(calls) == {len(NEW)}
    spread = float((steps.max() - steps.min()).float())
    assert (together - steps).abs().max() < 0.05 * spread


@pytest.mark.parametrize("ours", [attention.stepwise_attention, attention.grouped_attention])
@pytest.mark.parametrize("extra", [{"position_bias": 0.7}, {"is_causal": False}, {"module": False}])
def test_what_only_transformers_knows_is_left_to_it(ours, extra):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = extra.get("module", True), 2
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool).tril(6)
    extra = {k: v for k, v in extra.items() if k != "module"}
    if "position_bias" in extra:
        extra = {"position_bias": extra["position_bias"] * torch.randn(1, 4, 3, 9)}
    mask = mask if "position_bias" in extra else None
    expected, _ = attention.sdpa_attention_forward(module, query, key, value, mask, **extra)
    found, _ = ours(module, query, key, value, mask, **extra)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [1, 17, attention.BLOCK, 2 * attention.BLOCK + 5])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_blocks_of_a_prompt_are_causal_attention(n, scale):
    generator = torch.Generator().manual_seed(n)
    query, key = (torch.randn(2, heads, n, 16, generator=generator) for heads in (6, 2))
    value = torch.randn(2, 2, n, 24, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
    found = attention.blocked(query, key, value, scale)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("weights", ["own", "packed", "int8"])
@pytest.mark.parametrize("make", [llama, windowed])
def test_a_drafter_reads_its_prompt_in_blocks_where_all_is_seen(make, weights, monkeypatch):
    torch.manual_seed(0)
    model = make().bfloat16().eval()
    calls = []
    honest = attention.blocked
    monkeypatch.setattr(attention, "blocked", lambda *a: calls.append(a) or honest(*a))
    drafter = CachedModel(model, role="drafter", weights=weights)
    found = drafter.new_row().forward(TEXT, len(TEXT)).float()
    assert len(calls) == {llama: 3, windowed: 1}[make]  # of Gemma's seven layers one has no window
    usual = CachedModel(model).new_row().forward(TEXT, len(TEXT)).float()
    exact = CachedModel(copy.deepcopy(model).float()).new_row().forward(TEXT, len(TEXT))
    assert (found - exact).abs().mean() < 1.5 * (usual - exact).abs().mean()


def test_a_drafter_with_biased_keys_reads_its_prompt_as_usual(monkeypatch):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **SHAPE)).bfloat16().eval()
    for layer in model.model.layers:  # scores of some thousands, as Qwen2 models have them
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, 0, 20)
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, 0, 20)
    monkeypatch.delattr(attention, "blocked")
    found = CachedModel(model, role="drafter", weights="packed").new_row().forward(TEXT, len(TEXT))
    assert torch.equal(found, CachedModel(model).new_row().forward(TEXT, len(TEXT)))
