"""The automatic draft length: the best one for what was seen, and no price where drafting cannot pay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hetspec.runtime import attention
from hetspec.runtime.plan import LONGEST, LONGEST_AUTO, AutoLength, ConfidentLength, FixedLength, Step
from hetspec.runtime.weights import WIDE


class World:
    """Steps with known acceptances by position and known costs, in target steps."""

    def __init__(self, acceptances, c, slope=0.0, seed=0, noise=0.1):
        self.acceptances, self.c, self.slope, self.noise = acceptances, c, slope, noise
        self.random = np.random.default_rng(seed)

    def step(self, n, first=False):
        accepted = 0
        while (
            accepted < n and self.random.random() < self.acceptances[min(accepted, len(self.acceptances) - 1)]
        ):
            accepted += 1
        jitter = lambda: float(np.exp(self.noise * self.random.normal()))  # noqa: E731
        target, drafter = (1 + self.slope * n) * jitter(), n * self.c * jitter()
        return Step(first, True, n, accepted, target + drafter, target, drafter, n)

    def rate(self, n):
        kept = np.cumprod([self.acceptances[min(j, len(self.acceptances) - 1)] for j in range(n)])
        return (1 + kept.sum()) / (1 + n * (self.c + self.slope))

    def best(self):
        return max(self.rate(n) for n in range(LONGEST + 1))


def play(world, plan, steps):
    tokens = cost = 0.0
    for i in range(steps):
        step = world.step(plan.choose(), first=i == 0)
        plan.observe(step)
        tokens, cost = tokens + step.accepted + 1, cost + step.seconds
    return tokens / cost


@pytest.mark.parametrize(
    "world",
    [
        World([0.9], 0.1),
        World([0.5], 0.1),
        World([0.8], 0.3, slope=0.05),
        World([0.95, 0.5, 0.2], 0.15),  # a drafter that is good for one token only
        World([0.3], 0.2),
        World([0.7], 0.05, slope=0.2),
    ],
)
@pytest.mark.parametrize("measure", [True, False])
def test_it_comes_near_the_best_fixed_length(world, measure):
    if not measure:  # declared costs know nothing of the slope
        world = World(world.acceptances, world.c)
    rates = [play(world, AutoLength(world.c if not measure else 0.25, measure), 600) for _ in range(3)]
    assert np.mean(rates) > 0.93 * world.best()


@pytest.mark.parametrize("declared", [0.3, 0.9, 1.3])
@pytest.mark.parametrize("acceptance", [0.05, 0.5])
def test_a_pair_that_cannot_win_costs_next_to_nothing(declared, acceptance):
    """Also where the declared cost promised much."""
    world = World([acceptance], max(declared, 0.9))
    assert play(world, AutoLength(declared, measure=True), 500) > 0.97


@pytest.mark.parametrize(("acceptance", "slope"), [(0.3, 0.15), (0.4, 0.3)])
def test_short_texts_learn_from_the_ones_before(acceptance, slope):
    """Twenty steps are too few to learn what longer passes cost; forty texts are enough."""
    world = World([acceptance], 0.1, slope)
    plan, carried, fresh = AutoLength(0.1, measure=True), [], []
    for _ in range(50):
        plan = plan.next_text()
        carried.append(play(world, plan, 20))
        fresh.append(play(world, AutoLength(0.1, measure=True), 20))
    assert np.mean(carried[10:]) > 0.93 * world.best()
    assert np.mean(carried[10:]) > 1.03 * np.mean(fresh)


def test_another_text_begins_with_known_costs_and_little_else():
    plan = AutoLength(0.1, measure=True)
    play(World([0.9], 0.4, slope=0.2), plan, 100)
    following = plan.next_text()
    assert following.passes(3) == plan.passes(3) > 1.1
    assert sum(following.judged) < 0.5 * sum(plan.judged)
    play(World([0.1], 0.4), following, 30)
    assert plan.passes(3) != following.passes(3)  # a copy: streams do not disturb each other


def test_lengths_that_a_processor_reads_faster_are_found():
    """Two tokens at once take longer than one or four: seen with oneDNN on AMD's AVX-512."""
    times = np.array([2.1, 2.3, 1.6, 1.5, 1.5, 1.6, 1.9, 2.2, *([2.5] * LONGEST)]) / 2.1

    class Odd(World):
        def step(self, n, first=False):
            step = super().step(n, first)
            spent = step.target_seconds * times[n]
            return dataclasses.replace(step, target_seconds=spent, seconds=spent + step.drafter_seconds)

        def rate(self, n):
            return super().rate(n) * (1 + n * self.c) / (times[n] + n * self.c)

    world = Odd([0.5], 0.1)
    assert world.best() > 1.2 * world.rate(1)
    assert play(world, AutoLength(0.1, measure=True), 600) > 0.93 * world.best()


def test_it_drafts_again_when_the_text_becomes_easy():
    plan = AutoLength(0.4, measure=True)
    assert play(World([0.1], 0.4), plan, 300) > 0.95
    easy = World([0.95], 0.4)
    play(easy, plan, 900)
    assert play(easy, plan, 200) > 0.9 * easy.best()


def test_the_length_is_known_before_the_step_and_repeats():
    """Nothing but finished steps goes in: the same steps give the same lengths."""
    lengths = []
    for _ in range(2):
        plan, world = AutoLength(0.2, measure=False), World([0.7], 0.2, seed=5)
        own = []
        for i in range(60):
            own.append(plan.choose())
            plan.observe(world.step(own[-1], first=i == 0))
        lengths.append(own)
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1


def test_a_long_prompt_is_read_for_the_drafter_only_if_that_can_pay():
    plan = AutoLength(0.1, measure=True)
    assert not plan.pays(20.0, 1000)  # a plain step is needed first, to know what there is to save
    world = World([0.8], 0.1)
    for i in range(20):
        plan.observe(world.step(plan.choose(), first=i == 0))
    saved = 1 - 1 / world.best()  # target steps per token; the prompt costs 2 * 0.1 * 20 of them
    assert not plan.pays(20.0, int(0.7 * 4 / saved))
    assert plan.pays(20.0, int(1.5 * 4 / saved))
    assert not AutoLength(0.1, measure=True).next_text().pays(20.0, 1000)
    assert plan.next_text().pays(20.0, 100)
    hopeless = AutoLength(2.0, measure=True)
    hopeless.observe(world.step(0))
    assert not hopeless.pays(0.0, 1000)
    assert AutoLength(2.0, measure=False).pays(20.0, 1)  # nothing may follow the clock
    assert FixedLength(3).pays(20.0, 1)


class Sure:
    """Steps of a drafter that knows how often it is right, in target steps."""

    def __init__(self, c, reading=1.0, seed=0):
        self.c, self.reading = c, reading
        self.random = np.random.default_rng(seed)

    def draft(self):
        return self.random.beta(0.8, 0.5, size=LONGEST)

    def step(self, plan, first=False):
        sure, n = self.draft(), plan.choose()
        if isinstance(plan, ConfidentLength) and n:
            n = next((m for m in range(1, n) if not plan.goes_on(list(sure[:m]))), n)
            read = n if plan.worth_reading(list(sure[:n])) else 0
        else:
            read = n
        right = self.random.random(LONGEST) < sure
        accepted = min(read, int(np.argmin(np.append(right, False))))
        jitter = lambda: float(np.exp(0.1 * self.random.normal()))  # noqa: E731
        target, drafter = (self.reading if read else 1.0) * jitter(), n * self.c * jitter()
        return Step(first, True, read, accepted, target + drafter, target, drafter, n)


def rate_in(world, plan, steps=1500):
    tokens = cost = 0.0
    for i in range(steps):
        step = world.step(plan, first=i == 0)
        plan.observe(step)
        tokens, cost = tokens + step.accepted + 1, cost + step.target_seconds + step.drafter_seconds
    return tokens / cost


@pytest.mark.parametrize("reading", [1.0, 1.4])
@pytest.mark.parametrize("c", [0.05, 0.2])
@pytest.mark.parametrize("measure", [True, False])
def test_knowing_how_sure_the_drafter_is_beats_every_fixed_length(c, reading, measure):
    best = max(rate_in(Sure(c, reading), FixedLength(n)) for n in range(8))
    assert rate_in(Sure(c, reading), ConfidentLength(c, measure)) > 1.02 * best


@pytest.mark.parametrize("declared", [0.1, 0.7, 1.5])
def test_where_drafting_does_not_pay_sureness_costs_little(declared):
    assert rate_in(Sure(0.9, 1.4), ConfidentLength(declared, measure=True)) > 0.97


def test_the_longest_draft_is_still_a_short_read():
    assert attention.MOST == LONGEST_AUTO + 1 < WIDE
    plan = ConfidentLength(0.01, measure=False)
    assert plan.choose() == LONGEST_AUTO
    certain = AutoLength(1e-6, measure=False)
    for _ in range(200):
        certain.observe(Step(False, True, LONGEST_AUTO, LONGEST_AUTO, 1.0, 1.0, 0.0, LONGEST_AUTO))
    assert certain.choose() == LONGEST_AUTO
    recorded = AutoLength(1e-6, measure=False, longest=LONGEST)
    recorded.accepted, recorded.judged = [99.0] * LONGEST, [100.0] * LONGEST
    assert recorded.choose() == LONGEST


def test_a_draft_that_is_not_worth_reading_is_thrown_away():
    plan = ConfidentLength(0.1, measure=True)
    for n, seconds in ((0, 1.0), (2, 1.5)) * 4:
        plan.observe(Step(False, True, n, 0, seconds + 0.1 * n, seconds, 0.1 * n, n))
    assert not plan.worth_reading([0.2])
    assert plan.worth_reading([0.9, 0.8])
    assert not plan.goes_on([0.9, 0.02])
    assert plan.goes_on([0.9, 0.9])
    carried = plan.next_text()
    assert not carried.worth_reading([0.2])  # costs are known in the next text
    assert carried.done[0] < plan.done[0]


def test_what_guesses_know_of_prompts():
    plan = ConfidentLength(0.1, measure=True)
    assert not plan.pays(20.0, 1000)
    world = Sure(0.1)
    for i in range(40):
        plan.observe(world.step(plan, first=i == 0))
    plan.observe(Step(False, False, 0, 0, 1.0, 1.0, 0.0, 0))
    assert plan.pays(20.0, 40)
    assert not plan.pays(20.0, 2)
    assert ConfidentLength(0.1, measure=False).pays(20.0, 1)


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("when", [1, 30])
def test_an_interruption_is_not_remembered_for_long(part, when):
    world, plan, drafted, read = Sure(0.1, 1.2), ConfidentLength(0.1, measure=True), 0, 0
    for i in range(400):
        step = world.step(plan, first=i == 0)
        if i == when:
            longer = {"target_seconds": 300.0} if part == "target" else {"drafter_seconds": 300.0}
            step = dataclasses.replace(step, **longer)
        plan.observe(step)
        drafted += i >= 200 and step.drafter_forwards > 0
        read += i >= 200 and step.proposed > 0
    assert drafted > 190
    assert read > 120
    plan = plan.next_text()
    assert plan.choose() == LONGEST_AUTO


def test_looks_at_whether_drafting_pays_are_read_and_never_end():
    plan, read = ConfidentLength(0.6, measure=True), []
    for i in range(1000):
        n = plan.choose()
        right = i >= 500  # then the drafter begins to be always right
        proposed = 1 if n and plan.worth_reading([0.3]) else 0
        plan.observe(Step(False, True, proposed, int(right and n), 0, 1.0, 0.9 * bool(n), int(n > 0)))
        if n:
            read.append(proposed)
    assert len(read) > 15
    assert all(read)
    assert ConfidentLength(1.0, measure=True).choose() == 0
