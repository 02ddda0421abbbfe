"""A drafter's fast layers and attention against transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hetspec.runtime.attention import MOST, grouped
from hetspec.runtime.fused import FusedLayer
from hetspec.runtime.models import CachedModel
from hetspec.runtime.weights import Relaid
from tests.test_runtime import PROMPTS, TinyPair

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama with biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu")
    ),
    "a window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=50,
        )
    ),
}
TEXT = [(7 * i) % 90 + 3 for i in range(40)]


class SideBySide(nn.Module):
    """The plain way to compute several layers of the same inputs."""

    def __init__(self, *linears):
        super().__init__()
        self.linears = linears

    def forward(self, x):
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # norms that scale, biases that are not zero
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.6, 0.3)
    return model


def read(model: CachedModel, lengths: list[int]) -> torch.Tensor:
    """A prompt, then reads of these lengths, the last token of each cropped again."""
    row = model.new_row()
    row.forward(TEXT, 1)
    outs = []
    for i, n in enumerate(lengths):
        outs.append(row.forward([(5 * i + j) % 90 for j in range(n)], n))
        row.crop(row.length - 1)
    return torch.cat(outs)


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_layer_computes_what_the_layer_computes(name):
    model = made(name)
    fused = CachedModel(model)
    view = copy.copy(model)
    view._modules = dict(model._modules)
    view._modules["model"] = inner = copy.copy(model.model)
    assert all(map(FusedLayer.fits, model.model.layers))
    layers = nn.ModuleList([FusedLayer(layer, SideBySide) for layer in model.model.layers])
    inner._modules = {**model.model._modules, "layers": layers}
    fused.reader = fused._prompt_reader = view
    lengths = [1, 3, 1, MOST, MOST + 5, 2]
    expected = read(CachedModel(model), lengths)
    assert torch.allclose(read(fused, lengths), expected, atol=3e-5 * float(expected.abs().max()))
    assert not torch.equal(read(fused, lengths), expected)  # it was used


@pytest.mark.parametrize("weights", ["packed", "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_a_drafter_is_read_by_fused_layers(name, weights):
    model = made(name).bfloat16()
    drafter, expected = CachedModel(model, weights=weights, role="drafter"), CachedModel(model)
    assert sum(isinstance(m, FusedLayer) for m in drafter.reader.modules()) == 3
    lengths, least = [1, 4, 1, 20], 0.9 if weights == "int4" else 0.98
    found, own = read(drafter, lengths).float(), read(expected, lengths).float()
    assert torch.nn.functional.cosine_similarity(found, own, dim=-1).mean() > least
    assert drafter.weight_bytes <= expected.weight_bytes
    assert not any(isinstance(m, Relaid) for m in model.modules())


def test_a_batch_with_a_fused_drafter_writes_what_each_row_writes_alone():
    tiny = TinyPair().with_kernel()
    tiny.drafter = tiny.drafter.bfloat16()
    engine = tiny.engine(draft_weights="packed")
    assert any(isinstance(m, FusedLayer) for m in engine.drafter.model.reader.modules())
    for algorithm in ("tli", "slrs"):
        options = {"algorithm": algorithm, "num_draft_tokens": 3, "max_new_tokens": 16}
        outs = engine.generate_batch(PROMPTS[:3], **options)
        assert [o.new_ids for o in outs] == [
            engine.generate(p, algorithm="none", max_new_tokens=16).new_ids for p in PROMPTS[:3]
        ]
        assert all(o.stats.proposed for o in outs)


def test_a_layer_with_an_adapter_or_a_hook_stays_as_it_is():
    layer = made("llama").model.layers[0]
    assert FusedLayer.fits(layer)
    adapted, hooked = copy.deepcopy(layer), copy.deepcopy(layer)
    adapted.self_attn.q_proj = nn.Sequential(adapted.self_attn.q_proj, nn.Identity())
    hooked.mlp.down_proj.register_forward_hook(lambda *call: None)
    assert not FusedLayer.fits(adapted)
    assert not FusedLayer.fits(hooked)
    looking_ahead = made("gemma3").model.layers[0]
    assert FusedLayer.fits(looking_ahead)
    looking_ahead.self_attn.is_causal = False
    assert not FusedLayer.fits(looking_ahead)


@pytest.mark.parametrize(
    "part", ["self_attn.k_proj.weight", "self_attn.k_proj.bias", "input_layernorm.weight"]
)
def test_changed_weights_are_read(part):
    model = made("llama with biases").bfloat16()
    drafter = CachedModel(model, weights="packed", role="drafter")
    before = read(drafter, [1, 3])
    with torch.no_grad():
        model.model.layers[1].get_parameter(part).mul_(1.5)
    after = read(drafter, [1, 3])
    assert not torch.equal(before, after)
    assert torch.equal(after, read(CachedModel(model, weights="packed", role="drafter"), [1, 3]))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("kind", ["none", "bool", "added", "by head", "by row"])
def test_heads_that_share_keys_are_read_together(kind, n):
    generator = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(shape, generator=generator)

    batch, heads, key_heads, m, size = 2, 6, 2, 11, 8
    query, key = some(batch, heads, n, size), some(batch, key_heads, m, size)
    value = some(batch, key_heads, m, 5)  # may have another size
    causal = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    mask = {
        "none": None,
        "bool": (causal & (torch.arange(m) > 2))[None, None],
        "added": torch.where(causal, some(n, m), -torch.inf)[None, None],
        "by head": torch.where(causal, some(1, heads, n, m), -torch.inf),
        "by row": (causal & (torch.arange(m) > torch.tensor([2, 4])[:, None, None]))[:, None],
    }[kind]
    scale = 0.3
    found = grouped(query, key, value, mask, scale)
    for b in range(batch):
        for h in range(heads):
            for j in range(n):
                scores = scale * key[b, h // 3] @ query[b, h, j]
                here = causal if mask is None else mask.expand(batch, heads, n, m)[b, h]
                here = here[j] if mask is not None else causal[j]
                scores = scores.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else scores + here
                expected = torch.softmax(scores, 0) @ value[b, h // 3]
                assert torch.allclose(found[b, j, h], expected, atol=1e-5)
