"""F and the healing table against the tokenizer itself, over every pair of tokens of two trained tokenizers."""

from __future__ import annotations

import pytest

from hetspec.prep.intersect import build_map
from hetspec.runtime.boundaries import FirstTarget, LongerTokens
from hetspec.segment import Segmenter, is_utf8
from hetspec.vocab import Vocabulary
from tests.test_runtime import CODE, PROSE
from tests.toys import trained_bpe


class Side:
    def __init__(self, texts, size):
        tokenizer = trained_bpe(texts, size)
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_ids=(0,))
        self.segmenter = Segmenter(tokenizer, self.vocabulary)


@pytest.fixture(scope="module")
def pair():
    target, drafter = Side([CODE, PROSE], 700), Side([CODE], 500)
    return target, drafter, build_map(target.vocabulary, drafter.vocabulary, target.segmenter)


def test_first_target_equals_the_tokenizer_on_every_pair(pair):
    """White space matters: a pre-tokeniser leaves the last of four spaces to the word that follows."""
    target, drafter, mapping = pair
    first = FirstTarget(mapping, target.vocabulary, drafter.vocabulary, target.segmenter)
    pieces = drafter.vocabulary.pieces
    text_ids = [d for d, piece in enumerate(pieces) if piece and is_utf8(piece)]
    wrong = []
    for d in text_ids:
        found = first.of(d, text_ids)
        texts = [pieces[d] + pieces[e] for e in text_ids]
        for e, x, ids in zip(text_ids, found, target.segmenter.encode_batch(texts), strict=True):
            if x != ids[0]:
                wrong.append(
                    (pieces[d], pieces[e], target.vocabulary.pieces[x], target.vocabulary.pieces[ids[0]])
                )
    assert len(text_ids) > 300
    assert wrong == []


def test_the_end_of_the_text_is_the_image_of_the_token_alone(pair):
    target, drafter, mapping = pair
    first = FirstTarget(mapping, target.vocabulary, drafter.vocabulary, target.segmenter)
    d = drafter.vocabulary.ids_by_bytes[b"x"][0]
    assert first.of(d, [0]) == [mapping.first[d]]


def test_four_spaces_before_a_word():
    target, drafter = Side([CODE], 600), Side([CODE], 500)
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    first = FirstTarget(mapping, target.vocabulary, drafter.vocabulary, target.segmenter)
    four = drafter.vocabulary.ids_by_bytes[b"    "][0]
    word = drafter.vocabulary.ids_by_bytes[b"r"][0]
    assert target.vocabulary.pieces[mapping.first[four]] == b"    "
    assert target.vocabulary.pieces[first.of(four, [word])[0]] == b"   "


def test_longer_tokens_are_those_that_begin_with_the_piece(pair):
    _, drafter, _ = pair
    pieces = drafter.vocabulary.pieces
    longer = LongerTokens(drafter.vocabulary, pair[0].segmenter)
    for piece in {p for p in pieces if p}:
        expected = sorted(d for d, other in enumerate(pieces) if other.startswith(piece) and other != piece)
        assert sorted(longer.of(piece).tolist()) == expected


def test_following_is_what_the_target_reads_next(pair):
    target, _, _ = pair
    longer = LongerTokens(pair[1].vocabulary, target.segmenter)
    pieces = target.vocabulary.pieces
    for t in range(1, len(pieces), 7):
        for rest in (b" x", b"x", b"\n", b"    "):
            if not is_utf8(pieces[t]):
                continue
            ids = target.segmenter.encode(pieces[t] + rest)
            expected = ids[1] if len(ids) > 1 and ids[0] == t else -1
            assert longer.following(t, rest) == expected
