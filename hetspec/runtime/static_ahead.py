"""SLRS-4d in fixed shapes (ALGORITHMS §4d, reconstruction): the look-ahead's F as tables, and candidates' spellings.

`F(d, e)` asks a tokenizer, which a recorded step cannot. Here it is the longest target token that begins with the
bytes of `d` and lies within `bytes(d) + bytes(e)`, else the image of `d`: not always where the tokenizer cuts, but
fixed before any draw, which is all that exactness asks for.

Letters: `q` drafter, `pi` proposal; h places in q (drafter ids, or the kept ones of a pruned head), V target rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hetspec.runtime.algorithms import NEGLIGIBLE, KernelDraft
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary

CONTINUATIONS = 64  # of the likeliest drafter token
LONGEST_REST = 16  # bytes of e that can belong to F(d, e)
SPELLED = 3  # drafter tokens that may spell one candidate


class LongestTokens:
    """F as sorted keys: (d, rest) for every target token whose bytes are those of `d` and then `rest`.

    Args:
        target, drafter: the vocabularies.
        wanted: bool[V_d], the drafter ids that are looked ahead on.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, wanted: np.ndarray) -> None:
        continuing = {
            piece[:n] for piece in drafter.pieces for n in range(1, min(len(piece), LONGEST_REST) + 1)
        }
        rests: dict[bytes, int] = {}
        found: list[tuple[int, int, int]] = []
        for piece, ids in target.ids_by_bytes.items():
            for cut in range(max(1, len(piece) - LONGEST_REST), len(piece)):
                rest = piece[cut:]
                if rest not in continuing:
                    continue
                for d in drafter.ids_by_bytes.get(piece[:cut], ()):
                    if wanted[d]:
                        found.append((d, rests.setdefault(rest, len(rests)), ids[0]))
        self._rests = max(1, len(rests))
        entries = np.array(found, dtype=np.int64).reshape(-1, 3)
        keys = entries[:, 0] * self._rests + entries[:, 1]
        order = np.argsort(keys)
        self.keys, self.tokens = keys[order], entries[order, 2]
        known = [
            [rests[piece[:n]] for n in range(min(len(piece), LONGEST_REST), 0, -1) if piece[:n] in rests]
            for piece in drafter.pieces
        ]
        self.prefixes = np.full((len(wanted), max(1, *map(len, known))), -1, dtype=np.int64)
        for e, places in enumerate(known):
            self.prefixes[e, : len(places)] = places
        self.device_keys = torch.from_numpy(np.append(self.keys, np.iinfo(np.int64).max))
        self.device_tokens = torch.from_numpy(np.append(self.tokens, -1))
        self.device_prefixes = torch.from_numpy(self.prefixes)

    def to(self, device: torch.device) -> LongestTokens:
        """Moves the tables."""
        self.device_keys = self.device_keys.to(device)
        self.device_tokens = self.device_tokens.to(device)
        self.device_prefixes = self.device_prefixes.to(device)
        return self

    def __call__(self, d: Tensor, following: Tensor) -> Tensor:
        """F(d, e) for each e, −1 where no longer token begins with d.

        Args:
            d: int64[1].
            following: int64[n].

        Returns:
            int64[n].
        """
        rests = self.device_prefixes[following]
        keys = torch.where(rests >= 0, d * self._rests + rests, -1)
        at = torch.searchsorted(self.device_keys, keys)
        hits = self.device_keys[at] == keys
        longest = hits.long().argmax(dim=1, keepdim=True)  # the first: prefixes stand longest first
        tokens = torch.where(hits, self.device_tokens[at], -1)
        return tokens.gather(1, longest)[:, 0]


def looked_ahead_on(algorithm: KernelDraft) -> np.ndarray:
    """bool[V_d]: the drafter tokens that SLRS looks ahead on when they are the likeliest (`LookAhead.read`)."""
    look, s = algorithm.look_ahead, algorithm.settings
    if look is None:
        return np.zeros(0, dtype=bool)
    pieces = map(s.drafter.bytes_of, range(len(look.certainty)))
    return np.array(
        [
            bool(piece) and image >= 0 and certainty < look.threshold and look.first.extends(piece)
            for piece, image, certainty in zip(pieces, look.first.image, look.certainty, strict=True)
        ]
    )


class FixedAhead:
    """The look-ahead of SLRS-4d on a device.

    Args:
        algorithm: the SLRS whose look-ahead this is.
        wanted: `looked_ahead_on`, not empty.
        kept: ids of a pruned LM head, ascending, or None.
        device: where q is.
    """

    def __init__(
        self, algorithm: KernelDraft, wanted: np.ndarray, kept: np.ndarray | None, device: torch.device
    ) -> None:
        look, s = algorithm.look_ahead, algorithm.settings
        assert look is not None
        self.firsts = LongestTokens(s.target, s.drafter, wanted)
        self.targets = np.union1d(self.firsts.tokens, look.first.image[wanted])
        ids = np.arange(len(wanted)) if kept is None else kept
        self.width = look.width
        self._ids = torch.from_numpy(ids.astype(np.int64)).to(device)
        self._wanted = torch.from_numpy(wanted[ids]).to(device)
        self._images = torch.from_numpy(np.where(wanted, look.first.image, self.targets[:1])[ids]).to(device)
        self.firsts.to(device)

    def law(
        self,
        q: Tensor,
        following: Callable[[Tensor], Tensor],
        kernel: Callable[[Tensor], Tensor],
        column_of: Tensor,
    ) -> Tensor:
        """`Ahead.law`, on the columns, without a look at a value.

        Args:
            q: [h].
            following: reads a drafter id, int64[1], and gives the law after it, [h].
            kernel: `q·K` on the columns.
            column_of: int64[V]; every target id in `targets` has a column.

        Returns:
            [H], π up to a factor.
        """
        place = q.argmax(dim=0, keepdim=True)
        d = self._ids[place]
        wanted = self._wanted[place]
        masses, places = following(d).topk(min(self.width, len(q)))
        counted = masses > NEGLIGIBLE
        counted[0] = True
        masses = masses * counted
        firsts = self.firsts(d, self._ids[places])
        image = self._images[place]
        reached = column_of[torch.cat([torch.where(firsts >= 0, firsts, image), image])]
        shares = torch.cat([masses, (1 - masses.sum(0, keepdim=True)).clamp(min=0)])
        mass = q[place] * wanted
        pi = kernel(q.index_copy(0, place, q[place] - mass))
        # Shares of the same column are added up for each of them alike: no atomics, one value whoever writes last.
        same = (reached[:, None] == reached[None, :]).to(q.dtype)
        return pi.index_copy(0, reached, pi[reached] + mass * (same * shares).sum(dim=1))


def spellings(
    t2d: np.ndarray, columns: np.ndarray, target: Vocabulary, drafter: Vocabulary, segmenter: Segmenter
) -> tuple[np.ndarray, np.ndarray]:
    """Drafter tokens of the target ids among the columns: the preimage, else its bytes encoded.

    Args:
        t2d: int64[V].
        columns: target ids.
        target, drafter: the vocabularies.
        segmenter: of the drafter's tokenizer.

    Returns:
        int64[V, at most SPELLED], how many of them count int64[V]; 0 where no SPELLED tokens do it.
    """
    tokens = np.zeros((len(t2d), SPELLED), dtype=np.int64)
    counts = (t2d >= 0).astype(np.int64)
    tokens[:, 0] = np.maximum(t2d, 0)
    open_ids = [int(t) for t in columns if t2d[t] < 0 and target.bytes_of(t)]
    texts = [target.pieces[t] for t in open_ids]
    for t, text, ids in zip(open_ids, texts, segmenter.encode_batch(texts), strict=True):
        if len(ids) <= SPELLED and drafter.spell(ids) == text:
            counts[t] = len(ids)
            tokens[t, : len(ids)] = ids
    return tokens[:, : max(1, int(counts.max()))], counts
