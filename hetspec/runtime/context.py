"""The drafter's view of the target's text: drafter tokens, their byte ends, and what to re-read after a step.

The context begins as the drafter's own tokenizer begins a text and spells the committed bytes; it need not
be the canonical tokenisation (that costs acceptance, never correctness). The cost of a step does not grow
with the context: only the last few tokens are ever re-encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor

from hetspec.errors import UnsupportedModel
from hetspec.runtime.models import Row
from hetspec.segment import Segmenter

BACK_TOKENS = 8  # how far re-encoding may go back to reach the start of a word
SPACES = b" \t\n\r"


class DrafterContext:
    """One row of the drafter, aligned with the committed text.

    Args:
        row: the drafter's sequence.
        segmenter: of the drafter's tokenizer.
        prefix: ids before the text (BOS, or a prompt of the drafter's own); never re-encoded.
    """

    def __init__(self, row: Row, segmenter: Segmenter, prefix: list[int]) -> None:
        self.row = row
        self.segmenter = segmenter
        self.pieces = segmenter.vocabulary.pieces
        self.ids: list[int] = list(prefix)
        self.ends: list[int] = [0] * len(prefix)  # bytes of text up to and including each id
        self.text = bytearray()  # the committed bytes
        self.unspelled_bytes = 0
        self.align_seconds = 0.0
        self._prefix = len(prefix)
        self._fixed = len(prefix)  # ids before this one are never re-encoded
        self._committed = len(prefix)  # ids before this one are committed, the rest is drafted

    # -- drafting --------------------------------------------------------------------------------------

    def next_logits(self) -> Tensor:
        """Logits [V_d] for the token after everything in the context, drafted tokens included.

        Only ids the drafter has not read yet are fed.
        """
        return self.last_logits(1)[0]

    def last_logits(self, keep: int) -> Tensor:
        """Logits [keep, V_d] after each of the last `keep` ids; re-reads those of them it has read already."""
        if len(self.ids) >= self.row.max_length:
            self._slide()
        self.row.crop(len(self.ids) - keep)
        return self.row.forward(self.ids[self.row.length :], keep=keep)

    @property
    def readable(self) -> bool:
        """Whether there is anything to predict from (an empty text without BOS gives nothing)."""
        return bool(self.ids)

    def push(self, d: int) -> None:
        """Appends a drafted token."""
        self.ids.append(d)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(self.pieces[d]))

    @property
    def drafted(self) -> bytes:
        """The drafted bytes after the committed text."""
        start = self.ends[self._committed - 1] if self._committed else 0
        return self.segmenter.vocabulary.spell(self.ids[self._committed :])[len(self.text) - start :]

    def replaceable(self) -> int:
        """The last committed drafter token if nothing was drafted after it and it may be replaced, else −1."""
        last = len(self.ids) - 1
        return self.ids[last] if len(self.ids) == self._committed and max(self._fixed, 1) <= last else -1

    def pop(self) -> None:
        """Takes the last token out of the context."""
        self._cut(len(self.ids) - 1)
        self._committed = min(self._committed, len(self.ids))

    def replace(self, d: int) -> None:
        """Puts a token in the place of the last one, drafted or committed; its bytes begin with that one's.

        If it stood in the place of a committed token and is rejected, `commit` encodes those bytes again.
        """
        self.pop()
        self.push(d)

    # -- committing ------------------------------------------------------------------------------------

    def commit(self, new: bytes) -> None:
        """Takes over the bytes of a step: keeps the drafted tokens that spell them, encodes the rest.

        Args:
            new: bytes committed since the last call; b"" drops the drafted tokens.
        """
        started = time.perf_counter()
        self.text += new
        self._keep_drafted()
        if (self.ends[-1] if self.ends else 0) < len(self.text):
            self._encode_tail()
        self._committed = len(self.ids)
        self.align_seconds += time.perf_counter() - started

    def commit_control(self, d: int) -> None:
        """Appends a committed control token (mapped by role); text before it is not re-encoded any more."""
        self.commit(b"")
        self.push(d)
        self._committed = self._fixed = len(self.ids)

    def _keep_drafted(self) -> None:
        """Cuts the drafted tokens at the first that is not wholly inside the committed text."""
        start = self.ends[self._committed - 1] if self._committed else 0
        keep = self._committed
        while keep < len(self.ids):
            piece = self.pieces[self.ids[keep]]
            if not piece or self.text[start : start + len(piece)] != piece:
                break
            start += len(piece)
            keep += 1
        self._cut(keep)

    def _encode_tail(self) -> None:
        """Encodes the uncovered end of the text, from the start of its last word on."""
        start = self._word_start()
        begin = self.ends[start - 1] if start else 0
        tail = bytes(self.text[begin:])
        ids = self.segmenter.encode(tail)
        ends = self.segmenter.ends(tail, ids)
        same = start
        while same < len(self.ids) and same - start < len(ids) and self.ids[same] == ids[same - start]:
            same += 1
        self._cut(same)
        self.ids += ids[same - start :]
        if ends is not None:
            self.ends += [begin + int(end) for end in ends[same - start :]]
        else:
            # The drafter cannot spell this text (a normaliser, a missing byte token): one block, never cut inside.
            self.unspelled_bytes += max(0, len(tail) - len(self.segmenter.vocabulary.spell(ids)))
            self.ends += [len(self.text)] * (len(self.ids) - len(self.ends))
            if self.ends:
                self.ends[-1] = len(self.text)
            self._fixed = len(self.ids)

    def _word_start(self) -> int:
        """Index of the token re-encoding starts at: the last one that begins a word, if it is near."""
        lowest = max(self._fixed, len(self.ids) - BACK_TOKENS)
        for i in range(len(self.ids) - 1, lowest - 1, -1):
            piece = self.pieces[self.ids[i]]
            if piece[:1] and piece[0] in SPACES:
                while (
                    i > lowest
                    and self.pieces[self.ids[i]].strip(SPACES) == b""
                    and (self.pieces[self.ids[i - 1]][-1:].strip(SPACES) == b"")
                ):
                    i -= 1  # a run of white space is one pre-token
                return i
        return max(self._fixed, len(self.ids) - 2)

    def _cut(self, length: int) -> None:
        del self.ids[length:]
        del self.ends[length:]
        self.row.crop(length)

    def _slide(self) -> None:
        """Forgets the oldest half of the text when the drafter's window is full; its prefix stays."""
        keep = (self.row.max_length - self._prefix) // 2
        if keep < 1:
            raise UnsupportedModel(
                f"the drafter's window of {self.row.max_length} positions is filled by its own prompt.",
                "Use a drafter with a longer context.",
            )
        dropped = len(self.ids) - self._prefix - keep
        if dropped <= 0:
            return
        self.row.crop(self._prefix)
        del self.ids[self._prefix : self._prefix + dropped]
        del self.ends[self._prefix : self._prefix + dropped]
        self._committed = max(self._prefix, self._committed - dropped)
        self._fixed = max(self._prefix, self._fixed - dropped)


def spell_prompt(
    target_pieces: tuple[bytes, ...], ids: Iterable[int], t2d: dict[int, int]
) -> list[bytes | int]:
    """Target ids as runs of bytes and drafter control ids (mapped by role); other control tokens are left out.

    Args:
        target_pieces: bytes by target id.
        ids: the prompt.
        t2d: target control id -> drafter control id.
    """
    parts: list[bytes | int] = []
    run = bytearray()
    for t in ids:
        piece = target_pieces[t] if t < len(target_pieces) else b""
        if piece:
            run += piece
        elif t in t2d:
            if run:
                parts.append(bytes(run))
                run = bytearray()
            parts.append(t2d[t])
    if run:
        parts.append(bytes(run))
    return parts
