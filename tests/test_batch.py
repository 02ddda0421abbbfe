"""Batches: every row is what it would be alone; and transformers' own entry points."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation import GenerateDecoderOnlyOutput

import hetspec
from hetspec.errors import GenerationError, InvalidInput
from hetspec.runtime.batch import run_together
from hetspec.runtime.models import CachedModel, Reading, read_together
from tests.test_options import Recorder
from tests.test_runtime import CODE, PROMPTS, TinyPair
from tests.toys import tiny_model

KINDS = [
    ("llama", "gpt2"),
    ("gpt2", "llama"),
    ("gemma3", "mistral"),
    ("mistral", "gemma3"),
    ("bloom", "mpt"),
    ("opt", "gemma2"),
    ("mixtral", "neox"),
]


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


@pytest.mark.parametrize("kinds", KINDS, ids="←".join)
def test_greedy_rows_equal_their_single_runs(kinds):
    """Ragged prompts and ragged acceptance; sliding windows of 8, learned positions, ALiBi."""
    pair = TinyPair(*kinds, std=0.25)
    engine = pair.engine()
    prompts = [*PROMPTS[3:6], CODE[:150], [0], "class A:"]
    for algorithm, k in (("none", 0), ("slem", 4), ("slrs", 3), ("auto", "auto")):
        options = {"algorithm": algorithm, "num_draft_tokens": k, "max_new_tokens": 25}
        together = engine.generate_batch(prompts, **options)
        for prompt, out in zip(prompts, together, strict=True):
            alone = engine.generate(prompt, **options)
            assert out.new_ids == alone.new_ids, (prompt, algorithm)
            assert torch.equal(out.sequences, alone.sequences)
            if algorithm != "auto":
                assert (out.stats.accepted, out.stats.steps) == (alone.stats.accepted, alone.stats.steps)


@pytest.mark.parametrize("algorithm", ["none", "slem", "tli", "slrs"])
def test_sampled_rows_draw_as_alone(engine, algorithm):
    options = {"algorithm": algorithm, "num_draft_tokens": 3, "max_new_tokens": 20, "do_sample": True}
    together = engine.generate_batch(PROMPTS, seed=7, **options)
    assert [out.new_ids for out in together] == [
        engine.generate(prompt, seed=7 + row, **options).new_ids for row, prompt in enumerate(PROMPTS)
    ]


def test_rows_that_end_early_leave_the_others_alone(engine):
    alone = [
        engine.generate(p, algorithm="none", max_new_tokens=30, eos_token_id=[]).new_ids for p in PROMPTS
    ]
    stop = alone[0][3]
    options = {"algorithm": "slem", "num_draft_tokens": 4, "max_new_tokens": 30, "eos_token_id": stop}
    together = engine.generate_batch(PROMPTS, **options)
    ends = [new.index(stop) + 1 if stop in new else 30 for new in alone]
    assert [out.new_ids for out in together] == [new[:end] for new, end in zip(alone, ends, strict=True)]
    assert len(set(ends)) > 1


def test_the_target_is_read_once_for_all_rows(tiny):
    engine = tiny.engine()
    batches = []
    honest = tiny.target.forward

    def spy(*args, **kwargs):
        batches.append(kwargs["input_ids"].shape[0])
        return honest(*args, **kwargs)

    assert engine.target.model.joins  # tried before anything is counted
    engine.target.model.reader = engine.target.model._prompt_reader = spy
    outs = engine.generate_batch(
        PROMPTS[:4], algorithm="tli", num_draft_tokens=3, max_new_tokens=20, eos_token_id=[]
    )
    assert batches[:4] == [1] * 4  # the prompts
    assert len(batches) - 4 == max(out.stats.steps for out in outs) - 1
    assert batches[4] == 4


def test_padded_reads_equal_single_reads():
    """Logits of rows of every length, cropped between reads, against fresh forwards of each alone."""
    for kind in sorted({kind for pair in KINDS for kind in pair}):
        model = CachedModel(tiny_model(kind, 64, seed=4))
        rows = [model.new_row() for _ in range(4)]
        texts = [[(7 * b + 3 * i) % 64 for i in range(n)] for b, n in enumerate((1, 5, 17, 30))]
        generator = torch.Generator().manual_seed(0)
        read_together(model, [Reading(row, text, 1) for row, text in zip(rows, texts, strict=True)])
        for _ in range(5):
            readings = []
            for row, text in zip(rows, texts, strict=True):
                cut = int(torch.randint(1, len(text) + 1, (), generator=generator))
                row.crop(min(cut, row.length))
                del text[row.length :]
                new = torch.randint(
                    64, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator
                )
                text += new.tolist()
                readings.append(Reading(row, new.tolist(), len(new)))
            read_together(model, readings)
            for reading, text in zip(readings, texts, strict=True):
                fresh = model.model(torch.tensor([text])).logits[0, -reading.keep :]
                assert torch.allclose(reading.logits, fresh, atol=1e-6), (
                    kind
                )  # some compute in float32 within
                assert reading.row.length == len(text)


def test_rows_at_the_end_of_the_context_are_read_alone(engine):
    prompts = [[7] * 500, "x", [9] * 470]
    options = {"algorithm": "slem", "num_draft_tokens": 5, "max_new_tokens": 40, "eos_token_id": []}
    together = engine.generate_batch(prompts, **options)
    assert [out.new_ids for out in together] == [engine.generate(p, **options).new_ids for p in prompts]
    assert together[0].stats.stop_reason == "context"


def test_batch_forms(engine, tiny):
    ids = [tiny.target_tokenizer.encode(p).ids for p in ("x = 1", "class A:")]
    width = max(map(len, ids))
    padded = {
        side: torch.tensor(
            [([0] * (width - len(r)) + r) if side == "left" else r + [0] * (width - len(r)) for r in ids]
        )
        for side in ("left", "right")
    }
    mask = {
        "left": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in ids]),
        "right": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in ids]),
    }
    expected = [engine.generate(r, max_new_tokens=8).new_ids for r in ids]
    forms = [ids, ["x = 1", "class A:"], {"input_ids": ids}]
    forms += [{"input_ids": padded[s], "attention_mask": mask[s]} for s in padded]
    for form in forms:
        assert [o.new_ids for o in engine.generate_batch(form, max_new_tokens=8)] == expected
    assert engine.generate(
        {"input_ids": padded["left"][:1], "attention_mask": mask["left"][:1]}, max_new_tokens=8
    )
    for bad, message in (("x", "one prompt"), ([], "empty"), ([1, 2], "one prompt"), (["x", ""], "empty")):
        with pytest.raises(InvalidInput, match=message):
            engine.generate_batch(bad, max_new_tokens=2)
    with pytest.raises(InvalidInput, match="1 drafter_inputs for 2 prompts"):
        engine.generate_batch(["x", "y"], drafter_inputs=["x"])
    with pytest.raises(InvalidInput, match="several prompts at once"):
        engine.generate_batch(["x", "y"], logits_processor=[Recorder()])


def test_a_failing_row_ends_the_batch_with_its_error_and_no_thread_is_left(tiny):
    pair = TinyPair()
    pair.drafter.get_output_embeddings().weight.data[5] = torch.nan
    before = threading.active_count()
    with pytest.raises(GenerationError, match="the logits of the drafter are not finite"):
        pair.engine().generate_batch(["x = 1", "y"], algorithm="tli", num_draft_tokens=2, max_new_tokens=5)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_together([lambda: None, interrupted, lambda: None])
    assert threading.active_count() == before


# -- transformers' entry points ---------------------------------------------------------------------------------


def wrapped(tokenizer):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


@pytest.fixture(scope="module")
def extras(tiny):
    """What hf_generate needs beside transformers' own arguments."""
    return {
        "custom_generate": hetspec.hf_generate,
        "pair": tiny.pair,
        "drafter": tiny.drafter,
        "target_tokenizer": tiny.target_tokenizer,
        "drafter_tokenizer": tiny.drafter_tokenizer,
    }


HF_CASES = {
    "greedy": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12},
    "bad words": {"bad_words_ids": [[5], [113]]},
    "max_length": {"max_new_tokens": None, "max_length": 40},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", list(HF_CASES))
def test_custom_generate_equals_generate(tiny, extras, case, rows):
    tokenizer = wrapped(tiny.target_tokenizer)
    inputs = tokenizer([CODE[:60], "x = 1", "class A:\n    pass"][:rows], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **HF_CASES[case]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = tiny.target.generate(**inputs, **options)
        for algorithm in ("slem", "tli", "slrs"):
            found = tiny.target.generate(
                **inputs, **options, **extras, algorithm=algorithm, num_draft_tokens=4
            )
            if case != "scores":
                assert torch.equal(found, expected)
                continue
            assert isinstance(found, GenerateDecoderOnlyOutput)
            assert torch.equal(found.sequences, expected.sequences)
            assert len(found.stats) == rows
            for name in ("scores", "logits"):
                for ours, theirs in zip(found[name], expected[name], strict=True):
                    assert ours.shape == theirs.shape
                    running = theirs.isfinite().any(-1)
                    assert torch.allclose(ours[running].float(), theirs[running], atol=1e-4)


def test_custom_generate_samples_returns_and_seeds(tiny, extras):
    ids = torch.tensor([tiny.target_tokenizer.encode("x = 1").ids])
    options = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 10,
        "pad_token_id": 0,
        "num_return_sequences": 3,
    }
    before = torch.random.get_rng_state()
    runs = [tiny.target.generate(ids, **options, **extras, seed=s, algorithm="tli") for s in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) == 3
    assert torch.equal(before, torch.random.get_rng_state())


def test_custom_generate_streams(tiny, extras, capsys):
    tokenizer = wrapped(tiny.target_tokenizer)
    ids = torch.tensor([tiny.target_tokenizer.encode("x = 1").ids])
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    expected = tokenizer.decode(tiny.target.generate(ids, **options)[0, ids.shape[1] :])
    for name in ("token_streamer", "streamer"):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(
            target=tiny.target.generate, args=(ids,), kwargs={**options, **extras, name: streamer}
        )
        thread.start()
        assert "".join(streamer) == expected
        thread.join()
    tiny.target.generate(ids, **options, **extras, token_streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == expected.strip()


def test_custom_generate_honours_processors_criteria_and_refuses_the_rest(tiny, extras):
    tokenizer = wrapped(tiny.target_tokenizer)
    ids = torch.tensor([tiny.target_tokenizer.encode("x = 1").ids])
    options = {"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    stop = tokenizer.decode(tiny.target.generate(ids, **options)[0, ids.shape[1] + 6 :])[:2]
    own = {
        "logits_processor": lambda: LogitsProcessorList([Recorder()]),
        "stopping_criteria": lambda: StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])]),
    }
    for name, make in own.items():
        expected = tiny.target.generate(ids, **options, **{name: make()})
        for algorithm in ("slem", "tli"):
            found = tiny.target.generate(
                ids, **options, **{name: make()}, **extras, algorithm=algorithm, num_draft_tokens=4
            )
            assert torch.equal(found, expected)
    for bad, message in (
        ({"num_beams": 2}, "num_beams"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"inputs_embeds": torch.zeros(1, ids.shape[1], 32, dtype=torch.float64)}, "inputs_embeds"),
        ({"verify": "often"}, "often"),
    ):
        with pytest.raises(InvalidInput, match=message):
            tiny.target.generate(ids, **options, **bad, **extras)
    padded = torch.cat([ids, ids[:, :1]], 1)
    mask = torch.ones_like(padded)
    mask[:, -1] = 0
    with pytest.raises(InvalidInput, match="padded on the right"):
        tiny.target.generate(padded, attention_mask=mask, **options, **extras)
    with pytest.raises(InvalidInput, match="context holds 512"):
        tiny.target.generate(ids.repeat(1, 200), **options, **extras)
    used = tiny.target(ids, use_cache=True).past_key_values
    with pytest.raises(InvalidInput, match="a cache was given"):
        tiny.target.generate(torch.cat([ids, ids], 1), past_key_values=used, **options, **extras)


def test_a_text_generation_pipeline(tiny, extras):
    tokenizer = wrapped(tiny.target_tokenizer)
    run = pipeline("text-generation", model=tiny.target, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    for prompts in ("x = 1", ["x = 1", "class A:"]):
        assert run(prompts, **options, **extras, algorithm="tli") == run(prompts, **options)


def test_nothing_of_the_callers_is_changed(tiny, extras):
    ids = torch.tensor([tiny.target_tokenizer.encode("x = 1").ids])
    models = (tiny.target, tiny.drafter)
    before = [
        (m.generation_config.to_dict(), m.config.to_dict(), m.training, sorted(vars(m))) for m in models
    ]
    weights = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    with torch.inference_mode():
        tiny.target.generate(ids, repetition_penalty=1.2, max_new_tokens=5, **extras)
    with torch.enable_grad():
        out = tiny.target.generate(ids, do_sample=True, max_new_tokens=5, **extras)
    assert not out.requires_grad
    after = [(m.generation_config.to_dict(), m.config.to_dict(), m.training, sorted(vars(m))) for m in models]
    assert before == after
    for model, old in zip(models, weights, strict=True):
        assert all(torch.equal(v, old[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("slip", ["positions", "mask"])
def test_a_batch_without_positions_or_mask_is_noticed(monkeypatch, slip):
    """A mutant of the padded read: rows must then differ from their single runs."""
    from hetspec.runtime import models

    honest = models.CachedModel.read

    def mutant(self, tokens, cache, keep, **where):
        if len(tokens) > 1:
            if slip == "positions":
                where["position_ids"] = where["position_ids"] * 0
            else:
                where["attention_mask"] = where["attention_mask"] * 0 + 1
        return honest(self, tokens, cache, keep, **where)

    differ = []
    for kinds in (("llama", "gpt2"), ("gpt2", "llama"), ("neox", "llama"), ("mistral", "gemma3")):
        engine = TinyPair(*kinds, std=0.25).engine()
        assert engine.target.model.joins
        assert engine.drafter.model.joins
        options = {"algorithm": "none", "max_new_tokens": 20}
        alone = [engine.generate(p, **options).new_ids for p in PROMPTS[2:]]
        monkeypatch.setattr(models.CachedModel, "read", mutant)
        if [o.new_ids for o in engine.generate_batch(PROMPTS[2:], **options)] != alone:
            differ.append(kinds[0])
        monkeypatch.undo()
    assert differ == ["llama", "gpt2", "neox", "mistral"]
