"""Calibration, pruning and prediction on small random models, against direct computation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from hetspec.artifact import Kernel, PairArtifact
from hetspec.errors import InvalidArtifact, InvalidInput, StaleArtifact, UnsupportedModel
from hetspec.prep import calibrate as calibration
from hetspec.prep import documents as documents_module
from hetspec.prep.build import add_kernel, fitted, recalibrated
from hetspec.prep.calibrate import CalibrationSettings, calibrate, load_laws, save_laws, table, work_key
from hetspec.prep.documents import Document, read_documents, sample_documents
from hetspec.prep.fit import as_kernel
from hetspec.prep.predict import Costs, Walk, expected_steps, measure_costs, predict, probe, score
from hetspec.prep.priors import best_embedding, composed, mean_kernel, mixture_kernel
from hetspec.prep.prune import always_kept, choose, curve_point, pruned_pair, scores
from hetspec.prep.texts import FIT, HELD_OUT, STATISTICS, for_calibration, for_making, for_prediction, role_of
from hetspec.prep.weights import fit_kernel, weighted
from hetspec.runtime.bench import Contestant
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.options import plain_law
from tests.test_runtime import CODE, TinyPair

SMALL = CalibrationSettings(top=400, top_sparse=400, fit=60, held_out=40, shard_tokens=300)
TEXTS = [CODE[i : i + 90] for i in range(0, 9000, 90)]


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


@pytest.fixture(scope="module")
def documents(engine):
    return read_documents(TEXTS, engine.target, window=64, limit=2500)


@pytest.fixture(scope="module")
def result(tiny, engine, documents):
    return calibrate(tiny.pair, engine.target, engine.drafter, documents, SMALL)


@pytest.fixture(scope="module")
def pair(tiny, result):
    return recalibrated(tiny.pair, result.calibration, figures={}, settings={})


def laws_of(model, ids):
    with torch.inference_mode():
        return torch.softmax(model(torch.tensor([ids])).logits[0], -1).double().numpy()


def test_statistics_are_those_of_one_forward_per_text(tiny, result, documents):
    rows = [laws_of(tiny.target, d.ids)[d.start - 1 : -1] for d in documents if d.role == STATISTICS]
    p = np.concatenate(rows)
    assert len(p) == result.P.shape[0] > 500
    assert np.allclose(result.calibration.mean, p.mean(0), atol=1e-6)
    assert np.allclose(result.calibration.variance, p.var(0), atol=1e-6)
    P = result.P.toarray()
    assert ((P > 0).sum(1) == 400).all()
    assert np.allclose(P[P > 0], p[P > 0], atol=1e-6)
    assert (np.where(P > 0, 0, p).max(1) <= np.where(P > 0, P, 1).min(1) + 1e-6).all()  # the likeliest ones
    counted = np.bincount(
        np.concatenate([d.ids[d.start :] for d in documents if d.role in (STATISTICS, FIT)]), minlength=432
    )
    assert result.calibration.counts.tolist() == counted.tolist()


@pytest.mark.parametrize("use", [FIT, HELD_OUT])
def test_sampled_contexts_hold_both_models_laws_of_the_same_text(tiny, engine, result, documents, use):
    contexts = getattr(result.calibration, use)
    assert len(contexts.p) == len(contexts.q) > 30
    roles = {d.number: d.role for d in documents}
    assert {roles[n] for n in contexts.documents} == {use}
    c = 0
    for document in documents:
        if document.role != use:
            continue
        p = laws_of(tiny.target, document.ids)
        for j in range(document.start - 1, len(document.ids) - 1):
            if c == len(contexts.p) or contexts.documents[c] != document.number:
                break
            at = slice(contexts.p.indptr[c], contexts.p.indptr[c + 1])
            if not np.allclose(p[j][contexts.p.ids[at]], contexts.p.masses[at], atol=1e-6):
                continue  # not sampled
            text = engine.target.vocabulary.spell(document.ids[: j + 1])
            context = DrafterContext(
                engine.drafter.model.new_row(), engine.drafter.segmenter, engine.drafter.begins_with
            )
            context.commit_ids(document.ids[: j + 1], engine.target.vocabulary)
            assert engine.drafter.vocabulary.spell(context.ids) == text  # and nothing of what follows
            q = laws_of(tiny.drafter, context.ids)[-1]
            at = slice(contexts.q.indptr[c], contexts.q.indptr[c + 1])
            assert np.allclose(q[contexts.q.ids[at]], contexts.q.masses[at], atol=1e-6)
            c += 1
    assert c == len(contexts.p)


def test_unfinished_work_belongs_to_its_models(tiny, documents):
    assert work_key(tiny.pair, documents, SMALL, "a ← b") != work_key(tiny.pair, documents, SMALL, "a ← c")
    assert work_key(tiny.pair, documents, SMALL, "a ← b") == work_key(tiny.pair, documents, SMALL, "a ← b")


def test_every_text_has_one_role_wherever_it_is_met():
    texts = [f"text {i}" for i in range(1000)]
    making, prediction = set(for_making(texts)), set(for_prediction(texts))
    testing = {t for t in for_calibration(texts) if role_of(t) == HELD_OUT}
    assert not making & testing
    assert not prediction & (making | testing)
    assert making | testing | prediction == set(texts)
    assert 60 < len(prediction) < 140
    assert 150 < len(testing) < 250
    assert for_prediction(texts[:20]) == texts[:20]  # too few to set any aside
    assert len(for_calibration(["abc " * 4000])) > 60  # one file is cut up


@pytest.mark.parametrize("limit", [700, 950, 1200, 2000, 3000])
def test_no_sampling_stride_favours_a_role(engine, limit):
    texts = [CODE[i : i + 90] for i in range(0, 18000, 90)]
    roles = {d.role for d in read_documents(texts, engine.target, window=64, limit=limit)}
    assert roles >= {STATISTICS, FIT, HELD_OUT}


def test_short_contexts_are_respected(tiny, documents):
    """A drafter and a target of 32 positions: windows shrink, the drafter's context slides, nothing is read beyond."""
    short = TinyPair("gpt2", "gpt2", positions=32)
    engine = short.engine()
    cut = read_documents(TEXTS, engine.target, window=512, limit=600)
    assert max(len(d.ids) for d in cut) <= 32
    found = calibrate(tiny.pair, engine.target, engine.drafter, cut, SMALL)
    assert len(found.calibration.fit.q) == len(found.calibration.fit.p) > 0
    assert measure_costs(engine, longest=4).c > 0
    long_prompts = [CODE[:400], CODE[900:1300]]
    written = sample_documents(long_prompts, engine.target, max_new_tokens=8)
    assert all(len(d.ids) <= 32 for d in written)
    with pytest.raises(InvalidInput, match="do not fit"):
        sample_documents(long_prompts, engine.target, max_new_tokens=32)


def test_other_padding_than_the_pairs_is_cut_off(tiny, engine, documents):
    narrow = dataclasses.replace(
        tiny.pair,
        target=dataclasses.replace(tiny.pair.target, rows=tiny.pair.target.tokens),
        drafter=dataclasses.replace(tiny.pair.drafter, rows=tiny.pair.drafter.tokens),
        map=tiny.pair.map.widened(tiny.pair.target.tokens, tiny.pair.drafter.tokens),
    )
    found = calibrate(narrow, engine.target, engine.drafter, documents, SMALL)
    pair = recalibrated(narrow, found.calibration, figures={}, settings={})
    embedding = tiny.target.get_input_embeddings().weight  # with the padding rows
    kernel, _ = best_embedding(pair, embedding, top=8)
    assert kernel.indices.max() < narrow.target.tokens


def test_an_embedding_kernel_needs_no_drafter_laws(tiny, engine, documents):
    alone = calibrate(tiny.pair, engine.target, None, documents, SMALL)
    pair = recalibrated(tiny.pair, alone.calibration, figures={}, settings={})
    kernel, knobs = best_embedding(pair, tiny.target.get_input_embeddings().weight, top=8)
    assert len(kernel.indices) > 5 * (pair.map.d2t >= 0).sum()
    assert knobs == {"temperature": 0.1}


def test_an_interrupted_calibration_goes_on(tiny, engine, documents, result, tmp_path, monkeypatch):
    honest, calls = calibration._read, []

    def stops(document, *rest):
        calls.append(document)
        if len(calls) == 25:
            raise KeyboardInterrupt
        honest(document, *rest)

    monkeypatch.setattr(calibration, "_read", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny.pair, engine.target, engine.drafter, documents, SMALL, work=tmp_path)
    kept = len(list(tmp_path.glob("shard-?????.safetensors")))
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
        calibrate(tiny.pair, engine.target, None, [Document(0, FIT, (1, 2, 3), 1)], SMALL)
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


def test_long_prompts_are_read_from_the_end_and_keep_the_role_of_the_whole(engine, monkeypatch):
    monkeypatch.setattr(documents_module, "LONGEST_PROMPT", 10)
    monkeypatch.setattr(engine.target, "begins_with", [7])
    prompt = CODE[:300]
    (document,) = sample_documents([prompt], engine.target, max_new_tokens=4, seed=3)
    whole = engine.decoder(prompt, algorithm="none").ids
    assert document.ids[: document.start] == (7, *whole[-9:])
    assert document.role == role_of(prompt)


def test_laws_come_back_as_they_were_and_damage_is_named(result, tmp_path):
    path = save_laws(result.P, tmp_path / "work" / "laws.safetensors")
    assert (load_laws(path, result.P.shape[1]) != result.P).nnz == 0
    with pytest.raises(InvalidArtifact, match="beyond 300 rows"):
        load_laws(path, 300)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidArtifact, match=r"laws\.safetensors"):
        load_laws(path, result.P.shape[1])


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
    few = dataclasses.replace(
        pair.calibration.held_out, documents=pair.calibration.held_out.documents * 0 + 10_000
    )
    one_text = dataclasses.replace(pair, calibration=dataclasses.replace(pair.calibration, held_out=few))
    assert not fit_kernel(one_text, kernel).helps  # an interval over one text says nothing
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


def test_a_pruned_pair_takes_kernels_that_reach_nothing_new(pair, engine):
    """Kernels fitted to the head included; those that reach other drafter tokens are refused."""
    must = always_kept(pair, engine.drafter.vocabulary)
    old = pruned_pair(pair, choose(scores("mean", pair), 300, must, pair.reachable))
    assert old.kernels["mean"].head_fit is not None
    same = dataclasses.replace(composed_identity(pair), prior="covariance")
    new = add_kernel(old, same, {}, top=4, seconds=0.0)
    assert new.head is not None
    assert set(new.kernels) == {"mean", "covariance"}
    assert recalibrated(new, pair.calibration, figures={}, settings={}).head is not None
    lost = np.flatnonzero((pair.map.d2t < 0) & ~pair.reachable)[:3]
    more = np.concatenate([np.flatnonzero(pair.reachable), lost])
    images = np.where(pair.map.d2t[more] >= 0, pair.map.d2t[more], 5)
    order = np.argsort(more)
    indptr = np.zeros(len(pair.map.d2t) + 1, dtype=np.int64)
    indptr[more + 1] = 1
    wider = Kernel(
        prior="embedding",
        indptr=np.cumsum(indptr),
        indices=images[order].astype(np.int32),
        weights=np.ones(len(more), dtype=np.float32),
    )
    with pytest.raises(InvalidInput, match="reaches other drafter tokens"):
        add_kernel(old, wider, {}, top=4, seconds=0.0)


def test_a_new_calibration_takes_away_what_the_old_one_decided(pair):
    old = pruned_pair(
        fitted(
            add_kernel(pair, mean_kernel(pair.map, pair.calibration.mean), {}, top=4, seconds=0.0), "mean"
        ),
        None,
    )
    old = dataclasses.replace(old, figures={**old.figures, "prune": {"size": 3}})
    other = dataclasses.replace(pair.calibration, mean=np.roll(pair.calibration.mean, 1))
    new = recalibrated(old, other, figures={"text": "other"}, settings={})
    assert "prune" not in new.figures
    assert np.array_equal(new.kernels["mean"].mu, other.mean)
    assert new.figures["affinity"]["mean"]["held_out_tli_rate"] > 0
    none = dataclasses.replace(
        other,
        **{split: dataclasses.replace(getattr(other, split), q=table([])) for split in ("fit", "held_out")},
    )
    bare = recalibrated(old, none, figures={}, settings={})
    assert bare.kernels["mean"].fit is None
    assert "gain" not in bare.figures["affinity"]["mean"]


def test_rdk_takes_the_kernel_that_is_best_for_the_head_in_use(tiny, pair, engine):
    kernels = {
        "mean": mean_kernel(pair.map, pair.calibration.mean),
        "cosegment": dataclasses.replace(composed_identity(pair), prior="cosegment"),
    }
    figures = {
        "affinity": {"mean": {"held_out_rate": 0.4}, "cosegment": {"held_out_rate": 0.5}},
        "prune": {"rdk": {"mean": 0.3, "cosegment": 0.2}},
    }
    both = dataclasses.replace(pair, kernels=kernels, figures=figures)
    must = always_kept(both, engine.drafter.vocabulary)
    both = pruned_pair(both, choose(scores("mean", both), 280, must, both.reachable))
    both = dataclasses.replace(both, figures=figures)
    tokenizers = {"target_tokenizer": tiny.target_tokenizer, "drafter_tokenizer": tiny.drafter_tokenizer}
    assert Engine(tiny.target, tiny.drafter, both, **tokenizers)._tools.rdk_prior("auto") == "mean"
    assert (
        Engine(tiny.target, tiny.drafter, both, full_head=True, **tokenizers)._tools.rdk_prior("auto")
        == "cosegment"
    )
    unknown = dataclasses.replace(both, figures={})
    assert Engine(tiny.target, tiny.drafter, unknown, **tokenizers)._tools.rdk_prior("auto") == "cosegment"


def composed_identity(pair):
    rows = np.unique(pair.map.d2t[pair.map.d2t >= 0])
    return composed("covariance", pair.map, rows, rows[:, None], np.ones((len(rows), 1)), None)


def test_a_pruned_pair_with_another_drafter_is_named(tiny, pair, engine):
    from tests.toys import tiny_model

    must = always_kept(pair, engine.drafter.vocabulary)
    new = pruned_pair(pair, choose(scores("mean", pair), 330, must, pair.reachable))
    with pytest.raises(StaleArtifact, match="pruned head names row"):
        Engine(
            tiny.target,
            tiny_model("llama", 200, seed=4),
            new,
            target_tokenizer=tiny.target_tokenizer,
            drafter_tokenizer=tiny.drafter_tokenizer,
        )


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
def test_expected_steps_of_token_verification_are_what_simulation_gives(n):
    random = np.random.default_rng(n)
    match = random.random(30)
    zeros = np.zeros(30, dtype=np.int64)
    steps, judged, accepted = expected_steps(Walk(match, zeros, zeros, False), n, n, "token")
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


def test_block_verification_is_expected_to_take_fewer_steps():
    ratio = np.random.default_rng(1).gamma(1.0, 1.0, 40)  # π/p of a text: below and above 1
    zeros = np.zeros(40, dtype=np.int64)
    for n in (1, 2, 4, 8):
        steps = {m: expected_steps(Walk(ratio, zeros, zeros, False), n, n, m)[0] for m in ("block", "token")}
        assert steps["block"] <= steps["token"] + 1e-9
        if n == 1:
            assert steps["block"] == pytest.approx(steps["token"])


def test_guesses_are_walked_exactly():
    run = np.array([2, 1, 0, 0, 3, 2, 1, 0])
    walk = Walk(np.zeros(8), run, np.full(8, 3), True)
    steps, _, accepted = expected_steps(walk, 3, 3)
    assert steps == 3  # 0 → 3 (two accepted and the target's own), 3 → 4, 4 → 8
    assert accepted.sum() == 5


def test_guesses_at_the_end_of_a_text_are_not_short_changed():
    """A drafter that is always right: ⌈L/(n+1)⌉ passes, whatever draft the walk was made with."""
    for length, n in ((8, 3), (48, 2), (7, 5)):
        left = length - np.arange(length)
        walk = Walk(np.zeros(length), np.minimum(8, left), np.minimum(8, left), True)
        assert expected_steps(walk, n, 8)[0] == -(-length // (n + 1))


def test_predictions_use_the_plain_law_whatever_the_model_recommends(tiny):
    recommending = TinyPair()
    recommending.target.generation_config.update(
        top_p=0.8, top_k=5, min_p=0.3, repetition_penalty=1.3, no_repeat_ngram_size=2, max_length=20
    )
    engine = recommending.engine()
    before = recommending.target.generation_config
    prompts = [CODE[:50], CODE[100:160]]
    plain = sample_documents(prompts, tiny.engine().target, max_new_tokens=12, seed=3)
    assert [d.ids for d in sample_documents(prompts, engine.target, max_new_tokens=12, seed=3)] == [
        d.ids for d in plain
    ]
    assert recommending.target.generation_config is before
    decoder = engine.decoder(CODE[:50], algorithm="tli", max_new_tokens=5, **plain_law(1.0))
    assert decoder.warping == Warping(1.0)
    assert decoder.processing.processors == ()
    assert len(probe(engine, Contestant("tli", {"algorithm": "tli"}), score(engine, plain, 1.0)).walks) == 2


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
        probe(engine, contestant, score(engine, documents, temperature), draft_length=5),
        Costs((1.0,) * 6, 0.1),
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


def test_rows_hardly_ever_seen_are_looked_ahead_on(pair, tiny):
    identity = composed_identity(pair)
    counts = np.full(336, 100, dtype=np.int64)
    counts[:50] = 1
    kernel = dataclasses.replace(identity, prior="cosegment", counts=counts)
    tokenizers = {"target_tokenizer": tiny.target_tokenizer, "drafter_tokenizer": tiny.drafter_tokenizer}
    tools = Engine(
        tiny.target, tiny.drafter, dataclasses.replace(pair, kernels={"cosegment": kernel}), **tokenizers
    )._tools
    filled = np.diff(kernel.indptr) > 0
    assert (tools.certainty[:50] == 0).all()
    assert (tools.certainty[50:][filled[50:]] == 1).all()
