"""Segmentation of byte strings: what is encoded spells what was given, and control tokens never come out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from hetspec.segment import begins_text_with, is_utf8, split_utf8, unfinished_utf8
from hetspec.sources import load_tokenizer
from hetspec.vocab import Kind
from tests.builders import (
    CONTROLS,
    byte_bpe_tokenizers,
    byte_strings,
    fragments,
    full_byte_bpe,
    literal,
    read,
    respelled,
    sentencepiece_bpe,
    trained_sentencepiece,
    wordpiece,
)
from tests.toys import byte_bpe

# --- any bytes, any byte-level tokenizer


@given(byte_bpe_tokenizers(controls=CONTROLS), byte_strings)
def test_the_pieces_spell_the_bytes(tokenizer, text):
    side = read(tokenizer)
    ids = side.segmenter.encode(text)
    assert side.vocabulary.spell(ids) == text
    ends = side.segmenter.ends(text, ids)
    assert ends is not None
    assert ends.tolist() == [len(side.vocabulary.spell(ids[: n + 1])) for n in range(len(ids))]


@given(byte_bpe_tokenizers(controls=CONTROLS), st.lists(fragments, max_size=10).map(b"".join))
def test_control_strings_in_a_text_stay_text(tokenizer, text):
    side = read(tokenizer)
    kinds = side.vocabulary.kinds[side.segmenter.encode(text)]
    assert (kinds <= Kind.BYTE).all()


@given(byte_bpe_tokenizers(controls=CONTROLS), byte_strings, byte_strings)
def test_what_is_encoded_after_a_text_spells_only_the_new_bytes(tokenizer, behind, new):
    side = read(tokenizer)
    ids = side.segmenter.encode_after(behind, new)
    assert side.vocabulary.spell(ids) == new
    together = side.segmenter.encode(behind + new)
    head = together[: len(together) - len(ids)] if ids else together
    # Where a token boundary falls between the two, they are segmented together.
    boundaries = [len(side.vocabulary.spell(together[:n])) for n in range(len(together) + 1)]
    if behind and len(behind) in boundaries:
        assert head + ids == together
        assert side.vocabulary.spell(head) == behind
    else:
        assert ids == side.segmenter.encode(new)


@given(byte_bpe_tokenizers(controls=CONTROLS), st.lists(byte_strings, max_size=5))
def test_a_batch_is_encoded_like_its_parts(tokenizer, texts):
    segmenter = read(tokenizer).segmenter
    assert segmenter.encode_batch(texts) == [segmenter.encode(text) for text in texts]


def test_the_context_behind_decides_how_the_new_text_is_cut():
    side = read(full_byte_bpe(("ab", "bc")))
    a, c = ord("a"), ord("c")
    ab, bc = side.tokenizer.token_to_id("ab"), side.tokenizer.token_to_id("bc")
    assert side.segmenter.encode(b"bc") == [bc]
    assert side.segmenter.encode_after(b"x", b"bc") == [bc]
    # "ab" is merged first, so no boundary stands before "bc": it is cut as if it stood alone.
    assert side.segmenter.encode(b"abc") == [ab, c]
    assert side.segmenter.encode_after(b"a", b"bc") == [bc]
    assert side.segmenter.encode_after(b"xa", b"bc") == [bc]
    assert side.segmenter.encode_after(b"ab", b"c") == [c]
    assert side.segmenter.encode_after(b"", b"abc") == [ab, c]
    assert side.segmenter.encode_after(b"a", b"") == []
    assert side.segmenter.encode_after(b"xa", b"") == []
    assert a not in side.segmenter.encode_after(b"a", b"c")


# --- control tokens of every make


@pytest.mark.parametrize("make", [full_byte_bpe, sentencepiece_bpe], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("special", [True, False])
def test_markers_and_reserved_slots_in_a_text_stay_text(make, special):
    tokenizer = make()
    names = ["<|fim|>", "<unused7>", "<|a|>", "|>b", "<|a"] if special else ["<|fim|>", "<unused7>", "<|a|>"]
    tokenizer.add_tokens([literal(name, special=special) for name in names])
    side = read(tokenizer)
    for name in names:
        assert not side.vocabulary.pieces[tokenizer.token_to_id(name)]
    for text in (*names, "x<|fim|>y", "<|a|>b", "<<|a|>b<unused7><unused7>"):
        ids = side.segmenter.encode(text.encode())
        assert side.vocabulary.spell(ids) == text.encode(), text
        assert side.segmenter.encode_batch([text.encode()]) == [ids]


def test_a_literal_added_token_is_still_one_token():
    tokenizer = full_byte_bpe()
    tokenizer.add_tokens([literal("<think>")])
    side = read(tokenizer)
    assert side.segmenter.encode(b"<think>") == [tokenizer.token_to_id("<think>")]


def test_a_control_token_of_one_character_is_spelled_with_bytes():
    for make in (full_byte_bpe, sentencepiece_bpe):
        tokenizer = make()
        tokenizer.add_special_tokens([literal("☃", special=True)])
        side = read(tokenizer)
        assert side.tokenizer.encode("☃", add_special_tokens=False).ids == [tokenizer.token_to_id("☃")]
        assert side.vocabulary.spell(side.segmenter.encode("a☃☃".encode())) == "a☃☃".encode()


# --- what stands around a text


@pytest.mark.parametrize("scheme", ["always", "first", "never", "prepend"])
def test_no_space_is_put_before_a_text(scheme):
    side = read(sentencepiece_bpe(scheme=scheme))
    assert side.vocabulary.adds_prefix_space == (scheme != "never")
    for text in (b"the a the", b" the", b"the", b"  ", b"a\n a"):
        assert side.vocabulary.spell(side.segmenter.encode(text)) == text
    if scheme != "never":
        assert side.vocabulary.spell(side.tokenizer.encode("the", add_special_tokens=False).ids) == b" the"


def test_no_space_is_put_before_a_text_by_byte_level_pretokenizers():
    tokenizer = full_byte_bpe((" the",))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    side = read(tokenizer)
    assert side.vocabulary.adds_prefix_space
    assert side.vocabulary.spell(side.segmenter.encode(b"the 12")) == b"the 12"


def test_truncation_padding_and_bos_are_left_out():
    tokenizer = full_byte_bpe(("ab",), ("<bos>",))
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert begins_text_with(tokenizer) == [bos]
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    side = read(tokenizer)
    assert side.vocabulary.spell(side.segmenter.encode(b"ababab")) == b"ababab"
    assert len(side.segmenter.encode(b"ababab")) == 3
    assert tokenizer.truncation["max_length"] == 2  # the caller's own object is as it was
    assert tokenizer.padding["length"] == 9


def test_begins_text_with_nothing():
    assert begins_text_with(full_byte_bpe()) == []


# --- tokenizers that cannot spell everything


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_trained_sentencepiece_model_spells_any_bytes(tmp_path: Path, kind):
    (tmp_path / "m").write_bytes(trained_sentencepiece(kind))
    side = read(load_tokenizer(str(tmp_path / "m")).tokenizer)
    for text in (
        b"the lazy fox",
        b" the",
        b"a  b",
        "Zoë 😀\n".encode(),
        b"\xff\xc3",
        b"the \xf0\x9f fox",
        b"",
    ):
        assert side.vocabulary.spell(side.segmenter.encode(text)) == text


def test_a_missing_byte_is_left_out_and_said():
    side = read(byte_bpe([b"a", b"b", b"ab"], ("<eos>",)))
    assert side.vocabulary.notes == ("254 of 256 single bytes have no token",)
    for text in (b"ab\xff", b"abz"):
        ids = side.segmenter.encode(text)
        assert side.vocabulary.spell(ids) == b"ab"
        assert side.segmenter.ends(text, ids) is None


def test_an_unknown_token_never_stands_for_loose_bytes():
    tokenizer = respelled(
        byte_bpe([b"a", b"b"]), model__vocab={"a": 0, "b": 1, "<unk>": 2}, model__unk_token="<unk>"
    )
    side = read(tokenizer)
    assert side.tokenizer.encode("az").ids == [0, 2]
    assert side.segmenter.encode(b"a\xffb") == [0, 1]


def test_a_normaliser_shows_in_the_ends():
    tokenizer = full_byte_bpe()
    tokenizer.normalizer = normalizers.NFC()
    side = read(tokenizer)
    composed, split = "é".encode(), "e\u0301".encode()
    assert side.segmenter.ends(composed, side.segmenter.encode(composed)) is not None
    assert side.vocabulary.spell(side.segmenter.encode(split)) == composed
    assert side.segmenter.ends(split, side.segmenter.encode(split)) is None


def test_wordpiece_is_never_taken_for_exact():
    side = read(wordpiece())
    for text in (b"the", b"The", b"isn't", b"cafe!"):
        ids = side.segmenter.encode(text)
        spelled = side.vocabulary.spell(ids)
        assert (side.segmenter.ends(text, ids) is not None) == (spelled == text)
    assert side.segmenter.ends(b" the.", side.segmenter.encode(b" the.")).tolist() == [4, 5]


# --- UTF-8


def slow_split(text: bytes) -> list[tuple[bytes, bool]]:
    """Byte by byte: the longest valid character here, or one invalid byte; neighbours of a kind are joined."""
    runs: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(text):
        length, valid = next(
            ((n, True) for n in (1, 2, 3, 4) if is_one_character(text[at : at + n])), (1, False)
        )
        if runs and runs[-1][1] == valid:
            runs[-1] = (runs[-1][0] + text[at : at + length], valid)
        else:
            runs.append((text[at : at + length], valid))
        at += length
    return runs


def is_one_character(text: bytes) -> bool:
    return is_utf8(text) and len(text.decode()) == 1


def slow_unfinished(text: bytes) -> int:
    """The longest end that some continuation bytes would make one character."""
    ends = (
        b"\x80",
        b"\xbf",
        b"\x80\x80",
        b"\xbf\x80",
        b"\x80\x80\x80",
        b"\xbf\x80\x80",
        b"\x9f\x80",
        b"\x90\x80",
    )
    for n in (3, 2, 1):
        tail = text[-n:]
        if len(tail) == n and any(is_one_character(tail + end) for end in ends):
            return n
    return 0


utf8_like = st.lists(
    st.sampled_from([*(bytes([b]) for b in (0, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED)),
                     *(bytes([b]) for b in (0xEF, 0xF0, 0xF4, 0xF5, 0xFF)), "é€😀".encode()]),
    max_size=9,
).map(b"".join)  # fmt: skip


@given(st.one_of(utf8_like, st.binary(max_size=9)))
def test_split_utf8_is_its_slow_twin(text):
    runs = split_utf8(text)
    assert runs == slow_split(text)
    assert b"".join(run for run, _ in runs) == text


@given(st.one_of(utf8_like, st.binary(max_size=9)))
def test_unfinished_utf8_is_its_slow_twin(text):
    assert unfinished_utf8(text) == slow_unfinished(text)


@pytest.mark.parametrize(
    ("text", "unfinished"),
    [
        (b"", 0),
        (b"a", 0),
        (b"\xc3", 1),
        (b"a\xe2\x82", 2),
        (b"\xf0\x9f\x98", 3),
        ("😀".encode(), 0),
        (b"\x80", 0),
    ],
)
def test_unfinished_characters(text, unfinished):
    assert unfinished_utf8(text) == unfinished


@pytest.mark.parametrize("text", [b"\xc0", b"\xf5", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf0\x80"])
def test_what_no_byte_can_finish_is_not_waited_for(text):
    assert unfinished_utf8(text) == 0
