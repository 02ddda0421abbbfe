"""Losslessness by enumeration: the joint law of the committed tokens, over every branch of the real code.

The target's joint law of n tokens is compared with the law of what `Decoder.step` commits. Every mutant
(a planted bug) must be rejected on every seed: a test that cannot fail would be decoration.
"""

from __future__ import annotations

import pytest
import torch

from hetspec.prep.intersect import build_map
from hetspec.runtime import algorithms, laws
from hetspec.runtime.algorithms import SLEM, TLI, Plain, Proposal, Verdict
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.decode import Decoder
from hetspec.runtime.laws import Warping
from hetspec.runtime.plan import FixedLength
from tests.toys import TableRow, Toy, compose, enumerate_law, total_variation

K, N = 2, 3  # draft length and tokens compared: n = k + 1, so that the bonus and a second step are seen
SEEDS = range(6)
MUTANT_SEEDS = range(3)
TARGET = Toy([b"a", b"b", b"ab", b"ba"])
DRAFTER = Toy([b"b", b"a", b"aa", b"ab"])
PROMPT = [0, 1]
HEAT = Warping(temperature=0.8)


def joint(make, seed, warping=HEAT, k=K, n=N, target=TARGET, drafter=DRAFTER, zeros=(), zeros_d=()):
    """Law of the first n tokens of the real decoding loop."""
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    ends = frozenset(target.eos_ids)

    def step(committed):
        def run(rng):
            context = DrafterContext(
                TableRow(drafter.vocabulary.rows, f"q{seed}", zeros_d), drafter.segmenter, []
            )
            context.commit(target.vocabulary.spell([*PROMPT, *committed]))
            decoder = Decoder(
                target=TableRow(target.vocabulary.rows, f"p{seed}", zeros),
                vocabulary=target.vocabulary,
                prompt=[*PROMPT, *committed],
                context=context,
                algorithm=make(mapping, target, drafter, warping, ends),
                warping=warping,
                plan=FixedLength(k),
                rng=rng,
                eos_ids=ends,
                max_new_tokens=100,
            )
            return tuple(decoder.step())

        return enumerate_law(run)

    return compose(step, n, ends)


def truth(seed, warping=HEAT, n=N, target=TARGET, zeros=()):
    """The target's own joint law."""
    row = TableRow(target.vocabulary.rows, f"p{seed}", zeros)

    def step(committed):
        p = laws.law(row.logits_after([*PROMPT, *committed]), warping)
        return {(t,): float(p[t]) for t in range(len(p)) if p[t] > 0}

    return compose(step, n, frozenset(target.eos_ids))


def plain(mapping, target, drafter, warping, ends):
    return Plain()


def slem(mapping, target, drafter, warping, ends):
    return SLEM(mapping, target.vocabulary, drafter.vocabulary, target.segmenter)


def tli(mapping, target, drafter, warping, ends):
    return TLI(mapping, warping, Warping(temperature=0.8), ends)


ALL = {"none": plain, "slem": slem, "tli": tli}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALL)
def test_joint_law_is_the_targets(name, seed):
    law = joint(ALL[name], seed)
    assert abs(sum(law.values()) - 1) < 1e-12
    assert total_variation(law, truth(seed)) < 1e-12


@pytest.mark.parametrize("name", ["slem", "tli"])
@pytest.mark.parametrize(
    "warping",
    [Warping(0.7, top_k=3), Warping(1.3, top_p=0.8), Warping(1.0, min_p=0.2), Warping(0.9, 4, 0.9, 0.05)],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_joint_law_under_truncation(name, warping):
    assert total_variation(joint(ALL[name], 1, warping), truth(1, warping)) < 1e-12


CASES = {
    "drafter law with zeros": {"zeros_d": (0, 2)},
    "target law with zeros": {"zeros": (1, 3)},
    "k = 0": {"k": 0},
    "k = 1": {"k": 1},
    "k = 3": {"k": 3},
    "padded rows": {
        "target": Toy([b"a", b"b", b"ab", b"ba"], rows=7),
        "drafter": Toy([b"b", b"a", b"aa"], rows=6),
    },
    "same vocabulary": {"drafter": Toy([b"a", b"b", b"ab", b"ba"])},
    "drafter without EOS": {"drafter": Toy([b"b", b"a", b"ab"], eos=False)},
    "target without EOS": {"target": Toy([b"a", b"b", b"ba"], eos=False)},
    "one token shared": {"drafter": Toy([b"b", b"c", b"bb"])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["slem", "tli"])
def test_joint_law_in_corner_cases(name, case):
    arguments = CASES[case]
    expected = truth(2, target=arguments.get("target", TARGET), zeros=arguments.get("zeros", ()))
    assert total_variation(joint(ALL[name], 2, **arguments), expected) < 1e-12


def test_identical_models_accept_everything():
    """p = q exactly: no candidate is ever rejected."""
    same = Toy([b"a", b"b", b"ab", b"ba"])
    law = joint(tli, 0, target=same, drafter=same)
    assert total_variation(law, truth(0, target=same)) < 1e-12


# -- two drafter ids with one target id: masses add ------------------------------------------------------------


class Doubled(TLI):
    """TLI whose drafter has a second id for a shared byte string (as SentencePiece byte tokens give)."""

    def __init__(self, mapping, warping, draft_warping, ends, overwrite=False):
        super().__init__(mapping, warping, draft_warping, ends)
        # b"aa" (drafter id 2, unmapped) is declared a second spelling of the target's b"a" (id 0).
        self.shared = torch.cat([self.shared, torch.tensor([2])])
        self.image = torch.cat([self.image, torch.tensor([0])])
        self.overwrite = overwrite

    def proposal_law(self, logits):
        if not self.overwrite:
            return super().proposal_law(logits)
        q = laws.law(logits, self.draft_warping)
        return torch.zeros(self.rows, dtype=q.dtype).index_copy_(0, self.image, q[self.shared])


def test_two_drafter_ids_with_one_image():
    def make(mapping, target, drafter, warping, ends):
        return Doubled(mapping, warping, Warping(temperature=0.8), ends)

    assert total_variation(joint(make, 3), truth(3)) < 1e-12


# -- mutants -----------------------------------------------------------------------------------------------------


def accept_all(candidates, proposal_laws, logits, warping, rng):
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def residual_is_p(candidates, proposal_laws, logits, warping, rng):
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t] / pi[t])):
            return Verdict([*candidates[:j], rng.categorical(p)], j)
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def residual_off_by_one(candidates, proposal_laws, logits, warping, rng):
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t] / pi[t])):
            wrong = laws.residual(p, proposal_laws[max(0, j - 1)])
            return Verdict([*candidates[:j], rng.categorical(wrong)], j)
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def bonus_from_the_drafter(candidates, proposal_laws, logits, warping, rng):
    verdict = None
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t] / pi[t])):
            verdict = Verdict([*candidates[:j], rng.categorical(laws.residual(p, pi))], j)
            break
    if verdict is None:
        last = proposal_laws[-1] if proposal_laws else laws.law(logits[-1], warping)
        verdict = Verdict([*candidates, rng.categorical(last)], len(candidates))
    return verdict


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize(
    "mutant",
    [accept_all, residual_is_p, residual_off_by_one, bonus_from_the_drafter],
    ids=lambda f: f.__name__,
)
def test_verifier_mutants_are_rejected(monkeypatch, mutant, seed):
    monkeypatch.setattr(algorithms, "_verify_token", mutant)
    assert total_variation(joint(tli, seed), truth(seed)) > 1e-3


class JudgedUnnormalised(TLI):
    """Drawn from q' = q/q(I), judged by q."""

    def propose(self, context, behind, n, rng):
        ids, wrong = [], []
        for _ in range(n):
            logits = context.next_logits()
            q = laws.law(logits, self.draft_warping)
            naive = torch.zeros(self.rows, dtype=q.dtype).index_add_(0, self.image, q[self.shared])
            t = rng.categorical(naive / naive.sum())
            ids.append(t)
            wrong.append(naive)
            if t in self.eos_ids:
                break
            context.push(int(self.t2d[t]))
        return Proposal(ids, wrong)


class JudgedUntruncated(TLI):
    """Drawn from the truncated proposal, judged by the law before truncation."""

    def propose(self, context, behind, n, rng):
        proposal = super().propose(context, behind, n, rng)
        return Proposal(proposal.ids, [self.untruncated(pi) for pi in proposal.laws])

    @staticmethod
    def untruncated(pi):
        return 0.7 * pi + 0.3 / len(pi)


class CandidateDropped(TLI):
    """Drops an unlikely last candidate after it was drawn."""

    def propose(self, context, behind, n, rng):
        proposal = super().propose(context, behind, n, rng)
        if proposal.ids and float(proposal.laws[-1][proposal.ids[-1]]) < 0.4:
            return Proposal(proposal.ids[:-1], proposal.laws[:-1])
        return proposal


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize("mutant", [JudgedUnnormalised, JudgedUntruncated, CandidateDropped])
def test_tli_mutants_are_rejected(mutant, seed):
    def make(mapping, target, drafter, warping, ends):
        return mutant(mapping, warping, Warping(temperature=0.8), ends)

    assert total_variation(joint(make, seed), truth(seed)) > 1e-3


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_overwriting_masses_is_rejected(seed):
    class Mutant(Doubled):
        def propose(self, context, behind, n, rng):
            # The drafter's token is drawn, then carried over; the judge saw only the last of two masses.
            ids, wrong = [], []
            for _ in range(n):
                q = laws.law(context.next_logits(), self.draft_warping)
                true = torch.zeros(self.rows, dtype=q.dtype).index_add_(0, self.image, q[self.shared])
                judged = torch.zeros(self.rows, dtype=q.dtype).index_copy_(0, self.image, q[self.shared])
                t = rng.categorical(true / true.sum())
                ids.append(t)
                wrong.append(judged / judged.sum())
                if t in self.eos_ids:
                    break
                context.push(int(self.t2d[t]))
            return Proposal(ids, wrong)

    def make(mapping, target, drafter, warping, ends):
        return Mutant(mapping, warping, Warping(temperature=0.8), ends)

    assert total_variation(joint(make, seed), truth(seed)) > 1e-3


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_slem_mutant_is_rejected(monkeypatch, seed):
    def emits_the_candidate(candidates, logits, warping, rng):
        ids = []
        for j in range(len(candidates) + 1):
            x = rng.categorical(laws.law(logits[j], warping))
            if j < len(candidates) and x != candidates[j]:
                return Verdict([*ids, candidates[j]], len(ids))
            ids.append(x)
        return Verdict(ids, len(ids) - 1)

    monkeypatch.setattr(algorithms, "_verify_exact_match", emits_the_candidate)
    assert total_variation(joint(slem, seed), truth(seed)) > 1e-3


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_a_masked_target_is_rejected(monkeypatch, seed):
    """Restricting p to the intersection would bias the output."""
    honest = laws.law

    def masked(logits, warping, whose="the target"):
        p = honest(logits, warping, whose)
        if whose == "the target":
            p = p.clone()
            p[3] = 0  # b"ba" is not in the drafter's vocabulary
            p = p / p.sum()
        return p

    expected = truth(seed)
    monkeypatch.setattr(algorithms.laws, "law", masked)
    assert total_variation(joint(tli, seed), expected) > 1e-3
