"""Losslessness by enumeration with logits processors, stopping criteria and draft lengths that follow the past."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from hetspec.prep.intersect import build_map
from hetspec.runtime import decode, laws
from hetspec.runtime.auto import AutoChoice
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.decode import Decoder
from hetspec.runtime.plan import AutoLength, ConfidentLength, FixedLength
from hetspec.runtime.processors import CountPenalty, ProcessedLogits, Processing
from hetspec.runtime.verify import Proposal
from tests import test_exactness as e
from tests.toys import TableRow, compose, enumerate_law, total_variation

MAKERS = [e.slem, e.tli, e.rdk, e.slrs]


def shifted(ids, scores):
    """A processor of the user's: what is likely depends on the last two ids."""
    scores = scores.clone()
    scores[0, (int(ids[0, -1]) + 2 * int(ids[0, -2])) % scores.shape[1]] += 1.5
    return scores


PROCESSORS = {
    "repetition": (RepetitionPenaltyLogitsProcessor(1.8),),
    "ngrams": (NoRepeatNGramLogitsProcessor(2),),
    "counts": (CountPenalty(2, 0.7, 0.9),),
    "own": (shifted, RepetitionPenaltyLogitsProcessor(1.3)),
}


def processed_truth(seed, processing, n=e.N, target=e.TARGET, prompt=e.PROMPT):
    """The target's own joint law under the processors, id by id."""
    row = TableRow(target.vocabulary.rows, f"p{seed}")

    def step(committed):
        ids = [*prompt, *committed]
        p = laws.law(processing.scores(ids, row.logits_after(ids)), e.HEAT)
        return {(t,): float(p[t]) for t in range(len(p)) if p[t] > 0}

    return compose(step, n, frozenset(target.eos_ids))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("repetition", "token"),
        ("repetition", "block"),
        ("ngrams", "block"),
        ("counts", "block"),
        ("own", "token"),
    ],
)
def test_processors_are_exact(make, name, method):
    seed = 0
    processing = Processing(PROCESSORS[name])
    law = e.joint(make, seed, method=method, processing=processing)
    expected = processed_truth(seed, processing)
    assert total_variation(law, expected) < 1e-9
    assert total_variation(expected, e.truth(seed)) > 1e-2  # the processors matter


class CommittedPrefix(ProcessedLogits):
    """Every position processed with the prefix of the first: the drafted ids are not seen."""

    def __getitem__(self, j):
        return self.processing.scores(self.ids, self.logits[j])


class FirstOnly(ProcessedLogits):
    """Only the first position is processed."""

    def __getitem__(self, j):
        return super().__getitem__(j) if j == 0 else self.logits[j]


class BonusUnprocessed(ProcessedLogits):
    """The token after a wholly accepted draft comes from the bare law."""

    def __getitem__(self, j):
        return self.logits[j] if j == len(self.candidates) and j else super().__getitem__(j)


class OneBehind(ProcessedLogits):
    """Each position sees the prefix of the position before."""

    def __getitem__(self, j):
        return self.processing.scores([*self.ids, *self.candidates[: max(0, j - 1)]], self.logits[j])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mutant", [CommittedPrefix, FirstOnly, BonusUnprocessed, OneBehind])
def test_processor_mutants_are_rejected(monkeypatch, mutant, seed):
    processing = Processing(PROCESSORS["repetition"])
    monkeypatch.setattr(decode, "ProcessedLogits", mutant)
    law = e.joint(e.tli, seed, processing=processing)
    assert total_variation(law, processed_truth(seed, processing)) > 1e-3


# -- whole runs: criteria, and plans that remember ------------------------------------------------------------------


def run_law(make, seed, n, *, plan, method="token", criteria=(), algorithm=None):
    """Law of a whole generation of at most n tokens by one decoder, its plan remembering the steps before."""
    mapping = build_map(e.TARGET.vocabulary, e.DRAFTER.vocabulary, e.TARGET.segmenter)
    ends = frozenset(e.TARGET.eos_ids)

    def run(rng):
        context = DrafterContext(TableRow(e.DRAFTER.vocabulary.rows, f"q{seed}"), e.DRAFTER.segmenter, [])
        context.commit(e.TARGET.vocabulary.spell(e.PROMPT))
        made = functools.partial(make, mapping, e.TARGET, e.DRAFTER, e.HEAT, ends)
        chosen = algorithm() if algorithm is not None else None
        decoder = Decoder(
            target=TableRow(e.TARGET.vocabulary.rows, f"p{seed}"),
            vocabulary=e.TARGET.vocabulary,
            prompt=list(e.PROMPT),
            context=context,
            algorithm=chosen if chosen is not None else made(),
            warping=e.HEAT,
            plan=chosen if chosen is not None else plan(),
            rng=rng,
            eos_ids=ends,
            max_new_tokens=n,
            method=method,
            processing=Processing((), tuple(criteria)),
        )
        while not decoder.done:
            decoder.step()
        return tuple(decoder.new_ids)

    return enumerate_law(run)


class FollowsThePast:
    """Draft lengths that swing with what the step before accepted; the length is fixed before anything is drawn."""

    reason = ""

    def __init__(self):
        self.next = 2

    def choose(self):
        return self.next

    def observe(self, step):
        self.next = 1 + (step.accepted + step.proposed) % 3


def auto_choice(seed):
    """The product's own choice of algorithm, by declared costs."""
    mapping = build_map(e.TARGET.vocabulary, e.DRAFTER.vocabulary, e.TARGET.segmenter)
    arguments = (mapping, e.TARGET, e.DRAFTER, e.HEAT, frozenset(e.TARGET.eos_ids))
    algorithms = [e.slrs(*arguments), e.slem(*arguments), e.tli(*arguments)]
    plans = [AutoLength(0.2, measure=False) for _ in algorithms]
    return AutoChoice(algorithms, plans, cost=0.2, measure=False, records={})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("plan", [FollowsThePast, functools.partial(AutoLength, 0.3, measure=False)])
def test_draft_lengths_that_follow_the_past_are_exact(plan, method, seed):
    for make in (e.slem, e.tli):
        law = run_law(make, seed, 3, plan=plan, method=method)
        assert total_variation(law, e.truth(seed, n=3)) < 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_switching_algorithms_by_what_they_accepted_is_exact(seed):
    law = run_law(e.tli, seed, 3, plan=FollowsThePast, algorithm=functools.partial(auto_choice, seed))
    assert total_variation(law, e.truth(seed, n=3)) < 1e-9


class Moody:
    """Ends guesses early by how sure the drafter is, and throws every other one away."""

    thrown = False

    def goes_on(self, sure):
        return sure[-1] > 0.3

    def worth_reading(self, sure):
        self.thrown = not self.thrown
        return not self.thrown


@pytest.mark.parametrize("seed", range(3))
def test_guesses_that_end_early_or_are_thrown_away_are_exact(seed):
    seen, plans = [], []

    def stopped(stopping, *arguments):
        algorithm = e.slem(*arguments)
        algorithm.stopping = stopping
        honest = algorithm.propose
        algorithm.propose = lambda *more: seen.append(honest(*more)) or seen[-1]
        return algorithm

    def confident(*arguments):
        plans.append(ConfidentLength(0.1 + 0.1 * seed, measure=False))
        return stopped(plans[-1], *arguments)

    def moody(*arguments):
        plans.append(FixedLength(4))
        return stopped(Moody(), *arguments)

    for make in (confident, moody):
        seen.clear()
        law = run_law(make, seed, 3, plan=lambda: plans[-1])
        assert total_variation(law, e.truth(seed, n=3)) < 1e-9
        assert len({len(proposal.ids) for proposal in seen}) > 1
    assert any(not proposal.ids for proposal in seen)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("make", [e.tli, e.slrs])
def test_drafts_that_end_after_an_unlikely_candidate_are_exact(make, method, seed):
    plans, answers = [], []

    class Confident(ConfidentLength):
        def goes_on(self, sure):
            answers.append(super().goes_on(sure))
            return answers[-1]

    def confident(cost, *arguments):
        plans.append(Confident(cost, measure=False))
        algorithm = make(*arguments)
        algorithm.stopping = plans[-1]
        return algorithm

    for cost in (0.1, 0.2, 0.3):
        made = functools.partial(confident, cost)
        law = run_law(made, seed, 3, plan=lambda: plans[-1], method=method)
        assert total_variation(law, e.truth(seed, n=3)) < 1e-9
    assert set(answers) == {False, True}  # asked only while there is room for another


class ShortenedByTheDraw(FollowsThePast):
    """The length of the *present* step follows what was drawn in it."""

    def __init__(self, decoder_algorithm):
        super().__init__()
        self.inner, self.name = decoder_algorithm, "tli"

    def choose(self):
        return 3

    def propose(self, context, behind, n, rng):
        proposal = self.inner.propose(context, behind, n, rng)
        # "Confident" candidates only: those after and *including* the first unlikely one are dropped.
        sure = [float(pi[t]) >= 0.35 for t, pi in zip(proposal.ids, proposal.laws, strict=True)]
        kept = sure.index(False) if False in sure else len(sure)
        return Proposal(proposal.ids[:kept], proposal.laws[:kept])


class StopsAfterTheUnsure(ShortenedByTheDraw):
    """Drafting ends *after* the first unlikely candidate, which is still judged: allowed."""

    def propose(self, context, behind, n, rng):
        proposal = self.inner.propose(context, behind, n, rng)
        sure = [float(pi[t]) >= 0.35 for t, pi in zip(proposal.ids, proposal.laws, strict=True)]
        kept = sure.index(False) + 1 if False in sure else len(sure)
        return Proposal(proposal.ids[:kept], proposal.laws[:kept])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["token", "block"])
def test_dropping_an_unsure_candidate_is_rejected_and_stopping_after_it_is_not(seed, method):
    mapping = build_map(e.TARGET.vocabulary, e.DRAFTER.vocabulary, e.TARGET.segmenter)
    inner = e.tli(mapping, e.TARGET, e.DRAFTER, e.HEAT, frozenset(e.TARGET.eos_ids))
    for wrapper, exact in ((ShortenedByTheDraw, False), (StopsAfterTheUnsure, True)):
        law = run_law(e.tli, seed, 3, plan=None, method=method, algorithm=lambda w=wrapper: w(inner))
        distance = total_variation(law, e.truth(seed, n=3))
        assert distance < 1e-9 if exact else distance > 1e-3


@pytest.mark.parametrize("seed", range(1))
def test_criteria_cut_the_law_where_they_would_cut_plain_decoding(seed):
    """Stops once the text has two equal ids in a row: mid-block cuts included."""

    def criterion(ids, scores):
        return torch.tensor([bool(ids[0, -1] == ids[0, -2])])

    def cut(ids):
        whole = [*e.PROMPT, *ids]
        for i in range(len(e.PROMPT), len(whole)):
            if whole[i] == whole[i - 1]:
                return tuple(whole[len(e.PROMPT) : i + 1])
        return ids

    expected = {}
    for ids, p in e.truth(seed, n=3).items():
        expected[cut(ids)] = expected.get(cut(ids), 0.0) + p
    for make, method in ((e.slem, "token"), (e.tli, "block"), (e.slrs, "token")):
        law = run_law(make, seed, 3, plan=FollowsThePast, method=method, criteria=[criterion])
        assert total_variation(law, expected) < 1e-9
