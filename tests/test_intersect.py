"""The intersection map: equal bytes, consistent both ways, control tokens by role; and what it covers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetspec.prep.build import build_pair, corpus, most_frequent_unmapped, prepare
from hetspec.prep.intersect import build_map, corpus_coverage, map_figures, roles
from hetspec.sources import load_tokenizer
from hetspec.vocab import Kind
from tests.builders import (
    Side,
    byte_bpe_tokenizers,
    full_byte_bpe,
    literal,
    read,
    relabelled,
    sentencepiece_bpe,
    wordpiece,
)
from tests.toys import Toy, byte_bpe

pairs = st.tuples(byte_bpe_tokenizers(controls=("<eos>",)), byte_bpe_tokenizers(controls=("<end>",)))


def mapped(target: Side, drafter: Side):
    return build_map(target.vocabulary, drafter.vocabulary, target.segmenter)


def ending(tokenizer, *names: str, **roles) -> Side:
    return read(tokenizer, eos_ids=[tokenizer.token_to_id(name) for name in names], **roles)


def check_map(target: Side, drafter: Side) -> None:
    """Every promise of a map, the slow way."""
    m = mapped(target, drafter)
    t_pieces, d_pieces = target.vocabulary.pieces, drafter.vocabulary.pieces
    assert (m.d2t.dtype, m.t2d.dtype, m.first.dtype) == (np.int32,) * 3
    by_role = dict(reversed(roles(target.vocabulary, drafter.vocabulary)))
    for d in range(drafter.vocabulary.rows):
        piece = d_pieces[d] if d < len(d_pieces) else b""
        same = [t for t, other in enumerate(t_pieces) if piece and other == piece]
        if same:
            assert m.d2t[d] == min(same, key=lambda t: (target.vocabulary.kinds[t], t))
        else:
            assert m.d2t[d] == by_role.get(d, -1)
        if piece:
            ids = target.segmenter.encode(piece)
            fits = ids and t_pieces[ids[0]] and piece.startswith(t_pieces[ids[0]])
            assert m.first[d] == (ids[0] if fits else -1)
        else:
            assert m.first[d] == by_role.get(d, -1)
    for t in range(target.vocabulary.rows):
        back = np.flatnonzero(m.d2t == t)
        if len(back):
            assert m.t2d[t] in back
            assert m.d2t[m.t2d[t]] == t
        else:
            assert m.t2d[t] == -1


@given(pairs)
def test_a_map_keeps_every_promise(both):
    check_map(ending(both[0], "<eos>"), ending(both[1], "<end>"))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    "makers",
    [(full_byte_bpe, sentencepiece_bpe), (sentencepiece_bpe, sentencepiece_bpe), (full_byte_bpe, wordpiece)],
    ids=["byte level, sentencepiece", "two sentencepieces", "byte level, wordpiece"],
)
def test_a_map_across_styles_keeps_every_promise(makers, flip):
    first, second = makers[0]((" the", "a é", "caf")), makers[1]()
    second.add_tokens([literal("a é")])
    check_map(*((read(second), read(first)) if flip else (read(first), read(second))))


@given(pairs)
def test_the_two_directions_invert_each_other(both):
    one, two = ending(both[0], "<eos>"), ending(both[1], "<end>")
    there, back = mapped(one, two), mapped(two, one)
    for t in np.flatnonzero(there.t2d >= 0):
        assert back.t2d[there.t2d[t]] == t
    assert (there.t2d >= 0).sum() == (back.t2d >= 0).sum()


@given(pairs, st.integers(0, 1000))
def test_renaming_ids_renames_the_map(both, seed):
    rng = np.random.default_rng(seed)
    one, two = ending(both[0], "<eos>"), ending(both[1], "<end>")
    m = mapped(one, two)
    sizes = [len(side.vocabulary.pieces) for side in (one, two)]
    orders = [np.append(rng.permutation(size - 1), size - 1) for size in sizes]  # control tokens come last
    one2, two2 = (
        ending(relabelled(tokenizer, order), name)
        for tokenizer, order, name in zip(both, orders, ("<eos>", "<end>"), strict=True)
    )
    renamed = mapped(one2, two2)

    def rename(ids: np.ndarray, order: np.ndarray) -> np.ndarray:
        return np.where(ids >= 0, order[ids], -1)

    assert np.array_equal(renamed.d2t[orders[1]], rename(m.d2t, orders[0]))
    assert np.array_equal(renamed.first[orders[1]], rename(m.first, orders[0]))
    assert np.array_equal(renamed.t2d[orders[0]], rename(m.t2d, orders[1]))


@given(byte_bpe_tokenizers(controls=("<eos>",)))
def test_a_vocabulary_maps_onto_itself(tokenizer):
    side = ending(tokenizer, "<eos>")
    m = mapped(side, side)
    identity = np.arange(side.vocabulary.rows)
    assert np.array_equal(m.d2t, identity)
    assert np.array_equal(m.t2d, identity)


def test_a_vocabulary_with_duplicates_maps_onto_itself_but_for_them():
    tokenizer = sentencepiece_bpe()
    side = ending(tokenizer, "</s>")
    m = mapped(side, side)
    a, byte = tokenizer.token_to_id("A"), tokenizer.token_to_id("<0x41>")
    assert m.d2t[a] == m.d2t[byte] == a
    assert m.t2d[a] == a
    assert m.t2d[byte] == -1
    text = side.vocabulary.kinds <= Kind.BYTE
    others = [i for i in np.flatnonzero(text) if m.d2t[i] != i]
    assert all(chr(side.vocabulary.pieces[i][0]).isascii() for i in others)
    figures = map_figures(m, side.vocabulary, side.vocabulary)
    assert figures.duplicates == len(others) == 96  # space, newline and the 94 printable ASCII characters
    assert figures.intersection_count == text.sum() - len(others)
    assert figures.target_fraction == figures.drafter_fraction == 1.0


# --- control tokens


def sided(tokens: dict[str, str]) -> Side:
    """A toy whose control tokens have these roles: "eos", "turn", "both" or "" (none)."""
    tokenizer = byte_bpe([b"a"], tuple(tokens))
    by_role: dict[str, list[int]] = {"eos": [], "turn": [], "both": [], "": []}
    for token, role in tokens.items():
        by_role[role].append(tokenizer.token_to_id(token))
    return read(
        tokenizer,
        eos_ids=by_role["eos"] + by_role["both"],
        turn_end_ids=by_role["turn"] + by_role["both"],
    )


def by_names(target: Side, drafter: Side) -> dict[str, str]:
    """Drafter control token -> target control token."""
    m = mapped(target, drafter)
    controls = np.flatnonzero(drafter.vocabulary.kinds == Kind.CONTROL)
    return {
        drafter.tokenizer.id_to_token(d): target.tokenizer.id_to_token(m.d2t[d])
        for d in map(int, controls)
        if m.d2t[d] >= 0
    }


def test_control_tokens_match_by_role_and_never_by_string():
    target = sided({"<end>": "eos", "<im>": "turn", "<s>": ""})
    drafter = sided({"<im>": "eos", "<end>": "turn", "<s>": ""})
    assert by_names(target, drafter) == {"<im>": "<end>", "<end>": "<im>"}


@pytest.mark.parametrize(
    ("target", "drafter", "expected"),
    [
        ({"T": "eos"}, {"d": "turn", "D": "eos"}, {"d": "T", "D": "T"}),
        ({"t": "turn", "T": "eos"}, {"D": "eos"}, {"D": "T"}),
        ({"t": "turn"}, {"D": "eos"}, {"D": "t"}),
        ({"b": "both"}, {"d": "turn", "D": "eos"}, {"d": "b", "D": "b"}),
        ({"t": "turn", "T": "eos"}, {"b": "both"}, {"b": "t"}),
        ({"T": "eos", "U": "eos"}, {"D": "eos", "E": "eos"}, {"D": "T", "E": "T"}),
        ({"T": "eos"}, {"d": ""}, {}),
        ({"t": ""}, {"D": "eos"}, {}),
    ],
)
def test_ends_go_to_the_same_role_or_to_whatever_ends_a_generation(target, drafter, expected):
    assert by_names(sided(target), sided(drafter)) == expected
    check_map(sided(target), sided(drafter))


def test_the_preferred_preimage_of_an_end_has_the_same_role():
    target, drafter = sided({"T": "eos"}), sided({"d": "turn", "D": "eos"})
    m = mapped(target, drafter)
    assert m.t2d[target.tokenizer.token_to_id("T")] == drafter.tokenizer.token_to_id("D")


def test_role_ids_may_be_padding_rows():
    tokenizer = byte_bpe([b"a"])
    target, drafter = read(tokenizer, rows=4, eos_ids=[3]), read(tokenizer, rows=3, eos_ids=[2])
    assert mapped(target, drafter).d2t.tolist() == [0, -1, 3]


# --- what is covered


def test_figures_by_hand():
    target = Toy([b"a", b"b", b"ab", b"abc", b"c"], rows=9)
    drafter = Toy([b"a", b"ab", b"d", b"da"], rows=6)
    m = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    figures = map_figures(m, target.vocabulary, drafter.vocabulary)
    assert figures.intersection_count == 2
    assert figures.target_fraction == 2 / 5
    assert figures.drafter_fraction == 2 / 4
    assert figures.duplicates == 0
    assert figures.controls_mapped == 1
    assert figures.first_fraction == 3 / 4 - 1 / 4  # "d" is no text of the target, "da" begins with it


def test_nothing_in_common():
    one, two = Toy([b"a"], eos=False), Toy([b"b"], eos=False)
    m = build_map(one.vocabulary, two.vocabulary, one.segmenter)
    assert m.d2t.tolist() == m.t2d.tolist() == m.first.tolist() == [-1]
    figures = map_figures(m, one.vocabulary, two.vocabulary)
    assert (figures.intersection_count, figures.target_fraction, figures.first_fraction) == (0, 0.0, 0.0)


def test_corpus_coverage_by_hand():
    toy = Toy([b"a", b"b", b"ab"])
    covered = np.array([True, False, True, False])
    texts = [b"ab", b"bb", b"a"]
    assert corpus_coverage(texts, toy.segmenter, covered, toy.vocabulary) == 2 / 4
    assert corpus_coverage([], toy.segmenter, covered, toy.vocabulary) == 0.0
    assert corpus_coverage([b""], toy.segmenter, covered, toy.vocabulary) == 0.0


def test_corpus_is_an_even_sample():
    texts = [f"{i:04d}" for i in range(1000)]
    assert corpus(texts, limit=4000) == texts
    assert corpus(texts, limit=400) == texts[::10]
    assert corpus([], limit=10) == []


def test_a_long_text_is_sampled_too():
    text = "".join(f"line {i}\n" for i in range(100_000))
    sample = corpus([text], limit=100_000)
    assert 50_000 < sum(map(len, sample)) < 200_000
    assert all(part in text for part in sample)
    assert "line 9" in sample[-1]
    assert corpus(["x" * 1000], limit=128)[0] == "xx"  # no line ends: cut anywhere


def test_build_pair_measures_what_it_says(tmp_path):
    full_byte_bpe(("the", "cat")).save(str(tmp_path / "t.json"))
    full_byte_bpe(("the", "dog")).save(str(tmp_path / "d.json"))
    target, drafter = (prepare(load_tokenizer(str(tmp_path / name))) for name in ("t.json", "d.json"))
    said: list[str] = []
    pair = build_pair(target, drafter, ["the cat the cat"], "mine", said.append)
    assert pair.figures["map"]["intersection_count"] == 256 + 2  # "th" and "the"
    assert pair.figures["corpus"]["bytes"] == 15
    assert pair.figures["corpus"]["target_covered"] == 5 / 7  # the, space, cat, space, the, space, cat
    assert pair.figures["corpus"]["drafter_covered"] == 1.0
    assert said == ["intersecting the vocabularies", "measuring coverage on mine"]
    assert pair.target.revision.startswith("sha256:")
    pair.require(target.vocabulary, drafter.vocabulary)
    cat = target.vocabulary.ids_by_bytes[b"cat"][0]
    unmapped = most_frequent_unmapped(pair, target, ["the cat the cat"])
    assert unmapped == [{"id": cat, "bytes": "'cat'", "count": 2}]
