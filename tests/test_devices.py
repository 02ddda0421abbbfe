"""Models that are not simply on one device in bfloat16: spread by accelerate, float16."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hetspec.errors import UnsupportedModel
from hetspec.runtime.engine import Engine
from hetspec.sources import load_model
from tests.test_runtime import PROMPTS, TinyPair
from tests.test_shipped_pair import PROMPTS as SHIPPED_PROMPTS
from tests.test_shipped_pair import Shipped
from tests.toys import tiny_model, trained_bpe


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A tiny pair and the same with a target in two places: what accelerate's hooks do between GPUs, too."""
    tiny = TinyPair().with_kernel()
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"model.layers.1": "disk", "lm_head": "cpu"}
    target = dispatch_model(
        copy.deepcopy(tiny.target),
        places,
        offload_dir=tmp_path_factory.mktemp("offloaded"),
        main_device="cpu",
        force_hooks=True,
    )
    moved = copy.copy(tiny)
    moved.target = target
    return tiny, moved


@pytest.mark.parametrize("algorithm", ["none", "slem", "tli", "rdk", "slrs"])
def test_a_target_in_two_places_writes_the_same(spread, algorithm):
    tiny, moved = spread
    assert len(set(moved.target.hf_device_map.values())) == 2
    options = {"algorithm": algorithm, "num_draft_tokens": 3, "max_new_tokens": 16}
    for prompt in PROMPTS[:2]:
        expected = tiny.engine().generate(prompt, algorithm="none", max_new_tokens=16).new_ids
        assert moved.engine().generate(prompt, **options).new_ids == expected


def test_a_target_in_two_places_is_not_recorded(spread):
    moved = spread[1]
    engine = moved.engine(static=True)
    with pytest.raises(UnsupportedModel, match="spread over 2 devices"):
        engine.generate("x", algorithm="tli", max_new_tokens=4)


def test_device_auto_is_accelerates(tmp_path, monkeypatch):
    tiny_model("llama", 300, seed=1).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained_bpe(["a text"], 260), eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    asked = []
    honest = AutoModelForCausalLM.from_pretrained

    def spy(*arguments, **options):
        asked.append(options.get("device_map"))
        return honest(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    model = load_model(str(tmp_path), dtype=torch.float32, device="auto")
    assert asked == ["auto"]
    assert all(not parameter.is_meta for parameter in model.parameters())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match="accelerate, which is not installed"):
        load_model(str(tmp_path), dtype=torch.float32, device="auto")


@pytest.fixture(scope="module")
def half():
    return Shipped(torch.float16)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("algorithm", ["none", "slem", "tli", "rdk", "slrs"])
def test_float16(half, algorithm, static):
    """On these prompts no two logits are a rounding error apart."""
    engine = half.engine
    if static:
        engine = Engine(*half.models, half.pair, static=True, **half.tokenizers)
    accepted = 0
    for prompt in SHIPPED_PROMPTS[:2]:
        out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=16)
        assert out.new_ids == half.theirs(prompt, 16)
        accepted += out.stats.accepted
    assert algorithm == "none" or accepted
