"""The drafter's view of the target's text: drafter tokens, their byte ends, and what to re-read after a step.

The context begins as the drafter's own tokenizer begins a text and spells the committed bytes; it need not
be the canonical tokenisation (that costs acceptance, never correctness). The cost of a step does not grow
with the context: only the last few tokens are ever re-encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from torch import Tensor

from hetspec.runtime.models import Row
from hetspec.segment import Segmenter, unfinished_utf8
from hetspec.vocab import Vocabulary

# Tokens a drafter sees at most unless told otherwise. SmolLM2-135M takes 30 s on one core to read 7,500 tokens, and
# after them 1.23 tokens come of a pass, after the last 1,000 alone 1.20.
DRAFT_WINDOW, LEAST_WINDOW = 2048, 512
BACK_TOKENS = 8  # how far re-encoding may go back to reach the start of a word
SPACES = b" \t\n\r"


class DrafterContext:
    """One row of the drafter, aligned with the committed text.

    Args:
        row: the drafter's sequence.
        segmenter: of the drafter's tokenizer.
        prefix: ids before the text (BOS, or a prompt of the drafter's own); never re-encoded.
        sticky: how many of them stay when the window is full; by default all.
        controls: target control id -> drafter control id.
        window: ids it may hold; None for as many as the model was made for.
    """

    def __init__(
        self,
        row: Row,
        segmenter: Segmenter,
        prefix: list[int],
        *,
        sticky: int | None = None,
        controls: Mapping[int, int] | None = None,
        window: int | None = None,
    ) -> None:
        self.row = row
        self.window = row.max_length if window is None else min(window, row.max_length)
        self.segmenter = segmenter
        self.vocabulary = segmenter.vocabulary
        self.ids: list[int] = list(prefix)
        self.ends: list[int] = [0] * len(prefix)  # bytes of text up to and including each id
        self.text = bytearray()  # the committed bytes
        self.unspelled_bytes = 0
        self.align_seconds = 0.0
        self.controls = dict(controls or {})
        self._sticky = len(prefix) if sticky is None else sticky
        self._base = 0  # bytes of text before the first id after the sticky ones
        self._fixed = len(prefix)  # ids before this one are never re-encoded
        self._committed = len(prefix)  # ids before this one are committed, the rest is drafted

    # -- drafting --------------------------------------------------------------------------------------

    def can_read(self, more: int = 1) -> bool:
        """Whether the drafter can be asked for what comes next, with room for `more` ids after it.

        An empty context gives nothing to predict from. A full window forgets all but half of what it can hold of the
        committed text; if even that leaves no room (the drafted tokens fill it), drafting has to stop.
        """
        if len(self.ids) + more > self.window:
            self._slide()
        return len(self.ids) > 0 and len(self.ids) + more <= self.window

    @property
    def unread(self) -> int:
        """Ids the drafter has to read before it can draft."""
        full = len(self.ids) >= self.window
        return (self._sticky + self._kept if full else len(self.ids)) - self.row.length

    def next_logits(self) -> Tensor:
        """Logits [V_d] for the token after everything in the context, drafted tokens included.

        Only ids the drafter has not read yet are fed.
        """
        return self.last_logits(1)[0]

    def last_logits(self, keep: int) -> Tensor:
        """Logits [keep, V_d] after each of the last `keep` ids; re-reads those of them it has read already."""
        self.row.crop(len(self.ids) - keep)
        return self.row.forward(self.ids[self.row.length :], keep=keep)

    def push(self, d: int) -> None:
        """Appends a drafted token."""
        end = self._offset(len(self.ids)) + len(self.vocabulary.bytes_of(d))
        self.ids.append(d)
        self.ends.append(end)

    @property
    def drafted(self) -> bytes:
        """The drafted bytes after the committed text."""
        start = self._offset(self._committed)
        return self.vocabulary.spell(self.ids[self._committed :])[len(self.text) - start :]

    def replaceable(self) -> int:
        """The last committed drafter token if nothing was drafted after it and it may be replaced, else −1."""
        last = len(self.ids) - 1
        whole = len(self.ids) == self._committed and self._offset(len(self.ids)) == len(self.text)
        return self.ids[last] if whole and max(self._fixed, self._sticky, 1) <= last else -1

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

    def commit_ids(self, ids: Iterable[int], target: Vocabulary) -> None:
        """Takes over committed target ids: their bytes, and control tokens by role."""
        parts = spell_prompt(target.pieces, ids, self.controls)
        for part in parts:
            if isinstance(part, bytes):
                self.commit(part)
            else:
                self.commit_control(part)
        if not parts:
            self.commit(b"")

    def commit(self, new: bytes) -> None:
        """Takes over the bytes of a step: keeps the drafted tokens that spell them, encodes the rest.

        Args:
            new: bytes committed since the last call; b"" drops the drafted tokens.
        """
        started = time.perf_counter()
        self.text += new
        self._keep_drafted()
        end = len(self.text) - self._held_back()
        if self._offset(len(self.ids)) < end:
            self._encode_tail(end)
        self._committed = len(self.ids)
        self.align_seconds += time.perf_counter() - started

    def commit_control(self, d: int) -> None:
        """Appends a committed control token (mapped by role); text before it is not re-encoded any more."""
        self.commit(b"")
        self.push(d)
        self._committed = self._fixed = len(self.ids)

    def _offset(self, index: int) -> int:
        """Bytes of text before the id at `index`."""
        return self.ends[index - 1] if index > self._sticky else self._base

    def _held_back(self) -> int:
        """Bytes of an unfinished character at the end of the text that the drafter has no byte tokens for."""
        count = unfinished_utf8(bytes(self.text[-4:]))
        tail = self.text[len(self.text) - count :]
        return 0 if all(bytes([b]) in self.vocabulary.ids_by_bytes for b in tail) else count

    def _keep_drafted(self) -> None:
        """Cuts the drafted tokens at the first that is not wholly inside the committed text."""
        start = self._offset(self._committed)
        keep = self._committed
        while keep < len(self.ids):
            piece = self.vocabulary.bytes_of(self.ids[keep])
            if not piece or self.text[start : start + len(piece)] != piece:
                break
            start += len(piece)
            keep += 1
        self._cut(keep)

    def _encode_tail(self, end: int) -> None:
        """Encodes the text up to byte `end` from the start of its last word on."""
        start = self._word_start()
        begin = self._offset(start)
        tail = bytes(self.text[begin:end])
        ids = self.segmenter.encode(tail)
        ends = self.segmenter.ends(tail, ids)
        same = start
        while same < len(self.ids) and same - start < len(ids) and self.ids[same] == ids[same - start]:
            same += 1
        self._cut(same)
        self.ids += ids[same - start :]
        if ends is not None:
            self.ends += [begin + int(e) for e in ends[same - start :]]
            return
        # The drafter spells this stretch differently (a normaliser, a missing byte token): one block, never cut inside.
        self.unspelled_bytes += end - begin
        self.ends += [end] * (len(self.ids) - len(self.ends))
        if len(self.ids) > self._sticky:
            self.ends[-1] = end
        else:
            self._base = end
        self._fixed = len(self.ids)

    def _word_start(self) -> int:
        """Index of the token re-encoding starts at: the last one that begins a word, if it is near."""
        lowest = max(self._fixed, len(self.ids) - BACK_TOKENS)
        pieces = [self.vocabulary.bytes_of(d) for d in self.ids[lowest:]]
        for i in range(len(pieces) - 1, -1, -1):
            if pieces[i][:1].strip(SPACES) or not pieces[i]:
                continue
            # A run of white space is one pre-token: go back to its beginning.
            while i > 0 and not pieces[i].strip(SPACES) and not pieces[i - 1][-1:].strip(SPACES):
                i -= 1
            return lowest + i
        return max(self._fixed, len(self.ids) - 2)

    def _cut(self, length: int) -> None:
        del self.ids[length:]
        del self.ends[length:]
        self.row.crop(length)

    @property
    def _kept(self) -> int:
        """Committed ids that stay when the window is full, beside the sticky ones."""
        return max(2, (self.window - self._sticky) // 2)

    def _slide(self) -> None:
        """Forgets all but half a window of the committed text; what begins every text, and drafted tokens, stay."""
        dropped = min(len(self.ids) - self._sticky - self._kept, self._committed - self._sticky - 1)
        if dropped <= 0:
            return
        self._base = self._offset(self._sticky + dropped)
        self.row.crop(self._sticky)
        del self.ids[self._sticky : self._sticky + dropped]
        del self.ends[self._sticky : self._sticky + dropped]
        self._committed -= dropped
        self._fixed = max(self._sticky, self._fixed - dropped)


def spell_prompt(
    target_pieces: tuple[bytes, ...], ids: Iterable[int], t2d: Mapping[int, int]
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
