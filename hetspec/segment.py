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
        controls = [t.content for t in self.tokenizer.get_added_tokens_decoder().values() if t.special]
        self._control = re.compile("|".join(map(re.escape, controls))) if controls else None

    def encode(self, text: bytes) -> list[int]:
        """Ids for a byte string in the middle of a text (no special tokens, no dummy prefix)."""
        ids: list[int] = []
        for run, valid in split_utf8(text):
            if valid:
                for part in self._parts(run.decode()):
                    ids += self.tokenizer.encode(part, add_special_tokens=False).ids
            else:
                ids += self._encode_loose_bytes(run)
        return ids

    def encode_batch(self, texts: Sequence[bytes]) -> list[list[int]]:
        """`encode` of many byte strings."""
        simple = {i: text.decode() for i, text in enumerate(texts) if is_utf8(text)}
        simple = {i: text for i, text in simple.items() if len(self._parts(text)) == 1}
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

        (`Tokenizer.encode_special_tokens` would do the same, but it is a switch on the caller's object.)
        """
        if self._control is None:
            return [text]
        cuts = [0, *(match.start() + 1 for match in self._control.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b] or [text]

    def _encode_loose_bytes(self, run: bytes) -> list[int]:
        """Ids for bytes that are no valid UTF-8; a byte without a token is left out."""
        if self._byte_level:
            return [t.id for t in self.tokenizer.model.tokenize("".join(_ALPHABET[b] for b in run))]
        by_bytes = self.vocabulary.ids_by_bytes
        return [by_bytes[bytes([b])][0] for b in run if bytes([b]) in by_bytes]


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
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # not a continuation byte: the character starts here
            need = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
            return back if back < need else 0
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
