"""Which models may be target or drafter: what can be cropped, and what is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from hetspec.errors import UnsupportedModel
from hetspec.runtime import models
from hetspec.runtime.models import CachedModel, ModelRow
from tests.test_runtime import PROMPTS, TinyPair, plain
from tests.toys import tiny_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What the field's tools have generated garbage with (BUGS A11, D16), and models that look ahead.
UNUSABLE = {
    "mamba": ({"state_size": 4}, "linear_attention"),
    "mamba2": ({"state_size": 4, "num_heads": 8, "head_dim": 8}, "linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "rwkv": ({"attention_hidden_size": 32}, "cannot be cropped"),
    "bert": ({}, "does not forget"),
    "roberta": ({}, "does not forget"),
    "openai-gpt": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, "no KV cache"),
    "t5": ({"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
}


@pytest.mark.parametrize("kind", list(UNUSABLE))
def test_models_that_cannot_be_cropped_are_refused_by_name(kind):
    extra, message = UNUSABLE[kind]
    config = transformers.AutoConfig.for_model(kind)
    for name, value in {**SIZES, **extra}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
    for p in model.parameters():
        p.data *= 6 if p.ndim > 1 else 1  # as strong as trained weights
    with pytest.raises(UnsupportedModel, match=message):
        CachedModel(model)


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "gemma3", "mistral", "bloom", "mpt", "opt", "gemma2", "neox", "mixtral"]
)
def test_a_cropped_cache_is_a_fresh_one(kind):
    model = CachedModel(tiny_model(kind, 96, seed=5))
    row = model.new_row()
    text = [(5 + 3 * i) % 96 for i in range(24)]
    row.forward(text, 1)
    row.forward([7, 8, 9, 10], 4)
    for cut, more in ((25, [11, 12]), (20, [33]), (3, [44, 45, 46])):
        row.crop(cut)
        text = [*text[:24], 7, 8, 9, 10][:cut] if cut > 24 else text[:cut]
        text = [*text, *more]
        fresh = model.model(torch.tensor([text])).logits[0, -len(more) :]
        assert torch.allclose(row.forward(more, len(more)), fresh, atol=1e-6)


def test_the_probe_sees_a_crop_that_does_nothing(monkeypatch):
    model = tiny_model("llama", 96, seed=5)

    def forgetful(row, length):
        row.length = length

    monkeypatch.setattr(ModelRow, "crop", forgetful)
    with pytest.raises(UnsupportedModel, match="does not forget"):
        CachedModel(model)


def test_the_probe_sees_a_window_cropped_wrongly(monkeypatch):
    """A cache with the model's own windows: after a crop its last positions are gone (BUGS A10)."""

    class Recurrent(torch.nn.Module):
        """Adds a running mean of everything it has ever read: a state."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.total = inner, 0.0

        def forward(self, x, *args, **kwargs):
            self.total = self.total + x.mean()
            return self.inner(x, *args, **kwargs) + self.total

    model = tiny_model("llama", 96, seed=5)
    model.model.layers[1].mlp = Recurrent(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="does not forget"):
        CachedModel(model)


def test_a_model_is_probed_once(monkeypatch):
    model = tiny_model("llama", 96, seed=5)
    CachedModel(model)
    monkeypatch.setattr(models.CachedModel, "_probe", lambda self: pytest.fail("probed again"))
    CachedModel(model)


# -- quantised models ---------------------------------------------------------------------------------------------


class Int8Linear(torch.nn.Module):
    """Weights in int8, activations as they are; packs its weight where nobody else looks for it (BUGS N22)."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        self.register_buffer("scale", linear.weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("packed", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.packed.to(x.dtype) * self.scale.to(x.dtype)).T


def weight_only(model):
    """Every linear layer in int8, the head among them."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


def dynamic(model):
    """Int8 weights and activations, torch's own."""
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(copy.deepcopy(model).float(), {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("sides", [("target",), ("drafter",), ("target", "drafter")], ids="+".join)
@pytest.mark.parametrize("quantised", [weight_only, dynamic])
@pytest.mark.filterwarnings("ignore")
def test_quantised_targets_and_drafters(sides, quantised):
    pair = TinyPair()
    for side in sides:
        setattr(pair, side, quantised(getattr(pair, side)))
    engine = pair.engine()
    assert engine.target.model.rows == 432
    assert engine.drafter.model.rows == 336
    assert engine.drafter.model.quantised == ("drafter" in sides and quantised is dynamic)
    for prompt in PROMPTS[:4]:
        ids = pair.target_tokenizer.encode(prompt).ids
        expected = plain(pair.target, ids, 20)
        for algorithm in ("slem", "tli", "slrs"):
            out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=20)
            assert out.stats.proposed > 0
            # Activations quantised by what is read with them make a target's own text depend on the draft length.
            if quantised is weight_only or "target" not in sides:
                assert out.new_ids == expected


@pytest.mark.parametrize("sides", [("target",), ("drafter",), ("target", "drafter")], ids="+".join)
def test_quantised_targets_and_drafters_in_fixed_shapes(sides):
    pair = TinyPair()
    for side in sides:
        setattr(pair, side, weight_only(getattr(pair, side)))
    engine = pair.engine(static=True)
    for prompt in PROMPTS[:2]:
        expected = plain(pair.target, pair.target_tokenizer.encode(prompt).ids, 20)
        for algorithm in ("none", "slem", "tli", "slrs"):
            out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=20)
            assert out.new_ids == expected


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_head_is_not_pruned():
    import numpy as np

    with pytest.raises(UnsupportedModel, match="not a plain linear layer"):
        CachedModel(dynamic(tiny_model("llama", 96, seed=5)), np.arange(10))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float64")])
def test_target_and_drafter_of_different_dtypes(dtypes):
    pair = TinyPair()
    pair.target, pair.drafter = (
        getattr(pair, side).to(getattr(torch, dtype))
        for side, dtype in zip(("target", "drafter"), dtypes, strict=True)
    )
    engine = pair.engine()
    ids = pair.target_tokenizer.encode("x = 1").ids
    for algorithm in ("slem", "tli", "slrs"):
        for options in ({}, {"do_sample": True, "seed": 1}):
            out = engine.generate(ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=12, **options)
            assert out.stats.new_tokens == len(out.new_ids)
        if dtypes[0] == "float32":
            greedy = engine.generate(ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=12)
            assert greedy.new_ids == plain(pair.target, ids, 12)
