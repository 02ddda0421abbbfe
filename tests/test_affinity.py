"""Co-segmentation kernels: against a brute-force count, whatever the batches; and what they reach."""

from __future__ import annotations

import inspect
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetspec.prep import affinity
from hetspec.prep.affinity import common_starts, cosegment, kernel_figures
from hetspec.prep.intersect import build_map
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary
from tests.toys import Toy, trained_bpe

TEXT = inspect.getsource(textwrap)


class Side:
    def __init__(self, tokenizer, rows):
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer, rows=rows, eos_ids=(0,))
        self.segmenter = Segmenter(tokenizer, self.vocabulary)


@pytest.fixture(scope="module")
def pair():
    target, drafter = Side(trained_bpe([TEXT], 600), 610), Side(trained_bpe([TEXT[:5000]], 400), 404)
    return target, drafter, build_map(target.vocabulary, drafter.vocabulary, target.segmenter)


def brute_force(mapping, target, drafter, texts, smoothing):
    """The slow obvious twin: a dense matrix, filled boundary by boundary."""
    counts = np.zeros((len(mapping.d2t), len(mapping.t2d)))
    for text in texts:
        starts = {}
        position = 0
        for t in target.segmenter.encode(text):
            starts[position] = t
            position += len(target.vocabulary.pieces[t])
        position = 0
        for d in drafter.segmenter.encode(text):
            if position in starts:
                counts[d, starts[position]] += 1
            position += len(drafter.vocabulary.pieces[d])
    for d, image in enumerate(mapping.first):
        if image >= 0:
            counts[d, image] += smoothing
    sums = counts.sum(1, keepdims=True)
    return np.divide(counts, sums, out=np.zeros_like(counts), where=sums > 0)


def dense(kernel, width):
    matrix = np.zeros((len(kernel.indptr) - 1, width))
    rows = np.repeat(np.arange(len(kernel.indptr) - 1), np.diff(kernel.indptr))
    matrix[rows, kernel.indices] = kernel.weights
    return matrix


@pytest.mark.parametrize("smoothing", [0.5, 1.0])
def test_kernel_equals_brute_force(pair, smoothing):
    target, drafter, mapping = pair
    texts = [TEXT[i : i + 700].encode() for i in range(0, 7000, 700)]
    result = cosegment(mapping, target.segmenter, drafter.segmenter, texts, smoothing=smoothing, top=1000)
    expected = brute_force(mapping, target, drafter, texts, smoothing)
    assert np.allclose(dense(result.kernel, len(mapping.t2d)), expected, atol=1e-6)
    assert result.skipped_bytes == 0
    assert result.common_boundaries == result.counts.sum() > 500
    assert result.kernel.counts.tolist() == result.counts.tolist()


def test_batches_do_not_change_the_counts(pair, monkeypatch):
    target, drafter, mapping = pair
    texts = [TEXT[i : i + 100].encode() for i in range(0, 6000, 100)]
    whole = cosegment(mapping, target.segmenter, drafter.segmenter, texts)
    monkeypatch.setattr(affinity, "BATCH_BYTES", 256)
    seen = []
    streamed = cosegment(mapping, target.segmenter, drafter.segmenter, iter(texts), progress=seen.append)
    assert np.array_equal(whole.kernel.indices, streamed.kernel.indices)
    assert np.array_equal(whole.kernel.weights, streamed.kernel.weights)
    assert whole.text_sha256 == streamed.text_sha256
    assert seen == sorted(seen)
    assert seen[-1] == sum(map(len, texts))
    assert len(seen) > 10


def test_a_long_text_is_cut_at_line_ends_and_characters(monkeypatch):
    monkeypatch.setattr(affinity, "PIECE_BYTES", 50)
    text = ("x = 1\n" * 30 + "é" * 200).encode()
    pieces = list(affinity._pieces(text))
    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= 50
    for piece in pieces:
        piece.decode()


def test_rows_keep_their_largest_entries(pair):
    target, drafter, mapping = pair
    full = dense(
        cosegment(mapping, target.segmenter, drafter.segmenter, [TEXT.encode()], top=1000).kernel,
        len(mapping.t2d),
    )
    cut = cosegment(mapping, target.segmenter, drafter.segmenter, [TEXT.encode()], top=2).kernel
    assert np.diff(cut.indptr).max() == 2
    for d, row in enumerate(dense(cut, len(mapping.t2d))):
        if full[d].any():
            best = np.sort(full[d])[::-1][:2]
            assert np.allclose(np.sort(row)[::-1][:2], best / best.sum(), atol=1e-5)


def test_a_target_token_longer_than_any_drafter_token_is_reached():
    """What neither TLI nor the first-token map can do."""
    target, drafter = Toy([b"a", b"b", b"ab", b"abab"]), Toy([b"a", b"b", b"ab"])
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    long = target.vocabulary.pieces.index(b"abab")
    assert long not in mapping.first
    result = cosegment(mapping, target.segmenter, drafter.segmenter, [b"abababab"] * 20)
    assert result.kernel.weight_of(np.full(len(mapping.d2t), long)).max() > 0.8


def test_text_that_one_tokenizer_spells_differently_is_skipped_and_counted():
    target, drafter = Toy([b"a", b"b", b"ab"]), Toy([b"a", b"b"])
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    result = cosegment(mapping, target.segmenter, drafter.segmenter, [b"abab", b"a?b", b"ba"])
    assert result.skipped_bytes == 3  # "?" has no token
    assert result.target_tokens == 2 + 2


def test_no_text_gives_the_first_token_map(pair):
    target, drafter, mapping = pair
    kernel = cosegment(mapping, target.segmenter, drafter.segmenter, []).kernel
    images = np.where(mapping.first >= 0, mapping.first, mapping.d2t)
    assert np.array_equal(kernel.indices, images[images >= 0])
    assert np.all(kernel.weights == 1)


def test_figures_are_shares_and_counts(pair):
    target, drafter, mapping = pair
    result = cosegment(mapping, target.segmenter, drafter.segmenter, [TEXT.encode()])
    figures = kernel_figures(result, mapping, drafter.vocabulary)
    for name in ("rows_seen_fraction", "image_mass", "uncertain_mass"):
        assert 0 < figures[name] < 1
    assert figures["nnz"] == len(result.kernel.indices)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12), st.lists(st.integers(1, 4), min_size=1, max_size=12)
)
def test_common_starts_equals_the_obvious_loop(lengths_d, lengths_t):
    ends_d, ends_t = np.cumsum(lengths_d), np.cumsum(lengths_t)
    ids_d, ids_t = np.arange(len(lengths_d)) + 100, np.arange(len(lengths_t)) + 200
    starts_d = [0, *ends_d[:-1].tolist()]
    starts_t = [0, *ends_t[:-1].tolist()]
    expected = [
        (int(ids_d[i]), int(ids_t[j]))
        for i, a in enumerate(starts_d)
        for j, b in enumerate(starts_t)
        if a == b
    ]
    d, t = common_starts(ids_d, ends_d, ids_t, ends_t)
    assert list(zip(d.tolist(), t.tolist(), strict=True)) == expected
