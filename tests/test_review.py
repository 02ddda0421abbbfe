"""What a review of options, batches and transformers' entry points found, each with its test."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import transformers
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

import hetspec
from hetspec.errors import GenerationError, InvalidInput, StaleArtifact
from hetspec.runtime.engine import Engine
from hetspec.runtime.generate import engine_of
from hetspec.runtime.models import CachedModel, Reading, read_together
from hetspec.runtime.processors import split_warpers
from tests.test_runtime import TinyPair, self_pair
from tests.toys import tiny_model, trained_bpe

PROMPT = "def f(x):\n    return x"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


@pytest.fixture(scope="module")
def own(tiny):
    """The target as its own drafter: whole blocks are accepted."""
    return self_pair(tiny)


@pytest.fixture(scope="module")
def ids(tiny):
    return tiny.target_tokenizer.encode(PROMPT).ids


@pytest.fixture(scope="module")
def extras(tiny):
    return {
        "custom_generate": hetspec.hf_generate,
        "pair": tiny.pair,
        "drafter": tiny.drafter,
        "target_tokenizer": tiny.target_tokenizer,
        "drafter_tokenizer": tiny.drafter_tokenizer,
    }


def plain(tiny, ids, **options):
    settings = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 20, **options}
    out = tiny.target.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), **settings)
    return out[0, len(ids) :].tolist()


def strong(kind, **extra):
    """A model as `from_config` makes it, with weights that matter."""
    config = transformers.AutoConfig.for_model(kind)
    for name, value in {**SIZES, **extra}.items():
        if hasattr(config, name) or name in extra:
            setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters():
            if p.ndim > 1:
                p.data.normal_(std=0.25)
    return model.double()


# -- positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["bart", "trocr", "roformer", "roberta", "camembert", "llama", "gpt2", "opt"]
)
def test_rows_read_together_are_the_rows_read_alone_whatever_counts_the_positions(kind):
    """Positions from the cache's length, with an offset, from the mask; what cannot be padded is read one by one."""
    extra = {"is_decoder": True} if kind in ("roformer", "roberta", "camembert") else {}
    model = CachedModel(
        strong(kind, **extra, **({"word_embed_proj_dim": 32, "ffn_dim": 48} if kind == "opt" else {}))
    )
    assert model.joins == (kind not in ("bart", "trocr", "roformer"))
    texts = [[5, 11, 17, 23, 9, 8, 7], [7], [30, 31, 32]]
    together, alone = [[model.new_row() for _ in texts] for _ in range(2)]
    read_together(model, [Reading(row, text, 1) for row, text in zip(together, texts, strict=True)])
    readings = [Reading(row, [13, 19, 40][:n], n) for row, n in zip(together, (3, 2, 1), strict=True)]
    read_together(model, readings)
    for row, text, reading in zip(alone, texts, readings, strict=True):
        row.forward(text, 1)
        assert torch.allclose(reading.logits, row.forward(reading.ids, reading.keep), atol=1e-6)


def test_roberta_decodes_as_transformers_generates_with_it():
    """`generate` passes positions from 0, which the forward alone would not."""
    model = strong("roberta", is_decoder=True, vocab_size=300)
    tokenizer = trained_bpe(["x"], 258)
    ids = [5, 11, 17, 23]
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, 4).long(),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    engine = Engine(model, target_tokenizer=tokenizer)
    found = engine.generate(ids, algorithm="none", max_new_tokens=12, eos_token_id=[])
    assert found.new_ids == out[0, 4:].tolist()


def test_longrope_is_refused_where_a_text_would_cross_its_boundary(tiny):
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = strong(
        "phi3",
        vocab_size=300,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 24,
            **factors,
        },
        original_max_position_embeddings=24,
    )
    tokenizer = trained_bpe(["x"], 258)
    engine = Engine(model, target_tokenizer=tokenizer)
    assert engine.target.model.rope_boundary == 24
    with pytest.raises(InvalidInput, match="longrope"):
        engine.generate([5] * 20, algorithm="none", max_new_tokens=5)
    for prompt, n in (([5] * 20, 4), ([5] * 30, 6)):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)).long(),
            max_new_tokens=n,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :]
        out = engine.generate(prompt, algorithm="none", max_new_tokens=n, eos_token_id=[])
        assert out.new_ids == expected.tolist()


# -- criteria -------------------------------------------------------------------------------------------------


class Grammar:
    """A matcher: the processor advances it, the criterion reads whether it has ended."""

    def __init__(self, k):
        self.k, self.calls = k, []

    def __call__(self, ids, scores):
        self.calls.append(ids.shape[1])
        return scores

    def ended(self, ids, scores, **_):
        return torch.tensor([len(self.calls) >= self.k])


@pytest.mark.parametrize("k", [1, 2, 4, 9])
@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_processors_and_criteria_take_turns_as_in_plain_decoding(tiny, own, ids, k, algorithm):
    theirs, ours = Grammar(k), Grammar(k)

    class Ended(StoppingCriteria):
        def __call__(self, *arguments, **more):
            return theirs.ended(*arguments, **more)

    expected = plain(
        tiny,
        ids,
        logits_processor=LogitsProcessorList([theirs]),
        stopping_criteria=StoppingCriteriaList([Ended()]),
    )
    out = own.generate(
        ids,
        algorithm=algorithm,
        num_draft_tokens=5,
        max_new_tokens=20,
        eos_token_id=[],
        logits_processor=[ours],
        stopping_criteria=[ours.ended],
    )
    assert out.new_ids == expected
    assert len(expected) == k
    assert ours.calls == theirs.calls  # and none after the end


def test_a_criterion_of_the_users_replaces_the_one_of_its_type(tiny, own, ids, extras):
    free = plain(tiny, ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.target_tokenizer)
    early, late = free[3], next(t for t in free[6:] if t not in free[:6])
    cases = [
        ({"eos_token_id": [early]}, EosTokenCriteria(torch.tensor([late]))),
        ({"max_new_tokens": 5}, MaxLengthCriteria(max_length=len(ids) + 12)),
    ]
    for options, criterion in cases:
        expected = plain(tiny, ids, **options, stopping_criteria=StoppingCriteriaList([criterion]))
        assert len(expected) > 5
        settings = {"max_new_tokens": 20, "eos_token_id": [], **options}
        out = own.generate(
            ids, algorithm="slem", num_draft_tokens=5, **settings, stopping_criteria=[criterion]
        )
        assert out.new_ids == expected
        found = plain(tiny, ids, **options, stopping_criteria=StoppingCriteriaList([criterion]), **extras)
        assert found == expected
    stop, never = tokenizer.decode(free[:3]), StopStringCriteria(tokenizer, ["never at all"])
    out = own.generate(
        ids,
        max_new_tokens=20,
        eos_token_id=[],
        stop_strings=[stop],
        stopping_criteria=[never],
        algorithm="slem",
    )
    assert out.new_ids == free


def test_a_criterion_with_a_state_counts_for_each_row_of_a_batch(engine):
    class EighthCall(StoppingCriteria):
        def __init__(self):
            self.calls = 0

        def __call__(self, ids, scores, **_):
            self.calls += 1
            return torch.tensor([self.calls >= 8])

    criterion = EighthCall()
    outs = engine.generate_batch(
        ["x = 1", PROMPT, "class A:"],
        algorithm="slem",
        num_draft_tokens=3,
        max_new_tokens=20,
        eos_token_id=[],
        stopping_criteria=[criterion],
    )
    assert [len(o.new_ids) for o in outs] == [8, 8, 8]
    assert criterion.calls == 0


# -- scores and laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"renormalize_logits": True},
        {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)])},
        {"do_sample": True, "temperature": 0.005, "top_k": 40},
        {"do_sample": True, "renormalize_logits": True, "top_p": 0.7},
    ],
)
def test_scores_are_transformers_own(tiny, engine, ids, extras, options):
    settings = {
        "output_scores": True,
        "return_dict_in_generate": True,
        "max_new_tokens": 1,
        "pad_token_id": 0,
    }
    tensor = torch.tensor([ids])
    theirs = tiny.target.generate(tensor, **settings, **options).scores[0]
    found = tiny.target.generate(tensor, **settings, **options, **extras).scores[0]
    ours = engine.generate(ids, algorithm="tli", **options, output_scores=True, max_new_tokens=1).scores[0]
    for scores in (found, ours):
        assert torch.equal(torch.isinf(scores), torch.isinf(theirs))
        seen = torch.isfinite(theirs)
        assert torch.allclose(scores[seen].float(), theirs[seen], atol=1e-3)


def test_a_warper_that_keeps_something_of_what_it_drops_stays_a_processor():
    odd = TopKLogitsWarper(3, filter_value=0.0)
    assert split_warpers([odd])[0] == (odd,)


def test_no_gradients_in_processors_and_criteria(engine, tiny, extras):
    seen = []

    def watch(ids, scores, **_):
        seen.append(torch.is_grad_enabled())
        return scores

    def criterion(ids, scores, **_):
        seen.append(torch.is_grad_enabled())
        return False

    options = {"logits_processor": [watch], "stopping_criteria": [criterion], "max_new_tokens": 4}
    engine.generate("x = 1", algorithm="tli", **options)
    out = engine.generate("x = 1", guidance_scale=1.5, output_scores=True, max_new_tokens=3)
    engine.generate_batch(["x", "y"], stopping_criteria=[criterion], max_new_tokens=3)
    assert seen
    assert not any(seen)
    assert not out.scores[-1].requires_grad


# -- custom_generate ------------------------------------------------------------------------------------------


def test_arguments_that_would_be_ignored_are_refused(tiny, extras, ids):
    tensor = torch.tensor([ids])
    options = {"max_new_tokens": 3, "pad_token_id": 0, **extras}
    positions = torch.arange(len(ids))[None]
    tiny.target.generate(tensor, position_ids=positions, **options)  # the usual ones
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.target_tokenizer)
    for bad, message in (
        ({"position_ids": positions + 37}, "position_ids"),
        ({"seed": 1, "generator": torch.Generator()}, "only one"),
        ({"assistant_model": tiny.drafter}, "assistant_model"),
        ({"past_key_values": transformers.DynamicCache()}, "a cache was given"),
        ({"max_new_tokens": 600}, "context holds 512"),
        (
            {"streamer": TextIteratorStreamer(tokenizer), "token_streamer": TextIteratorStreamer(tokenizer)},
            "streamer",
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            tiny.target.generate(tensor, **{**options, **bad})


def test_streamers_without_length_and_behind_wrappers(tiny, extras, ids):
    class Empty(list):
        ended = False

        def put(self, value):
            self.seen = [*getattr(self, "seen", []), *value.flatten().tolist()]

        def end(self):
            self.ended = True

    def wrapper(*arguments, pair=None, drafter=None, target_tokenizer=None, drafter_tokenizer=None, **more):
        return hetspec.hf_generate(
            *arguments,
            pair=pair,
            drafter=drafter,
            target_tokenizer=target_tokenizer,
            drafter_tokenizer=drafter_tokenizer,
            **more,
        )

    options = {"max_new_tokens": 6, "pad_token_id": 0, **extras}
    for changes in (
        {"token_streamer": Empty()},
        {"streamer": Empty()},
        {"streamer": Empty(), "custom_generate": wrapper},
    ):
        settings = {**options, **changes}
        out = tiny.target.generate(torch.tensor([ids]), **settings)
        streamer = changes.get("streamer", changes.get("token_streamer"))
        assert streamer.seen == out[0].tolist()
        assert streamer.ended


def test_a_changed_tokenizer_is_seen_on_every_path():
    fresh = TinyPair()
    tokenizers = {
        "target_tokenizer": fresh.target_tokenizer,
        "drafter_tokenizer": fresh.drafter_tokenizer,
    }

    def engine():
        return engine_of(fresh.target, fresh.drafter, fresh.pair, dict(tokenizers))

    assert engine() is engine()
    fresh.target_tokenizer.add_tokens(["zzz"])
    with pytest.raises(StaleArtifact):
        engine()


# -- batches --------------------------------------------------------------------------------------------------


def test_rows_that_have_ended_give_their_memory_back(engine):
    rows = []
    honest = engine.prepared_decoder
    engine.prepared_decoder = lambda *a, **k: rows.append(honest(*a, **k)) or rows[-1]
    try:
        engine.generate_batch(["x", "y", PROMPT], algorithm="slem", num_draft_tokens=2, max_new_tokens=6)
    finally:
        del engine.prepared_decoder
    gc.collect()
    assert [r.target.length for r in rows] == [r.context.row.length for r in rows] == [0, 0, 0]


def test_the_drafters_go_first_even_if_they_are_larger(tiny):
    big = TinyPair()
    big.drafter = tiny_model("llama", 336, seed=2)
    big.target = tiny_model("gpt2", 432, seed=1)
    engine = big.engine()
    engine.target.model.__dict__["joins"] = engine.drafter.model.__dict__["joins"] = True
    sizes = []
    honest = big.target.forward

    def spy(*arguments, **options):
        sizes.append(options["input_ids"].shape[0])
        return honest(*arguments, **options)

    engine.target.model.reader = engine.target.model._prompt_reader = spy
    engine.generate_batch(
        ["x = 1", PROMPT, "y"], algorithm="tli", num_draft_tokens=2, max_new_tokens=9, eos_token_id=[]
    )
    assert sizes[:3] == [1, 1, 1]
    assert sizes[3:6] == [3, 3, 3]


def test_ragged_ids_of_a_tokenizer_are_a_batch(engine, tiny):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.target_tokenizer)
    encoded = tokenizer(["x = 1", "class A:\n  pass"])
    encoded.pop("token_type_ids", None)
    outs = engine.generate_batch(encoded, max_new_tokens=4)
    assert [o.new_ids for o in outs] == [
        o.new_ids for o in engine.generate_batch(["x = 1", "class A:\n  pass"], max_new_tokens=4)
    ]


# -- one clear line -------------------------------------------------------------------------------------------


def nothing(ids, scores):
    return None


def forbid(ids, scores):
    return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": nothing}, "Give a list"),
        ({"stopping_criteria": 3}, "expected a list of callables"),
        ({"logits_processor": [nothing]}, "returned nothing"),
        ({"stopping_criteria": [nothing]}, "returned nothing"),
        ({"bad_words_ids": [[9999]]}, "NoBadWordsLogitsProcessor failed|refuses"),
        ({"forced_eos_token_id": 9999, "max_new_tokens": 1}, "ForcedEOSTokenLogitsProcessor failed|refuses"),
        ({"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": []}, "refuses"),
        ({"watermarking_config": 3}, "refuses"),
        ({"guidance_scale": "a"}, "refuses|failed"),
        ({"stop_strings": 3}, "stop_strings"),
        ({"do_sample": True, "temperature": "a"}, "temperature"),
        ({"seed": "a"}, "seed"),
        ({"generator": 3}, "generator"),
    ],
)
def test_a_wrong_value_is_one_line(engine, options, message):
    with pytest.raises(InvalidInput, match=message):
        engine.generate("x = 1", **{"max_new_tokens": 3, **options})


def test_processors_that_forbid_everything_are_named(engine):
    for sampled in (False, True):
        with pytest.raises(GenerationError, match="forbid every token"):
            engine.generate("x", logits_processor=[forbid], do_sample=sampled, max_new_tokens=2)


def test_none_is_no_processor(engine):
    out = engine.generate("x = 1", logits_processor=None, stopping_criteria=None, max_new_tokens=3)
    assert out.new_ids == engine.generate("x = 1", max_new_tokens=3).new_ids


def test_an_empty_row_is_called_empty(tiny, extras, ids):
    tensor, mask = torch.tensor([ids, ids]), torch.ones(2, len(ids)).long()
    mask[1] = 0
    with pytest.raises(InvalidInput, match="empty"):
        tiny.target.generate(tensor, attention_mask=mask, max_new_tokens=2, pad_token_id=0, **extras)


def test_no_thread_outlives_a_batch(engine):
    before = threading.active_count()
    engine.generate_batch(["x", "y"], max_new_tokens=3)
    time.sleep(0)
    assert threading.active_count() == before
