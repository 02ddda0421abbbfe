"""Where one tokenizer's tokens end inside the other's: longer tokens, and first tokens of joined strings.

Pure functions of the two tokenizers, cached; any answer they give is lossless, a good one raises acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from hetspec.artifact import VocabularyMap
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary


class LongerTokens:
    """For a drafter token: the drafter tokens that begin with its bytes and are longer.

    Args:
        drafter: the drafter's vocabulary.
        segmenter: of the target's tokenizer.
    """

    def __init__(self, drafter: Vocabulary, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._sorted = sorted((piece, d) for d, piece in enumerate(drafter.pieces) if piece)
        self._ids = torch.tensor([d for _, d in self._sorted])
        self._following: dict[tuple[int, bytes], int] = {}

    def of(self, piece: bytes) -> Tensor:
        """Drafter ids whose bytes begin with `piece` and go on, int64."""
        start = bisect_left(self._sorted, (piece + b"\0", -1))
        end = bisect_left(self._sorted, (piece + b"\xff" * 64, -1))
        return self._ids[start:end]

    def following(self, t: int, rest: bytes) -> int:
        """The target token after `t` when the text goes on with `rest`; −1 if the target would not begin with `t`."""
        key = (t, rest)
        if key not in self._following:
            ids = self._segmenter.encode(self._segmenter.vocabulary.pieces[t] + rest)
            self._following[key] = ids[1] if len(ids) > 1 and ids[0] == t else -1
        return self._following[key]


class FirstTarget:
    """`F(d, e)`: the first target token of ``bytes(d) + bytes(e)`` (ALGORITHMS §4d), cached across prompts.

    Args:
        mapping: its `first` is the answer where the text ends after `d`.
        target, drafter: the vocabularies.
        segmenter: of the target's tokenizer.
    """

    def __init__(
        self, mapping: VocabularyMap, target: Vocabulary, drafter: Vocabulary, segmenter: Segmenter
    ) -> None:
        self.image = mapping.first
        self._target, self._drafter, self._segmenter = target, drafter, segmenter
        self._sorted = sorted(piece for piece in target.pieces if piece)
        self._extends: dict[bytes, bool] = {}
        self._known: dict[int, dict[int, int]] = {}

    def extends(self, piece: bytes) -> bool:
        """Whether some target token begins with `piece` and goes on."""
        if piece not in self._extends:
            at = bisect_left(self._sorted, piece + b"\0")
            self._extends[piece] = at < len(self._sorted) and self._sorted[at].startswith(piece)
        return self._extends[piece]

    def of(self, d: int, following: Sequence[int]) -> list[int]:
        """F(d, e) for each e; `d` must have an image."""
        known = self._known.setdefault(d, {})
        missing = [e for e in following if e not in known]
        if missing:
            self._look_up(d, missing, known)
        return [known[e] for e in following]

    def _look_up(self, d: int, following: Sequence[int], known: dict[int, int]) -> None:
        # Every pair is asked: a trie of the target's tokens cannot tell, since pre-tokenisers look ahead (the last of
        # four spaces goes to the word that follows) and merges compete across the boundary ("se" + "n" -> "s", "en").
        piece, image = self._drafter.pieces[d], int(self.image[d])
        asked = [e for e in following if self._drafter.bytes_of(e)]
        known.update(dict.fromkeys(following, image))
        texts = [piece + self._drafter.pieces[e] for e in asked]
        for e, text, ids in zip(asked, texts, self._segmenter.encode_batch(texts), strict=True):
            first = self._target.pieces[ids[0]] if ids else b""
            if first and text.startswith(first):
                known[e] = ids[0]
