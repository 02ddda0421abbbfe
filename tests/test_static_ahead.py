"""SLRS in recorded steps: its tables against the bytes they stand for, its law against the dynamic one, its texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetspec.runtime import laws, static_ahead, static_step
from hetspec.runtime.algorithms import Ahead, KernelDraft
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.static_ahead import (
    NEGLIGIBLE,
    SPELLED,
    FixedAhead,
    LongestTokens,
    looked_ahead_on,
    spellings,
)
from hetspec.runtime.static_decode import StaticDecoder
from hetspec.runtime.static_step import Draft
from tests.test_runtime import TinyPair
from tests.test_shipped_pair import Shipped

CPU = torch.device("cpu")
PROMPTS = ("def add(a, b):\n    return", "The river runs through", "x = [1, 2")


@pytest.fixture(scope="module")
def engine():
    return TinyPair(std=0.25).with_kernel().engine(static=True)


def algorithm_of(engine: Engine, form: str = "lookahead") -> KernelDraft:
    warping = Warping()
    return engine._tools.algorithm(
        "slrs", form, "auto", warping=warping, draft_warping=warping, eos_ids=frozenset()
    )


def longest(engine: Engine, d: int, e: int) -> int:
    """F(d, e) by its definition: every target token is tried."""
    target, drafter = engine.target.vocabulary, engine.drafter.vocabulary
    start, text = drafter.bytes_of(d), drafter.bytes_of(d) + drafter.bytes_of(e)
    fits = [p for p in target.ids_by_bytes if len(p) > len(start) and text.startswith(p)]
    return target.ids_by_bytes[max(fits, key=len)][0] if fits and start else -1


def test_first_tokens_are_the_longest_that_fit(engine):
    drafter = engine.drafter.vocabulary
    firsts = LongestTokens(engine.target.vocabulary, drafter, np.ones(len(drafter.pieces), dtype=bool))
    every = torch.arange(len(drafter.pieces))
    rng = np.random.default_rng(0)
    longer = 0
    for d in rng.choice(len(drafter.pieces), 60, replace=False).tolist():
        found = firsts(torch.tensor([d]), every).tolist()
        assert found == [longest(engine, d, e) for e in every.tolist()]
        longer += sum(x >= 0 for x in found)
    assert longer > 50


def test_what_is_not_wanted_has_no_longer_token(engine):
    drafter = engine.drafter.vocabulary
    firsts = LongestTokens(engine.target.vocabulary, drafter, np.zeros(len(drafter.pieces), dtype=bool))
    assert not len(firsts.keys)
    assert firsts(torch.tensor([70]), torch.arange(9)).tolist() == [-1] * 9


def twin(engine: Engine, q: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`Ahead.law` with F by its definition."""
    algorithm = algorithm_of(engine)
    look = algorithm.look_ahead
    d = int(q.argmax())
    piece, image = engine.drafter.vocabulary.bytes_of(d), int(look.first.image[d])
    if not piece or image < 0 or look.certainty[d] >= look.threshold or not look.first.extends(piece):
        return algorithm.kernel.apply(q)
    masses, es = after.topk(min(look.width, len(after)))
    kept = max(1, int((masses > NEGLIGIBLE).sum()))
    firsts = [longest(engine, d, e) for e in es[:kept].tolist()]
    firsts = torch.tensor([x if x >= 0 else image for x in firsts])
    return Ahead(d, after, masses[:kept], firsts, image).law(q, algorithm.kernel)


def differing(engine: Engine, cases: int = 60) -> int:
    """In how many random positions the law in fixed shapes is not the twin's."""
    draft = Draft(algorithm_of(engine), engine._tools, CPU, torch.float64)
    rows = engine.drafter.model.rows
    generator = torch.Generator().manual_seed(0)
    popular = np.bincount(draft.ahead.firsts.keys // draft.ahead.firsts._rests).argsort()[::-1]
    wrong = 0
    for case in range(cases):
        q, after = torch.softmax(3 * torch.randn(2, rows, dtype=torch.float64, generator=generator), dim=-1)
        if case % 2:  # a token that many target tokens begin with
            q[int(popular[case % 20])] += 1
            q /= q.sum()
        read = []
        found = draft.ahead.law(
            q,
            lambda d, after=after, read=read: read.append(int(d)) or after,
            draft.reach,
            draft.reach.column_of,
        )
        assert read == [int(q.argmax())]
        whole = torch.zeros(draft.reach.width, dtype=torch.float64)
        whole[draft.reach.columns] = found
        wrong += not torch.allclose(whole, twin(engine, q, after), rtol=1e-9, atol=1e-14)
    return wrong


def test_the_law_is_the_dynamic_one(engine):
    assert differing(engine) == 0


def shortest_first(self, d, following):
    rests = self.device_prefixes[following].flip(1)
    keys = torch.where(rests >= 0, d * self._rests + rests, -1)
    at = torch.searchsorted(self.device_keys, keys)
    hits = self.device_keys[at] == keys
    tokens = torch.where(hits, self.device_tokens[at], -1)
    return tokens.gather(1, hits.long().argmax(dim=1, keepdim=True))[:, 0]


def keeps_its_mass(self, q, following, kernel, column_of):
    return HONEST_LAW(self, q, following, lambda rest: kernel(q), column_of)


def looks_ahead_everywhere(self, q, following, kernel, column_of):
    wanted = self._wanted
    self._wanted = torch.ones_like(wanted)
    try:
        return HONEST_LAW(self, q, following, kernel, column_of)
    finally:
        self._wanted = wanted


HONEST_LAW = FixedAhead.law


@pytest.mark.parametrize(
    ("where", "what", "mutant"),
    [
        (LongestTokens, "__call__", shortest_first),
        (FixedAhead, "law", keeps_its_mass),
        (FixedAhead, "law", looks_ahead_everywhere),
        (static_ahead, "NEGLIGIBLE", 0.02),
    ],
    ids=["shortest token", "mass counted twice", "certain tokens too", "likely continuations dropped"],
)
def test_mutants_of_the_law_are_seen(engine, monkeypatch, where, what, mutant):
    monkeypatch.setattr(where, what, mutant)
    assert differing(engine) > 0


def test_a_pruned_head_looks_ahead_by_its_own_places(engine):
    rows = engine.drafter.model.rows
    algorithm = algorithm_of(engine)
    kept = np.sort(np.random.default_rng(0).choice(rows, rows // 2, replace=False))
    wanted = looked_ahead_on(algorithm)
    whole, pruned = (FixedAhead(algorithm, wanted, some, CPU) for some in (None, kept))
    column_of = torch.arange(engine._tools.map.t2d.shape[0])
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        q, after = torch.softmax(
            3 * torch.randn(2, len(kept), dtype=torch.float64, generator=generator), dim=-1
        )
        full, full_after = torch.zeros(2, rows, dtype=torch.float64)
        full[kept], full_after[kept] = q, after

        def kernel(law: torch.Tensor) -> torch.Tensor:
            return algorithm.kernel.apply(law)

        def spread(law: torch.Tensor, kept: np.ndarray = kept) -> torch.Tensor:
            whole_law = torch.zeros(rows, dtype=torch.float64)
            whole_law[kept] = law
            return kernel(whole_law)

        torch.testing.assert_close(
            pruned.law(q, lambda d, after=after: after, spread, column_of),
            whole.law(full, lambda d, after=full_after: after, kernel, column_of),
        )


def test_a_pair_without_anything_to_look_ahead_on_drafts_without(engine):
    """A kernel that is sure of every token, or a target without longer ones."""
    algorithm = algorithm_of(engine)
    algorithm.look_ahead.threshold = 0.0
    assert not looked_ahead_on(algorithm).any()
    draft = Draft(algorithm, engine._tools, CPU, torch.float64)
    assert draft.ahead is None
    assert draft.reads(3) == 3


def test_spellings(engine):
    tools, drafter = engine._tools, engine.drafter
    columns = np.arange(len(tools.map.t2d))
    tokens, counts = spellings(
        tools.map.t2d, columns, engine.target.vocabulary, drafter.vocabulary, drafter.segmenter
    )
    several = 0
    for t, piece in enumerate(map(engine.target.vocabulary.bytes_of, columns.tolist())):
        if counts[t]:
            assert drafter.vocabulary.spell(tokens[t, : counts[t]].tolist()) == piece
            several += counts[t] > 1
        elif piece:
            assert len(drafter.segmenter.encode(piece)) > SPELLED
        if tools.map.t2d[t] >= 0:
            assert counts[t] == 1
    assert several > 20


# -- texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
def test_greedy_texts_are_plain_ones(engine, k):
    for prompt in PROMPTS:
        options = {"max_new_tokens": 20}
        plain = engine.generate(prompt, algorithm="none", **options)
        out = engine.generate(prompt, algorithm="slrs", num_draft_tokens=k, **options)
        assert isinstance(engine.decoder(prompt, algorithm="slrs", max_new_tokens=1), StaticDecoder)
        assert out.new_ids == plain.new_ids
        assert out.stats.proposed > 10


def test_candidates_of_several_drafter_tokens_are_read_on(engine, monkeypatch):
    """The law after a candidate that two drafter tokens spell is the drafter's law after both."""
    decoder = engine.decoder(PROMPTS[0], algorithm="slrs", num_draft_tokens=2, max_new_tokens=8)
    draft = decoder.draft
    forced = int(next(t for t in draft.reach.columns.tolist() if draft.counts[t] == 2))
    place = int(draft.reach.column_of[forced])
    rows = []
    honest = static_step.StaticStep._drawn

    def drawn(self, pi, j):
        rows.append(pi.clone())
        return torch.tensor([place]) if j == 0 else honest(self, pi, j)

    monkeypatch.setattr(static_step.StaticStep, "_drawn", drawn)
    decoder.step()
    engine._statics._pairs.clear()
    prompt_ids = engine.decoder(PROMPTS[0], algorithm="slrs", max_new_tokens=1).context.ids
    row = engine.drafter.model.new_row()
    ids = [*prompt_ids, *draft.tokens[forced, :2].tolist()]
    q = laws.law(row.forward(ids, keep=1)[0], Warping())
    d = int(q.argmax())
    after = laws.law(row.forward([d], keep=1)[0], Warping())
    expected = twin(engine, q.double(), after.double())
    found = torch.zeros_like(expected)
    found[draft.reach.columns] = rows[1].double()
    torch.testing.assert_close(found, expected / expected.sum(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """Models that agree now and then: random ones with sharp laws never do."""
    shipped = Shipped(torch.float32)
    return Engine(*shipped.models, shipped.pair, **shipped.tokenizers, static=True)


@pytest.mark.parametrize("verify", ["token", "block"])
def test_sampled_texts_have_the_targets_law(trained, verify):
    """χ² of the first two tokens of texts with two drafted candidates."""
    engine, prompt, draws = trained, "The capital of France is", 100
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 5, "max_new_tokens": 2}
    options = {"algorithm": "slrs", "slrs_form": "lookahead", "num_draft_tokens": 2, "verify": verify}
    joint: dict[tuple[int, ...], int] = {}
    accepted = 0
    for seed in range(draws):
        out = engine.generate(prompt, seed=seed, **options, **sampled)
        accepted += out.stats.accepted
        joint[tuple(out.new_ids)] = joint.get(tuple(out.new_ids), 0) + 1
    assert accepted > 0.1 * draws
    warping = Warping(0.6, 5)
    ids = engine.decoder(prompt, algorithm="none", max_new_tokens=2).ids
    first = laws.law(engine.target.model.new_row().forward(ids, keep=1)[0], warping)
    expected = {}
    for t in torch.nonzero(first).flatten().tolist():
        second = laws.law(engine.target.model.new_row().forward([*ids, t], keep=1)[0], warping)
        for u in torch.nonzero(second).flatten().tolist():
            expected[t, u] = draws * float(first[t] * second[u])
    assert set(joint) <= set(expected)
    big = {key for key, value in expected.items() if value >= 5}
    cells = [(joint.get(key, 0), expected[key]) for key in big]
    cells.append(
        (draws - sum(seen for seen, _ in cells), sum(v for k, v in expected.items() if k not in big))
    )
    statistic = sum((seen - wanted) ** 2 / max(wanted, 1e-9) for seen, wanted in cells)
    assert len(cells) > 3
    assert statistic < len(cells) + 5 * (2 * len(cells)) ** 0.5
