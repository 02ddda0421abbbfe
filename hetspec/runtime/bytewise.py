"""SLRS-4c: drafters whose tokens are single bytes walk the target's byte trie (ALGORITHMS §4c; reconstruction).

From the root, the drafter draws a byte, then a coin says whether the target's token ends before it, else the walk goes
one node down. So the law ψ of the token it ends at is known exactly, token by token, from one teacher-forced pass:
`ψ(t) = [Π_j q(t_j│c·t_{<j})·(1 − stop(t_{<j}, t_j))] · Σ_b q(b│c·t)·stop(t, b)`. Any stop table is lossless.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hetspec.runtime import laws
from hetspec.runtime.algorithms import DraftSettings
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.rng import Rng
from hetspec.runtime.trie import ByteTrie
from hetspec.runtime.verify import Proposal
from hetspec.vocab import Vocabulary


def is_bytewise(vocabulary: Vocabulary) -> bool:
    """Whether every token of text is a single byte."""
    return all(len(piece) <= 1 for piece in vocabulary.pieces) and any(vocabulary.pieces)


@dataclass(frozen=True)
class Branches:
    """What can happen at a node, and with which probability.

    Attributes:
        start: the first child.
        masses: float64[children + 1], going down to each child, and stopping here. At the root the last entry is 0.
        roles: target control tokens the drafter may end with instead, and their probabilities; at the root only.
    """

    start: int
    masses: Tensor
    roles: dict[int, float] = field(default_factory=dict)

    @property
    def stop(self) -> float:
        """The probability that the token ends here."""
        return float(self.masses[-1])

    def down(self, node: int) -> float:
        """The probability of going to a child."""
        return float(self.masses[node - self.start])


class ByteWalk:
    """The walk's law at each node.

    Args:
        settings: the pair and the generation.
        trie: of the target's vocabulary.
        stop: float[N], the probability that the token ends at a node's parent if the node's byte comes next.
    """

    def __init__(self, settings: DraftSettings, trie: ByteTrie, stop: np.ndarray) -> None:
        assert len(stop) == len(trie)
        self.settings, self.trie = settings, trie
        self.stop = torch.from_numpy(stop.astype(np.float64))
        pieces = settings.drafter.pieces
        self._ids = np.array([d for d, piece in enumerate(pieces) if piece])
        self._bytes = np.array([piece[0] for piece in pieces if piece])
        self._roles = [
            (d, int(t))
            for d, t in enumerate(settings.mapping.d2t)
            if t >= 0 and not (d < len(pieces) and pieces[d])
        ]
        self.id_of = {piece[0]: d for d, piece in reversed(list(enumerate(pieces))) if piece}

    def branches(self, node: int, logits: Tensor) -> Branches | None:
        """The law at a node from the drafter's logits [V_d] after its string; None at a dead end.

        Where a token ends, whatever is no child ends it. At the root, and where none ends, only children (and, at
        the root, control tokens by role) count, renormalised; they may all be impossible.
        """
        # In float64: the walk draws from the masses normalised, ψ multiplies them as they are.
        q = laws.law(logits.double(), self.settings.draft_warping, "the drafter").numpy()
        by_byte = np.bincount(self._bytes, q[self._ids], minlength=256)  # an id more than once: masses add
        below = self.trie.children(node)
        masses = np.zeros(below.stop - below.start + 1)
        masses[:-1] = by_byte[self.trie.byte[below]]
        if node and self.trie.token[node] >= 0:
            masses[:-1] *= 1 - self.stop.numpy()[below]
            masses[-1] = max(0.0, 1 - masses.sum())
            return Branches(below.start, torch.from_numpy(masses))
        roles: dict[int, float] = {}
        for d, t in self._roles if not node else ():
            roles[t] = roles.get(t, 0.0) + float(q[d])
        total = float(masses.sum()) + sum(roles.values())
        if not total > 0:
            return None
        return Branches(
            below.start, torch.from_numpy(masses / total), {t: m / total for t, m in roles.items()}
        )


class WalkLaw:
    """ψ after a context, computed where it is asked for; the drafter re-reads the token's bytes.

    In one pass, or, in half precision, byte by byte as the walk does: there a pass over several bytes rounds otherwise
    than single steps (tiny-bytes: ψ off by 0.5 % on average, 6 % at most), and ψ must be the law that was drawn from.

    Args:
        walk: the walk.
        context: holds the context as its first `length` ids, until the step is committed.
        length: ids before the candidate.
        root: the law at the root.
        singly: read the bytes one by one.
    """

    def __init__(
        self, walk: ByteWalk, context: DrafterContext, length: int, root: Branches, *, singly: bool = False
    ) -> None:
        self._walk, self._context, self._length, self._root = walk, context, length, root
        self._singly = singly
        self._known: dict[int, float] = dict(root.roles)

    def __getitem__(self, t: int) -> float:
        """ψ(t)."""
        if t not in self._known:
            self._known[t] = self._compute(t)
        return self._known[t]

    def remember(self, t: int, psi: float) -> None:
        """Takes over the candidate's own ψ, known from the walk that drew it."""
        self._known[t] = psi

    def _compute(self, t: int) -> float:
        walk = self._walk
        piece = walk.settings.target.bytes_of(t)
        path = walk.trie.path(piece) if piece else []
        if not path or walk.trie.token[path[-1]] != t or not all(b in walk.id_of for b in piece):
            return 0.0
        psi = self._root.down(path[0])
        if not psi > 0:
            return 0.0
        row = self._context.row
        row.crop(self._length)
        for j, logits in enumerate(self._read([walk.id_of[b] for b in piece])):
            branches = walk.branches(path[j], logits)
            if branches is not None:
                psi *= branches.down(path[j + 1]) if j + 1 < len(path) else branches.stop
            if branches is None or not psi > 0:
                psi = 0.0
                break
        row.crop(self._length)
        return psi

    def _read(self, ids: list[int]) -> Iterator[Tensor]:
        """Logits [V_d] after each of the ids."""
        row = self._context.row
        again = self._context.ids[row.length : self._length]  # forgotten if an earlier law was asked since
        if not self._singly:
            yield from row.forward([*again, *ids], keep=len(ids))
            return
        for d in again:
            row.forward([d], keep=1)
        for d in ids:
            yield row.forward([d], keep=1)[0]


class BytewiseSLRS:
    """Candidates drawn by walks; the byte that ended one is thrown away and drawn anew for the next.

    A walk that comes to a dead end has drawn *none*: a candidate that is certainly rejected (ALGORITHMS §1). At
    temperature 0 every choice is the likeliest.

    Args:
        walk: the walk.
    """

    name = "slrs"

    def __init__(self, walk: ByteWalk) -> None:
        self.walk = walk
        self._longest = max(map(len, walk.settings.target.pieces), default=0)

    def propose(self, context: DrafterContext, behind: list[int], n: int, rng: Rng) -> Proposal:
        """Drafts `n` candidates; see `Algorithm.propose`."""
        s = self.walk.settings
        ids: list[int] = []
        proposal_laws: list[WalkLaw] = []
        none: WalkLaw | None = None
        logits: Tensor | None = None
        if not context.can_read(self._longest + 2):  # makes room before the first candidate
            return Proposal()
        while len(ids) < n and len(context.ids) + self._longest + 2 <= context.window:
            if logits is None:
                logits = context.next_logits()
            root = self.walk.branches(0, logits)
            if root is None:
                break
            halves = logits.dtype not in (torch.float32, torch.float64)
            law = WalkLaw(self.walk, context, len(context.ids), root, singly=halves)
            t, psi, logits = self._token(context, root, rng)
            if t < 0:
                none = law
                break
            law.remember(t, psi)
            ids.append(t)
            proposal_laws.append(law)
            if t in s.eos_ids or t in root.roles:
                break
        if s.warping.greedy:
            return Proposal(ids)
        return Proposal(ids, proposal_laws, none)

    def _token(self, context: DrafterContext, root: Branches, rng: Rng) -> tuple[int, float, Tensor | None]:
        """Walks from the root; (token, its ψ, logits after it), token −1 at a dead end."""
        walk, greedy = self.walk, self.walk.settings.warping.greedy
        branches: Branches | None = root
        node, psi, logits = 0, 1.0, None
        while branches is not None:
            roles = list(branches.roles.items())
            masses = torch.cat([branches.masses, torch.tensor([m for _, m in roles], dtype=torch.float64)])
            choice = int(masses.argmax()) if greedy else rng.categorical(masses)
            psi *= float(masses[choice])
            if choice >= len(branches.masses):
                return roles[choice - len(branches.masses)][0], psi, None
            if choice == len(branches.masses) - 1:
                return int(walk.trie.token[node]), psi, logits
            node = branches.start + choice
            context.push(walk.id_of[int(walk.trie.byte[node])])
            logits = context.next_logits()
            branches = walk.branches(node, logits)
        return -1, psi, logits
