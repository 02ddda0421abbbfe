"""Static decoding against the dynamic path it must equal: rows, laws, verdicts, texts, and no look at a value."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetspec.errors import GenerationError, InvalidInput, UnsupportedModel
from hetspec.runtime import static_step, verify
from hetspec.runtime.engine import Engine
from hetspec.runtime.kernels import Redistribution, TargetKernel
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import CachedModel, ModelRow
from hetspec.runtime.static import CHUNK, StaticModel, StaticRow
from hetspec.runtime.static_decode import StaticDecoder
from hetspec.runtime.static_step import CATCH_UP, Noise, Reach, StaticStep, judge, judge_greedy
from hetspec.runtime.verify import Proposal
from tests.test_runtime import TinyPair
from tests.test_shipped_pair import PROMPTS, Shipped
from tests.toys import tiny_model

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mistral", "opt", "gemma2", "neox", "mixtral"])
def test_a_row_reads_what_a_growing_cache_reads(kind):
    """Windows of 8, reads of every width, rejections in between."""
    model = CachedModel(tiny_model(kind, 100, seed=1, std=0.25))
    row, fixed = ModelRow(model), StaticRow(StaticModel(model, 200))
    choose = random.Random(kind)
    for _ in range(12):
        n = choose.choice([1, 2, 3, 5, 17, 20])
        ids = [choose.randrange(100) for _ in range(n)]
        torch.testing.assert_close(
            fixed.forward(ids, min(n, 3)), row.forward(ids, min(n, 3)), rtol=0, atol=1e-5
        )
        cut = max(1, row.length - choose.choice([0, 1, 4]))
        row.crop(cut)
        fixed.crop(cut)


def test_a_long_prompt_is_read_in_parts():
    model = CachedModel(tiny_model("llama", 100, seed=1, positions=2048))
    ids = [i * 7 % 100 for i in range(CHUNK + 20)]
    expected = ModelRow(model).forward(ids, 30)
    torch.testing.assert_close(StaticRow(StaticModel(model, 1024)).forward(ids, 30), expected)


def test_models_without_a_mask_of_four_dimensions_are_refused():
    with pytest.raises(UnsupportedModel, match="fixed shapes"):
        StaticModel(CachedModel(tiny_model("bloom", 100, seed=1)), 64)


# -- laws and verdicts ---------------------------------------------------------------------------------------


def random_kernel(rng, rows, width, entries):
    return TargetKernel(
        rng.integers(0, rows, entries), rng.integers(0, width, entries), rng.random(entries), width
    )


@pytest.mark.parametrize("pruned", [False, True])
def test_a_proposal_is_what_the_dynamic_path_proposes(pruned):
    rng = np.random.default_rng(1)
    rows, width = 30, 40
    kept = np.arange(0, rows, 2) if pruned else None
    intersection = TargetKernel.from_map(np.where(np.arange(rows) % 3 == 0, np.arange(rows) + 5, -1), width)
    cold = torch.from_numpy(rng.random(width))
    cold[::2] = 0
    cold /= cold.sum()
    kernel = random_kernel(rng, rows, width, 60)
    if kept is not None:
        intersection, kernel = intersection.restricted(kept), kernel.restricted(kept)
    q = torch.from_numpy(rng.random(rows))
    if kept is not None:
        q[1::2] = 0
    q /= q.sum()
    for proposer in (intersection, kernel, Redistribution(intersection, kernel, cold, 0.2, 0.3)):
        reach = Reach(proposer, kept, torch.device("cpu"), torch.float64)
        found = torch.zeros(width, dtype=torch.float64)
        found[reach.columns] = reach(q if kept is None else q[torch.from_numpy(kept)])
        torch.testing.assert_close(found, proposer.apply(q))
        assert bool((reach.column_of[reach.columns] == torch.arange(len(reach.columns))).all())


class NoiseRng:
    """Draws as `judge` does from the same noise: one uniform for all, the last token by a race."""

    def __init__(self, uniform, noise):
        self.uniform, self.noise = uniform, noise

    def accept(self, ratio):
        return self.uniform < ratio

    def categorical(self, law):
        return int((law / self.noise).argmax())


class Case:
    """Random laws: p over V ids, π on some columns, candidates drawn from it."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.width, self.k = 9, 4

        def law(*size):
            return torch.softmax(2 * torch.randn(*size, generator=generator, dtype=torch.float64), dim=-1)

        mapping = np.array([2, 0, -1, 5, 7, 8])
        self.reach = Reach(
            TargetKernel.from_map(mapping, self.width), None, torch.device("cpu"), torch.float64
        )
        self.p = law(self.k + 1, self.width)
        self.pi = law(self.k, len(self.reach.columns))
        self.places = torch.tensor([int(torch.multinomial(x, 1, generator=generator)) for x in self.pi])
        self.count = int(torch.randint(0, self.k + 1, (), generator=generator))
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        noise = torch.empty(self.width, dtype=torch.float64).exponential_(generator=generator)
        self.uniform = uniform
        self.noise = Noise(torch.empty(0), noise, torch.full((self.k,), uniform, dtype=torch.float64))

    def judged(self, method):
        accepted, token = judge(
            self.p, self.pi, self.places, torch.tensor([self.count]), self.reach, self.noise, method
        )
        return int(accepted), int(token)

    def expected(self, method):
        ids = self.reach.columns[self.places[: self.count]].tolist()
        wide = torch.zeros(self.k, self.width, dtype=torch.float64)
        wide[:, self.reach.columns] = self.pi
        proposal = Proposal(ids, list(wide[: self.count]))
        rng = NoiseRng(self.uniform, self.noise.last)
        verdict = verify.verify(proposal, self.p.log(), Warping(), rng, method)
        return verdict.accepted, verdict.ids[-1]


def differing(method, cases=400):
    return sum(Case(seed).judged(method) != Case(seed).expected(method) for seed in range(cases))


@pytest.mark.parametrize("method", ["token", "block"])
def test_a_verdict_is_the_dynamic_paths(method):
    assert differing(method) == 0
    assert {Case(seed).judged(method)[0] for seed in range(400)} == {0, 1, 2, 3, 4}


def test_levels_of_a_block_have_draws_of_their_own():
    """With a uniform for each level, against the chain written out."""
    for seed in range(300):
        case = Case(seed)
        uniforms = torch.rand(case.k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        case.noise.uniforms.copy_(uniforms)
        wide = torch.zeros(case.k, case.width, dtype=torch.float64)
        wide[:, case.reach.columns] = case.pi
        ids = case.reach.columns[case.places].tolist()
        w, best = 1.0, 0
        for i in range(1, case.count + 1):
            w = min(1.0, w * float(case.p[i - 1, ids[i - 1]] / wide[i - 1, ids[i - 1]]))
            chance = w
            if i < case.count:
                s = float((w * case.p[i] - wide[i]).clamp(min=0).sum())
                chance = s / (s + 1 - w) if s > 0 else 0.0
            if uniforms[i - 1] < chance:
                best = i
        assert case.judged("block")[0] == best


@pytest.mark.parametrize(
    "mutant", ["surplus ignores w", "residual forgets the proposal", "bonus by the residual", "whole mass"]
)
def test_mutants_of_the_arithmetic_are_seen(mutant, monkeypatch):
    from hetspec.runtime import device_kernels as kernels

    race, masses = kernels.surplus_race, kernels.surplus_masses
    if mutant == "surplus ignores w":
        monkeypatch.setattr(
            kernels, "surplus_race", lambda p, pi, of, w, *rest: race(p, pi, of, torch.ones_like(w), *rest)
        )
    elif mutant == "residual forgets the proposal":
        monkeypatch.setattr(kernels, "surplus_race", lambda p, pi, *rest: race(p, 0 * pi, *rest))
    elif mutant == "bonus by the residual":
        monkeypatch.setattr(
            kernels,
            "surplus_race",
            lambda p, pi, of, w, row, count, noise: race(p, pi, of, w, row, count + 1, noise),
        )
    else:
        monkeypatch.setattr(kernels, "surplus_masses", lambda p, pi, c, w: masses(p, 0 * pi, c, w))
    assert differing("block") > 0


def test_greedy_verdicts():
    logits = torch.eye(4)  # the target wants 0, 1, 2, 3
    for ids, count, expected in (
        ([0, 1, 2], 3, (3, 3)),
        ([0, 1, 2], 2, (2, 2)),
        ([0, 2, 2], 3, (1, 1)),
        ([3, 1, 2], 3, (0, 0)),
        ([0, 1, 2], 0, (0, 0)),
    ):
        accepted, token = judge_greedy(logits, torch.tensor(ids), torch.tensor([count]))
        assert (int(accepted), int(token)) == expected


# -- texts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return Shipped(torch.float32)


@pytest.fixture(scope="module")
def engine(shipped):
    return Engine(*shipped.models, shipped.pair, **shipped.tokenizers, static=True)


@pytest.fixture(scope="module")
def twins(shipped):
    """tiny-bpe drafting for itself: everything it proposes within the draft stands."""
    return self_drafting(shipped, static=True), self_drafting(shipped, static=False)


def self_drafting(shipped, **options):
    from hetspec.prep.build import build_pair, prepare

    side = prepare(shipped.tokenizers["target_tokenizer"])
    pair = build_pair(side, side, ["a text"], "test")
    return Engine(
        shipped.models[0],
        shipped.models[0],
        pair,
        target_tokenizer=side.source,
        drafter_tokenizer=side.source,
        **options,
    )


@pytest.mark.parametrize("algorithm", ["none", "tli", "rdk", "slem", "slrs"])
def test_greedy_texts_and_counts_are_the_dynamic_paths(engine, shipped, algorithm):
    for prompt in PROMPTS:
        for k in (1, 4):
            options = {"algorithm": algorithm, "num_draft_tokens": k, "max_new_tokens": 24}
            out, other = engine.generate(prompt, **options), shipped.engine.generate(prompt, **options)
            assert out.new_ids == other.new_ids
            counts = [(s.stats.steps, s.stats.accepted, s.stats.new_tokens) for s in (out, other)]
            assert counts[0] == counts[1]


def test_a_drafter_that_is_always_right(twins):
    static, dynamic = twins
    for prompt in PROMPTS:
        options = {"algorithm": "tli", "num_draft_tokens": 5, "max_new_tokens": 40}
        out, other = static.generate(prompt, **options), dynamic.generate(prompt, **options)
        assert out.new_ids == other.new_ids
        assert out.stats.acceptance_rate > 0.9
        assert abs(out.stats.steps - other.stats.steps) <= 1  # near-ties may fall otherwise


def test_auto_drafts_with_declared_costs(twins):
    out = twins[0].generate(PROMPTS[0], max_new_tokens=40)
    assert out.algorithm == "tli"
    assert out.new_ids == twins[1].generate(PROMPTS[0], algorithm="none", max_new_tokens=40).new_ids


def test_the_same_seed_gives_the_same_text(engine):
    runs = [
        engine.generate(PROMPTS[0], algorithm="tli", max_new_tokens=12, seed=s, **SAMPLED).new_ids
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_texts_have_the_targets_law(twins, verification):
    """χ² of the second of three sampled tokens, given a first that is nearly certain; the drafter is often kept."""
    static, dynamic = twins
    prompt, draws = PROMPTS[2], 200
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 6, "max_new_tokens": 2}
    joint: dict[tuple[int, ...], int] = {}
    accepted = 0
    for seed in range(draws):
        out = static.generate(
            prompt,
            algorithm="tli",
            num_draft_tokens=2,
            draft_temperature=1.5,
            seed=seed,
            verify=verification,
            **sampled,
        )
        accepted += out.stats.accepted
        joint[tuple(out.new_ids)] = joint.get(tuple(out.new_ids), 0) + 1
    assert 0.2 * draws < accepted < 0.98 * draws
    from hetspec.runtime import laws

    warping = Warping(0.7, 6)
    decoder = dynamic.decoder(prompt, algorithm="none", max_new_tokens=2)
    first = laws.law(decoder.target.forward(decoder.ids, keep=1)[0], warping)
    expected = {}
    for t in torch.nonzero(first).flatten().tolist():
        row = dynamic.target.model.new_row()
        second = laws.law(row.forward([*decoder.ids, t], keep=1)[0], warping)
        for u in torch.nonzero(second).flatten().tolist():
            expected[t, u] = draws * float(first[t] * second[u])
    assert set(joint) <= set(expected)
    big = {key for key, value in expected.items() if value >= 5}
    cells = [(joint.get(key, 0), expected[key]) for key in big]
    rest = sum(v for key, v in expected.items() if key not in big)
    cells.append((draws - sum(seen for seen, _ in cells), rest))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_drafters_window_slides(shipped):
    """The drafter's window is full long before the text ends."""
    pair = TinyPair("llama", "llama", std=0.25)
    pair.drafter = tiny_model("llama", pair.drafter.config.vocab_size, seed=2, positions=40, std=0.25)
    tokenizers = {
        "target_tokenizer": pair.target_tokenizer,
        "drafter_tokenizer": pair.drafter_tokenizer,
    }
    static = Engine(pair.target, pair.drafter, pair.pair, **tokenizers, static=True)
    options = {"algorithm": "tli", "num_draft_tokens": 3, "max_new_tokens": 80}
    expected = pair.engine().generate("The quick brown fox", algorithm="none", max_new_tokens=80).new_ids
    out = static.generate("The quick brown fox", **options)
    assert out.new_ids == expected
    assert out.stats.drafter_tokens > 80
    assert CATCH_UP < 20  # so the half that stays is read ahead of the step


def test_streams_that_run_at_the_same_time_have_buffers_of_their_own(engine):
    streams = [engine.stream(p, algorithm="tli", max_new_tokens=12) for p in PROMPTS[:2]]
    ids: list[list[int]] = [[], []]
    for _ in range(12):
        for own, stream in zip(ids, streams, strict=True):
            own += next((chunk.ids for chunk in stream), [])
    for prompt, own in zip(PROMPTS, ids, strict=False):
        assert own == engine.generate(prompt, algorithm="none", max_new_tokens=12).new_ids


def test_ends_stops_and_room(engine, shipped):
    """An eos inside a draft, a stop string, a text that fills the target's window."""
    prompt = PROMPTS[0]
    plain = shipped.engine.generate(prompt, algorithm="none", max_new_tokens=24).new_ids
    for extra in ({"eos_token_id": plain[5]}, {"stop_strings": ["\n"]}, {"max_new_tokens": 1}):
        options = {"max_new_tokens": 24, "num_draft_tokens": 4, **extra}
        out = engine.generate(prompt, algorithm="tli", **options)
        other = shipped.engine.generate(prompt, algorithm="tli", **options)
        assert out.new_ids == other.new_ids
        assert out.stats.stop_reason == other.stats.stop_reason
    window = shipped.models[0].config.max_position_embeddings
    ids = (plain * window)[: window - 6]
    out = engine.generate(ids, algorithm="tli", num_draft_tokens=4, max_new_tokens=24)
    other = shipped.engine.generate(ids, algorithm="tli", num_draft_tokens=4, max_new_tokens=24)
    assert out.new_ids == other.new_ids
    assert out.stats.stop_reason == other.stats.stop_reason == "context"


def test_what_recorded_steps_cannot_do_runs_on_fixed_buffers(engine, shipped):
    options = {"algorithm": "tli", "max_new_tokens": 10, "repetition_penalty": 1.3}
    decoder = engine.decoder(PROMPTS[0], **options)
    assert not isinstance(decoder, StaticDecoder)
    assert isinstance(decoder.target, StaticRow)
    assert (
        engine.generate(PROMPTS[0], **options).new_ids
        == shipped.engine.generate(PROMPTS[0], **options).new_ids
    )
    assert isinstance(engine.decoder(PROMPTS[0], algorithm="tli", max_new_tokens=4), StaticDecoder)


def test_a_draft_that_is_too_long_is_refused(engine):
    with pytest.raises(InvalidInput, match="at most 16"):
        engine.generate(PROMPTS[0], algorithm="tli", num_draft_tokens=17, max_new_tokens=4)


def test_broken_weights_are_reported():
    pair = TinyPair()
    tokenizers = {
        "target_tokenizer": pair.target_tokenizer,
        "drafter_tokenizer": pair.drafter_tokenizer,
    }
    for model, whose in ((pair.drafter, "the drafter"), (pair.target, "the target")):
        engine = Engine(pair.target, pair.drafter, pair.pair, **tokenizers, static=True)
        model.get_output_embeddings().weight.data.fill_(float("nan"))
        for options in ({}, SAMPLED):
            with pytest.raises(GenerationError, match=f"logits of {whose} are not finite"):
                engine.generate("x", algorithm="tli", num_draft_tokens=2, max_new_tokens=4, **options)


# -- no look at a value --------------------------------------------------------------------------------------

LOOKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "multinomial")


class NoLook(TorchDispatchMode):
    """Raises where a tensor is asked for a value, which on a GPU would make the host wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in LOOKS:
            raise AssertionError(f"{func._schema.name} looks at a value")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [{}, SAMPLED])
@pytest.mark.parametrize("algorithm", ["none", "tli", "rdk", "slrs:lookahead"])
def test_no_value_is_asked_for_inside_a_step(engine, monkeypatch, algorithm, sampled):
    body, calls = StaticStep._body, []

    def guarded(self):
        calls.append(self)
        with NoLook():
            body(self)

    monkeypatch.setattr(StaticStep, "_body", guarded)
    engine._statics._pairs.clear()
    name, _, form = algorithm.partition(":")
    forms = {"slrs_form": form} if form else {}
    engine.generate(PROMPTS[0], algorithm=name, num_draft_tokens=3, max_new_tokens=6, **forms, **sampled)
    assert calls
    engine._statics._pairs.clear()


def test_a_look_would_be_seen(engine, monkeypatch):
    def looking(logits, ids, count):
        if bool(count > 0):
            pass
        return judge_greedy(logits, ids, count)

    monkeypatch.setattr(static_step, "judge_greedy", looking)
    with pytest.raises(AssertionError, match="looks at a value"):
        test_no_value_is_asked_for_inside_a_step(engine, monkeypatch, "tli", {})
    engine._statics._pairs.clear()
