"""The audit finds nothing where there is nothing, and finds every planted bug."""

from __future__ import annotations

import pytest
import torch

from hetspec.runtime import audit, verify
from hetspec.runtime.verify import Verdict
from tests.test_exactness import accept_all, residual_is_p
from tests.test_runtime import CODE, TinyPair

PROMPTS = [CODE[:60], CODE[500:560]]


@pytest.fixture(scope="module")
def engine():
    pair = TinyPair()
    with torch.no_grad():  # a drafter that is right now and then
        pair.drafter.get_output_embeddings().weight.mul_(0.3)
    return pair.engine()


def first(engine, algorithm, samples=800):
    return audit.audit_first_token(
        engine, PROMPTS[0], 0, algorithm, samples=samples, temperature=0.7, num_draft_tokens=2, seed=1
    )


def texts(engine, algorithm, n=10):
    prompts = [CODE[i : i + 40] for i in range(0, 40 * n, 40)]
    return audit.audit_text(
        engine, prompts, algorithm, temperature=1.0, max_new_tokens=24, num_draft_tokens=3, seed=1
    )


@pytest.mark.parametrize("algorithm", ["none", "slem", "tli", "slrs"])
def test_a_sound_engine_passes(engine, algorithm):
    greedy = audit.audit_greedy(engine, PROMPTS, [algorithm], max_new_tokens=16, num_draft_tokens=3)
    assert greedy == {"texts": 2, "identical": 2, "near_ties": 0, "different": 0, "mismatches": []}
    token = first(engine, algorithm)
    text = texts(engine, algorithm)
    assert token.p_value > 1e-4
    assert text["tokens"] > 100
    assert audit.verdict(greedy, [token], [text]) == "lossless"


def test_remembered_answers_are_the_models(engine):
    target = engine.target.model
    ids = engine.target.segmenter.encode(PROMPTS[0].encode())
    memo = audit.MemoRow(audit.Memory(target.new_row()))
    for crop, feed, keep in (
        (0, ids, 2),
        (5, [7, 8, 9], 3),
        (6, [8, 1], 1),
        (5, [7, 8, 9], 3),
        (2, ids[2:9], 4),
    ):
        memo.crop(crop)
        logits = memo.forward(feed, keep)
        fresh = target.new_row().forward(memo.read, keep)
        assert torch.allclose(logits, fresh, atol=1e-9)


@pytest.mark.parametrize("mutant", [accept_all, residual_is_p])
def test_a_biased_verifier_is_found(engine, monkeypatch, mutant):
    monkeypatch.setattr(verify, "_verify_block", mutant)
    sound = {"different": 0}
    assert audit.verdict(sound, [first(engine, "tli", samples=4000)], []) == "not lossless"


def test_an_accepting_verifier_shows_in_whole_texts(engine, monkeypatch):
    monkeypatch.setattr(verify, "_verify_block", accept_all)
    assert audit.verdict({"different": 0}, [], [texts(engine, "tli", n=20)]) == "not lossless"


def test_a_greedy_slip_is_found_and_a_near_tie_is_not_one(engine, monkeypatch):
    honest = verify._verify_greedy

    def second_best(candidates, logits):
        found = honest(candidates, logits)
        return Verdict([*found.ids[:-1], int(logits[len(found.ids) - 1].topk(2).indices[1])], found.accepted)

    monkeypatch.setattr(verify, "_verify_greedy", second_best)
    greedy = audit.audit_greedy(engine, PROMPTS, ["tli"], max_new_tokens=8, num_draft_tokens=3)
    assert greedy["different"] == 2
    assert greedy["mismatches"][0]["gap"] > greedy["mismatches"][0]["rounding"]
    assert audit.verdict(greedy, [], []) == "not lossless"


def test_mismatches_are_looked_at_with_a_fresh_forward(engine):
    logits = engine.target.model.new_row().forward([1, 2, 3], keep=1)[0]
    best, second = logits.topk(2).indices.tolist()
    other = audit._mismatch(engine, 0, "tli", [1, 2, 3], [best], [second])
    assert not other.near_tie
    assert other.gap == pytest.approx(float(logits[best] - logits[second]))
    ends = audit._mismatch(engine, 0, "tli", [1, 2, 3], [5], [5, 6])
    assert (ends.gap, ends.near_tie, ends.position) == (None, False, 1)


def test_the_chi_square_is_scipys():
    from scipy.stats import chisquare

    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    counts = {0: 380, 1: 320, 2: 190, 3: 110}
    statistic, degrees, p_value = audit.chi_square(counts, p)
    expected = chisquare([380, 320, 190, 110], [400, 300, 200, 100])
    assert statistic == pytest.approx(expected.statistic)
    assert (degrees, p_value) == (3, pytest.approx(expected.pvalue))
    rare = torch.tensor([0.9, 0.0995, 0.0005], dtype=torch.float64)
    assert audit.chi_square({0: 900, 1: 99, 2: 1}, rare)[1] == 1  # too rare for a cell


def test_the_least_certain_prompts_are_looked_at(engine):
    prompts = ["x = 1", "class A:", "def f(x):", " " * 9]
    rows = [engine.target.model.new_row().forward(engine.decoder(p).ids, keep=1)[0] for p in prompts]
    entropies = [float(torch.distributions.Categorical(logits=row).entropy()) for row in rows]
    chosen = audit.least_certain(engine, prompts, 2, 1.0)
    assert set(chosen) == set(sorted(range(4), key=lambda i: -entropies[i])[:2])
