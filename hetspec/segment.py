"""Bytes in, ids out: a tokenizer freed of everything that is not segmentation.

A `Segmenter` adds no special tokens, no dummy prefix, no truncation; it reads control-token strings as
plain text and spells bytes that are not valid UTF-8 with the vocabulary's own byte tokens. Its result may
still spell something else than its input (a normaliser, a missing byte token): `Segmenter.ends` says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hetspec.vocab import Vocabulary, byte_alphabet

_ALPHABET = byte_alphabet()


class Segmenter:
    """Tokenises byte strings in the middle of a text.

    Args:
        tokenizer: the backend tokenizer; it is not changed (copied if it has to be).
        vocabulary: the bytes of the same tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = _without_context(tokenizer, vocabulary)
        self._byte_level = vocabulary.style == "byte-level BPE"
        self._controls = _controls(self.tokenizer, vocabulary)
        self._control = _first_characters(self._controls)

    def encode(self, text: bytes) -> list[int]:
        """Ids for a byte string in the middle of a text (no special tokens, no dummy prefix)."""
        ids: list[int] = []
        for run, valid in split_utf8(text):
            if valid:
                for part in self._parts(run.decode()):
                    if part in self._controls:  # a single character: cannot be cut
                        ids += self._encode_loose_bytes(part.encode())
                    else:
                        ids += self.tokenizer.encode(part, add_special_tokens=False).ids
            else:
                ids += self._encode_loose_bytes(run)
        return ids

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        """`encode` of many byte strings."""
        simple = {i: text.decode() for i, text in enumerate(texts) if is_utf8(text)}
        simple = {
            i: text
            for i, text in simple.items()
            if text not in self._controls and self._parts(text) == [text]
        }
        encodings = self.tokenizer.encode_batch_fast(list(simple.values()), add_special_tokens=False)
        ids = {i: encoding.ids for i, encoding in zip(simple, encodings, strict=True)}
        return [ids[i] if i in ids else self.encode(text) for i, text in enumerate(texts)]

    def encode_after(self, behind: bytes, new: bytes) -> list[int]:
        """Ids for `new` when it follows `behind`.

        Both are tokenised together; what follows the token boundary at the end of `behind` is returned.
        If no boundary falls there, `new` is tokenised alone.
        """
        if behind:
            together = behind + new
            ids = self.encode(together)
            ends = self.ends(together, ids)
            if ends is not None:
                cut = int(np.searchsorted(ends, len(behind), side="right"))
                if cut and ends[cut - 1] == len(behind):
                    return ids[cut:]
        return self.encode(new)

    def ends(self, text: bytes, ids: Sequence[int]) -> np.ndarray | None:
        """Byte offset in `text` after each id, int64[len(ids)]; None where the ids spell something else."""
        pieces = self.vocabulary.pieces
        spelled = [pieces[i] for i in ids]
        if b"".join(spelled) != text:
            return None
        return np.cumsum([len(piece) for piece in spelled], dtype=np.int64)

    def _parts(self, text: str) -> list[str]:
        """The text, cut after the first character of every control-token string, so that none is read as one.

        (`Tokenizer.encode_special_tokens` would do the same, but it is a switch on the caller's object, and
        knows nothing of control tokens that are not called special.)
        """
        if self._control is None:
            return [text]
        cuts = {0, len(text)}
        for match in self._control.finditer(text):
            cuts.add(match.end())
            if match.group() in self._controls:
                cuts.add(match.start())
        return [text[a:b] for a, b in pairwise(sorted(cuts))] or [text]

    def _encode_loose_bytes(self, run: bytes) -> list[int]:
        """Ids for bytes that are no valid UTF-8; a byte without a token is left out."""
        pieces = self.vocabulary.pieces
        if self._byte_level:
            tokens = self.tokenizer.model.tokenize("".join(_ALPHABET[b] for b in run))
            return [token.id for token in tokens if pieces[token.id]]  # not the unknown token
        by_bytes = self.vocabulary.ids_by_bytes
        return [by_bytes[bytes([b])][0] for b in run if bytes([b]) in by_bytes]


def _controls(tokenizer: Tokenizer, vocabulary: Vocabulary) -> frozenset[str]:
    """Added tokens that spell nothing: special ones, markers and reserved slots."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token.content for i, token in added.items() if not vocabulary.pieces[i])


def _first_characters(strings: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern that finds the first character of each of these strings, overlapping ones too."""
    rests: dict[str, list[str]] = {}
    for string in sorted(strings, key=lambda s: (-len(s), s)):
        rests.setdefault(string[0], []).append(re.escape(string[1:]))
    return (
        re.compile("|".join(f"{re.escape(c)}(?={'|'.join(r)})" for c, r in rests.items())) if rests else None
    )


def is_utf8(text: bytes) -> bool:
    """Whether a byte string is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def split_utf8(text: bytes) -> list[tuple[bytes, bool]]:
    """Cuts a byte string into maximal runs (run, is it valid UTF-8), in order."""
    runs: list[tuple[bytes, bool]] = []

    def add(run: bytes, valid: bool) -> None:
        if runs and runs[-1][1] == valid:
            run = runs.pop()[0] + run
        if run:
            runs.append((run, valid))

    while text:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            add(text[: error.start], True)
            add(text[error.start : error.end], False)
            text = text[error.end :]
        else:
            add(text, True)
            break
    return runs


def unfinished_utf8(text: bytes) -> int:
    """Number of bytes at the end of `text` that begin a UTF-8 character without finishing it (0..3)."""
    for n in range(min(3, len(text)), 0, -1):
        tail = text[-n:]
        need = 4 if tail[0] >= 0xF0 else 3 if tail[0] >= 0xE0 else 2
        # Two fillings are enough: after E0 and F0 only high bytes may follow, after ED and F4 only low ones.
        if n < need and any(is_utf8(tail + (fill + b"\x80\x80")[: need - n]) for fill in (b"\x80", b"\xbf")):
            return n
    return 0


def begins_text_with(tokenizer: Tokenizer) -> list[int]:
    """The special ids a tokenizer puts before any text (its BOS), [] if none."""
    encoding = tokenizer.encode("a")
    ids: list[int] = []
    for i, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not special:
            break
        ids.append(i)
    return ids


def untruncated(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, or a copy of it without truncation and padding (settings of earlier calls, not of the text)."""
    if not (tokenizer.truncation or tokenizer.padding):
        return tokenizer
    return Tokenizer.from_str(
        json.dumps({**json.loads(tokenizer.to_str()), "truncation": None, "padding": None})
    )


def _without_context(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, or a copy of it with truncation, padding and dummy prefix taken out where it has any."""
    if not (vocabulary.adds_prefix_space or tokenizer.truncation or tokenizer.padding):
        return tokenizer
    spec = json.loads(tokenizer.to_str())
    spec.update(truncation=None, padding=None, post_processor=None)
    spec["normalizer"] = _strip_prepend(spec.get("normalizer"))
    _strip_prefix_space(spec.get("pre_tokenizer"))
    return Tokenizer.from_str(json.dumps(spec))


def _strip_prepend(component: dict[str, Any] | None) -> dict[str, Any] | None:
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Sequence":
        inner = [kept for part in component["normalizers"] if (kept := _strip_prepend(part)) is not None]
        return {"type": "Sequence", "normalizers": inner}
    return component


def _strip_prefix_space(component: dict[str, Any] | None) -> None:
    if component is None:
        return
    if component["type"] == "Sequence":
        for part in component["pretokenizers"]:
            _strip_prefix_space(part)
    elif component["type"] == "ByteLevel":
        component["add_prefix_space"] = False
    elif component["type"] == "Metaspace":
        component["prepend_scheme"] = "never"
