"""A vocabulary as bytes: what every id of a tokenizer really spells.

The bytes come from the piece strings and from the tokenizer's own rules, never from ``decode([id])``:
a decoder may strip leading spaces, and bytes that are no whole character all decode to U+FFFD.
What is not understood is refused by name. Knows nothing about models, pairs or files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hetspec.errors import HetspecError, IncompatiblePair, UnsupportedTokenizer

FINGERPRINT_VERSION = 1
SPACE_SIGN = "▁"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

# The fixed text of the behaviour fingerprint: scripts, spacing, digits, code, control characters, emoji.
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 12345.67 dollars, isn't it? I'll DON'T they've",
    "def f(x):\n    if x >= 10:\n\t\treturn [i**2 for i in range(x)]\r\n\n\n    # done  \n",
    "Zürich naïve façade — Привет мир, こんにちは世界, 你好，世界! مرحبا बहुत 😀👩‍💻 e\u0301 ﬁ ①",
    "  leading,  double   triple\n\n \n trailing  ",
    "\x00\x01 tab\t nbsp\u00a0 bom\ufeff \u2028 \ud7ff \U00040000",
    "https://example.org/a_b-c?d=%20&e=1e-9;{}[]()<>|\\/\"'`~!@#$%^&*+=",
    "AbCdEfGHIJ camelCase snake_case 3.14159 1,000,000 0x7fff 2026-11-30T12:00:00Z <s> </s> <|endoftext|>",
    "a" * 40 + " " * 40 + "\n" * 20 + "=" * 40,
)


class Kind(IntEnum):
    """What an id stands for."""

    TEXT = 0  # spells at least one byte
    BYTE = 1  # spells exactly one byte
    CONTROL = 2  # special token: no bytes, mapped by role only
    UNUSED = 3  # padding row or reserved slot: no bytes, never drafted


@dataclass(frozen=True)
class Vocabulary:
    """The bytes and the kind of every id of one tokenizer.

    Attributes:
        name: what the tokenizer was called by whoever loaded it.
        pieces: canonical bytes by id; empty for control and unused ids. Length: the tokenizer's ids.
        kinds: uint8[len(pieces)], values of `Kind`.
        rows: rows of the model's output (padding rows included), at least ``len(pieces)``.
        eos_ids: control ids that end a generation.
        turn_end_ids: control ids that end a turn of a chat; may overlap `eos_ids`.
        vocab_sha256: fingerprint of kinds and bytes by id.
        behaviour_sha256: fingerprint of how the tokenizer segments text.
        style: "byte-level BPE", "SentencePiece BPE", "Unigram" or "WordPiece".
        adds_prefix_space: whether encoding puts a space before the text.
        notes: facts a user should know (a normaliser changes text, byte tokens are missing, …).
    """

    name: str
    pieces: tuple[bytes, ...]
    kinds: np.ndarray
    rows: int
    eos_ids: tuple[int, ...]
    turn_end_ids: tuple[int, ...]
    vocab_sha256: str
    behaviour_sha256: str
    style: str
    adds_prefix_space: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        size = len(self.pieces)
        if self.kinds.shape != (size,):
            raise HetspecError(f"vocabulary {self.name}: {self.kinds.shape} kinds for {size} pieces.")
        if self.rows < size:
            raise IncompatiblePair(
                f"vocabulary {self.name}: the model has {self.rows:,} rows but the tokenizer has {size:,} ids.",
                "This tokenizer does not belong to this model.",
            )
        for role in (*self.eos_ids, *self.turn_end_ids):
            if not 0 <= role < self.rows:
                raise HetspecError(
                    f"vocabulary {self.name}: end-of-sequence id {role} is outside 0..{self.rows - 1}.",
                    "Correct eos_token_id in the model's generation_config.json.",
                )
        has_bytes = np.fromiter((bool(piece) for piece in self.pieces), dtype=bool, count=size)
        if not np.array_equal(has_bytes, self.kinds <= Kind.BYTE):
            raise HetspecError(f"vocabulary {self.name}: text ids need bytes, control ids must have none.")

    @property
    def text_tokens(self) -> int:
        """Number of ids that spell bytes."""
        return int((self.kinds <= Kind.BYTE).sum())

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, list[int]]:
        """Byte string -> the ids that spell it, text ids before single-byte ids, then ascending."""
        table: dict[bytes, list[int]] = {}
        for i, piece in enumerate(self.pieces):
            if piece:
                table.setdefault(piece, []).append(i)
        for ids in table.values():
            if len(ids) > 1:
                ids.sort(key=lambda i: (self.kinds[i], i))
        return table

    def bytes_of(self, i: int) -> bytes:
        """The bytes of one id; b"" for control, unused and padding ids."""
        return self.pieces[i] if i < len(self.pieces) else b""

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of a sequence of ids; control and padding ids spell nothing."""
        pieces, size = self.pieces, len(self.pieces)
        return b"".join(pieces[i] for i in ids if 0 <= i < size)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        name: str = "tokenizer",
        rows: int | None = None,
        eos_ids: Iterable[int] = (),
        turn_end_ids: Iterable[int] = (),
    ) -> Vocabulary:
        """Reads a vocabulary out of a `tokenizers.Tokenizer`.

        Args:
            tokenizer: the backend tokenizer (``backend_tokenizer`` of a transformers fast tokenizer).
            name: used in messages.
            rows: rows of the model's logits; the number of ids if there is no model.
            eos_ids: ids that end a generation.
            turn_end_ids: ids that end a turn.

        Raises:
            UnsupportedTokenizer: a component whose effect on bytes is not understood.
        """
        spec = json.loads(tokenizer.to_str())
        rules = _rules(spec, name)
        try:
            behaviour = _behaviour_sha256(tokenizer, spec)
        except Exception as error:  # the tokenizers library raises nothing more special
            raise UnsupportedTokenizer(f"tokenizer {name} cannot encode text: {error}.") from None
        added = tokenizer.get_added_tokens_decoder()
        in_model = set(_model_pieces(spec))
        roles = set(eos_ids) | set(turn_end_ids)
        by_id = tokenizer.get_vocab(with_added_tokens=True)
        size = max(by_id.values(), default=-1) + 1
        pieces: list[bytes] = [b""] * size
        kinds = np.full(size, Kind.UNUSED, dtype=np.uint8)
        unknown = spec["model"].get("unk_token") or _unigram_unknown(spec)
        for piece, i in by_id.items():
            token = added.get(i)
            if i in roles or piece == unknown or (token is not None and (token.special or _is_marker(piece))):
                kinds[i] = Kind.CONTROL
                continue
            if _is_reserved(piece):
                continue
            literal = token is not None and piece not in in_model
            spelled = piece.encode("utf-8") if literal else rules.bytes_of(piece, i)
            if spelled:
                pieces[i] = spelled
                kinds[i] = Kind.BYTE if len(spelled) == 1 and rules.is_byte(piece) else Kind.TEXT
        return cls(
            name=name,
            pieces=tuple(pieces),
            kinds=kinds,
            rows=size if rows is None else rows,
            eos_ids=tuple(sorted(set(eos_ids))),
            turn_end_ids=tuple(sorted(set(turn_end_ids))),
            vocab_sha256=_vocab_sha256(pieces, kinds),
            behaviour_sha256=behaviour,
            style=rules.style,
            adds_prefix_space=rules.adds_prefix_space,
            notes=_notes(spec, pieces),
        )


# -- piece string -> bytes ---------------------------------------------------------------------------------


def byte_alphabet() -> dict[int, str]:
    """The GPT-2 byte alphabet: byte -> the printable character that stands for it in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    table.update({b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in table)})
    return table


class _Inverse(dict[int, int]):
    """`str.translate` table from the byte alphabet to code points 0..255; other characters raise."""

    def __missing__(self, key: int) -> int:
        raise ValueError(chr(key))


_TO_BYTE = _Inverse({ord(c): b for b, c in byte_alphabet().items()})


@dataclass(frozen=True)
class _Rules:
    """How the piece strings of one tokenizer turn into bytes."""

    style: str
    adds_prefix_space: bool
    byte_fallback: bool = False
    prefix: str = ""
    cleanup: bool = False
    name: str = ""

    def is_byte(self, piece: str) -> bool:
        """Whether a one-byte piece is the vocabulary's own byte token rather than a character."""
        return self.style == "byte-level BPE" or (self.byte_fallback and _byte_token(piece) is not None)

    def bytes_of(self, piece: str, i: int) -> bytes:
        """Canonical bytes of a piece of the model (not of a literal added token)."""
        if self.style == "byte-level BPE":
            try:
                return piece.translate(_TO_BYTE).encode("latin-1")
            except ValueError as error:
                raise UnsupportedTokenizer(
                    f"tokenizer {self.name}: piece {piece!r} (id {i}) has a character {str(error)!r} outside the "
                    "byte-level alphabet.",
                    "Mark it as an added token in tokenizer.json if it is plain text or a control token.",
                ) from None
        if self.style == "WordPiece":
            return _wordpiece_text(piece, self.prefix, self.cleanup).encode("utf-8")
        if self.byte_fallback and (value := _byte_token(piece)) is not None:
            return bytes([value])
        return piece.replace(SPACE_SIGN, " ").encode("utf-8")


def _byte_token(piece: str) -> int | None:
    return int(piece[3:5], 16) if _BYTE_TOKEN.fullmatch(piece) else None


def _wordpiece_text(piece: str, prefix: str, cleanup: bool) -> str:
    """The text a WordPiece decoder appends for a piece that is not the first one."""
    text = piece[len(prefix) :] if prefix and piece.startswith(prefix) else " " + piece
    if not cleanup:
        return text
    for spaced, tight in (
        *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
        (" ' ", "'"),
        *((f" {tail}", tail) for tail in ("n't", "'m", "'s", "'ve", "'re")),
    ):
        text = text.replace(spaced, tight)
    return text


def _is_marker(piece: str) -> bool:
    """Control tokens that some tokenizers add without calling them special (``<|fim_prefix|>``)."""
    return (
        len(piece) > 4 and piece[0] == "<" and piece[-1] == ">" and piece[1] in "|｜" and piece[-2] in "|｜"
    )


def _is_reserved(piece: str) -> bool:
    """Reserved slots that no text can produce: Gemma's ``<unused0>`` and BERT's ``[unused0]``."""
    return (piece.startswith("<unused") and piece.endswith(">")) or (
        piece.startswith("[unused") and piece.endswith("]")
    )


def _flatten(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A component of tokenizer.json as the list of its parts (a Sequence is unrolled)."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for inner in component[key] for part in _flatten(inner, key)]
    return [component]


def _rules(spec: dict[str, Any], name: str) -> _Rules:
    """Reads the style of a tokenizer from its model, decoder, pre-tokenizer and normaliser."""

    def refuse(what: str) -> UnsupportedTokenizer:
        return UnsupportedTokenizer(
            f"tokenizer {name}: {what} is not understood, so its bytes cannot be known.",
            "Supported: byte-level BPE, SentencePiece BPE or Unigram (byte fallback or not), WordPiece.",
        )

    model = spec["model"]
    decoders = _flatten(spec.get("decoder"), "decoders")
    pre = _flatten(spec.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flatten(spec.get("normalizer"), "normalizers")
    kinds = [d["type"] for d in decoders]
    prefix_space = any(
        (p["type"] == "ByteLevel" and p.get("add_prefix_space", False))
        or (p["type"] == "Metaspace" and p.get("prepend_scheme", "always") != "never")
        for p in pre
    ) or any(n["type"] == "Prepend" for n in normalizers)

    if model["type"] == "WordPiece" or kinds == ["WordPiece"]:
        if model["type"] != "WordPiece" or kinds != ["WordPiece"]:
            raise refuse(f"model {model['type']} with decoder {kinds or 'none'}")
        decoder = decoders[0]
        return _Rules("WordPiece", True, prefix=decoder["prefix"], cleanup=decoder["cleanup"], name=name)
    if model["type"] not in ("BPE", "Unigram"):
        raise refuse(f"model {model['type']}")
    if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        raise refuse("BPE with an end-of-word suffix or continuation prefix")
    if "ByteLevel" in kinds:
        if kinds != ["ByteLevel"] or model["type"] != "BPE":
            raise refuse(f"model {model['type']} with decoder {kinds}")
        if not any(p["type"] == "ByteLevel" for p in (*pre, *normalizers)):
            raise refuse("a ByteLevel decoder without a ByteLevel pre-tokenizer")
        return _Rules("byte-level BPE", prefix_space, name=name)
    if not kinds:
        raise refuse(f"model {model['type']} without a decoder")
    for decoder in decoders:
        if decoder["type"] == "Replace":
            if decoder["pattern"] != {"String": SPACE_SIGN} or decoder["content"] != " ":
                raise refuse(f"decoder Replace {decoder['pattern']} -> {decoder['content']!r}")
        elif decoder["type"] == "Metaspace":
            if decoder.get("replacement", SPACE_SIGN) != SPACE_SIGN:
                raise refuse(f"decoder Metaspace with {decoder['replacement']!r}")
        elif decoder["type"] not in ("ByteFallback", "Fuse", "Strip"):
            raise refuse(f"decoder {decoder['type']}")
    style = "Unigram" if model["type"] == "Unigram" else "SentencePiece BPE"
    fallback = "ByteFallback" in kinds
    if bool(model.get("byte_fallback")) and not fallback:
        raise refuse(f"byte fallback in the model but not in the decoder {kinds}")
    return _Rules(style, prefix_space, byte_fallback=fallback, name=name)


def _model_pieces(spec: dict[str, Any]) -> Iterable[str]:
    vocab = spec["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)


def _unigram_unknown(spec: dict[str, Any]) -> str | None:
    unk_id = spec["model"].get("unk_id")
    return None if unk_id is None else str(spec["model"]["vocab"][unk_id][0])


def _notes(spec: dict[str, Any], pieces: list[bytes]) -> tuple[str, ...]:
    """Facts about text that this tokenizer cannot represent as it is."""
    harmless = ("Prepend", "Replace", "ByteLevel")
    notes = [
        f"normaliser {n['type']} may change text on encoding"
        for n in _flatten(spec.get("normalizer"), "normalizers")
        if n["type"] not in harmless
    ]
    missing = 256 - len({p for p in pieces if len(p) == 1})
    if missing:
        notes.append(f"{missing} of 256 single bytes have no token")
    return tuple(notes)


# -- fingerprints ------------------------------------------------------------------------------------------


def _vocab_sha256(pieces: list[bytes], kinds: np.ndarray) -> str:
    """Kind and length-prefixed bytes by id: independent of library versions and file formats."""
    digest = hashlib.sha256(b"hetspec vocabulary %d\n" % FINGERPRINT_VERSION)
    digest.update(
        b"".join(
            b"%d %d " % (kind, len(piece)) + piece for kind, piece in zip(kinds.tolist(), pieces, strict=True)
        )
    )
    return digest.hexdigest()


def _behaviour_sha256(tokenizer: Tokenizer, spec: dict[str, Any]) -> str:
    """A normal form of tokenizer.json without truncation and padding, plus the ids of the probe texts.

    Two tokenizers can have the same vocabulary and still segment text differently (merge order,
    pre-tokeniser, normaliser); truncation and padding are call-time settings that live in the JSON all
    the same; ``encode_special_tokens`` changes behaviour and is not in the JSON.
    """
    rest = {
        key: value for key, value in spec.items() if key not in ("truncation", "padding", "version", "model")
    }
    if _adds_nothing(
        rest.get("post_processor")
    ):  # wrapping a bare tokenizer in transformers' class puts one in
        rest["post_processor"] = None
    model = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    digest = hashlib.sha256(b"hetspec behaviour %d\n" % FINGERPRINT_VERSION)
    digest.update(json.dumps([rest, model], sort_keys=True, separators=(",", ":")).encode())
    # The two large lists by hand: json.dumps of 500,000 merges would dominate.
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        ordered = sorted(vocab, key=vocab.__getitem__)
        digest.update(_joined(ordered) + json.dumps([vocab[piece] for piece in ordered]).encode())
    else:
        digest.update(json.dumps(vocab).encode())
    merges = spec["model"].get("merges") or ()
    digest.update(_joined([part for m in merges for part in (m.split(" ") if isinstance(m, str) else m)]))
    digest.update(b"1" if tokenizer.encode_special_tokens else b"0")
    probed = tokenizer
    if spec.get("truncation") or spec.get("padding"):
        probed = Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}))
        probed.encode_special_tokens = tokenizer.encode_special_tokens
    for text in PROBE_TEXTS:
        digest.update(json.dumps(probed.encode(text, add_special_tokens=False).ids).encode())
    return digest.hexdigest()


def _adds_nothing(post_processor: dict[str, Any] | None) -> bool:
    """Whether a template leaves a text as it is: the text alone, as segment 0."""
    return post_processor is not None and (
        post_processor.get("type") == "TemplateProcessing"
        and post_processor.get("single") == [{"Sequence": {"id": "A", "type_id": 0}}]
    )


def _joined(strings: list[str]) -> bytes:
    """Strings in one, with their lengths, so that two lists never give the same bytes."""
    return json.dumps(list(map(len, strings))).encode() + "".join(strings).encode()
