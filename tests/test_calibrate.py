"""Calibration, pruning and prediction on small random models, against direct computation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hetspec.artifact import PairArtifact
from hetspec.errors import InvalidInput, UnsupportedModel
from hetspec.prep import calibrate as calibration
from hetspec.prep.build import add_kernel, extend, fitted
from hetspec.prep.calibrate import FIT, HELD_OUT, STATISTICS, CalibrationSettings, calibrate, role
from hetspec.prep.documents import Document, read_documents, sample_documents
from hetspec.prep.predict import Costs, Walk, expected_steps, predict, probe
from hetspec.prep.priors import fit_kernel, mean_kernel, mixture_kernel, weighted
from hetspec.prep.prune import always_kept, choose, curve_point, pruned_pair, scores
from hetspec.runtime.bench import Contestant
from hetspec.runtime.generate import Engine
from tests.test_runtime import CODE, TinyPair

SMALL = CalibrationSettings(top=400, top_sparse=400, fit=60, held_out=40, shard_tokens=300)
TEXTS = [CODE[i : i + 400] for i in range(0, 6000, 400)]


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


@pytest.fixture(scope="module")
def documents(engine):
    return read_documents(TEXTS, engine.target, window=64, limit=1500)


@pytest.fixture(scope="module")
def result(tiny, engine, documents):
    return calibrate(tiny.pair, engine.target, engine.drafter, documents, SMALL)


@pytest.fixture(scope="module")
def pair(tiny, result):
    return extend(tiny.pair, stage="calibrate", calibration=result.calibration, figures={}, settings={})


def laws_of(model, ids):
    with torch.inference_mode():
        return torch.softmax(model(torch.tensor([ids])).logits[0], -1).double().numpy()


def test_statistics_are_those_of_one_forward_per_text(tiny, result, documents):
    rows = [laws_of(tiny.target, d.ids)[d.start - 1 : -1] for d in documents if role(d.number) == STATISTICS]
    p = np.concatenate(rows)
    assert len(p) == result.P.shape[0] > 500
    assert np.allclose(result.calibration.mean, p.mean(0), atol=1e-6)
    assert np.allclose(result.calibration.variance, p.var(0), atol=1e-6)
    assert np.allclose(result.P.toarray(), np.sort(p, 1)[:, -400:].min(1, keepdims=True) * 0 + p, atol=2e-2)
    counted = np.bincount(np.concatenate([d.ids[d.start :] for d in documents]), minlength=432)
    assert result.calibration.counts.tolist() == counted.tolist()


@pytest.mark.parametrize("use", [FIT, HELD_OUT])
def test_sampled_contexts_hold_both_models_laws_of_the_same_text(tiny, engine, result, documents, use):
    contexts = getattr(result.calibration, use)
    assert len(contexts.p) == len(contexts.q) > 30
    assert {role(n) for n in contexts.documents} == {use}
    found = 0
    target, drafter = engine.target, engine.drafter
    for document in documents:
        if role(document.number) != use:
            continue
        p = laws_of(tiny.target, document.ids)
        text = target.vocabulary.spell(document.ids)
        own = drafter.segmenter.encode(text)
        q = laws_of(tiny.drafter, own)
        ends = drafter.segmenter.ends(text, own).tolist()
        at = 0
        for j, t in enumerate(document.ids[:-1]):
            at += len(target.vocabulary.bytes_of(t))
            if j < document.start - 1 or at not in ends:
                continue
            for c in np.flatnonzero(contexts.documents == document.number):
                a, b = contexts.p.indptr[c], contexts.p.indptr[c + 1]
                if np.allclose(p[j][contexts.p.ids[a:b]], contexts.p.masses[a:b], atol=1e-6):
                    a, b = contexts.q.indptr[c], contexts.q.indptr[c + 1]
                    assert np.allclose(
                        q[ends.index(at)][contexts.q.ids[a:b]], contexts.q.masses[a:b], atol=1e-6
                    )
                    found += 1
    assert found >= len(contexts.p)


def test_an_interrupted_calibration_goes_on(tiny, engine, documents, result, tmp_path, monkeypatch):
    honest, calls = calibration._read, []

    def stops(document, *rest):
        calls.append(document)
        if len(calls) == 12:
            raise KeyboardInterrupt
        honest(document, *rest)

    monkeypatch.setattr(calibration, "_read", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny.pair, engine.target, engine.drafter, documents, SMALL, work=tmp_path)
    kept = len(list(tmp_path.glob("shard-?????.npz")))
    assert kept >= 1
    calls.clear()
    monkeypatch.setattr(calibration, "_read", lambda *a: (calls.append(a[0]), honest(*a)))
    again = calibrate(tiny.pair, engine.target, engine.drafter, documents, SMALL, work=tmp_path)
    assert 0 < len(calls) < len(documents)  # only what was missing
    for name in ("mean", "variance", "counts", "drafter_counts"):
        assert np.allclose(getattr(again.calibration, name), getattr(result.calibration, name), atol=1e-9)
    assert (again.P != result.P).nnz == 0


def test_too_few_texts_are_refused(tiny, engine):
    with pytest.raises(InvalidInput, match="too few"):
        calibrate(tiny.pair, engine.target, None, [Document(0, (1, 2, 3), 1)], SMALL)
    with pytest.raises(InvalidInput, match="no text"):
        calibrate(tiny.pair, engine.target, None, [], SMALL)


def test_a_calibration_without_a_drafter_gives_no_fit(tiny, engine, documents):
    alone = calibrate(tiny.pair, engine.target, None, documents, SMALL)
    assert len(alone.calibration.held_out.q) == 0
    pair = dataclasses.replace(tiny.pair, calibration=alone.calibration)
    with pytest.raises(InvalidInput, match="no drafter laws"):
        fit_kernel(pair, mean_kernel(pair.map, alone.calibration.mean))


def test_sampled_texts_are_continuations_kept_for_the_next_call(engine, tmp_path):
    store = tmp_path / "texts.jsonl"
    prompts = ["def f(x):", "import os\n", "class A:"]
    first = sample_documents(prompts, engine.target, max_new_tokens=12, seed=3, store=store)
    assert [d.number for d in first] == [0, 1, 2]
    for prompt, d in zip(prompts, first, strict=True):
        assert engine.target.vocabulary.spell(d.ids[: d.start]).decode() == prompt
        assert 1 <= len(d.ids) - d.start <= 12
    store.write_text(store.read_text().splitlines()[0] + "\n{broken")
    assert sample_documents(prompts, engine.target, max_new_tokens=12, seed=3, store=store)[0] == first[0]


def test_greedy_texts_are_plain_decoding_despite_padding(engine):
    prompts = ["x", "def f(x):\n    return x + 1", "The quick"]
    for d, prompt in zip(
        sample_documents(prompts, engine.target, max_new_tokens=10, temperature=0), prompts, strict=True
    ):
        out = engine.generate(prompt, algorithm="none", do_sample=False, max_new_tokens=10)
        assert list(d.ids[d.start :]) == out.new_ids


# -- fitted kernels and pruned heads ---------------------------------------------------------------------------


def test_weights_are_only_shipped_where_they_help(pair):
    kernel = mean_kernel(pair.map, pair.calibration.mean)
    fit = fit_kernel(pair, kernel)
    assert fit.fit_bound - fit.fit_value <= 1e-5
    assert fit.helps == (fit.gain_low > 0)
    assert fit.held_out_rate == pytest.approx(
        fit.held_out_tli_rate + (fit.gain if fit.helps else 0), abs=1e-9
    )
    new = fitted(add_kernel(pair, kernel, {}, top=4, seconds=0.0), "mean")
    assert new.kernels["mean"].fit.tolist() == [fit.theta, fit.lam]
    useless = dataclasses.replace(kernel, mu=np.eye(432, dtype=np.float32)[431])  # a padding row
    assert not fit_kernel(pair, useless).helps


@pytest.mark.parametrize("name", ["overlap", "frequency", "mean", "variance", "random"])
def test_heads_keep_what_they_must_and_nothing_unreachable(pair, engine, name, tmp_path):
    must = always_kept(pair, engine.drafter.vocabulary)
    assert 256 <= must.sum() <= 258
    for size in (1, 270, 300, 10_000):
        head = choose(scores(name, pair), size, must, pair.reachable)
        assert np.isin(np.flatnonzero(must), head.kept).all()
        assert pair.reachable[head.kept].all()
        assert len(head.kept) == min(max(size, must.sum()), pair.reachable.sum())
    new = pruned_pair(pair, choose(scores(name, pair), 300, must, pair.reachable))
    new.require(engine.target.vocabulary, engine.drafter.vocabulary)
    again = PairArtifact.from_pretrained(new.save_pretrained(tmp_path / "pair"))
    assert again.head.kept.tolist() == new.head.kept.tolist()
    assert again.parts == ["map", "kernel-mean", "calibration", "head"]
    assert np.array_equal(again.calibration.held_out.q.masses, pair.calibration.held_out.q.masses)
    assert again.kernels["mean"].head_fit.tolist() == new.kernels["mean"].head_fit.tolist()


def test_unknown_scores_and_missing_sources_are_named(pair):
    with pytest.raises(InvalidInput, match="unknown score"):
        scores("luck", pair)
    with pytest.raises(InvalidInput, match="did not write"):
        scores("generated", pair)


def test_a_curve_point_is_the_direct_computation(pair, engine):
    head = choose(scores("overlap", pair), 290, always_kept(pair, engine.drafter.vocabulary), pair.reachable)
    point = curve_point(pair, head, row_bytes=64)
    held = pair.calibration.held_out
    total = mass = 0.0
    images = pair.map.d2t[head.kept]
    for c in range(len(held.p)):
        p, q = np.zeros(432), np.zeros(336)
        p[held.p.ids[held.p.indptr[c] : held.p.indptr[c + 1]]] = held.p.masses[
            held.p.indptr[c] : held.p.indptr[c + 1]
        ]
        q[held.q.ids[held.q.indptr[c] : held.q.indptr[c + 1]]] = held.q.masses[
            held.q.indptr[c] : held.q.indptr[c + 1]
        ]
        pi = np.zeros(432)
        np.add.at(pi, images[images >= 0], q[head.kept[images >= 0]])
        total += np.minimum(p, pi / (pi.sum() + max(0, 1 - q.sum()))).sum()
        mass += p[np.unique(images[images >= 0])].sum()
    assert point.tli == pytest.approx(total / len(held.p), abs=1e-6)
    assert point.target_mass == pytest.approx(mass / len(held.p), abs=1e-6)
    assert point.head_bytes == 290 * 64
    assert point.speedup is None


@pytest.mark.parametrize("algorithm", ["slem", "tli", "rdk", "slrs"])
def test_a_pruned_drafter_is_lossless_and_stays_inside_its_head(tiny, pair, engine, algorithm):
    must = always_kept(pair, engine.drafter.vocabulary)
    new = pruned_pair(pair, choose(scores("overlap", pair), 280, must, pair.reachable))
    tokenizers = {"target_tokenizer": tiny.target_tokenizer, "drafter_tokenizer": tiny.drafter_tokenizer}
    pruned = Engine(tiny.target, tiny.drafter, new, **tokenizers)
    prompt = "def f(x):\n    return x"
    plain = engine.generate(prompt, algorithm="none", do_sample=False, max_new_tokens=30)
    out = pruned.generate(prompt, algorithm=algorithm, num_draft_tokens=4, do_sample=False, max_new_tokens=30)
    assert out.new_ids == plain.new_ids
    sampled = pruned.generate(
        prompt, algorithm=algorithm, num_draft_tokens=4, do_sample=True, seed=1, max_new_tokens=30
    )
    assert len(sampled.new_ids) == 30 or sampled.stats.stop_reason == "eos"
    assert pruned.drafter.model.weight_bytes < engine.drafter.model.weight_bytes
    whole = Engine(tiny.target, tiny.drafter, new, full_head=True, **tokenizers)
    assert whole.drafter.model.weight_bytes == engine.drafter.model.weight_bytes


def test_a_quantised_drafter_with_a_pruned_pair_is_refused(tiny, pair, engine):
    import copy

    new = pruned_pair(
        pair,
        choose(scores("overlap", pair), 280, always_kept(pair, engine.drafter.vocabulary), pair.reachable),
    )
    drafter = copy.deepcopy(tiny.drafter).float()
    drafter.set_output_embeddings(torch.ao.nn.quantized.dynamic.Linear(32, 336))
    with pytest.raises(UnsupportedModel, match="not a plain linear layer"):
        Engine(
            tiny.target,
            drafter,
            new,
            target_tokenizer=tiny.target_tokenizer,
            drafter_tokenizer=tiny.drafter_tokenizer,
        )


def test_a_mixture_shares_rows_by_fitted_weights(pair):
    from scipy import sparse

    from hetspec.prep.priors import as_kernel

    images = np.where(pair.map.first >= 0, pair.map.first, 0)
    one = sparse.csr_array((np.ones(336), (np.arange(336), images)), shape=(336, 432))
    two = sparse.csr_array((np.ones(336), (np.arange(336), (images + 1) % 431)), shape=(336, 432))
    both = dataclasses.replace(
        pair,
        kernels={
            "cosegment": as_kernel("cosegment", one, None),
            "covariance": as_kernel("covariance", two, None),
        },
    )
    kernel, weights = mixture_kernel(both)
    assert sum(weights.values()) == pytest.approx(1)
    assert np.add.reduceat(kernel.weights, kernel.indptr[:-1]).tolist() == pytest.approx([1] * 336)
    assert weighted(kernel, fit_kernel(both, kernel)).fit is not None
    with pytest.raises(InvalidInput, match="needs two kernels"):
        mixture_kernel(pair)


# -- prediction ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_expected_steps_are_what_simulation_gives(n):
    random = np.random.default_rng(n)
    match = random.random(30)
    zeros = np.zeros(30, dtype=np.int64)
    steps, judged, accepted = expected_steps(Walk(match, zeros, zeros, False), n, n)
    runs = 20_000
    total, seen, kept = 0, np.zeros(n), np.zeros(n)
    for _ in range(runs):
        at = 0
        while at < 30:
            total += 1
            m = 0
            while m < min(n, 29 - at):
                seen[m] += 1
                if random.random() >= match[at + m]:
                    break
                kept[m] += 1
                m += 1
            at += m + 1
    assert steps == pytest.approx(total / runs, rel=0.01)
    assert judged == pytest.approx(seen / runs, rel=0.05, abs=0.05)
    assert accepted == pytest.approx(kept / runs, rel=0.05, abs=0.05)


def test_guesses_are_walked_exactly():
    run = np.array([2, 1, 0, 0, 3, 2, 1, 0])
    walk = Walk(np.zeros(8), run, np.full(8, 3), True)
    steps, _, accepted = expected_steps(walk, 3, 3)
    assert steps == 3  # 0 → 3 (two accepted and the target's own), 3 → 4, 4 → 8
    assert accepted.sum() == 5


@pytest.mark.parametrize("algorithm", ["tli", "slrs", "slem"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_meet_what_is_measured(tiny, engine, algorithm, temperature):
    """Predicted and measured tokens per pass on the same prompts, with a drafter that much of passes."""
    close = TinyPair()
    with torch.no_grad():
        for own in close.drafter.parameters():
            own.mul_(0.3)
    engine = close.engine()
    prompts = [CODE[i : i + 60] for i in range(0, 3600, 150)]
    documents = sample_documents(prompts, engine.target, max_new_tokens=24, temperature=temperature, seed=5)
    contestant = Contestant(algorithm, {"algorithm": algorithm})
    found = predict(
        algorithm,
        probe(engine, contestant, documents, temperature=temperature, draft_length=3),
        Costs((1.0, 1.0, 1.0, 1.0), 0.1),
    )
    tokens = steps = 0
    law = {"do_sample": True, "top_k": 0} if temperature else {"do_sample": False}
    for number, prompt in enumerate(prompts):
        for repeat in range(3 if temperature else 1):
            out = engine.generate(
                prompt,
                algorithm=algorithm,
                num_draft_tokens=3,
                max_new_tokens=24,
                seed=100 * repeat + number,
                **law,
            )
            tokens, steps = tokens + len(out.new_ids), steps + out.stats.steps
    assert found.tokens_per_pass[3].mean == pytest.approx(tokens / steps, rel=0.1 if temperature else 0.02)
    assert found.tokens_per_pass[3].low <= found.tokens_per_pass[3].mean <= found.tokens_per_pass[3].high
    assert all(0 <= a <= 1 + 1e-9 for a in found.acceptance_by_position)
