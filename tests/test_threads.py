"""Short reads with one thread where that is faster: tried once, set back whatever happens, the same logits."""

from __future__ import annotations

import time

import pytest
import torch

from hetspec.runtime import threads
from hetspec.runtime.models import CachedModel, ModelRow
from hetspec.runtime.threads import ShortReads, faster_alone
from tests.toys import tiny_model


@pytest.fixture
def two():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sleeping(alone, together):
    return lambda: time.sleep(alone if torch.get_num_threads() == 1 else together)


def test_what_is_faster_alone_is_seen(two):
    assert faster_alone(sleeping(0.005, 0.05), 2)
    assert not faster_alone(sleeping(0.05, 0.005), 2)
    assert not faster_alone(sleeping(0.02, 0.02), 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("alone", [True, False])
def test_it_is_tried_once_and_set_back(two, monkeypatch, alone):
    tried = []
    monkeypatch.setattr(threads, "faster_alone", lambda read, count: tried.append(count) or alone)
    reads = ShortReads()
    for _ in range(3):
        with reads(lambda: None):
            assert torch.get_num_threads() == (1 if alone else 2)
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="broken"), reads(lambda: None):
        raise ValueError("broken")
    assert torch.get_num_threads() == 2
    assert tried == [2]


def test_a_user_with_one_thread_pays_nothing(monkeypatch):
    monkeypatch.setattr(threads, "faster_alone", lambda *a: pytest.fail("tried"))
    assert torch.get_num_threads() == 1
    with ShortReads()(lambda: None):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_reads_the_same(two, monkeypatch, alone):
    seen = []
    monkeypatch.setattr(threads, "faster_alone", lambda read, count: read() or alone)
    model = tiny_model("llama", 100, seed=1)
    model.model.embed_tokens.register_forward_hook(lambda *a: seen.append(torch.get_num_threads()))
    row, prompt = ModelRow(CachedModel(model)), [i * 7 % 100 for i in range(40)]
    whole = row.forward(prompt, 1)
    assert seen[-1] == 2  # a long read
    short = row.forward([3, 5], 2)
    assert seen[-1] == (1 if alone else 2)
    torch.set_num_threads(1)
    fresh = ModelRow(CachedModel(model))
    torch.testing.assert_close(fresh.forward(prompt, 1), whole)
    torch.testing.assert_close(fresh.forward([3, 5], 2), short)
    assert row.forwards == 2
