"""Every option of transformers' decoding: equal to plain `generate` under greedy decoding, whatever is drafted."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from hetspec.errors import InvalidInput
from hetspec.runtime.laws import Warping, law
from hetspec.runtime.processors import CountPenalty, prepare, split_warpers
from tests.test_runtime import CODE, TinyPair, self_pair

PROMPT = "def f(x):\n    return x"
N = 18
RUNS = [
    ("none", 0),
    ("slem", 1),
    ("slem", 5),
    ("tli", 4),
    ("rdk", 3),
    ("slrs", 1),
    ("slrs", 4),
    ("auto", "auto"),
]


@pytest.fixture(scope="module")
def tiny():
    return TinyPair().with_kernel()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


@pytest.fixture(scope="module")
def ids(tiny):
    return tiny.target_tokenizer.encode(PROMPT).ids


@pytest.fixture(scope="module")
def free(tiny, ids):
    """The greedy text without any option."""
    return plain(tiny, ids, eos_token_id=None)


def plain(tiny, ids, **options):
    """The new ids of transformers' own decoding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = tiny.target.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            pad_token_id=0,
            **{"max_new_tokens": N, **options},
        )
    return out[0, len(ids) :].tolist()


def option_cases(free):
    """Options that change the greedy text of the tiny target, by name."""
    a, b, c = free[0], free[2], free[5]
    return {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 8.0},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[a], [b, c], free[3:5]]},
        "sequence_bias": {"sequence_bias": [[[a], -50.0], [[b, 17], 40.0]]},
        "min_length": {"min_length": 18, "eos_token_id": [a, c]},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [a, c]},
        "forced_bos_token_id": {"forced_bos_token_id": 33},
        "forced_eos_token_id": {"forced_eos_token_id": 44, "eos_token_id": [44]},
        "suppress_tokens": {"suppress_tokens": sorted(set(free[:8]))},
        "begin_suppress_tokens": {"begin_suppress_tokens": [a]},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (5, 1.6),
            "eos_token_id": [free[9], 300],
        },
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True},
        "watermarking_config": {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash"}},
        "guidance_scale": {"guidance_scale": 1.7},
        "eos list": {"eos_token_id": [free[4], 3]},
        "max_length": {"max_new_tokens": None, "max_length": 40},
        "several": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 5,
            "bad_words_ids": [[b]],
        },
    }


CASES = list(option_cases(list(range(20))))


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_under_every_option(tiny, engine, ids, free, case):
    options = option_cases(free)[case]
    prompts = {
        "forced_bos_token_id": ids[:1],
        "encoder_no_repeat_ngram_size": tiny.target_tokenizer.encode(CODE[:500]).ids,
    }
    ids = prompts.get(case, ids)
    expected = plain(tiny, ids, **{"eos_token_id": None, **options})
    if case not in ("remove_invalid_values", "renormalize_logits"):
        assert expected != plain(tiny, ids, eos_token_id=None)  # else the case could not fail
    for algorithm, k in RUNS:
        ours = {"max_new_tokens": N, "eos_token_id": [], **options}
        out = engine.generate(ids, algorithm=algorithm, num_draft_tokens=k, **ours)
        assert out.new_ids == expected, (algorithm, k)


def test_the_models_own_generation_config_is_honoured_and_left_alone(tiny, engine, ids, free):
    config = tiny.target.generation_config
    before = config.to_dict()
    config.repetition_penalty, config.suppress_tokens = 1.3, [free[1]]
    try:
        expected = plain(tiny, ids)
        assert expected != free
        for algorithm in ("none", "slem", "tli", "slrs"):
            assert (
                engine.generate(ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=N).new_ids
                == expected
            )
            off = {"repetition_penalty": 1.0, "suppress_tokens": None, "eos_token_id": []}
            out = engine.generate(ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=N, **off)
            assert out.new_ids == free
    finally:
        tiny.target.generation_config = GenerationConfig.from_dict(before)
    assert tiny.target.generation_config.to_dict() == before


def test_a_generation_config_file(engine, tiny, ids, tmp_path):
    config = GenerationConfig(repetition_penalty=1.4, max_new_tokens=N, eos_token_id=0)
    config.save_pretrained(tmp_path)
    expected = engine.generate(ids, algorithm="none", repetition_penalty=1.4, max_new_tokens=N).new_ids
    for given in (tmp_path, tmp_path / "generation_config.json", str(tmp_path), config):
        assert engine.generate(ids, algorithm="tli", generation_config=given).new_ids == expected
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(InvalidInput, match=r"bad\.json is not a generation config"):
        engine.generate(ids, generation_config=tmp_path / "bad.json")


# -- the user's own processors and criteria --------------------------------------------------------------


class Recorder(LogitsProcessor):
    """Remembers what it was asked; every call changes the scores by what it has seen, so an extra call would show."""

    def __init__(self):
        self.prefixes, self.state = [], 0

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        self.state = (self.state * 31 + int(input_ids[0, -1]) + 1) % 997
        scores[:, self.state % scores.shape[-1]] += 6.0  # in place, as some do
        return scores


@pytest.mark.parametrize(("algorithm", "k"), RUNS[1:5])
def test_a_stateful_processor_sees_the_calls_of_plain_decoding(tiny, engine, ids, free, algorithm, k):
    reference, ours = Recorder(), Recorder()
    expected = plain(tiny, ids, logits_processor=LogitsProcessorList([reference]), eos_token_id=None)
    assert expected != free
    out = engine.generate(
        ids,
        algorithm=algorithm,
        num_draft_tokens=k,
        max_new_tokens=N,
        eos_token_id=[],
        logits_processor=[ours],
    )
    assert out.new_ids == expected
    assert ours.prefixes == reference.prefixes


def test_a_stateful_processor_is_called_once_per_token_when_sampling(engine, tiny, ids):
    for algorithm in ("slem", "tli", "slrs"):
        ours = Recorder()
        out = engine.generate(
            ids,
            algorithm=algorithm,
            num_draft_tokens=4,
            max_new_tokens=N,
            do_sample=True,
            seed=3,
            eos_token_id=[],
            logits_processor=[ours],
        )
        whole = ids + out.new_ids
        assert ours.prefixes[:N] == [whole[: len(ids) + i] for i in range(N)]
        assert len(ours.prefixes) == N
        with pytest.raises(InvalidInput, match="keeps a state"):
            engine.generate(
                ids, algorithm=algorithm, logits_processor=[ours], verify="block", max_new_tokens=2
            )


def test_processors_never_see_a_text_that_has_ended(tiny):
    """A grammar may raise when asked what follows the end."""
    engine = self_pair(tiny)
    ids = tiny.target_tokenizer.encode("class A:").ids
    eos = engine.generate(ids, algorithm="none", max_new_tokens=9, eos_token_id=[]).new_ids[3]

    class Grammar(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert eos not in input_ids[0, len(ids) :]
            return scores

    for algorithm in ("slem", "tli", "slrs"):
        out = engine.generate(
            ids, algorithm=algorithm, num_draft_tokens=6, eos_token_id=eos, logits_processor=[Grammar()]
        )
        assert out.stats.stop_reason == "eos"


def test_a_prefix_constraint(tiny, engine, ids):
    seen = []

    def allowed(batch, prefix):
        seen.append(batch)
        return [5 + int(prefix[-1]) % 7, 40 + len(prefix) % 5]

    expected = plain(tiny, ids, prefix_allowed_tokens_fn=allowed)
    for algorithm in ("none", "slem", "tli", "slrs"):
        out = engine.generate(
            ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=N, prefix_allowed_tokens_fn=allowed
        )
        assert out.new_ids == expected
    assert set(seen) == {0}


def test_a_processor_that_breaks_the_shape_is_named(engine):
    with pytest.raises(InvalidInput, match="a logits processor returned scores of shape"):
        engine.generate("x", logits_processor=[lambda ids, scores: scores[:, :5]], max_new_tokens=3)


class AfterIds(StoppingCriteria):
    """Stops at a total length, and counts how often it was asked."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("extra", range(1, 8))
def test_a_criterion_stops_in_the_middle_of_a_block(tiny, ids, extra):
    engine = self_pair(tiny)
    expected = plain(tiny, ids, eos_token_id=None)[:extra]
    for algorithm in ("slem", "tli", "slrs"):
        criterion = AfterIds(len(ids) + extra)
        out = engine.generate(
            ids,
            algorithm=algorithm,
            num_draft_tokens=5,
            max_new_tokens=N,
            eos_token_id=[],
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        assert out.new_ids == expected
        assert out.stats.stop_reason == "criterion"
        assert criterion.asked == [len(ids) + i + 1 for i in range(extra)]


def test_stop_strings_end_where_transformers_ends(tiny, free):
    """Each stop string of the text itself, also those that a token completes in its middle (BUGS A4)."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.target_tokenizer)
    engine = self_pair(tiny)
    ids = tiny.target_tokenizer.encode(PROMPT).ids
    text = tokenizer.decode(free)
    starts = [i for i in range(0, len(text) - 2, max(1, len(text) // 12)) if "\ufffd" not in text[i : i + 2]]
    assert len(starts) > 3
    ends = set()
    for start in starts:
        stop = text[start : start + 2]
        expected = plain(tiny, ids, stop_strings=[stop, "never"], tokenizer=tokenizer, eos_token_id=None)
        ends.add(len(expected))
        for algorithm in ("slem", "tli"):
            out = engine.generate(
                ids,
                algorithm=algorithm,
                num_draft_tokens=6,
                max_new_tokens=N,
                eos_token_id=[],
                stop_strings=[stop, "never"],
            )
            assert out.new_ids == expected
            if len(expected) < N:
                assert out.stats.stop_reason == "stop string"
    assert len(ends) > 2


def test_max_time_stops_after_the_token_it_is_noticed_at(engine):
    out = engine.generate("x", algorithm="slem", max_new_tokens=400, max_time=1e-9, eos_token_id=[])
    assert len(out.new_ids) == 1
    assert out.stats.stop_reason == "time"


# -- penalties that transformers does not have --------------------------------------------------------------


def test_presence_and_frequency_penalties(tiny, engine, ids, free):
    """A slow obvious twin, token by token."""

    def twin(presence, frequency):
        new = []
        for _ in range(N):
            logits = tiny.target(torch.tensor([ids + new])).logits[0, -1].clone()
            for x in set(new):
                logits[x] -= presence + frequency * new.count(x)
            new.append(int(logits.argmax()))
        return new

    for presence, frequency in ((2.5, 0.0), (0.0, 1.5), (1.0, -0.5)):
        expected = twin(presence, frequency)
        assert expected != free
        for algorithm, k in RUNS:
            out = engine.generate(
                ids,
                algorithm=algorithm,
                num_draft_tokens=k,
                max_new_tokens=N,
                eos_token_id=[],
                presence_penalty=presence,
                frequency_penalty=frequency,
            )
            assert out.new_ids == expected
    assert CountPenalty(2, 1.0, 0.5)(torch.tensor([[1, 1, 2, 2, 3]]), torch.zeros(1, 4)).tolist() == [
        [0.0, 0.0, -2.0, -1.5]
    ]


# -- scores, logits, draws --------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["none", "slem", "tli", "slrs"])
def test_scores_and_logits_are_those_of_transformers(tiny, engine, ids, algorithm):
    options = {"repetition_penalty": 1.3, "output_scores": True, "output_logits": True, "max_new_tokens": 12}
    reference = tiny.target.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
    )
    out = engine.generate(ids, algorithm=algorithm, num_draft_tokens=3, eos_token_id=[], **options)
    assert len(out.scores) == len(out.logits) == 12
    assert torch.allclose(torch.cat(out.scores).float(), torch.cat(reference.scores), atol=1e-4)
    assert torch.allclose(torch.cat(out.logits).float(), torch.cat(reference.logits), atol=1e-4)


def test_sampled_scores_are_the_law_each_token_was_drawn_from(tiny, engine, ids):
    warp = {"temperature": 0.7, "top_k": 9, "top_p": 0.9}
    for algorithm in ("none", "slem", "tli", "slrs"):
        out = engine.generate(
            ids,
            algorithm=algorithm,
            num_draft_tokens=3,
            max_new_tokens=10,
            do_sample=True,
            seed=1,
            output_scores=True,
            eos_token_id=[],
            **warp,
        )
        for i, scores in enumerate(out.scores):
            logits = tiny.target(torch.tensor([ids + out.new_ids[:i]])).logits[0, -1]
            expected = law(logits, Warping(**warp))
            assert torch.allclose(torch.softmax(scores[0].double(), -1), expected, atol=1e-6)
            assert expected[out.new_ids[i]] > 0


def test_a_generator_gives_the_draws(engine):
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return engine.generate(
            "x", algorithm="tli", do_sample=True, generator=generator, num_draft_tokens=3, max_new_tokens=20
        ).new_ids

    assert run(5) == run(5) != run(6)
    assert (
        run(5)
        == engine.generate(
            "x", algorithm="tli", do_sample=True, seed=5, num_draft_tokens=3, max_new_tokens=20
        ).new_ids
    )


# -- what transformers prepares, split into processors and warping --------


def test_prepared_processors_end_in_the_warping(tiny):
    fields = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "max_length": 9}
    processors, warping = split_warpers(prepare(tiny.target, [1, 2], fields, []))
    assert processors == ()
    assert warping == Warping(0.5, 7, 0.8, 0.1)
    own = RepetitionPenaltyLogitsProcessor(1.2)
    processors, warping = split_warpers(
        prepare(tiny.target, [1, 2], {**fields, "renormalize_logits": True}, [own])
    )
    assert processors == (own,)
    assert warping == Warping(0.5, 7, 0.8, 0.1)
    processors, warping = split_warpers([TemperatureLogitsWarper(0.5), TypicalLogitsWarper(0.9)])
    assert len(processors) == 2
    assert warping == Warping(1.0)
    kept = TopKLogitsWarper(3, min_tokens_to_keep=2)
    assert split_warpers([kept]) == ((kept,), Warping(1.0))


@pytest.mark.parametrize(
    "exotic", [{"typical_p": 0.6}, {"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.02}, {"top_h": 0.5}]
)
def test_exotic_warpers_give_transformers_law(tiny, engine, ids, exotic):
    options = {"temperature": 0.8, "top_k": 30, **exotic}
    reference = tiny.target.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=True,
        max_new_tokens=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    expected = torch.softmax(reference.scores[0][0], -1)
    out = engine.generate(
        ids, algorithm="tli", do_sample=True, max_new_tokens=1, output_scores=True, **options
    )
    assert torch.allclose(torch.softmax(out.scores[0][0], -1).float(), expected, atol=1e-5)
    assert (expected > 0).sum() < 30


def test_criteria_given_twice_do_not_clash(engine):
    out = engine.generate(
        "x", max_new_tokens=9, eos_token_id=[], stopping_criteria=[MaxLengthCriteria(max_length=4)]
    )
    assert len(out.sequences[0]) == 4


def test_an_option_that_json_cannot_hold_is_still_read(engine, ids, free):
    """sequence_bias with tuple keys, as transformers documents it first."""
    bias = {(free[0],): -50.0}
    out = engine.generate(ids, algorithm="tli", max_new_tokens=4, sequence_bias=bias)
    same = engine.generate(
        ids, algorithm="none", max_new_tokens=4, sequence_bias=json.loads(f"[[[{free[0]}], -50.0]]")
    )
    assert out.new_ids == same.new_ids != free[:4]
