"""The runtime on small random models of real architectures, in float64: equality with transformers' own decoding."""

from __future__ import annotations

import dataclasses
import dis  # two modules of the standard library serve as text
import inspect
import textwrap

import pytest
import torch

import hetspec
from hetspec.artifact import PairArtifact, TokenizerIdentity
from hetspec.errors import GenerationError, IncompatiblePair, InvalidInput, StaleArtifact, UnsupportedModel
from hetspec.prep.affinity import cosegment
from hetspec.prep.intersect import build_map
from hetspec.runtime import decode, request
from hetspec.runtime import plan as plans
from hetspec.runtime.engine import Engine
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary
from tests.toys import tiny_model, trained_bpe

CODE, PROSE = inspect.getsource(dis), inspect.getsource(textwrap)
PROMPTS = [
    "def f(x):\n    return x",
    "The quick brown fox",
    "x",
    "    \n\n\t",
    "naïve café 🤗 你好",
    "مرحبا x = [1, 2, 3]\r\n",
    " " * 20 + "for i in range(10):\n",
    "import os, sys\nclass A:\n    pass\n",
]


class TinyPair:
    """A heterogeneous pair of trained tokenizers with random models."""

    def __init__(
        self, target_kind="llama", drafter_kind="llama", eos=0, drafter_tokenizer=None, **model_options
    ):
        self.target_tokenizer = trained_bpe([CODE, PROSE], 420)
        self.drafter_tokenizer = drafter_tokenizer or trained_bpe([PROSE[: len(PROSE) // 3]], 330)
        rows = self.drafter_tokenizer.get_vocab_size() + 6
        self.target = tiny_model(target_kind, 432, seed=1, eos=eos, **model_options)
        self.drafter = tiny_model(drafter_kind, rows, seed=2, **model_options)
        t = Vocabulary.from_tokenizer(self.target_tokenizer, name="t", rows=432, eos_ids=(0,))
        d = Vocabulary.from_tokenizer(self.drafter_tokenizer, name="d", rows=rows, eos_ids=(0,))
        self.pair = PairArtifact(
            target=TokenizerIdentity.of(t),
            drafter=TokenizerIdentity.of(d),
            map=build_map(t, d, Segmenter(self.target_tokenizer, t)),
        )

    def with_kernel(self):
        """The same pair with a co-segmentation kernel, so that RDK can be run and SLRS knows where to look ahead."""
        t = Vocabulary.from_tokenizer(self.target_tokenizer, name="t", rows=432, eos_ids=(0,))
        d = Vocabulary.from_tokenizer(self.drafter_tokenizer, name="d", rows=336, eos_ids=(0,))
        sides = Segmenter(self.target_tokenizer, t), Segmenter(self.drafter_tokenizer, d)
        kernel = cosegment(self.pair.map, *sides, [CODE.encode()]).kernel
        self.pair = dataclasses.replace(self.pair, kernels={"cosegment": kernel})
        return self

    def engine(self, drafter=None, **options):
        return Engine(
            self.target,
            drafter if drafter is not None else self.drafter,
            self.pair,
            target_tokenizer=self.target_tokenizer,
            drafter_tokenizer=self.drafter_tokenizer,
            **options,
        )


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny.engine()


def plain(model, prompt_ids, n):
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt_ids) :].tolist()


@pytest.mark.parametrize(
    "kinds",
    [
        ("llama", "gpt2"),
        ("gpt2", "llama"),
        ("gemma3", "mistral"),
        ("mistral", "gemma3"),
        ("bloom", "mpt"),
        ("mpt", "opt"),
        ("opt", "bloom"),
        ("gemma2", "neox"),
        ("neox", "mixtral"),
        ("mixtral", "gemma2"),
    ],
)
def test_greedy_equals_transformers(kinds):
    """Rotary and learned positions, sliding windows of 8 on either side, every draft length."""
    pair = TinyPair(*kinds, std=0.25)
    engine = pair.engine()
    runs = [("none", 0), ("slem", 1), ("slem", 5), ("tli", 1), ("tli", 5), ("slrs", 1), ("slrs", 5)]
    for prompt in PROMPTS[3:7]:
        ids = pair.target_tokenizer.encode(prompt).ids
        expected = plain(pair.target, ids, 30)
        for algorithm, k in runs:
            out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=k, max_new_tokens=30)
            assert out.new_ids == expected, (prompt, algorithm, k)


def test_auto_length_changes_nothing_but_speed(engine, tiny):
    ids = tiny.target_tokenizer.encode(PROMPTS[0]).ids
    for algorithm in ("slem", "tli", "auto"):
        assert engine.generate(PROMPTS[0], algorithm=algorithm, max_new_tokens=30).new_ids == plain(
            tiny.target, ids, 30
        )


def self_pair(tiny):
    """The target as its own drafter, tokenizer and all."""
    t = Vocabulary.from_tokenizer(tiny.target_tokenizer, name="t", rows=432, eos_ids=(0,))
    identity = TokenizerIdentity.of(t)
    pair = PairArtifact(identity, identity, build_map(t, t, Segmenter(tiny.target_tokenizer, t)))
    return Engine(
        tiny.target,
        tiny.target,
        pair,
        target_tokenizer=tiny.target_tokenizer,
        drafter_tokenizer=tiny.target_tokenizer,
    )


def test_the_target_as_its_own_drafter_accepts_everything(tiny):
    out = self_pair(tiny).generate(
        "def f(x):", algorithm="tli", num_draft_tokens=4, max_new_tokens=20, eos_token_id=[]
    )
    assert out.stats.accepted == out.stats.proposed == 16
    assert out.stats.steps == 4
    assert out.stats.tokens_per_target_pass == 5.0
    assert out.stats.acceptance_by_position == [1.0] * 4


def test_cached_logits_equal_a_fresh_forward(tiny, engine):
    """After every step, rejections included, the next logits are those of the whole sequence read afresh."""
    decoder = engine.decoder(PROMPTS[4], algorithm="slem", num_draft_tokens=5, max_new_tokens=40)
    while not decoder.done:
        decoder.step()
        cached = decoder.target.length
        assert cached == len(decoder.ids) - 1
        fed = decoder.ids[cached:]
        logits = decoder.target.forward(fed, keep=1)[0]
        decoder.target.crop(cached)
        fresh = tiny.target(torch.tensor([decoder.ids])).logits[0, -1]
        assert torch.allclose(logits, fresh, atol=1e-9)
        context = decoder.context
        if not decoder.done:
            drafted = context.next_logits()
            fresh = tiny.drafter(torch.tensor([context.ids])).logits[0, -1]
            assert torch.allclose(drafted, fresh, atol=1e-9)


def test_drafter_context_spells_the_committed_text(engine):
    for prompt in PROMPTS:
        for algorithm in ("slem", "slrs"):
            decoder = engine.decoder(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=40)
            while not decoder.done:
                decoder.step()
                context = decoder.context
                committed = context.ids[: context._committed]
                if not decoder.done:
                    assert context.segmenter.vocabulary.spell(committed) == bytes(context.text)
                    assert bytes(context.text) == engine.target.vocabulary.spell(decoder.ids)
                    assert context.ends[-1] == len(context.text)


def test_drafter_reads_only_new_tokens(engine):
    """What it reads over a whole run: its prompt once, then a few tokens a step, however long the context is."""
    prompt = CODE[:700]
    for algorithm in ("slem", "tli"):
        decoder = engine.decoder(prompt, algorithm=algorithm, num_draft_tokens=4, max_new_tokens=50)
        start = len(decoder.context.ids)
        while not decoder.done:
            decoder.step()
        stats = decoder.stats
        assert stats.drafter_tokens <= start + stats.drafter_forwards + 10 * stats.steps
        assert stats.drafter_tokens < 3 * start


def test_eos_inside_an_accepted_run_ends_the_generation(tiny):
    """Any token may be declared EOS; the output is cut at its first occurrence."""
    engine = self_pair(tiny)
    free = engine.generate("class A:", algorithm="none", max_new_tokens=30, eos_token_id=[]).new_ids
    for stop in (free[3], free[7]):
        expected = free[: free.index(stop) + 1]
        for algorithm in ("none", "slem", "tli"):
            out = engine.generate(
                "class A:",
                algorithm=algorithm,
                num_draft_tokens=8,
                max_new_tokens=30,
                eos_token_id=[stop, 431],
            )
            assert out.new_ids == expected
            assert out.stats.stop_reason == "eos"


@pytest.mark.parametrize("n", [1, 2, 6, 7])
def test_exactly_max_new_tokens(engine, n):
    for algorithm in ("none", "slem", "tli"):
        out = engine.generate(
            "x = 1", algorithm=algorithm, num_draft_tokens=5, max_new_tokens=n, eos_token_id=[]
        )
        assert len(out.new_ids) == n
        assert out.stats.new_tokens == n


def test_a_seed_repeats_and_the_global_state_is_untouched(engine, tiny):
    before = torch.random.get_rng_state()
    config = tiny.target.generation_config.to_dict()
    runs = [
        engine.generate("x", algorithm="tli", do_sample=True, seed=seed, max_new_tokens=20).new_ids
        for seed in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert torch.equal(before, torch.random.get_rng_state())
    assert config == tiny.target.generation_config.to_dict()
    assert not any(p.requires_grad and p.grad is not None for p in tiny.target.parameters())


def test_stream_yields_the_same_text(engine):
    out = engine.generate(PROMPTS[4], algorithm="slem", max_new_tokens=40)
    chunks = list(engine.stream(PROMPTS[4], algorithm="slem", max_new_tokens=40))
    assert "".join(chunk.text for chunk in chunks) == out.text
    assert [i for chunk in chunks for i in chunk.ids] == out.new_ids


def test_streamer_gets_prompt_and_tokens(engine):
    class Recorder:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Recorder()
    out = engine.generate("x = 1", algorithm="tli", max_new_tokens=9, streamer=streamer)
    assert streamer.seen == out.sequences[0].tolist()
    assert streamer.ended


def test_function_api_and_prompt_forms(tiny):
    ids = tiny.target_tokenizer.encode("x = 1").ids
    kwargs = {
        "drafter": tiny.drafter,
        "pair": tiny.pair,
        "target_tokenizer": tiny.target_tokenizer,
        "drafter_tokenizer": tiny.drafter_tokenizer,
        "max_new_tokens": 8,
    }
    forms = ["x = 1", ids, torch.tensor(ids), torch.tensor([ids]), {"input_ids": torch.tensor([ids])}]
    results = {tuple(hetspec.generate(tiny.target, form, **kwargs).new_ids) for form in forms}
    assert len(results) == 1


# -- a drafter that cannot keep up -------------------------------------------------------------------------------


def test_a_drafter_with_a_short_window_reads_a_tail():
    pair = TinyPair()
    short = tiny_model("gpt2", 336, seed=3, positions=48)
    ids = pair.target_tokenizer.encode(CODE[:400]).ids
    expected = plain(pair.target, ids, 60)
    for algorithm in ("slem", "tli", "slrs"):
        out = pair.engine(short).generate(ids, algorithm=algorithm, num_draft_tokens=4, max_new_tokens=60)
        assert out.new_ids == expected
        assert out.stats.proposed > 0


def test_disjoint_vocabularies_decode_plainly_or_are_refused(tiny):
    target = trained_bpe(["aaaa"], 258)
    vocabulary = Vocabulary.from_tokenizer(target, name="t", rows=432)
    none = build_map(vocabulary, vocabulary, Segmenter(target, vocabulary))
    for name in ("d2t", "t2d"):
        getattr(none, name)[:] = -1
    identity = TokenizerIdentity.of(vocabulary)
    engine = Engine(
        tiny.target,
        tiny.target,
        PairArtifact(identity, identity, none),
        target_tokenizer=target,
        drafter_tokenizer=target,
    )
    with pytest.raises(IncompatiblePair, match="share no token"):
        engine.generate("x", algorithm="tli", max_new_tokens=4)
    assert len(engine.generate("x", algorithm="slem", max_new_tokens=4, eos_token_id=[]).new_ids) == 4


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_gained_a_token_is_refused(tiny):
    tokenizer = trained_bpe([CODE, PROSE], 420)
    engine = Engine(
        tiny.target,
        tiny.drafter,
        tiny.pair,
        target_tokenizer=tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
    )
    engine.generate("x", max_new_tokens=2)
    tokenizer.add_tokens(["zzz"])
    with pytest.raises(StaleArtifact, match="hetspec-prep build-map"):
        engine.generate("x", max_new_tokens=2)


def test_swapped_sides_are_refused(tiny):
    with pytest.raises((StaleArtifact, IncompatiblePair)):
        Engine(
            tiny.target,
            tiny.drafter,
            tiny.pair,
            target_tokenizer=tiny.drafter_tokenizer,
            drafter_tokenizer=tiny.target_tokenizer,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens"),
        ({"assistant_confidence_threshold": 0.1}, "assistant_confidence_threshold"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"token_healing": True}, "token_healing"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"repetition_penalty": -1.0}, "strictly positive"),
        ({"bad_words_ids": "x"}, "bad_words_ids"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"max_time": -1}, "max_time"),
        ({"seed": 1, "generator": torch.Generator()}, "only one"),
        ({"verify": "sometimes"}, "sometimes"),
        ({"generation_config": "/nowhere/at/all.json"}, "not a generation config"),
        ({"misspelt": 1}, "misspelt"),
        ({"algorithm": "magic"}, "magic"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": "five"}, "num_draft_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "top_p": 0.0}, "top_p"),
        ({"do_sample": True, "min_p": 2.0}, "min_p"),
    ],
)
def test_options_that_are_not_honoured_are_refused_by_name(engine, options, message):
    with pytest.raises(InvalidInput, match=message):
        engine.generate("x", **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[1, 2], [3, 4]], "generate_batch"),
        ([5000], "outside"),
        ([1] * 512, "context"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "holes"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "shape"),
        ({"input_ids": [[1, 2]], "pixel_values": [[0.5]]}, "pixel_values"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 1]]}, "token_type_ids"),
        ({"inputs_embeds": [[0.1]]}, "inputs_embeds"),
        ([{"role": "user", "content": "x"}], "chat template"),
        (3.5, "float"),
    ],
    ids=[
        "text",
        "ids",
        "batch",
        "range",
        "long",
        "holes",
        "mask",
        "pixels",
        "types",
        "embeds",
        "chat",
        "type",
    ],
)
def test_prompts_that_cannot_be_used(engine, prompt, message):
    with pytest.raises(InvalidInput, match=message):
        engine.generate(prompt, max_new_tokens=4)


def test_generation_stops_at_the_end_of_the_context(engine):
    out = engine.generate([7] * 505, algorithm="slem", num_draft_tokens=5, max_new_tokens=50, eos_token_id=[])
    assert out.stats.stop_reason == "context"
    assert len(out.sequences[0]) == 512


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("algorithm", ["slem", "tli"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_one_clear_error(side, algorithm, do_sample):
    pair = TinyPair()
    getattr(pair, side).get_output_embeddings().weight.data[5] = torch.nan
    with pytest.raises(GenerationError, match=f"the logits of the {side} are not finite"):
        pair.engine().generate(
            "x = 1", algorithm=algorithm, num_draft_tokens=3, max_new_tokens=5, do_sample=do_sample
        )


def test_encoder_decoder_and_recurrent_models_are_refused(tiny):
    import transformers

    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=432, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=432, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    for model, message in ((t5, "encoder-decoder"), (mamba, "cannot be cropped")):
        with pytest.raises(UnsupportedModel, match=message):
            Engine(model, None, None, target_tokenizer=tiny.target_tokenizer)


# -- what a review found, each with its test ---------------------------------------------------------------------------


def test_a_users_generation_config_keeps_the_models_eos(tiny):
    """transformers fills the fields a user's config leaves open from the model's."""
    from transformers import GenerationConfig

    engine = self_pair(tiny)
    free = engine.generate("class A:", algorithm="none", max_new_tokens=12, eos_token_id=[]).new_ids
    tiny.target.generation_config.eos_token_id = free[4]
    try:
        config = GenerationConfig(max_new_tokens=12, do_sample=False)
        ids = torch.tensor([tiny.target_tokenizer.encode("class A:").ids])
        expected = tiny.target.generate(ids, generation_config=config, pad_token_id=0)[
            0, ids.shape[1] :
        ].tolist()
        for algorithm in ("none", "slem", "tli", "slrs"):
            out = engine.generate(
                "class A:", algorithm=algorithm, num_draft_tokens=3, generation_config=config
            )
            assert out.new_ids == expected == free[: free.index(free[4]) + 1]
    finally:
        tiny.target.generation_config.eos_token_id = 0


def test_truncation_and_padding_of_earlier_calls_do_not_touch_prompts_or_drafts(tiny):
    tokenizer = trained_bpe([CODE, PROSE], 420)
    engine = Engine(
        tiny.target,
        tiny.drafter,
        tiny.pair,
        target_tokenizer=tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
    )
    before = engine.generate(CODE[:80], algorithm="slem", num_draft_tokens=4, max_new_tokens=20)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    after = engine.generate(CODE[:80], algorithm="slem", num_draft_tokens=4, max_new_tokens=20)
    assert torch.equal(before.sequences, after.sequences)
    assert before.stats.accepted == after.stats.accepted


def test_a_changed_normaliser_is_a_stale_pair(tiny):
    from tokenizers import normalizers

    tokenizer = trained_bpe([CODE, PROSE], 420)
    engine = Engine(
        tiny.target,
        tiny.drafter,
        tiny.pair,
        target_tokenizer=tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
    )
    engine.generate("x", max_new_tokens=2)
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(StaleArtifact):
        engine.generate("x", max_new_tokens=2)


@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_a_pair_built_without_models_serves_padded_ones(tiny, algorithm):
    """A bare tokenizer file knows nothing of padding rows."""
    t = Vocabulary.from_tokenizer(tiny.target_tokenizer, name="t", eos_ids=(0,))
    d = Vocabulary.from_tokenizer(tiny.drafter_tokenizer, name="d", eos_ids=(0,))
    assert (t.rows, d.rows) == (420, 330)
    bare = PairArtifact(
        TokenizerIdentity.of(t), TokenizerIdentity.of(d), build_map(t, d, Segmenter(tiny.target_tokenizer, t))
    )
    engine = Engine(
        tiny.target,
        tiny.drafter,
        bare,
        target_tokenizer=tiny.target_tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
    )
    for seed in range(3):
        out = engine.generate(
            "x = 1", algorithm=algorithm, num_draft_tokens=4, max_new_tokens=20, do_sample=True, seed=seed
        )
        same = tiny.engine().generate(
            "x = 1", algorithm=algorithm, num_draft_tokens=4, max_new_tokens=20, do_sample=True, seed=seed
        )
        assert out.new_ids == same.new_ids


@pytest.mark.parametrize("positions", [3, 4, 6, 10, 24, 40])
@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_any_drafter_window_is_lossless_and_keeps_its_text_aligned(tiny, positions, algorithm):
    short = tiny_model("gpt2", 336, seed=3, positions=positions)
    ids = tiny.target_tokenizer.encode(CODE[:200]).ids
    decoder = tiny.engine(short).decoder(ids, algorithm=algorithm, num_draft_tokens=5, max_new_tokens=30)
    reencoded = []
    encode = decoder.context.segmenter.encode
    decoder.context.segmenter.encode = lambda text: reencoded.append(len(text)) or encode(text)
    while not decoder.done:
        decoder.step()
        context = decoder.context
        if not decoder.done:
            kept = context.vocabulary.spell(context.ids[: context._committed])
            assert bytes(context.text).endswith(kept)
            assert context.ends[-1] == len(context.text)
            assert len(context.ids) <= max(positions, 60)
    del decoder.context.segmenter.encode
    assert decoder.new_ids == plain(tiny.target, ids, 30)
    assert max(reencoded, default=0) < 120  # never the whole text


def test_a_long_prompt_of_the_drafters_own_slides_too(tiny):
    short = tiny_model("gpt2", 336, seed=3, positions=32)
    own = tiny.drafter_tokenizer.encode(CODE[:300]).ids
    ids = tiny.target_tokenizer.encode("x = 1").ids
    out = tiny.engine(short).generate(
        ids, drafter_inputs=own, algorithm="slem", num_draft_tokens=4, max_new_tokens=30
    )
    assert out.new_ids == plain(tiny.target, ids, 30)
    assert out.stats.proposed > 0


@pytest.mark.parametrize("algorithm", ["slem", "tli", "slrs"])
def test_a_drafter_sees_no_more_than_its_window(tiny, engine, algorithm, monkeypatch):
    monkeypatch.setattr(request, "LEAST_WINDOW", 64)
    ids = tiny.target_tokenizer.encode(CODE).ids[:200]
    options = {"algorithm": algorithm, "num_draft_tokens": 3, "eos_token_id": []}
    decoder = engine.decoder(ids, **options, max_new_tokens=40, draft_window=64)
    unread, longest = decoder.context.unread, 0
    assert unread == 32 + len(engine.drafter.begins_with)
    while not decoder.done:
        decoder.step()
        longest = max(longest, decoder.context.row.length)
    assert decoder.new_ids == plain(tiny.target, ids, 40)
    assert 40 < longest <= 64
    assert decoder.stats.proposed > 30
    wide = engine.decoder(ids, **options, draft_window=2048).context
    assert wide.unread == len(wide.ids) > 200
    for window in (10, None):
        with pytest.raises(InvalidInput, match=f"draft_window is {window}, expected 64 or more"):
            engine.generate(ids, draft_window=window)


def test_reading_again_what_a_full_window_keeps_is_not_a_usual_step(tiny, engine, monkeypatch):
    monkeypatch.setattr(request, "LEAST_WINDOW", 64)
    monkeypatch.setattr(decode, "REREAD", 16)
    ids = tiny.target_tokenizer.encode(CODE).ids[:100]
    decoder = engine.decoder(ids, algorithm="slem", num_draft_tokens=3, max_new_tokens=60, draft_window=64)
    steps = []
    monkeypatch.setattr(decoder.plan, "observe", steps.append)
    read = []
    while not decoder.done:
        before = decoder.context.row.tokens_fed
        decoder.step()
        read.append(decoder.context.row.tokens_fed - before)
    first = [step.first for step in steps]
    assert first == [i == 0 or n > 20 for i, n in enumerate(read)]
    assert sum(first) > 1


def test_role_ids_in_padded_rows_do_no_harm(tiny):
    t = Vocabulary.from_tokenizer(tiny.target_tokenizer, name="t", rows=432, eos_ids=(0,))
    d = Vocabulary.from_tokenizer(tiny.drafter_tokenizer, name="d", rows=336, eos_ids=(334,))
    pair = PairArtifact(
        TokenizerIdentity.of(t), TokenizerIdentity.of(d), build_map(t, d, Segmenter(tiny.target_tokenizer, t))
    )
    engine = Engine(
        tiny.target,
        tiny.drafter,
        pair,
        target_tokenizer=tiny.target_tokenizer,
        drafter_tokenizer=tiny.drafter_tokenizer,
    )
    ids = [0, *tiny.target_tokenizer.encode("x = 1").ids]
    for algorithm in ("slem", "tli", "slrs"):
        assert engine.generate(
            ids, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=10
        ).new_ids == plain(tiny.target, ids, 10)


@pytest.mark.parametrize("prompt", [[0], [0, 0], [425], [425, 431]])
def test_prompts_of_control_or_padding_ids_only(tiny, engine, prompt):
    for algorithm in ("slem", "tli", "slrs"):
        out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=12)
        assert out.new_ids == plain(tiny.target, prompt, 12)


def test_a_control_token_generated_mid_text_reaches_the_drafter_as_in_a_prompt(tiny, engine):
    text = tiny.target_tokenizer.encode("x = 1").ids
    decoder = engine.decoder([*text, 0, *text], algorithm="slem", eos_token_id=[])
    grown = engine.decoder(text, algorithm="slem", eos_token_id=[])
    grown.context.commit_ids([0], engine.target.vocabulary)
    grown.context.commit_ids(text, engine.target.vocabulary)
    assert grown.context.ids == decoder.context.ids
    assert 0 in grown.context.ids


def test_sampling_options_without_sampling_are_refused(engine):
    with pytest.raises(InvalidInput, match=r"temperature=0\.7, top_p=0\.9 without do_sample"):
        engine.generate("x", temperature=0.7, top_p=0.9)
    with pytest.raises(InvalidInput, match="no effect"):
        engine.generate("x", algorithm="slem", draft_temperature=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"eos_token_id": [9999]}, "9999"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_values_of_the_wrong_type_are_named(engine, options, message):
    with pytest.raises(InvalidInput, match=message):
        engine.generate("x", **options)


def test_ids_as_numpy_and_eos_as_tensor(engine):
    import numpy as np

    reference = engine.generate([5, 6], algorithm="none", max_new_tokens=5, eos_token_id=[3]).new_ids
    forms = (np.array([5, 6]), [np.int64(5), np.int64(6)], np.array([[5, 6]]))
    for form in forms:
        out = engine.generate(form, algorithm="none", max_new_tokens=5, eos_token_id=torch.tensor(3))
        assert out.new_ids == reference
    with pytest.raises(InvalidInput, match="not whole numbers"):
        engine.generate(torch.tensor([0.5, 1.0]), max_new_tokens=2)


def test_parts_of_the_time_sum_to_the_total(engine):
    stats = engine.generate(CODE[:600], algorithm="slrs", num_draft_tokens=4, max_new_tokens=30).stats
    assert sum(stats.seconds.values()) == pytest.approx(stats.total_seconds, rel=0.02)


def test_auto_counts_only_steps_that_drafted(engine):
    for _ in range(4):
        engine.generate("x", algorithm="auto", num_draft_tokens=2, max_new_tokens=1)
    key = next(k for k in engine._records if k[3] == 2)
    assert all(record.steps == 0 for record in engine._records[key].values())


def test_auto_with_a_seed_repeats_and_tells_why(engine):
    runs = [engine.generate("x = 1", do_sample=True, seed=4, max_new_tokens=40) for _ in range(2)]
    assert runs[0].new_ids == runs[1].new_ids
    assert runs[0].stats.choice == runs[1].stats.choice
    assert "tokens per target step" in runs[0].stats.choice
    assert runs[0].algorithm in ("slrs", "slem", "tli")


@pytest.mark.parametrize("algorithm", ["auto", "slem"])
def test_a_long_prompt_is_not_read_for_the_drafter_where_that_would_not_pay(
    tiny, engine, monkeypatch, algorithm
):
    asked = []
    monkeypatch.setattr(decode, "LONG_PROMPT", 100)
    monkeypatch.setattr(plans.ConfidentLength, "choose", lambda _: 2)
    prompt = tiny.target_tokenizer.encode(CODE).ids[:100]
    for pays in (False, True):
        monkeypatch.setattr(
            plans.ConfidentLength, "pays", lambda _, *seen, pays=pays: asked.append(seen) or pays
        )
        out = engine.generate(prompt, algorithm=algorithm, max_new_tokens=6, eos_token_id=[])
        assert out.new_ids == plain(tiny.target, prompt, 6)
        assert (out.stats.drafter_forwards > 0) == pays
        assert (out.stats.choice == decode.UNREAD) == (not pays)
    assert asked[0][0] == float("inf")  # before the target has read it
    assert asked[0][1] == 6
    asked.clear()
    engine.generate(prompt[1:], algorithm=algorithm, max_new_tokens=6)
    engine.generate(prompt, algorithm=algorithm, num_draft_tokens=2, max_new_tokens=6)
    assert not asked
