"""The GPU check in small on the CPU: it is right here, and sees when something is not."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from hetspec.runtime import device_kernels, static_step, verify
from hetspec.runtime.verify import Verdict

SCRIPT = Path(__file__).parent.parent / "pipelines" / "gpu_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pair(check):
    sizes = check.SMALL
    return check.Pair(
        sizes[0], sizes[0].make("cpu", torch.float32), sizes[2], sizes[2].make("cpu", torch.float32)
    )


@pytest.mark.parametrize(("name", "tokens"), [("deepseek", 127_997), ("qwen", 151_643), ("smollm2", 49_156)])
def test_the_vocabularies_are_real_and_whole(check, name, tokens):
    tokenizer = check.vocabulary(name, 1 << 20)
    assert tokenizer.get_vocab_size() == tokens
    text = "def quicksort(xs):\n    return [x for x in xs if x < pivot]  # naïve, 42 €"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < 0.45 * len(text)  # long tokens are reached by their merges
    assert check.vocabulary(name, 1000).get_vocab_size() == 1000


def test_it_is_right_in_small(pair):
    found = pair.exactness(tokens=12, draws=100)
    assert found["right"]
    assert set(found["greedy_same_tokens"].values()) == {12}
    assert len(found["greedy_same_tokens"]) == 8
    assert found["freedom"] >= 3


def test_it_sees_a_wrong_verifier(pair, monkeypatch):
    def accept_all(candidates, proposal_laws, logits, warping, rng, none=None):
        return Verdict([*candidates, 0], len(candidates))

    monkeypatch.setattr(verify, "_verify_block", accept_all)
    assert not pair.exactness(tokens=4, draws=100)["right"]


def test_it_sees_a_wrong_static_verdict(pair, monkeypatch):
    monkeypatch.setattr(
        static_step, "judge", lambda p, pi, places, count, *rest: (count, p[-1].argmax()[None])
    )
    assert not pair.exactness(tokens=4, draws=100)["right"]


def test_the_kernels_are_compared(check, monkeypatch):
    assert all(found["right"] for found in check.kernels("cpu", ((3000, 1000),)))
    wrong = types.SimpleNamespace(**{**vars(device_kernels), "race": lambda *a: device_kernels.race(*a) + 1})
    monkeypatch.setattr(static_step, "arithmetic", lambda device: wrong)
    assert not any(found["right"] for found in check.kernels("cpu", ((3000, 1000),)))


def test_the_times_and_the_cost_model_are_there(check, pair):
    found = pair.times(float("inf"))
    assert set(found["pass_ms"]) == {"1", "2", "4", "8"}
    assert all(value > 0 for value in found["tokens_per_second"].values())
    model = check.cost_model(check.REAL[0], check.REAL[1], torch.bfloat16)
    assert 6e9 < model["target_bytes"] / 2 < 8e9
    assert 0.4e9 < model["drafter_bytes"] / 2 < 0.6e9
    step = check.cost_model(check.REAL[0], check.REAL[1], torch.bfloat16, 1e12)["steps"]["3"]
    assert step["bytes"] == model["target_bytes"] + 3 * model["drafter_bytes"]
    assert step["bound_ms"] == pytest.approx(step["bytes"] / 1e9)
    assert set(found["static_step_ms"]) == {"0", "1", "3", "5"}
    json.dumps(model)


def test_without_a_device_it_says_so(check, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert check.main() == 2
    assert "--device cpu --small" in capsys.readouterr().err
