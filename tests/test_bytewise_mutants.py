"""SLRS-4c by whole-run enumeration with the shipped residual, and planted bugs the same comparison must reject."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetspec.runtime import bytewise, laws, verify
from hetspec.runtime.bytewise import Branches, ByteWalk, BytewiseSLRS, WalkLaw
from hetspec.runtime.trie import ByteTrie
from tests.test_exactness import joint, settings, truth
from tests.toys import Toy, total_variation

# "bab" is reached over "ba", which is no token; "aa" makes where a token ends matter. Without an end of text the
# enumeration stays small.
TARGET = Toy([b"a", b"b", b"bab", b"aa"], eos=False)
BYTES = Toy([b"b", b"a"], eos=False)
SEEDS = range(2)


def made(walk=ByteWalk, cls=BytewiseSLRS, stop=None):
    def make(mapping, target, drafter, warping, ends):
        trie = ByteTrie.of(target.vocabulary.pieces)
        table = np.random.default_rng(7).random(len(trie)) if stop is None else np.full(len(trie), stop)
        return cls(walk(settings(mapping, target, drafter, warping, ends), trie, table))

    return make


def distance(make, seed, k=2, n=2, target=TARGET):
    law = joint(make, seed, target=target, drafter=BYTES, k=k, n=n)
    assert abs(sum(law.values()) - 1) < 1e-12
    return total_variation(law, truth(seed, target=target, n=n))


@pytest.fixture
def residual_vector(monkeypatch):
    """The residual as one vector: its loop has many branches, and `test_the_shipped_loop…` walks them."""

    def draw(p, pi, rng):
        whole = torch.tensor([float(pi[x]) for x in range(len(p))], dtype=torch.float64)
        return rng.categorical(laws.residual(p.double(), whole))

    monkeypatch.setattr(verify, "_residual_draw", draw)


@pytest.mark.parametrize(("k", "n"), [(1, 2), (2, 2)])
def test_the_shipped_loop_over_every_branch_has_the_targets_law(k, n):
    """Nothing replaced: the walk, ψ by teacher forcing, and the residual by rejection."""
    assert distance(made(), 1, k, n, target=Toy([b"a", b"b", b"bab"], eos=False)) < 1e-12


@pytest.mark.parametrize("stop", [None, 0.5])
def test_the_unmutated_walk_passes(residual_vector, stop):
    assert max(distance(made(stop=stop), seed) for seed in SEEDS) < 1e-12


# -- mutants of ψ --------------------------------------------------------------------------------------------------


class NoStops(WalkLaw):
    """ψ as the drafter's probability of the token's bytes, as if stops did not exist."""

    def _compute(self, t):
        walk, row = self._walk, self._context.row
        psi, piece = 1.0, walk.settings.target.bytes_of(t)
        for j, b in enumerate(piece):
            row.crop(self._length - 1)
            last = self._context.ids[self._length - 1]
            logits = row.forward([last, *(walk.id_of[c] for c in piece[:j])], keep=1)[0]
            psi *= float(laws.law(logits, walk.settings.draft_warping)[walk.id_of[b]])
        row.crop(self._length)
        return psi

    def remember(self, t, psi):
        """The candidate is judged by the same wrong law."""


class StopsAtTheRoot(WalkLaw):
    """ψ with a factor 1 − stop at the root, where the walk cannot stop."""

    def _compute(self, t):
        first = self._walk.trie.path(self._walk.settings.target.bytes_of(t))[0]
        return super()._compute(t) * (1 - float(self._walk.stop[first]))

    def remember(self, t, psi):
        """The candidate is judged by the same wrong law."""


class CandidateOnly(WalkLaw):
    """The candidate's ψ is right, every other token's is 0: the residual is p without the candidate."""

    def _compute(self, t):
        return 0.0


# -- mutants of the walk -------------------------------------------------------------------------------------------


class NotRenormalised(WalkLaw):
    """ψ where no token ends takes the children's masses as they are; the walk draws among the children."""

    def _compute(self, t):
        walk, psi = self._walk, super()._compute(t)
        piece = walk.settings.target.bytes_of(t)
        path = walk.trie.path(piece)
        for j, node in enumerate(path[:-1]):
            if walk.trie.token[node] < 0:
                self._context.row.crop(self._length)
                logits = self._context.row.forward([walk.id_of[b] for b in piece[: j + 1]], keep=1)[0]
                q = laws.law(logits, walk.settings.draft_warping)
                below = walk.trie.children(node)
                psi *= float(sum(q[walk.id_of[int(b)]] for b in walk.trie.byte[below]))
        self._context.row.crop(self._length)
        return psi

    def remember(self, t, psi):
        """The candidate is judged by the same wrong law."""


class KeepsTheByte(BytewiseSLRS):
    """The byte before which a token ended is drawn and begins the next token, whose ψ does not know of it."""

    forced: int | None = None

    def propose(self, context, behind, n, rng):
        self.forced = None
        return super().propose(context, behind, n, rng)

    def _token(self, context, root, rng):
        walk = self.walk
        if self.forced is not None:  # the first byte is no draw
            below = walk.trie.children(0)
            at = int(np.flatnonzero(walk.trie.byte[below] == self.forced)[0])
            masses = torch.zeros_like(root.masses)
            masses[at] = 1.0
            kept, root = float(root.masses[at]), Branches(root.start, masses)
        else:
            kept = 1.0
        t, psi, logits = super()._token(context, root, rng)
        # What the byte after the token was, given that the token ended before it.
        q = laws.law(logits, walk.settings.draft_warping).double()
        node = walk.trie.path(walk.settings.target.bytes_of(t))[-1]
        ends = torch.zeros(256, dtype=torch.float64)
        for b, d in walk.id_of.items():
            ends[b] = q[d]
        below = walk.trie.children(node)
        for child in range(below.start, below.stop):
            ends[walk.trie.byte[child]] *= float(walk.stop[child])
        self.forced = rng.categorical(ends)
        return t, psi * kept, logits


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mutant", [NoStops, StopsAtTheRoot, CandidateOnly, NotRenormalised])
def test_a_wrong_psi_is_rejected(residual_vector, monkeypatch, mutant, seed):
    monkeypatch.setattr(bytewise, "WalkLaw", mutant)
    assert distance(made(), seed, k=1) > 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_the_byte_is_rejected(residual_vector, seed):
    """Seen only from the second candidate on."""
    assert distance(made(cls=KeepsTheByte), seed, k=1) < 1e-12
    assert distance(made(cls=KeepsTheByte), seed, k=2) > 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_residual_drawn_from_p_is_rejected(monkeypatch, seed):
    monkeypatch.setattr(verify, "_residual_draw", lambda p, pi, rng: rng.categorical(p))
    assert distance(made(), seed, k=1) > 1e-4
