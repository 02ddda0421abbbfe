"""SLRS-4c: the byte trie, ψ against brute force, and losslessness by enumeration with planted bugs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hetspec.errors import GenerationError
from hetspec.prep.stops import PRIOR_COUNT, PRIOR_STOP, stop_table
from hetspec.runtime import laws, verify
from hetspec.runtime.bytewise import Branches, ByteWalk, BytewiseSLRS, WalkLaw, is_bytewise
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.laws import Warping
from hetspec.runtime.trie import ByteTrie
from hetspec.runtime.verify import Proposal
from hetspec.sources import load_tokenizer
from hetspec.vocab import Vocabulary
from tests.test_exactness import HEAT, joint, settings, truth
from tests.toys import TableRow, TapeRng, Toy, enumerate_law, total_variation

# "abb" and "bab" end tokens whose prefixes "abb"[:2] is a token and "ba" is none.
TARGET = Toy([b"a", b"b", b"ab", b"abb", b"bab"])
SMALL = Toy([b"a", b"b", b"ab"])
BYTES = Toy([b"b", b"a", b"c"])  # "c" begins no target token


def stops(kind, size, seed=0):
    if kind == "random":
        return np.random.default_rng(seed).random(size)
    return np.full(size, {"half": 0.5, "always": 1.0, "never": 0.0}[kind])


def bytewise(kind="random", walk=ByteWalk, cls=BytewiseSLRS):
    def make(mapping, target, drafter, warping, ends):
        trie = ByteTrie.of(target.vocabulary.pieces)
        return cls(walk(settings(mapping, target, drafter, warping, ends), trie, stops(kind, len(trie))))

    return make


# -- the trie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        [b"a"],
        [b"", b"ab", b"a", b"abc", b"b", b"", b"ab", b"\xff\x00"],
        [bytes([b]) for b in range(256)] + [bytes(p) for p in itertools.product((0, 255), repeat=4)],
    ],
)
def test_the_trie_holds_every_prefix_once(pieces):
    trie = ByteTrie.of(pieces)
    prefixes = {piece[:n] for piece in pieces for n in range(len(piece) + 1)}
    assert len(trie) == len(prefixes)
    seen = set()

    def walk(node, text):
        seen.add(text)
        named = int(trie.token[node])
        assert named == (pieces.index(text) if text and text in pieces else -1)
        below = trie.children(node)
        assert (np.diff(trie.byte[below].astype(int)) > 0).all()
        for child in range(below.start, below.stop):
            assert child > node
            walk(child, text + bytes([trie.byte[child]]))

    walk(0, b"")
    assert seen == prefixes
    for piece in filter(None, pieces):
        assert len(trie.path(piece)) == len(piece)
    assert trie.path(b"nowhere") == []


# -- losslessness ------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_residual(monkeypatch):
    """The residual as a vector, from the same ψ: the rejection loop has no last branch (it is tested below)."""

    def draw(p, pi, rng):
        if not isinstance(pi, torch.Tensor):
            pi = torch.tensor([pi[x] for x in range(len(p))], dtype=torch.float64)
        return rng.categorical(laws.residual(p.double(), pi))

    monkeypatch.setattr(verify, "_residual_draw", draw)


@pytest.mark.parametrize(
    ("kind", "k", "n"),
    [("random", 2, 2), ("random", 1, 3), ("half", 1, 2), ("always", 1, 2), ("never", 1, 2)],
)
def test_joint_law_is_the_targets(exact_residual, kind, k, n):
    law = joint(bytewise(kind), k, target=TARGET, drafter=BYTES, k=k, n=n)
    assert abs(sum(law.values()) - 1) < 1e-12
    assert total_variation(law, truth(k, target=TARGET, n=n)) < 1e-12


CASES = {
    "drafter law with zeros": {"zeros_d": (1,)},  # below "ba" only "bab" goes on: dead ends
    "everything ends": {"zeros_d": (0, 1)},
    "target law with zeros": {"zeros": (0, 3)},
    "padded rows": {"target": Toy([b"a", b"b", b"ab"], rows=7), "drafter": Toy([b"b", b"a"], rows=6)},
    "drafter without EOS": {"drafter": Toy([b"b", b"a"], eos=False)},
    "target without EOS": {"target": Toy([b"a", b"b", b"ba"], eos=False)},
    "a byte is missing": {"drafter": Toy([b"b", b"c"])},
    "top k": {"warping": Warping(0.9, top_k=3)},
}


@pytest.mark.parametrize("case", CASES)
def test_joint_law_in_corner_cases(exact_residual, case):
    arguments = {"target": TARGET, "drafter": BYTES, "k": 1, "n": 2, **CASES[case]}
    told = {key: arguments[key] for key in ("target", "zeros", "n", "warping") if key in arguments}
    assert total_variation(joint(bytewise(), 2, **arguments), truth(2, **told)) < 1e-12


def test_dead_ends_are_reached(exact_residual):
    """ "ba" is no token and "bab" needs a b; a drafter law with a zero makes the walk end there."""
    target = Toy([b"a", b"b", b"ab", b"bab"])

    law = joint(bytewise(walk=DeadEnds), 1, target=target, drafter=BYTES, k=1, n=2)
    assert total_variation(law, truth(1, target=target, n=2)) < 1e-12


# -- mutants -----------------------------------------------------------------------------------------------------


class NoStopInPsi(WalkLaw):
    """ψ as if every byte went on."""

    def _compute(self, t):
        walk, kept = self._walk, self._walk.stop
        walk.stop = torch.zeros_like(kept)
        try:
            return super()._compute(t)
        finally:
            walk.stop = kept


class Doubled(WalkLaw):
    """ψ of what the residual asks about is twice too large."""

    def _compute(self, t):
        return min(1.0, 2 * super()._compute(t))


class Forced:
    """Gives one draw, then draws."""

    def __init__(self, rng, first):
        self.rng, self.first = rng, first

    def categorical(self, law):
        first, self.first = self.first, None
        return self.rng.categorical(law) if first is None or not law[first] > 0 else first


class KeepsTheByte(BytewiseSLRS):
    """The byte that ended a walk begins the next one, whose ψ is told as if it had been drawn anew."""

    def propose(self, *args):
        self.kept = None
        return super().propose(*args)

    def _token(self, context, root, rng):
        t, psi, logits = super()._token(context, root, Forced(rng, self.kept))
        self.kept = None
        if t >= 0 and logits is not None:
            walk, trie = self.walk, self.walk.trie
            q = laws.law(logits, walk.settings.draft_warping)
            below = trie.children(trie.path(walk.settings.target.bytes_of(t))[-1])
            stop = dict(zip(trie.byte[below].tolist(), walk.stop[below].tolist(), strict=True))
            roots = trie.byte[trie.children(0)]
            ended = torch.tensor([float(q[walk.id_of[b]]) * stop.get(b, 1.0) for b in roots])
            self.kept = rng.categorical(ended)
        return t, psi, logits


class StopsAtTheRoot(BytewiseSLRS):
    """A walk may end before its first byte, and ψ does not know."""

    def _token(self, context, root, rng):
        masses = torch.cat([0.7 * root.masses[:-1], torch.tensor([0.3], dtype=torch.float64)])
        t, psi, logits = super()._token(context, Branches(root.start, masses, root.roles), rng)
        return t, psi / 0.7, logits


class NotRenormalised(ByteWalk):
    """Where no token ends the children's masses are taken as they are, in the walk only."""

    def branches(self, node, logits):
        found = super().branches(node, logits)
        if found is None or not node or self.trie.token[node] >= 0:
            return found
        return Branches(found.start, 0.5 * found.masses, found.roles)


class WrongCandidate(BytewiseSLRS):
    """ψ of the candidate is that of another path."""

    def _token(self, context, root, rng):
        t, psi, logits = super()._token(context, root, rng)
        return t, 0.5 * psi, logits


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mutant", [NoStopInPsi, Doubled])
def test_a_wrong_psi_is_seen(exact_residual, monkeypatch, mutant, seed):
    monkeypatch.setattr("hetspec.runtime.bytewise.WalkLaw", mutant)
    law = joint(bytewise(), seed, target=TARGET, drafter=BYTES, k=1, n=2)
    assert total_variation(law, truth(seed, target=TARGET, n=2)) > 1e-4


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "mutant", [{"cls": WrongCandidate}, {"cls": StopsAtTheRoot}, {"walk": NotRenormalised}]
)
def test_a_wrong_walk_is_seen(exact_residual, mutant, seed):
    law = joint(bytewise(**mutant), seed, target=TARGET, drafter=BYTES, k=1, n=2)
    assert total_variation(law, truth(seed, target=TARGET, n=2)) > 1e-4


@pytest.mark.parametrize("seed", range(2))
def test_the_residual_is_drawn_by_rejection_not_from_p(monkeypatch, seed):
    """The shipped loop, every branch of it, in a whole step."""
    arguments = {"target": SMALL, "drafter": BYTES, "k": 1, "n": 1}
    expected = truth(seed, target=SMALL, n=1)
    assert total_variation(joint(bytewise(), seed, **arguments), expected) < 1e-12
    monkeypatch.setattr(verify, "_residual_draw", lambda p, pi, rng: rng.categorical(p))
    assert total_variation(joint(bytewise(), seed, **arguments), expected) > 1e-4


@pytest.mark.parametrize("seed", range(2))
def test_none_is_no_bonus(exact_residual, monkeypatch, seed):
    """Dropping the undrawn candidate, and drawing from p there, biases the text."""
    target = Toy([b"a", b"b", b"ab", b"bab"])
    monkeypatch.setattr(
        "hetspec.runtime.bytewise.Proposal", lambda ids=(), laws_=None, none=None: Proposal(list(ids), laws_)
    )
    law = joint(bytewise(walk=DeadEnds), seed, target=target, drafter=BYTES, k=1, n=2)
    assert total_variation(law, truth(seed, target=target, n=2)) > 1e-4


class DeadEnds(ByteWalk):
    """Walks end where no token does."""

    def branches(self, node, logits):
        found = super().branches(node, logits)
        return None if node and self.trie.token[node] < 0 else found


# -- the residual by rejection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_residual_drawn_by_rejection_has_its_law(seed):
    """Every branch of the loop: it ends, asks for no token twice, and keeps tokens in proportion to max(0, p − ψ)."""
    drawn = np.random.default_rng(seed).dirichlet(np.full(5, 0.7), size=2)
    p, psi = (torch.from_numpy(row) for row in drawn)
    p[3], psi[4] = 0, 0
    p /= p.sum()

    class Once:
        def __init__(self):
            self.asked = set()

        def __getitem__(self, x):
            assert x not in self.asked
            self.asked.add(x)
            return float(psi[x])

    law = enumerate_law(lambda rng: verify._residual_draw(p, Once(), rng))
    expected = (p - psi).clamp(min=0)
    assert law == pytest.approx({x: float(e / expected.sum()) for x, e in enumerate(expected) if e > 0})


def test_a_residual_of_a_law_that_covers_the_targets_is_an_error():
    with pytest.raises(GenerationError, match="covers the target's"):
        verify._residual_draw(torch.tensor([0.75, 0.25]), [0.75, 0.25], TapeRng((0, 0, 1, 0)))


# -- ψ against brute force -------------------------------------------------------------------------------------------


def brute_force(walk, row, length, t):
    """ψ(t) by the formula, one forward for every prefix."""
    trie, piece = walk.trie, walk.settings.target.bytes_of(t)
    context = list(row.read[:length])

    def law(prefix):
        ids = [*context, *(walk.id_of[b] for b in prefix)]
        q = laws.law(row.logits_after(ids), walk.settings.draft_warping).double()
        by_byte = {}
        for d, text in enumerate(walk.settings.drafter.pieces):
            if text:
                by_byte[text[0]] = by_byte.get(text[0], 0.0) + float(q[d])
        return by_byte, q

    psi, node = 1.0, 0
    for j, b in enumerate(piece):
        by_byte, q = law(piece[:j])
        below = trie.children(node)
        children = {int(trie.byte[c]): c for c in range(below.start, below.stop)}
        if b not in children:
            return 0.0
        if node and trie.token[node] >= 0:
            psi *= by_byte.get(b, 0.0) * (1 - float(walk.stop[children[b]]))
        else:
            total = sum(by_byte.get(c, 0.0) for c in children)
            total += 0 if node else sum(float(q[d]) for d, _ in walk._roles)
            psi *= by_byte.get(b, 0.0) / total
        node = children[b]
    if trie.token[node] != t:
        return 0.0
    by_byte, q = law(piece)
    below = trie.children(node)
    going = sum(
        by_byte.get(int(trie.byte[c]), 0.0) * (1 - float(walk.stop[c]))
        for c in range(below.start, below.stop)
    )
    return psi * (1 - going)


def walk_law(target, drafter, seed="q0", stop=None):
    from hetspec.prep.intersect import build_map

    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    trie = ByteTrie.of(target.vocabulary.pieces)
    walk = ByteWalk(
        settings(mapping, target, drafter, HEAT, frozenset(target.eos_ids)),
        trie,
        stops("random", len(trie)) if stop is None else stop,
    )
    row = TableRow(drafter.vocabulary.rows, seed)
    context = DrafterContext(row, drafter.segmenter, [])
    context.commit(b"ab")
    root = walk.branches(0, context.next_logits())
    return walk, row, WalkLaw(walk, context, len(context.ids), root)


def test_psi_is_the_formulas_and_sums_to_one():
    walk, row, law = walk_law(TARGET, BYTES)
    found = [law[t] for t in range(TARGET.vocabulary.rows)]
    ends = list(TARGET.eos_ids)
    for t in (t for t in range(TARGET.vocabulary.rows) if t not in ends):
        assert found[t] == pytest.approx(brute_force(walk, row, 2, t), abs=1e-12)
    assert sum(found) == pytest.approx(1, abs=1e-12)


@pytest.mark.slow
def test_psi_on_a_real_vocabulary():
    """1,000 tokens of SmolLM2 under a random law of bytes, against the formula (float64)."""
    source = load_tokenizer("smollm2-135m")
    real = Vocabulary.from_tokenizer(source.tokenizer, name="smollm2-135m", eos_ids=source.eos_ids)

    class Real:
        vocabulary, eos_ids = real, source.eos_ids

        def __init__(self):
            from hetspec.segment import Segmenter

            self.segmenter = Segmenter(source.tokenizer, real)

    drafter = Toy([bytes([b]) for b in range(256)])
    walk, row, law = walk_law(Real(), drafter)
    assert len(walk.trie) == len({p[:n] for p in real.pieces for n in range(len(p) + 1)})
    chosen = np.random.default_rng(0).choice(real.text_tokens, 1000, replace=False)
    for t in map(int, chosen):
        assert law[t] == pytest.approx(
            brute_force(walk, row, 2, t), rel=1e-9, abs=0
        )  # most are far below 1e-9


# -- the stop table --------------------------------------------------------------------------------------------------


def test_the_stop_table_counts_what_the_tokenizer_did():
    texts = [b"abbabab", b"ababb", b"bab"]
    result = stop_table(TARGET.vocabulary, TARGET.segmenter, texts)
    trie = ByteTrie.of(TARGET.vocabulary.pieces)
    expected = {}
    for text in texts:
        ids = TARGET.segmenter.encode(text)
        for i, t in enumerate(ids):
            piece = TARGET.vocabulary.bytes_of(t)
            path = trie.path(piece)
            for parent, node in itertools.pairwise(path):
                if trie.token[parent] >= 0:
                    expected.setdefault(node, [0, 0])[1] += 1
            following = TARGET.vocabulary.bytes_of(ids[i + 1])[:1] if i + 1 < len(ids) else b""
            longer = trie.path(piece + following) if following else []
            if longer:
                expected.setdefault(longer[-1], [0, 0])[0] += 1
    assert expected
    for node in range(len(trie)):
        ended, passed = expected.get(node, (0, 0))
        assert result.table.counts[node] == ended + passed
        if ended + passed:
            probability = (ended + PRIOR_COUNT * PRIOR_STOP) / (ended + passed + PRIOR_COUNT)
            assert result.table.stop[node] == pytest.approx(probability)


def test_bytes_are_told_from_longer_tokens():
    assert is_bytewise(BYTES.vocabulary)
    assert not is_bytewise(TARGET.vocabulary)
