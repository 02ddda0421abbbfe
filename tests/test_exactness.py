"""Losslessness by enumeration: the joint law of the committed tokens, over every branch of the real code.

The target's joint law of n tokens is compared with the law of what `Decoder.step` commits. Every mutant
(a planted bug) must be rejected on every seed: a test that cannot fail would be decoration.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from hetspec.prep.intersect import build_map
from hetspec.runtime import laws, verify
from hetspec.runtime.algorithms import (
    SLEM,
    DraftSettings,
    Healing,
    KernelDraft,
    LookAhead,
    Plain,
)
from hetspec.runtime.boundaries import FirstTarget, LongerTokens
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.decode import Decoder
from hetspec.runtime.enumerated import EnumeratedSLRS
from hetspec.runtime.kernels import Redistribution, TargetKernel, cold_law
from hetspec.runtime.laws import Warping
from hetspec.runtime.plan import FixedLength
from hetspec.runtime.verify import Proposal, Verdict
from tests.toys import TableRow, Toy, compose, enumerate_law, total_variation

K, N = 2, 3  # draft length and tokens compared: n = k + 1, so that the bonus and a second step are seen
SEEDS = range(6)
MUTANT_SEEDS = range(3)
TARGET = Toy([b"a", b"b", b"ab", b"ba"])
DRAFTER = Toy([b"b", b"a", b"aa", b"ab"])
PROMPT = (0, 1)
HEAT = Warping(temperature=0.8)


def joint(
    make,
    seed,
    warping=HEAT,
    k=K,
    n=N,
    target=TARGET,
    drafter=DRAFTER,
    zeros=(),
    zeros_d=(),
    prompt=PROMPT,
    method="token",
    **more,
):
    """Law of the first n tokens of the real decoding loop; `more` goes to the decoder."""
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    ends = frozenset(target.eos_ids)

    def step(committed):
        def run(rng):
            context = DrafterContext(
                TableRow(drafter.vocabulary.rows, f"q{seed}", zeros_d), drafter.segmenter, []
            )
            context.commit(target.vocabulary.spell([*prompt, *committed]))
            decoder = Decoder(
                target=TableRow(target.vocabulary.rows, f"p{seed}", zeros),
                vocabulary=target.vocabulary,
                prompt=[*prompt, *committed],
                context=context,
                algorithm=make(mapping, target, drafter, warping, ends),
                warping=warping,
                plan=FixedLength(k),
                rng=rng,
                eos_ids=ends,
                max_new_tokens=100,
                method=method,
                **more,
            )
            return tuple(decoder.step())

        return enumerate_law(run)

    return compose(step, n, ends)


def truth(seed, warping=HEAT, n=N, target=TARGET, zeros=(), prompt=PROMPT):
    """The target's own joint law."""
    row = TableRow(target.vocabulary.rows, f"p{seed}", zeros)

    def step(committed):
        p = laws.law(row.logits_after([*prompt, *committed]), warping)
        return {(t,): float(p[t]) for t in range(len(p)) if p[t] > 0}

    return compose(step, n, frozenset(target.eos_ids))


def plain(mapping, target, drafter, warping, ends):
    return Plain()


def slem(mapping, target, drafter, warping, ends):
    longer = LongerTokens(drafter.vocabulary, target.segmenter)
    return SLEM(mapping, target.vocabulary, drafter.vocabulary, target.segmenter, longer)


def settings(mapping, target, drafter, warping, ends):
    return DraftSettings(
        mapping=mapping,
        target=target.vocabulary,
        drafter=drafter.vocabulary,
        drafter_segmenter=drafter.segmenter,
        warping=warping,
        draft_warping=Warping(temperature=0.8),
        eos_ids=ends,
    )


def tli(mapping, target, drafter, warping, ends, cls=KernelDraft):
    kernel = TargetKernel.from_map(mapping.d2t, len(mapping.t2d))
    return cls("tli", kernel, settings(mapping, target, drafter, warping, ends))


def random_kernel(mapping, empty_row=0):
    """A row-stochastic kernel with one empty row (so that Σπ < 1 before normalising) and with duplicate images."""
    rows, columns = len(mapping.d2t), len(mapping.t2d)
    weights = np.random.default_rng(5).dirichlet(np.full(columns, 0.4), size=rows)
    weights[empty_row] = 0
    at = np.nonzero(weights > 0.02)
    return TargetKernel(*at, weights[at], columns)


def rdk(mapping, target, drafter, warping, ends, cls=KernelDraft):
    return cls("rdk", random_kernel(mapping), settings(mapping, target, drafter, warping, ends))


def mixed(mapping, theta, lam, kept=None):
    """RDK's general law: TLI, a kernel and the cold mean law; with a pruned head, over the kept drafter ids."""
    width = len(mapping.t2d)
    intersection, kernel = TargetKernel.from_map(mapping.d2t, width), random_kernel(mapping)
    if kept is not None:
        intersection, kernel = intersection.restricted(kept), kernel.restricted(kept)
    reached = np.zeros(width, dtype=bool)
    reached[intersection.columns.numpy()] = True
    mu = np.random.default_rng(3).dirichlet(np.ones(width))
    return Redistribution(intersection, kernel, cold_law(mu, reached), theta, lam)


def rdk_mixed(mapping, target, drafter, warping, ends, cls=KernelDraft):
    return cls("rdk", mixed(mapping, 0.2, 0.3), settings(mapping, target, drafter, warping, ends))


def rdk_mean(mapping, target, drafter, warping, ends, cls=KernelDraft):
    return cls("rdk", mixed(mapping, 0.35, 0.0), settings(mapping, target, drafter, warping, ends))


KEPT = np.array([0, 3, 4])  # b"b", b"ab", <eos>


def rdk_pruned(mapping, target, drafter, warping, ends, cls=KernelDraft):
    """A drafter whose head has lost b"a" and b"aa" (the table's zeros); b"a" comes back by redistribution."""
    return cls("rdk", mixed(mapping, 0.2, 0.3, KEPT), settings(mapping, target, drafter, warping, ends))


def slrs_first(mapping, target, drafter, warping, ends, cls=KernelDraft):
    kernel = TargetKernel.from_map(mapping.first, len(mapping.t2d))
    return cls("slrs", kernel, settings(mapping, target, drafter, warping, ends))


def slrs(mapping, target, drafter, warping, ends, cls=KernelDraft, look_ahead=LookAhead, healing=Healing):
    first = FirstTarget(mapping, target.vocabulary, drafter.vocabulary, target.segmenter)
    longer = LongerTokens(drafter.vocabulary, target.segmenter)
    return cls(
        "slrs",
        random_kernel(mapping, empty_row=1),
        settings(mapping, target, drafter, warping, ends),
        look_ahead(first, np.zeros(len(mapping.d2t)), width=2) if look_ahead else None,
        healing(longer, drafter.vocabulary) if healing else None,
    )


def slrs_no_healing(*args, **kwargs):
    return slrs(*args, healing=None, **kwargs)


def slrs_enumerated(mapping, target, drafter, warping, ends, cls=EnumeratedSLRS):
    return cls(settings(mapping, target, drafter, warping, ends), target.segmenter, length=2)


ALL = {
    "none": plain,
    "slem": slem,
    "tli": tli,
    "rdk": rdk,
    "rdk mixed": rdk_mixed,
    "rdk mean": rdk_mean,
    "rdk pruned": rdk_pruned,
    "slrs-4a": slrs_enumerated,
    "slrs-4b": slrs_first,
    "slrs-4d": slrs_no_healing,
    "slrs": slrs,
}
DRAFTING = [name for name in ALL if name != "none"]


# Four seeds where the product goes; two for the forms whose parts it contains. Guesses know no block verification.
RUNS = [
    (name, seed, method)
    for name in ALL
    for method in (("token",) if name in ("none", "slem") else ("block", "token"))
    for seed in range(4 if name in ("slem", "tli", "slrs") and (method == "block" or name == "slem") else 2)
]


@pytest.mark.parametrize(("name", "seed", "method"), RUNS)
def test_joint_law_is_the_targets(name, seed, method):
    # The enumerated form takes V_d times the forwards: one candidate, two tokens.
    sizes = {"k": 1, "n": 2} if name == "slrs-4a" else {"k": K, "n": N}
    zeros_d = tuple(set(range(5)) - set(KEPT.tolist())) if name == "rdk pruned" else ()
    law = joint(ALL[name], seed, **sizes, zeros_d=zeros_d, method=method)
    assert abs(sum(law.values()) - 1) < 1e-12
    assert total_variation(law, truth(seed, n=sizes["n"])) < 1e-12


@pytest.mark.parametrize("name", ["slem", "tli", "rdk", "slrs"])
@pytest.mark.parametrize(
    "warping",
    [Warping(0.7, top_k=3), Warping(1.3, top_p=0.8), Warping(1.0, min_p=0.2), Warping(0.9, 4, 0.9, 0.05)],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_joint_law_under_truncation(name, warping):
    assert total_variation(joint(ALL[name], 1, warping, method="block"), truth(1, warping)) < 1e-12


CASES = {
    "drafter law with zeros": {"zeros_d": (0, 2)},
    "target law with zeros": {"zeros": (1, 3)},
    "k = 0": {"k": 0},
    "k = 1": {"k": 1},
    "k = 3": {"k": 3, "n": 2},
    "padded rows": {
        "n": 2,
        "target": Toy([b"a", b"b", b"ab", b"ba"], rows=7),
        "drafter": Toy([b"b", b"a", b"aa"], rows=6),
    },
    "same vocabulary": {"drafter": Toy([b"a", b"b", b"ab", b"ba"])},
    "drafter without EOS": {"drafter": Toy([b"b", b"a", b"ab"], eos=False)},
    "target without EOS": {"target": Toy([b"a", b"b", b"ba"], eos=False)},
    "one token shared": {"drafter": Toy([b"b", b"c", b"bb"])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["slem", "tli", "slrs"])
def test_joint_law_in_corner_cases(name, case):
    arguments = CASES[case]
    told = {key: arguments[key] for key in ("target", "zeros", "n") if key in arguments}
    expected = truth(2, **told)
    assert total_variation(joint(ALL[name], 2, **arguments, method="block"), expected) < 1e-12


def test_identical_models_accept_everything():
    """p = q exactly: no candidate is ever rejected."""
    same = Toy([b"a", b"b", b"ab", b"ba"])
    law = joint(tli, 0, target=same, drafter=same)
    assert total_variation(law, truth(0, target=same)) < 1e-12


# -- two drafter ids with one target id: masses add ------------------------------------------------------------


def doubled(mapping, target, drafter, warping, ends, cls=KernelDraft):
    """TLI whose drafter has a second id for a shared byte string (as SentencePiece byte tokens give).

    b"aa" (drafter id 2, unmapped) is declared a second spelling of the target's b"a" (id 0).
    """
    images = mapping.d2t.copy()
    images[2] = 0
    kernel = TargetKernel.from_map(images, len(mapping.t2d))
    return cls("tli", kernel, settings(mapping, target, drafter, warping, ends))


def test_two_drafter_ids_with_one_image():
    assert total_variation(joint(doubled, 3), truth(3)) < 1e-12


# -- mutants -----------------------------------------------------------------------------------------------------


def accept_all(candidates, proposal_laws, logits, warping, rng, none=None):
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def residual_is_p(candidates, proposal_laws, logits, warping, rng, none=None):
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t] / pi[t])):
            return Verdict([*candidates[:j], rng.categorical(p)], j)
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def residual_off_by_one(candidates, proposal_laws, logits, warping, rng, none=None):
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        p = laws.law(logits[j], warping)
        if not rng.accept(float(p[t] / pi[t])):
            wrong = laws.residual(p, proposal_laws[max(0, j - 1)])
            return Verdict([*candidates[:j], rng.categorical(wrong)], j)
    return Verdict([*candidates, rng.categorical(laws.law(logits[-1], warping))], len(candidates))


def bonus_from_the_drafter(candidates, proposal_laws, logits, warping, rng, none=None):
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
    monkeypatch.setattr(verify, "_verify_token", mutant)
    assert total_variation(joint(tli, seed), truth(seed)) > 1e-3


# -- block verification ----------------------------------------------------------------------------------------


def block_by_the_book(
    candidates, proposal_laws, logits, warping, rng, none=None, *, clip=True, last=True, weight=True
):
    """Sun et al. 2403.10444, Algorithm 2, word by word: every draw made, then the largest i that succeeds."""
    n = len(candidates)
    p = [laws.law(row, warping) for row in logits]
    w = [1.0]
    for j, (t, pi) in enumerate(zip(candidates, proposal_laws, strict=True)):
        ratio = w[-1] * float(p[j][t] / pi[t])
        w.append(min(1.0, ratio) if clip else ratio)
    tau = 0
    for i in range(1, n + 1):
        if i == n:
            h = w[n]
        else:
            s = float((w[i] * p[i] - proposal_laws[i]).clamp(min=0).sum())
            h = s / max(s + 1 - w[i], 1e-9) if s > 0 else 0.0
        if rng.accept(max(0.0, h)):
            tau = i
        elif not last:
            break
    if tau == n:
        return Verdict([*candidates, rng.categorical(p[n])], n)
    rest = ((w[tau] if weight else 1.0) * p[tau] - proposal_laws[tau]).clamp(min=0)
    rest = rest if float(rest.sum()) > 0 else p[tau]
    return Verdict([*candidates[:tau], rng.categorical(rest)], tau)


@pytest.mark.parametrize(
    ("make", "seed", "k"), [(tli, 0, 3), (tli, 1, 3), (tli, 2, 3), (slrs, 0, 2), (slrs, 1, 2)]
)
def test_block_verification_is_the_papers(monkeypatch, make, seed, k):
    expected = joint(make, seed, method="block", k=k, n=2)
    monkeypatch.setattr(verify, "_verify_block", block_by_the_book)
    assert total_variation(joint(make, seed, method="block", k=k, n=2), expected) < 1e-12


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize(
    "slip", ["clip", "last", "weight"], ids=["w not clipped", "stops at the first", "residual"]
)
def test_block_verification_mutants_are_rejected(monkeypatch, slip, seed):
    mutant = functools.partial(block_by_the_book, **{slip: False})
    monkeypatch.setattr(verify, "_verify_block", mutant)
    assert total_variation(joint(tli, seed, method="block", k=3), truth(seed)) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_block_verification_accepts_at_least_as_many(seed):
    def expected_length(method):
        mapping = build_map(TARGET.vocabulary, DRAFTER.vocabulary, TARGET.segmenter)

        def run(rng):
            context = DrafterContext(TableRow(DRAFTER.vocabulary.rows, f"q{seed}"), DRAFTER.segmenter, [])
            context.commit(TARGET.vocabulary.spell(PROMPT))
            decoder = Decoder(
                target=TableRow(TARGET.vocabulary.rows, f"p{seed}"),
                vocabulary=TARGET.vocabulary,
                prompt=list(PROMPT),
                context=context,
                algorithm=tli(mapping, TARGET, DRAFTER, HEAT, frozenset()),
                warping=HEAT,
                plan=FixedLength(3),
                rng=rng,
                eos_ids=frozenset(),
                max_new_tokens=100,
                method=method,
            )
            return len(decoder.step())

        return sum(n * p for n, p in enumerate_law(run).items())

    assert expected_length("block") >= expected_length("token") - 1e-12


class Judged(KernelDraft):
    """Draws candidates as the product does, and hands other laws to the judge."""

    def propose(self, context, behind, n, rng):
        self.seen = []
        proposal = super().propose(context, behind, n, rng)
        return Proposal(proposal.ids, [self.judge(j, pi) for j, pi in enumerate(proposal.laws)])

    def judge(self, j, pi):
        raise NotImplementedError


class JudgedUnnormalised(Judged):
    """Drawn from q·K normalised, judged by q·K as it is (the leftover mass forgotten)."""

    def judge(self, j, pi):
        return 0.6 * pi


class JudgedUntruncated(Judged):
    def judge(self, j, pi):
        return 0.7 * pi + 0.3 / len(pi)


class CandidateDropped(KernelDraft):
    """Drops an unlikely last candidate after it was drawn."""

    def propose(self, context, behind, n, rng):
        proposal = super().propose(context, behind, n, rng)
        if proposal.ids and float(proposal.laws[-1][proposal.ids[-1]]) < 0.4:
            return Proposal(proposal.ids[:-1], proposal.laws[:-1])
        return proposal


class RedrawnFromTheTarget(KernelDraft):
    """Where a row of the kernel is empty, a draw from some other law takes the leftover, unjudged."""

    def propose(self, context, behind, n, rng):
        q = laws.law(context.next_logits(), self.settings.draft_warping)
        pi = self.kernel.apply(q)
        leftover = float(1 - pi.sum())
        symbol = rng.categorical(torch.tensor([1 - leftover, leftover], dtype=pi.dtype))
        other = torch.softmax(torch.arange(len(pi), dtype=pi.dtype), 0)
        t = rng.categorical(other if symbol else pi / pi.sum())
        judged = pi.clone()
        judged[t] = judged[t].clamp(min=1e-3)
        return Proposal([t], [judged])


class TokenThenColumn(KernelDraft):
    """Draws a drafter token, then a column of its row (again, if the row is empty); judged by the normalised product.

    With an empty row the first draw is restricted to the filled rows *after* the warping of q, with another
    normalisation than the product's.
    """

    def propose(self, context, behind, n, rng):
        q = laws.law(context.next_logits(), self.settings.draft_warping)
        d = rng.categorical(q)
        dense = torch.zeros(len(q), self.kernel.width, dtype=q.dtype)
        dense[self.kernel.rows, self.kernel.columns] = self.kernel.weights.to(q.dtype)
        if float(dense[d].sum()) == 0:
            d = int(dense.sum(1).argmax())  # a fixed substitute instead of a fresh draw
        t = rng.categorical(dense[d] / dense[d].sum())
        pi = q @ dense
        judged = pi / pi.sum()
        judged[t] = judged[t].clamp(min=1e-3)
        return Proposal([t], [judged])


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize(
    ("make", "mutant"),
    [
        (tli, JudgedUnnormalised),
        (tli, JudgedUntruncated),
        (tli, CandidateDropped),
        (rdk, JudgedUnnormalised),
        (rdk, CandidateDropped),
        (rdk, RedrawnFromTheTarget),
        (rdk, TokenThenColumn),
        (slrs, JudgedUnnormalised),
    ],
)
def test_law_mutants_are_rejected(make, mutant, seed):
    law = joint(functools.partial(make, cls=mutant), seed)
    assert total_variation(law, truth(seed)) > 1e-3


class JudgedByTLI(Judged):
    """Drawn from the redistributed law, judged by TLI's."""

    def propose(self, context, behind, n, rng):
        self.tli_laws = []
        honest = self.kernel.intersection.apply

        def spy(q):
            tli = honest(q)
            self.tli_laws.append(tli / tli.sum())
            return tli

        self.kernel.intersection.apply = spy
        try:
            return super().propose(context, behind, n, rng)
        finally:
            del self.kernel.intersection.apply

    def judge(self, j, pi):
        return self.tli_laws[j].clamp(min=1e-3)


class AnotherTheta(JudgedByTLI):
    """Drawn with one θ, judged with another."""

    def judge(self, j, pi):
        cold = self.kernel.cold
        return (pi + 0.15 * cold - 0.15 * self.tli_laws[j]).clamp(min=1e-3)


class NotNormalisedBeforeMixing(JudgedByTLI):
    """Drawn from the normalised mixture, judged by one whose TLI part kept its sum q(I)."""

    def judge(self, j, pi):
        return (pi - 0.4 * (1 - self.kernel.theta) * self.tli_laws[j]).clamp(min=1e-3)


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize("make", [rdk_mixed, rdk_mean])
@pytest.mark.parametrize("mutant", [JudgedByTLI, AnotherTheta, NotNormalisedBeforeMixing, JudgedUnnormalised])
def test_redistribution_mutants_are_rejected(make, mutant, seed):
    law = joint(functools.partial(make, cls=mutant), seed)
    assert total_variation(law, truth(seed)) > 1e-3


class Overwriting(KernelDraft):
    """Masses of two drafter ids with one image: added for the draw, overwritten for the judge."""

    def propose(self, context, behind, n, rng):
        q = laws.law(context.next_logits(), self.settings.draft_warping)
        true = self.kernel.apply(q)
        judged = torch.zeros_like(true).index_copy_(0, self.kernel.columns, q[self.kernel.rows])
        t = rng.categorical(true / true.sum())
        return Proposal([t], [judged / judged.sum()])


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_overwriting_masses_is_rejected(seed):
    law = joint(functools.partial(doubled, cls=Overwriting), seed)
    assert total_variation(law, truth(seed)) > 1e-3


class ChosenAfterTheDraw(KernelDraft):
    """The token to look ahead on is chosen after the candidate: the judge's law knows what was drawn."""

    def propose(self, context, behind, n, rng):
        q = laws.law(context.next_logits(), self.settings.draft_warping)
        drawn = self.kernel.apply(q)
        drawn = drawn / drawn.sum()
        t = rng.categorical(drawn)
        ahead = self.look_ahead.read(context, q, self.settings.draft_warping)
        if ahead is None or t != ahead.image:
            return Proposal([t], [drawn])
        judged = ahead.law(q, self.kernel)
        judged = judged / judged.sum()
        judged[t] = judged[t].clamp(min=1e-3)
        return Proposal([t], [judged])


class ContinuationReused(KernelDraft):
    """The continuation drafted for the look-ahead becomes the next candidate, judged by the unconditional law.

    Given that the first candidate was the image of d alone, the continuation is conditioned on not extending it.
    """

    def propose(self, context, behind, n, rng):
        s = self.settings
        q = laws.law(context.next_logits(), s.draft_warping)
        d = int(q.argmax())
        if not s.drafter.bytes_of(d) or s.mapping.first[d] < 0:
            return Proposal()
        context.push(d)
        after = laws.law(context.next_logits(), s.draft_warping)
        e = rng.categorical(after)
        firsts = self.look_ahead.first.of(d, range(len(after)))
        psi = torch.zeros(self.kernel.width, dtype=q.dtype).index_add_(0, torch.tensor(firsts), after)
        t = firsts[e]
        image = int(s.mapping.d2t[e])
        if s.target.bytes_of(t) != s.drafter.pieces[d] or image < 0:
            return Proposal([t], [psi])
        second = TargetKernel.from_map(s.mapping.d2t, self.kernel.width).apply(after)
        return Proposal([t, image], [psi, second / second.sum()])


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
@pytest.mark.parametrize("mutant", [ChosenAfterTheDraw, ContinuationReused])
def test_look_ahead_mutants_are_rejected(mutant, seed):
    law = joint(functools.partial(slrs_no_healing, cls=mutant), seed)
    assert total_variation(law, truth(seed)) > 1e-3


class SegmentationsOnly(EnumeratedSLRS):
    """ψ summed over the drafter's segmentations of `t` itself judges the retokenised candidate."""

    def propose(self, context, behind, n, rng):
        psi = self.psi(context)
        pi = psi / psi.sum()
        t = rng.categorical(pi)
        judged = torch.tensor(
            [self.segmentations(context, self.settings.target.bytes_of(x)) for x in range(len(pi))]
        )
        judged[t] = judged[t].clamp(min=1e-3)
        return Proposal([t], [judged])

    def segmentations(self, context, text):
        if not text:
            return 0.0
        q = laws.law(context.next_logits(), self.settings.draft_warping)
        total = 0.0
        for d, piece in enumerate(self.settings.drafter.pieces):
            if piece and text.startswith(piece):
                context.push(d)
                rest = text[len(piece) :]
                total += float(q[d]) * (self.segmentations(context, rest) if rest else 1.0)
                context.pop()
        return total


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_segmentation_law_mutant_is_rejected(seed):
    law = joint(functools.partial(slrs_enumerated, cls=SegmentationsOnly), seed)
    assert total_variation(law, truth(seed)) > 1e-3


class HealedAfterTheDraw(KernelDraft):
    """Drawn from the healed law, judged by the law without healing."""

    def propose(self, context, behind, n, rng):
        s = self.settings
        before, logits = self._open(context, behind)
        q = laws.law(context.next_logits() if logits is None else logits, s.draft_warping)
        pi = self.kernel.apply(q)
        pi = pi / pi.sum()
        drawn = pi if before is None else self.healing.mix(pi, before)
        drawn = drawn / drawn.sum()
        t = rng.categorical(drawn)
        judged = pi.clone()
        judged[t] = judged[t].clamp(min=1e-3)
        return Proposal([t], [judged])


@pytest.mark.parametrize("seed", MUTANT_SEEDS)
def test_healing_mutant_is_rejected(seed):
    # The prompt ends in b"a", which the drafter would rather have written as b"aa" or b"ab".
    law = joint(functools.partial(slrs, cls=HealedAfterTheDraw, look_ahead=None), seed, prompt=(1, 0))
    assert total_variation(law, truth(seed, prompt=(1, 0))) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_healing_is_exact_where_it_acts(seed):
    law = joint(slrs, seed, prompt=(1, 0))
    assert total_variation(law, truth(seed, prompt=(1, 0))) < 1e-12


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

    monkeypatch.setattr(verify, "_verify_exact_match", emits_the_candidate)
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
    monkeypatch.setattr(laws, "law", masked)
    assert total_variation(joint(tli, seed), expected) > 1e-3
