"""A real pair that needs no download: the shipped tiny-bpe as the target, tiny-bytes as its drafter.

What random models cannot show: laws with a shape, candidates that stand, texts that end.
"""

from __future__ import annotations

import pytest
import torch

import hetspec
from hetspec.prep.build import add_cosegment, add_stops, build_pair, prepare
from hetspec.runtime import laws
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.sources import load_model, load_tokenizer, shipped_drafters

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "The river runs through the city and down to the sea, and the people of the city live by it.\n",
]
PROMPTS = (
    "def fibonacci(n):\n    if n < 2:\n        return",
    "The capital of France is Paris, and the largest city in",
    "Once upon a time there was a",
)
CHAT = [{"role": "user", "content": "What is the sky?"}]
ALGORITHMS = ("slem", "tli", "rdk", "slrs")


class Shipped:
    def __init__(self, dtype: torch.dtype) -> None:
        sides = [prepare(load_tokenizer(name)) for name in ("tiny-bpe", "tiny-bytes")]
        self.models = [load_model(name, dtype=dtype) for name in ("tiny-bpe", "tiny-bytes")]
        pair = build_pair(sides[0], sides[1], TEXTS, "test")
        pair, _ = add_cosegment(pair, sides[0], sides[1], TEXTS, ["test"])
        self.pair = add_stops(pair, sides[0], TEXTS, ["test"])
        self.tokenizers = {"target_tokenizer": sides[0].source, "drafter_tokenizer": sides[1].source}
        self.engine = Engine(*self.models, self.pair, **self.tokenizers)

    def theirs(self, prompt: str, tokens: int) -> list[int]:
        """transformers' own greedy ids."""
        ids = torch.tensor([self.engine.decoder(prompt, algorithm="none", max_new_tokens=1).ids])
        out = self.models[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        return [int(t) for t in out[0, ids.shape[1] :]]


@pytest.fixture(scope="module")
def shipped():
    return Shipped(torch.float32)


@pytest.fixture(scope="module")
def half():
    return Shipped(torch.bfloat16)


def test_both_are_found_by_name():
    assert set(shipped_drafters()) == {"tiny-bpe", "tiny-bytes"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_greedy_text_is_transformers(shipped, algorithm):
    accepted = 0
    for prompt in PROMPTS:
        out = shipped.engine.generate(prompt, algorithm=algorithm, num_draft_tokens=5, max_new_tokens=24)
        assert out.new_ids == shipped.theirs(prompt, 24)
        accepted += out.stats.accepted
    assert accepted


@pytest.mark.parametrize("algorithm", ["slem", "slrs"])
def test_half_precision_keeps_every_bit(half, algorithm):
    for prompt in PROMPTS[:2]:
        plain = half.engine.generate(prompt, algorithm="none", max_new_tokens=24, output_logits=True)
        out = half.engine.generate(
            prompt, algorithm=algorithm, num_draft_tokens=6, max_new_tokens=24, output_logits=True
        )
        assert out.new_ids == plain.new_ids == half.theirs(prompt, 24)
        assert all(torch.equal(a, b) for a, b in zip(out.logits, plain.logits, strict=True))


@pytest.mark.parametrize("algorithm", ["slem", "slrs"])
def test_first_tokens_have_the_targets_law(shipped, algorithm):
    """χ² of 120 sampled first tokens against the law."""
    engine, prompt = shipped.engine, PROMPTS[2]
    decoder = engine.decoder(prompt, algorithm="none", max_new_tokens=1)
    p = laws.law(decoder.target.forward(decoder.ids, keep=1)[0], Warping())
    counts = torch.zeros_like(p, dtype=torch.float64)
    for seed in range(120):
        out = engine.generate(
            prompt,
            algorithm=algorithm,
            num_draft_tokens=1,
            max_new_tokens=2,
            do_sample=True,
            top_k=0,
            seed=seed,
        )
        counts[out.new_ids[0]] += 1
    expected = 120 * p.double()
    big = expected >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_the_byte_form_is_chosen_and_says_no_to_blocks(shipped):
    chosen = shipped.engine.decoder("a", algorithm="slrs", max_new_tokens=4).algorithm
    assert type(chosen).__name__ == "BytewiseSLRS"
    with pytest.raises(hetspec.errors.InvalidInput, match="token by token"):
        shipped.engine.generate("a", algorithm="slrs", verify="block", max_new_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_batch_are_their_single_runs(shipped, temperature):
    options = {"algorithm": "slrs", "num_draft_tokens": 3, "max_new_tokens": 16}
    options |= {"do_sample": True, "temperature": temperature, "seed": 3} if temperature else {}
    batch = shipped.engine.generate_batch(list(PROMPTS), **options)
    for row, (prompt, out) in enumerate(zip(PROMPTS, batch, strict=True)):
        alone = dict(options, seed=3 + row) if temperature else options
        assert out.new_ids == shipped.engine.generate(prompt, **alone).new_ids


def test_without_a_stop_table_the_byte_form_says_how_to_build_one(shipped):
    sides = [prepare(load_tokenizer(name)) for name in ("tiny-bpe", "tiny-bytes")]
    bare = Engine(*shipped.models, build_pair(sides[0], sides[1], TEXTS, "test"), **shipped.tokenizers)
    with pytest.raises(hetspec.errors.IncompatiblePair, match="no stop table"):
        bare.generate("a", algorithm="slrs", slrs_form="bytes", max_new_tokens=4)
    assert bare.generate("a", algorithm="slrs", max_new_tokens=4).new_ids  # auto: look-ahead
    pair = build_pair(sides[1], sides[0], TEXTS, "test")
    turned = Engine(
        shipped.models[1],
        shipped.models[0],
        pair,
        target_tokenizer=sides[1].source,
        drafter_tokenizer=sides[0].source,
    )
    with pytest.raises(
        hetspec.errors.IncompatiblePair, match="tokens are single bytes, tiny-bpe has tokens of up"
    ):
        turned.generate("a", algorithm="slrs", slrs_form="bytes", max_new_tokens=4)
