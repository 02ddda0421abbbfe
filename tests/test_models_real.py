"""Real models of moderate size, both ways round (marker slow: `make test-slow`)."""

from __future__ import annotations

import math

import pytest
import torch

from hetspec.errors import UnknownSource
from hetspec.prep.build import build_pair, prepare
from hetspec.runtime import laws, verify
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import CachedModel
from hetspec.sources import load_model, load_tokenizer, named_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROSE = [
    "The history of the bicycle begins in the early nineteenth century, when",
    "Rain fell on the harbour all night, and in the morning the fishermen",
    "A good dictionary does more than define words; it",
    "La révolution française commence en",
    "In mathematics, a prime number is",
]


class RealPair:
    def __init__(self, target, drafter, dtype=torch.float32):
        try:
            sides = [prepare(load_tokenizer(name)) for name in (target, drafter)]
            models = [load_model(name, dtype=dtype) for name in (target, drafter)]
        except UnknownSource as error:
            pytest.skip(f"LOUD SKIP, a packaged model has vanished: {error}")
        self.target = models[0]
        self.pair = build_pair(sides[0], sides[1], [], "none")
        self.engine = Engine(
            models[0],
            models[1],
            self.pair,
            target_tokenizer=sides[0].source,
            drafter_tokenizer=sides[1].source,
        )


@pytest.fixture(scope="module")
def code():
    prompts = named_texts("humaneval")
    return [prompts[i] for i in (0, 23, 53, 82, 121)]


@pytest.fixture(
    scope="module", params=[("smollm2-135m", "gemma3-270m"), ("gemma3-270m", "smollm2-135m")], ids=str
)
def real(request):
    return RealPair(*request.param)


def excess_surprise(model, out):
    """Σ (NLL − entropy) of the new tokens under fresh target forwards, and its variance.

    Given its context a token drawn from the target's law has expected surprise equal to that law's entropy, so
    the sum has mean zero whatever path the text takes: a martingale, and a sharp test of the law on real models.
    """
    with torch.inference_mode():
        logits = model(out.sequences).logits[0, -len(out.new_ids) - 1 : -1].double()
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    variance = (p * log_p**2).sum(-1) - entropy**2
    nll = -log_p.gather(1, torch.tensor(out.new_ids)[:, None])[:, 0]
    return float((nll - entropy).sum()), float(variance.sum())


def test_greedy_equals_transformers_on_ten_prompts(real, code):
    for prompt in [*code, *PROSE]:
        ids = torch.tensor([real.engine.decoder(prompt, algorithm="none").ids])
        out = real.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        expected = out[0, ids.shape[1] :].tolist()
        for algorithm in ("none", "slem", "tli", "slrs"):
            out = real.engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=16)
            assert out.new_ids == expected, (prompt, algorithm)


OPTIONS = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3, "min_new_tokens": 20},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"bad_words_ids": [[198], [257], [107]], "renormalize_logits": True},
    {"stop_strings": ["return", " the", "."]},
    {"exponential_decay_length_penalty": (4, 1.2)},
    {"max_length": 90},
    {"logits_processor": True},
]
# Every pair of (option, algorithm), (option, draft length) and (algorithm, draft length) occurs.
COVER = [
    (o, algorithm, (1, 3, 6)[(o + a) % 3])
    for o in range(len(OPTIONS))
    for a, algorithm in enumerate(("slem", "tli", "slrs"))
]


class Alternating:
    """A processor with a state: every second call forbids the likeliest token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls % 2 == 0:
            scores[0, scores[0].argmax()] = -torch.inf
        return scores


def test_options_equal_transformers_pairwise(real, code):
    """32 tokens in float32; transformers has no presence and frequency penalty, so plain decoding stands in for it."""
    from transformers import LogitsProcessorList

    tokenizer = real.engine.target.transformers_tokenizer
    for o, options in enumerate(OPTIONS):
        prompt = [*code, *PROSE][o]
        ids = real.engine.decoder(prompt, algorithm="none").ids
        lengths = {} if "max_length" in options else {"max_new_tokens": 32}
        ours = {**lengths, **options}
        stateful = ours.pop("logits_processor", False)
        if "presence_penalty" in options:
            expected = real.engine.generate(ids, algorithm="none", **ours).new_ids
        else:
            theirs = {**ours, "tokenizer": tokenizer} if "stop_strings" in ours else dict(ours)
            if stateful:
                theirs["logits_processor"] = LogitsProcessorList([Alternating()])
            out = real.target.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                pad_token_id=0,
                **theirs,
            )
            expected = out[0, len(ids) :].tolist()
        for which, algorithm, k in COVER:
            if which == o:
                own = {"logits_processor": [Alternating()]} if stateful else {}
                found = real.engine.generate(
                    ids, algorithm=algorithm, num_draft_tokens=k, **ours, **own
                ).new_ids
                assert found == expected, (options, algorithm, k)


def test_a_batch_is_its_single_runs(real, code):
    prompts = [code[0], *PROSE[:2], "x"]
    for algorithm in ("slem", "tli"):
        options = {"algorithm": algorithm, "num_draft_tokens": 3, "max_new_tokens": 16}
        together = real.engine.generate_batch(prompts, **options)
        assert [o.new_ids for o in together] == [real.engine.generate(p, **options).new_ids for p in prompts]


def test_fixed_shapes_write_the_same_texts(real, code):
    """A float32 pass in fixed shapes rounds otherwise; on this prompt no two logits are that close."""
    dynamic = real.engine
    static = Engine(
        real.target,
        dynamic.drafter.model.model,
        real.pair,
        target_tokenizer=dynamic.target.tokenizer,
        drafter_tokenizer=dynamic.drafter.tokenizer,
        static=True,
    )
    plain = dynamic.generate(code[0], algorithm="none", max_new_tokens=20)
    for algorithm in ("none", "tli", "slrs", "slem"):
        out = static.generate(code[0], algorithm=algorithm, num_draft_tokens=3, max_new_tokens=20)
        assert out.new_ids == plain.new_ids
        assert algorithm == "none" or out.stats.accepted > 0


def test_drafting_saves_target_passes(real, code):
    for algorithm in ("slem", "tli", "slrs"):
        stats = real.engine.generate(
            code[0], algorithm=algorithm, num_draft_tokens=4, max_new_tokens=40
        ).stats
        assert stats.tokens_per_target_pass > 1.3
        assert (
            stats.drafter_tokens < 2.5 * len(real.engine.decoder(code[0], algorithm="slem").context.ids) + 120
        )


def test_sampled_acceptance_agrees_with_the_laws(real, monkeypatch):
    """TLI at temperature 1: accepted share of the judged candidates against the mean of Σ min(p, π)."""
    expected, honest = [], verify._verify_token

    def spy(candidates, proposal_laws, logits, warping, rng, none=None):
        verdict = honest(candidates, proposal_laws, logits, warping, rng, none)
        for j in range(min(verdict.accepted + 1, len(candidates))):
            expected.append(float(laws.acceptance(laws.law(logits[j], warping), proposal_laws[j])))
        return verdict

    monkeypatch.setattr(verify, "_verify_token", spy)
    accepted = judged = 0
    excess = variance = 0.0
    for seed in range(6):
        out = real.engine.generate(
            PROSE[seed % len(PROSE)],
            algorithm="tli",
            verify="token",
            num_draft_tokens=3,
            max_new_tokens=40,
            do_sample=True,
            top_k=0,
            seed=seed,
        )
        accepted += out.stats.accepted
        judged += sum(out.stats.proposed_by_position)
        surprise = excess_surprise(real.target, out)
        excess, variance = excess + surprise[0], variance + surprise[1]
    assert judged == len(expected) > 100
    mean = sum(expected) / judged
    spread = math.sqrt(sum(a * (1 - a) for a in expected)) / judged
    assert abs(accepted / judged - mean) < 4.5 * spread
    assert abs(excess) < 5 * math.sqrt(variance)  # a heavy-tailed sum: wider than a normal one's bound


def test_two_step_law_of_a_real_pair(real):
    """First token of TLI on one prompt, many seeds, against the target's exact law over its likeliest tokens."""
    from scipy.stats import chi2

    from hetspec.runtime.rng import TorchRng
    from hetspec.runtime.verify import Proposal

    decoder = real.engine.decoder(
        "The capital of France is", algorithm="tli", do_sample=True, top_k=0, seed=0
    )
    logits = decoder.target.forward(decoder.ids, keep=1)
    p = laws.law(logits[0], Warping(1.0))
    pi = decoder.algorithm.propose(decoder.context, decoder.ids[-8:], 1, TorchRng(1)).laws[0]
    rng, n = TorchRng(7), 4000
    row = torch.cat([logits, logits])  # the second row only feeds the bonus, which is not looked at
    cells = p.topk(7).indices.tolist()
    counts = torch.zeros(8)
    for _ in range(n):
        t = rng.categorical(pi)
        first = verify.verify(Proposal([t], [pi]), row, Warping(1.0), rng).ids[0]
        counts[cells.index(first) if first in cells else 7] += 1
    law = torch.cat([p[cells], (1 - p[cells].sum()).reshape(1)])
    statistic = float(((counts - n * law) ** 2 / (n * law)).sum())
    assert statistic < chi2.isf(1e-6, 7)
    draft_law = torch.cat([pi[cells], (1 - pi[cells].sum()).clamp(min=1e-9).reshape(1)])
    assert float(((counts - n * draft_law) ** 2 / (n * draft_law)).sum()) > chi2.isf(
        1e-6, 7
    )  # p ≠ π: it can fail


@pytest.mark.parametrize("drafter", ["tiny-bpe", "tiny-bytes"])
def test_half_precision_keeps_every_bit(code, drafter):
    """Greedy bfloat16 texts, their scores too, are those of plain decoding whatever was drafted (CPU)."""
    pair = RealPair("smollm2-135m", drafter, dtype=torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() is False:
        pytest.skip("LOUD SKIP, this processor has no bfloat16 arithmetic")
    for number, prompt in enumerate(code[:2] + PROSE[:3]):
        plain = pair.engine.generate(prompt, algorithm="none", max_new_tokens=40, output_logits=True)
        out = pair.engine.generate(
            prompt,
            algorithm=("slem", "tli", "slrs")[number % 3],
            num_draft_tokens=(8, 3, 5, 15, 1)[number],
            max_new_tokens=40,
            output_logits=True,
        )
        assert out.new_ids == plain.new_ids
        assert all(torch.equal(a, b) for a, b in zip(out.logits, plain.logits, strict=True))
        ids = torch.tensor([pair.engine.decoder(prompt, algorithm="none", max_new_tokens=1).ids])
        theirs = pair.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=None,
        )
        assert [int(t) for t in theirs[0, ids.shape[1] :]] == plain.new_ids


def test_half_precision_passes_over_a_windowed_model_equal_transformers_steps(code):
    """Gemma 3: sliding windows, and layers that some processors sum otherwise for a single row."""
    model = load_model("gemma3-270m", dtype=torch.bfloat16)
    tokenizer = load_tokenizer("gemma3-270m").tokenizer
    ours = CachedModel(model, role="target", weights="auto")
    lengths = (4, 1, 8, 2, 16)
    for text in (code[0], PROSE[0]):
        ids = tokenizer.encode(text).ids
        theirs = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = theirs.sequences[0, len(ids) :].tolist()
        row = ours.new_row()
        logits = [row.forward(ids, 1)]
        for n in lengths:
            start = row.length - len(ids)
            logits.append(row.forward(new[start : start + n], n))
        assert torch.equal(torch.cat(logits)[:32], torch.cat(theirs.logits))
