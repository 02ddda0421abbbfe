"""Tokenizers read as bytes: every style, every kind of id, what is refused, and the two fingerprints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hetspec.errors import HetspecError, UnsupportedTokenizer
from hetspec.sources import load_tokenizer
from hetspec.vocab import Kind, Vocabulary, byte_alphabet
from tests.builders import (
    byte_bpe_tokenizers,
    full_byte_bpe,
    literal,
    read,
    relabelled,
    respelled,
    sentencepiece_bpe,
    trained_sentencepiece,
    wordpiece,
)
from tests.toys import byte_bpe


def vocabulary_of(tokenizer: Tokenizer, **roles) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer, **roles)


def piece_of(tokenizer: Tokenizer, piece: str, **roles) -> tuple[bytes, Kind]:
    vocabulary = vocabulary_of(tokenizer, **roles)
    i = tokenizer.token_to_id(piece)
    return vocabulary.pieces[i], Kind(vocabulary.kinds[i])


# --- the bytes of a piece


def test_byte_level_pieces_are_the_bytes_behind_the_alphabet():
    tokenizer = full_byte_bpe((" the", "é\n", "\t\t"))
    assert piece_of(tokenizer, "Ġthe") == (b" the", Kind.TEXT)
    assert piece_of(tokenizer, "Ã©Ċ") == ("é\n".encode(), Kind.TEXT)
    assert piece_of(tokenizer, "Ã©"[0]) == (b"\xc3", Kind.BYTE)
    vocabulary = vocabulary_of(tokenizer)
    assert [vocabulary.ids_by_bytes[bytes([b])] for b in range(256)] == [[b] for b in range(256)]
    assert vocabulary.style == "byte-level BPE"
    assert not vocabulary.adds_prefix_space
    assert vocabulary.notes == ()


def test_byte_alphabet_is_that_of_the_tokenizers_library():
    assert sorted(byte_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for b, c in byte_alphabet().items():
        if b < 128:
            assert decoders.ByteLevel().decode([c]).encode() == bytes([b])


def test_sentencepiece_pieces_spell_spaces_and_bytes():
    tokenizer = sentencepiece_bpe(("▁▁the", "é"))
    assert piece_of(tokenizer, "▁▁the") == (b"  the", Kind.TEXT)
    assert piece_of(tokenizer, "é") == ("é".encode(), Kind.TEXT)
    assert piece_of(tokenizer, "<0x0A>") == (b"\n", Kind.BYTE)
    assert piece_of(tokenizer, "<0xFF>") == (b"\xff", Kind.BYTE)
    for control in ("<unk>", "<s>", "</s>"):
        assert piece_of(tokenizer, control) == (b"", Kind.CONTROL)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.style == "SentencePiece BPE"
    assert vocabulary.adds_prefix_space


def test_a_character_comes_before_the_byte_token_of_the_same_bytes():
    tokenizer = sentencepiece_bpe()
    table = vocabulary_of(tokenizer).ids_by_bytes
    a, byte = tokenizer.token_to_id("A"), tokenizer.token_to_id("<0x41>")
    assert byte < a  # so the order is by kind, not by id
    assert table[b"A"] == [a, byte]
    assert table[b"\xc3"] == [tokenizer.token_to_id("<0xC3>")]


@pytest.mark.parametrize("piece", ["<0x+1>", "<0x 1>", "<0xGG>", "<0x1>", "<0x123>", "<0x٠١>"])
def test_what_only_looks_like_a_byte_token_is_text(piece):
    tokenizer = sentencepiece_bpe()
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    tokenizer = respelled(tokenizer, model__vocab={**vocab, piece: len(vocab)})
    assert piece_of(tokenizer, piece) == (piece.encode(), Kind.TEXT)


def test_byte_tokens_are_text_without_byte_fallback():
    tokenizer = sentencepiece_bpe(("<0x41>",), fallback=False)
    spec = json.loads(tokenizer.to_str())
    spec["decoder"]["decoders"] = [d for d in spec["decoder"]["decoders"] if d["type"] != "ByteFallback"]
    assert piece_of(Tokenizer.from_str(json.dumps(spec)), "<0x41>") == (b"<0x41>", Kind.TEXT)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_trained_sentencepiece_model_spells_what_its_own_library_says(tmp_path: Path, kind):
    import sentencepiece

    blob = trained_sentencepiece(kind, user_defined_symbols=["<tag>", "▁▁▁"])
    (tmp_path / "m.model").write_bytes(blob)
    source = load_tokenizer(str(tmp_path / "m.model"))
    own = sentencepiece.SentencePieceProcessor(model_proto=blob)
    vocabulary = vocabulary_of(source.tokenizer, rows=source.rows, eos_ids=source.eos_ids)
    assert vocabulary.style == ("Unigram" if kind == "unigram" else "SentencePiece BPE")
    assert len(vocabulary.pieces) == own.vocab_size()
    for i, piece in enumerate(vocabulary.pieces):
        if own.is_byte(i):
            assert (piece, vocabulary.kinds[i]) == (bytes([int(own.id_to_piece(i)[3:5], 16)]), Kind.BYTE)
        elif own.is_control(i) or own.is_unknown(i):
            assert (piece, vocabulary.kinds[i]) == (b"", Kind.CONTROL)
        else:
            assert piece == own.id_to_piece(i).replace("▁", " ").encode()
            assert vocabulary.kinds[i] == Kind.TEXT


def test_unigram_without_byte_fallback_has_no_byte_kind(tmp_path: Path):
    (tmp_path / "m").write_bytes(trained_sentencepiece("unigram", byte_fallback=False, vocab_size=60))
    vocabulary = vocabulary_of(load_tokenizer(str(tmp_path / "m")).tokenizer)
    assert Kind.BYTE not in vocabulary.kinds
    assert any("single bytes have no token" in note for note in vocabulary.notes)


@pytest.mark.parametrize("cleanup", [True, False])
def test_wordpiece_pieces_spell_what_the_decoder_appends(cleanup):
    tokenizer = wordpiece(cleanup)
    vocabulary = vocabulary_of(tokenizer)
    for piece, i in tokenizer.get_vocab().items():
        if vocabulary.kinds[i] <= Kind.BYTE:
            assert vocabulary.pieces[i].decode() == tokenizer.decoder.decode(["x", piece])[1:], piece
    assert piece_of(tokenizer, "the")[0] == b" the"
    assert piece_of(tokenizer, "##ing")[0] == b"ing"
    assert piece_of(tokenizer, ".")[0] == (b"." if cleanup else b" .")
    assert piece_of(tokenizer, "[unused0]") == (b"", Kind.UNUSED)
    assert piece_of(tokenizer, "[UNK]") == (b"", Kind.CONTROL)
    assert any("BertNormalizer" in note for note in vocabulary.notes)


# --- the kinds of ids


@pytest.mark.parametrize("make", [full_byte_bpe, sentencepiece_bpe], ids=["byte level", "sentencepiece"])
def test_added_tokens_are_literal_text_unless_they_are_markers(make):
    tokenizer = make()
    tokenizer.add_tokens([literal(t) for t in ("é\n\n", "<think>", "<|fim|>", "<｜User｜>", "<unused7>")])
    assert piece_of(tokenizer, "é\n\n") == ("é\n\n".encode(), Kind.TEXT)
    assert piece_of(tokenizer, "<think>") == (b"<think>", Kind.TEXT)
    assert piece_of(tokenizer, "<|fim|>") == (b"", Kind.CONTROL)
    assert piece_of(tokenizer, "<｜User｜>") == (b"", Kind.CONTROL)
    assert piece_of(tokenizer, "<unused7>") == (b"", Kind.UNUSED)


def test_special_tokens_and_roles_have_no_bytes():
    tokenizer = full_byte_bpe(("bye",), ("<eos>", "plain words"))
    bye = tokenizer.token_to_id("bye")
    assert piece_of(tokenizer, "<eos>") == (b"", Kind.CONTROL)
    assert piece_of(tokenizer, "plain words") == (b"", Kind.CONTROL)
    assert piece_of(tokenizer, "bye") == (b"bye", Kind.TEXT)
    assert piece_of(tokenizer, "bye", eos_ids=[bye]) == (b"", Kind.CONTROL)
    assert piece_of(tokenizer, "bye", turn_end_ids=[bye]) == (b"", Kind.CONTROL)


def test_an_added_token_that_repeats_a_piece_is_counted_once():
    tokenizer = full_byte_bpe(("ab",))
    before = vocabulary_of(tokenizer)
    spec = json.loads(tokenizer.to_str())
    again = {
        "id": 300,
        "content": "ab",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    spec["added_tokens"].append(again)
    vocabulary = vocabulary_of(Tokenizer.from_str(json.dumps(spec)))
    assert len(vocabulary.ids_by_bytes[b"ab"]) == 1
    assert vocabulary.text_tokens == before.text_tokens


def test_holes_in_the_ids_are_unused():
    tokenizer = byte_bpe([b"a", b"b"], ())
    tokenizer = respelled(tokenizer, model__vocab={"a": 0, "b": 3}, model__merges=[])
    vocabulary = vocabulary_of(tokenizer, rows=6)
    assert vocabulary.pieces == (b"a", b"", b"", b"b")
    assert vocabulary.kinds.tolist() == [Kind.BYTE, Kind.UNUSED, Kind.UNUSED, Kind.BYTE]
    assert vocabulary.text_tokens == 2
    assert vocabulary.spell([0, 1, 3, 5, 99, -1]) == b"ab"


def test_rows_are_the_models_and_must_cover_the_ids():
    tokenizer = byte_bpe([b"a", b"b"], ("<eos>",))
    assert vocabulary_of(tokenizer).rows == 3
    assert vocabulary_of(tokenizer, rows=64).rows == 64
    with pytest.raises(HetspecError, match="has 2 rows but the tokenizer has 3 ids") as caught:
        vocabulary_of(tokenizer, rows=2)
    assert "does not belong to this model" in caught.value.hint


@pytest.mark.parametrize("roles", [{"eos_ids": [3]}, {"eos_ids": [-1]}, {"turn_end_ids": [2, 3]}])
def test_role_ids_outside_the_rows_are_refused(roles):
    with pytest.raises(HetspecError, match=r"outside 0\.\.2"):
        vocabulary_of(byte_bpe([b"a", b"b"], ("<eos>",)), **roles)


def test_a_vocabulary_must_agree_with_itself():
    good = vocabulary_of(byte_bpe([b"a", b"b"], ("<eos>",)))
    fields = dict(good.__dict__)
    fields.pop("ids_by_bytes", None)
    with pytest.raises(HetspecError, match="control ids must have none"):
        Vocabulary(**{**fields, "pieces": (b"a", b"", b"")})
    with pytest.raises(HetspecError, match="kinds for 3 pieces"):
        Vocabulary(**{**fields, "kinds": np.zeros(2, np.uint8)})


# --- refusals


def without(tokenizer: Tokenizer, part: str) -> Tokenizer:
    return respelled(tokenizer, **{part: None})


def bpe(**options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], **options))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def with_decoder(tokenizer: Tokenizer, decoder) -> Tokenizer:
    tokenizer.decoder = decoder
    return tokenizer


REFUSED = {
    "end-of-word suffix": lambda: bpe(end_of_word_suffix="</w>"),
    "continuation prefix": lambda: bpe(continuing_subword_prefix="##"),
    "model WordLevel": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "model BPE without a decoder": lambda: without(full_byte_bpe(), "decoder"),
    "decoder BPEDecoder": lambda: with_decoder(sentencepiece_bpe(), decoders.BPEDecoder()),
    "decoder CTC": lambda: with_decoder(sentencepiece_bpe(), decoders.CTC()),
    "without a ByteLevel pre-tokenizer": lambda: without(full_byte_bpe(), "pre_tokenizer"),
    "model Unigram with decoder": lambda: with_decoder(
        Tokenizer(models.Unigram([("a", 0.0)], 0, False)), decoders.ByteLevel()
    ),
    "decoder Replace": lambda: with_decoder(sentencepiece_bpe(), decoders.Replace("_", " ")),
    "decoder Metaspace with": lambda: with_decoder(sentencepiece_bpe(), decoders.Metaspace(replacement="_")),
    "byte fallback in the model but not": lambda: with_decoder(sentencepiece_bpe(), decoders.Fuse()),
    "model WordPiece with decoder": lambda: with_decoder(wordpiece(), decoders.ByteLevel()),
    "model BPE with decoder": lambda: with_decoder(bpe(), decoders.WordPiece()),
    "outside the byte-level alphabet": lambda: respelled(
        full_byte_bpe(), model__vocab={"漢": 0}, model__merges=[]
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_component_that_is_not_understood_is_refused_by_name(what):
    with pytest.raises(UnsupportedTokenizer) as caught:
        vocabulary_of(REFUSED[what](), name="theirs")
    assert what in caught.value.message
    assert "tokenizer theirs" in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cannot_encode_is_refused_in_one_line():
    tokenizer = byte_bpe([b"a", b"b"], ("<unk>",))
    tokenizer.model.unk_token = "<unk>"  # not in the model's own vocabulary
    with pytest.raises(UnsupportedTokenizer, match="cannot encode text: Unk token `<unk>` not found"):
        vocabulary_of(tokenizer)


# --- fingerprints


def fingerprints(tokenizer: Tokenizer, **roles) -> tuple[str, str]:
    vocabulary = vocabulary_of(tokenizer, **roles)
    return vocabulary.vocab_sha256, vocabulary.behaviour_sha256


@pytest.mark.parametrize("make", [full_byte_bpe, sentencepiece_bpe, wordpiece])
def test_fingerprints_ignore_truncation_padding_and_a_round_trip(make, tmp_path: Path):
    plain = fingerprints(make())
    cut = make()
    cut.enable_truncation(2)
    cut.enable_padding(length=5)
    assert fingerprints(cut) == plain
    make().save(str(tmp_path / "t.json"), pretty=True)
    assert fingerprints(Tokenizer.from_file(str(tmp_path / "t.json"))) == plain
    assert fingerprints(make()) == plain


def test_fingerprints_ignore_rows_and_names_but_see_new_control_tokens():
    tokenizer = full_byte_bpe(("ab",))
    plain = fingerprints(tokenizer)
    assert fingerprints(tokenizer, rows=999, name="another") == plain
    assert fingerprints(tokenizer, eos_ids=[tokenizer.token_to_id("<eos>")]) == plain
    assert fingerprints(tokenizer, eos_ids=[tokenizer.token_to_id("ab")])[0] != plain[0]


def merged(order: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}, order))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_merge_order_changes_the_behaviour_and_not_the_vocabulary():
    one, two = merged([("a", "b"), ("b", "c")]), merged([("b", "c"), ("a", "b")])
    assert one.get_vocab() == two.get_vocab()
    assert fingerprints(one)[0] == fingerprints(two)[0]
    assert fingerprints(one)[1] != fingerprints(two)[1]


def test_merges_of_pieces_with_spaces_are_told_apart():
    def spaced(merge: list[str]) -> Tokenizer:
        vocab = {piece: i for i, piece in enumerate(["a", " ", "b", "a ", " b", "a b"])}
        tokenizer = sentencepiece_bpe(fallback=False)
        return respelled(
            tokenizer, added_tokens=[], model__vocab=vocab, model__merges=[merge], model__unk_token=None
        )

    assert fingerprints(spaced(["a ", "b"]))[1] != fingerprints(spaced(["a", " b"]))[1]


def test_every_part_of_the_behaviour_is_in_its_fingerprint():
    def changed(change) -> tuple[str, str]:
        tokenizer = full_byte_bpe(("the", " the", "abc"))
        change(tokenizer)
        return fingerprints(tokenizer)

    changes = {
        "as it is": lambda t: None,
        "normaliser": lambda t: setattr(t, "normalizer", normalizers.NFC()),
        "another normaliser": lambda t: setattr(t, "normalizer", normalizers.NFKC()),
        "pre-tokenizer": lambda t: setattr(
            t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        ),
        "encode_special_tokens": lambda t: setattr(t, "encode_special_tokens", True),
        "literal added token": lambda t: t.add_tokens([literal("xyzzy")]),
        "another added token": lambda t: t.add_tokens([literal("plugh")]),
        "special added token": lambda t: t.add_special_tokens([literal("xyzzy", special=True)]),
    }
    behaviours = {name: changed(change)[1] for name, change in changes.items()}
    assert len(set(behaviours.values())) == len(behaviours), behaviours
    vocabularies = {name: changed(change)[0] for name, change in changes.items()}
    for name in ("normaliser", "another normaliser", "pre-tokenizer", "encode_special_tokens"):
        assert vocabularies[name] == vocabularies["as it is"]
    for name in ("literal added token", "special added token"):
        assert vocabularies[name] != vocabularies["as it is"]
    assert vocabularies["literal added token"] != vocabularies["special added token"]


def test_a_changed_piece_or_id_changes_both_fingerprints():
    plain = fingerprints(byte_bpe([b"a", b"b", b"c"]))
    for tokens in ([b"a", b"b", b"d"], [b"a", b"c", b"b"], [b"a", b"b", b"c", b"d"], [b"a", b"b"]):
        other = fingerprints(byte_bpe(tokens))
        assert other[0] != plain[0]
        assert other[1] != plain[1]


def test_a_score_of_a_unigram_changes_the_behaviour(tmp_path: Path):
    (tmp_path / "m").write_bytes(trained_sentencepiece("unigram"))
    tokenizer = load_tokenizer(str(tmp_path / "m")).tokenizer
    spec = json.loads(tokenizer.to_str())
    spec["model"]["vocab"][-1][1] -= 1.0
    one, two = fingerprints(tokenizer), fingerprints(Tokenizer.from_str(json.dumps(spec)))
    assert one[0] == two[0]
    assert one[1] != two[1]


@given(byte_bpe_tokenizers())
def test_fingerprints_follow_the_ids(tokenizer):
    vocabulary = vocabulary_of(tokenizer)
    size = len(vocabulary.pieces)
    assert fingerprints(relabelled(tokenizer, np.arange(size))) == fingerprints(tokenizer)
    swapped = np.arange(size)
    swapped[[0, size - 1]] = size - 1, 0
    other = fingerprints(relabelled(tokenizer, swapped))
    assert other[0] != vocabulary.vocab_sha256
    assert other[1] != vocabulary.behaviour_sha256


@given(byte_bpe_tokenizers())
def test_every_token_spells_what_it_was_made_of(tokenizer):
    side = read(tokenizer)
    for i, piece in enumerate(side.vocabulary.pieces):
        assert piece.decode("utf-8", "replace") == tokenizer.decode([i])
        assert side.vocabulary.ids_by_bytes[piece] == [i]


def test_reading_does_not_change_the_tokenizer():
    tokenizer = sentencepiece_bpe()
    tokenizer.enable_truncation(4)
    before = tokenizer.to_str()
    read(tokenizer)
    assert tokenizer.to_str() == before
