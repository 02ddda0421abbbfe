"""A byte trie of a vocabulary in flat arrays, for drafters that write one byte at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ByteTrie:
    """All byte strings that begin a token; node 0 is the empty one.

    Nodes stand in order of depth, then of their parent, then of their byte, so that the children of a node are
    neighbours and ascend, and every node but the root stands for one edge.

    Attributes:
        first: int32[N + 1], children of node s are the nodes first[s] … first[s+1] − 1.
        byte: uint8[N], the last byte of each node's string (0 at the root).
        token: int32[N], the token whose bytes are exactly the node's string, −1 if there is none. Of several tokens
            with the same bytes the lowest id.
    """

    first: np.ndarray
    byte: np.ndarray
    token: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[bytes]) -> ByteTrie:
        """The trie of the pieces; empty ones (control tokens) are left out.

        Built level by level: pieces that share a node and the next byte share the next node.
        """
        ids = np.array([i for i, piece in enumerate(pieces) if piece], dtype=np.int64)
        lengths = np.array([len(pieces[i]) for i in ids], dtype=np.int64)
        text = np.frombuffer(b"".join(pieces[i] for i in ids), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        node = np.zeros(len(ids), dtype=np.int64)  # where each piece has got to
        parents, bytes_, tokens = [np.array([-1])], [np.zeros(1, np.uint8)], [np.array([-1])]
        size, depth = 1, 0
        while len(ids):
            keys = node * 256 + text[starts + depth]
            distinct, where = np.unique(keys, return_inverse=True)
            node = size + where
            found = np.full(len(distinct), -1)
            ended = np.flatnonzero(lengths == depth + 1)
            found[where[ended][::-1]] = ids[ended][::-1]  # written last: the lowest id
            parents.append(distinct // 256)
            bytes_.append((distinct % 256).astype(np.uint8))
            tokens.append(found)
            size, depth = size + len(distinct), depth + 1
            going = lengths > depth
            ids, lengths, starts, node = ids[going], lengths[going], starts[going], node[going]
        children = np.bincount(np.concatenate(parents)[1:], minlength=size)
        first = np.concatenate([[1], 1 + np.cumsum(children)])
        return cls(first.astype(np.int32), np.concatenate(bytes_), np.concatenate(tokens).astype(np.int32))

    def __len__(self) -> int:
        return len(self.byte)

    def children(self, node: int) -> slice:
        """The children of a node."""
        return slice(int(self.first[node]), int(self.first[node + 1]))

    def path(self, piece: bytes) -> list[int]:
        """Nodes on the way down `piece`, one for each byte; [] if it begins no token."""
        node, nodes = 0, []
        for b in piece:
            below = self.children(node)
            at = below.start + int(np.searchsorted(self.byte[below], b))
            if at >= below.stop or self.byte[at] != b:
                return []
            nodes.append(at)
            node = at
        return nodes
