"""SLRS-4c with a small random model that writes bytes: prompts, batches, windows, heads, dtypes, refusals, commands."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import hetspec
from hetspec.artifact import PairArtifact, PrunedHead, TokenizerIdentity
from hetspec.prep.intersect import build_map
from hetspec.prep.stops import stop_table
from hetspec.runtime.algorithms import BEHIND_TOKENS
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary
from tests.builders import full_byte_bpe
from tests.test_runtime import CODE, PROMPTS, TinyPair, plain
from tests.toys import tiny_model

BYTES = {"algorithm": "slrs", "slrs_form": "bytes", "num_draft_tokens": 3}


class BytePair(TinyPair):
    """A trained target tokenizer and a drafter with a token for each byte and an end of text."""

    def __init__(self):
        super().__init__(drafter_tokenizer=full_byte_bpe())
        self.drafter = tiny_model("llama", 263, seed=2, eos=256)
        t = Vocabulary.from_tokenizer(self.target_tokenizer, name="t", rows=432, eos_ids=(0,))
        d = Vocabulary.from_tokenizer(self.drafter_tokenizer, name="d", rows=263, eos_ids=(256,))
        segmenter = Segmenter(self.target_tokenizer, t)
        self.pair = PairArtifact(
            target=TokenizerIdentity.of(t),
            drafter=TokenizerIdentity.of(d),
            map=build_map(t, d, segmenter),
            stops=stop_table(t, segmenter, [CODE.encode()]).table,
        )


@pytest.fixture(scope="module")
def tiny():
    return BytePair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


def test_greedy_equals_plain_decoding_alone_and_in_a_batch(tiny, engine):
    together = engine.generate_batch(PROMPTS[1:5], max_new_tokens=16, **BYTES)
    for prompt, out in zip(PROMPTS[1:5], together, strict=True):
        expected = plain(tiny.target, tiny.target_tokenizer.encode(prompt).ids, 16)
        assert engine.generate(prompt, max_new_tokens=16, **BYTES).new_ids == out.new_ids == expected
        assert out.stats.proposed > 0


def test_sampled_rows_draw_as_alone(engine):
    options = {"max_new_tokens": 10, "do_sample": True, **BYTES}
    together = engine.generate_batch(PROMPTS[:3], seed=7, **options)
    assert [out.new_ids for out in together] == [
        engine.generate(prompt, seed=7 + row, **options).new_ids for row, prompt in enumerate(PROMPTS[:3])
    ]
    assert sum(out.stats.proposed for out in together) > 0


@pytest.mark.parametrize("positions", [4, 24, 64])
def test_any_drafter_window_is_lossless(tiny, positions):
    ids = tiny.target_tokenizer.encode(CODE[:200]).ids
    short = tiny_model("gpt2", 263, seed=3, eos=256, positions=positions)
    out = tiny.engine(short).generate(ids, max_new_tokens=20, **BYTES)
    assert out.new_ids == plain(tiny.target, ids, 20)
    sampled = tiny.engine(short).generate(ids, max_new_tokens=20, do_sample=True, seed=1, **BYTES)
    assert (sampled.stats.proposed > 0) == (positions == 64)  # half a window has to hold the longest token


def test_a_pruned_head_serves(tiny):
    pair = BytePair()
    reachable = np.flatnonzero(pair.pair.reachable).astype(np.int32)
    pair.pair = dataclasses.replace(pair.pair, head=PrunedHead(reachable))
    pruned = pair.engine()
    assert pruned._tools.kept is not None
    out = pruned.generate(PROMPTS[0], max_new_tokens=12, **BYTES)
    assert out.new_ids == plain(tiny.target, tiny.target_tokenizer.encode(PROMPTS[0]).ids, 12)
    assert pruned.generate(PROMPTS[0], max_new_tokens=12, do_sample=True, seed=1, **BYTES).stats.proposed > 0


def test_through_transformers_own_generate(tiny):
    ids = torch.tensor([tiny.target_tokenizer.encode(PROMPTS[0]).ids])
    out = tiny.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        custom_generate=hetspec.hf_generate,
        pair=tiny.pair,
        drafter=tiny.drafter,
        target_tokenizer=tiny.target_tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
        **BYTES,
    )
    assert out[0, ids.shape[1] :].tolist() == plain(tiny.target, ids[0].tolist(), 12)


class Towards:
    """An Rng that draws a walk down to one token."""

    def __init__(self, trie, piece):
        path = trie.path(piece)
        self.choices = [
            node - trie.children(above).start for above, node in zip([0, *path], path, strict=False)
        ]
        below = trie.children(path[-1])
        self.choices.append(below.stop - below.start)

    def categorical(self, law):
        return self.choices.pop(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_psi_asked_again_is_the_psi_that_was_drawn_from(tiny, dtype):
    """Bit for bit in half precision, where a pass over several bytes rounds otherwise than the walk's single steps."""
    engine = tiny.engine(tiny_model("llama", 263, seed=2, eos=256, std=0.25).to(dtype))
    pieces = engine.target.vocabulary.pieces
    for t in sorted(range(300, 420), key=lambda t: -len(pieces[t]))[:20]:
        decoder = engine.decoder(PROMPTS[1], seed=0, do_sample=True, **BYTES)
        algorithm, context = decoder.algorithm, decoder.context
        rng = Towards(algorithm.walk.trie, pieces[t])
        proposal = algorithm.propose(context, decoder.ids[-BEHIND_TOKENS:], 1, rng)
        assert proposal.ids == [t]
        law = proposal.laws[0]
        drawn = law[t]
        law._known.clear()
        tolerance = {torch.bfloat16: 0, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
        assert drawn > 0
        assert law[t] == pytest.approx(drawn, rel=tolerance, abs=0)
