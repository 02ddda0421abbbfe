"""Prompts of every kind, whatever the drafter's tokenizer does to them: lossless, and aligned to the last byte."""

from __future__ import annotations

import logging

import pytest
import torch
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from hetspec.errors import InvalidInput
from hetspec.runtime.engine import Engine
from tests.builders import sentencepiece_bpe, wordpiece
from tests.test_runtime import PROSE, TinyPair, plain
from tests.toys import trained_bpe

CASES = {
    "control tokens only": [0, 0, 0],
    "padding rows only": [425, 431],
    "a normaliser changes it": "ﬁne ½ Ⅷ ÀÉ ẞ Å ｆｕｌｌ",
    "emoji in several tokens": "👩‍👩‍👧 🤗🏳️‍🌈",
    "a broken character": [131, 200, 240, 160],
    "right to left": "مرحبا بالعالم שלום עולם",
    "CJK": "你好，世界。これはテストです。안녕하세요",
    "leading spaces": " " * 100 + "x",
    "line ends": "a\r\nb\rc\n\r\n\t\r\n",
    "NUL": "a\x00b\x00\x00",
    "combining": "e\u0301 o\u0308 \u200d\u200b\ufeff",
    "control token as text": "<eos> <|im_end|> </s> <eos>",
    "repeated paragraph": "The same words again. " * 12,
}


def normalising():
    tokenizer = trained_bpe([PROSE], 300)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


DRAFTERS = {
    "byte-level BPE": lambda: None,
    "normalising": normalising,
    "SentencePiece": sentencepiece_bpe,
    "without byte fallback": lambda: sentencepiece_bpe(fallback=False),
    "WordPiece": wordpiece,
}


@pytest.fixture(scope="module", params=list(DRAFTERS))
def pair(request):
    return TinyPair(drafter_tokenizer=DRAFTERS[request.param]())


@pytest.fixture(scope="module")
def engine(pair):
    return pair.engine()


def test_greedy_is_plain_on_every_kind_of_prompt(pair, engine):
    for name, prompt in CASES.items():
        ids = prompt if isinstance(prompt, list) else pair.target_tokenizer.encode(prompt).ids
        expected = plain(pair.target, ids, 16)
        for algorithm in ("slem", "tli", "slrs"):
            out = engine.generate(prompt, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=16)
            assert out.new_ids == expected, (name, algorithm)


def test_no_drift_over_500_tokens(pair, engine):
    """The drafter's committed tokens spell the whole text at every step, rejections and all."""
    for algorithm in ("slem", "slrs") if pair.drafter_tokenizer.get_vocab_size() % 2 else ("slrs",):
        decoder = engine.decoder(
            "naïve 🤗 你好\r\n",
            algorithm=algorithm,
            num_draft_tokens=4,
            max_new_tokens=480,
            do_sample=True,
            seed=3,
            eos_token_id=[],
        )
        while not decoder.done:
            decoder.step()
            context = decoder.context
            if decoder.done:
                break
            text = engine.target.vocabulary.spell(decoder.ids)
            assert bytes(context.text) in (text, b" " + text)  # the drafter's dummy prefix is its own
            assert len(context.ids) == len(context.ends)
            held_back = len(context.text) - context.ends[-1]
            assert 0 <= held_back <= 3  # of an unfinished character at most
            if context.unspelled_bytes == 0:
                spelled = context.vocabulary.spell(context.ids[: context._committed])
                assert bytes(context.text[: context.ends[-1]]).endswith(
                    spelled
                )  # a full window keeps the tail
                assert len(spelled) > min(150, context.ends[-1] - 1)
        assert len(decoder.new_ids) == 480
        assert decoder.stats.drafter_tokens < 4 * (decoder.stats.drafter_forwards + 500)


# -- chats -------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "target": "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] ",
    "drafter": "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}### assistant: ",
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


def with_template(tokenizer, side):
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.chat_template = TEMPLATES.get(side)
    return wrapped


def chat_engine(tiny, sides):
    return Engine(
        tiny.target,
        tiny.drafter,
        tiny.pair,
        target_tokenizer=with_template(tiny.target_tokenizer, "target" if "target" in sides else ""),
        drafter_tokenizer=with_template(tiny.drafter_tokenizer, "drafter" if "drafter" in sides else ""),
    )


@pytest.fixture(scope="module")
def tiny():
    return TinyPair()


def drafter_text(decoder):
    context = decoder.context
    return context.vocabulary.spell(context.ids).decode()


def test_each_model_gets_its_own_template(tiny):
    engine = chat_engine(tiny, ("target", "drafter"))
    rendered = "[system] Be brief.\n[user] What is 2 + 2?\n[assistant] "
    ids = tiny.target_tokenizer.encode(rendered).ids
    for algorithm in ("slem", "tli", "slrs"):
        decoder = engine.decoder(CHAT, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=16)
        assert decoder.ids == ids
        assert drafter_text(decoder) == "### system:\nBe brief.\n### user:\nWhat is 2 + 2?\n### assistant: "
        while not decoder.done:
            decoder.step()
        assert decoder.new_ids == plain(tiny.target, ids, 16)


def test_a_drafter_without_a_template_reads_the_targets_text(tiny):
    engine = chat_engine(tiny, ("target",))
    decoder = engine.decoder(CHAT, algorithm="slem", max_new_tokens=4)
    assert drafter_text(decoder) == "[system] Be brief.\n[user] What is 2 + 2?\n[assistant] "
    with pytest.raises(InvalidInput, match="t has no chat template"):
        chat_engine(tiny, ("drafter",)).decoder(CHAT)


def test_a_drafter_whose_template_refuses_the_chat_says_so_and_reads_the_text(tiny, caplog):
    engine = chat_engine(tiny, ("target", "drafter"))
    engine.drafter.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with caplog.at_level(logging.WARNING, "hetspec"):
        decoder = engine.decoder(CHAT, algorithm="slem", max_new_tokens=4)
    assert drafter_text(decoder).startswith("[system] Be brief.")
    assert "no system role" in caplog.text


@pytest.mark.parametrize("own", ["Count: 1, 2, 3, 4,", [5, 6, 7], CHAT], ids=["text", "ids", "chat"])
def test_the_drafter_may_have_a_prompt_of_its_own(tiny, own):
    engine = chat_engine(tiny, ("target", "drafter"))
    ids = tiny.target_tokenizer.encode("x = 1").ids
    decoder = engine.decoder(
        "x = 1", drafter_inputs=own, algorithm="slem", num_draft_tokens=3, max_new_tokens=16
    )
    begun = len(decoder.context.ids)
    expected = own if own == [5, 6, 7] else None
    if expected:
        assert decoder.context.ids[-3:] == expected
    else:
        assert drafter_text(decoder).endswith("4," if isinstance(own, str) else "assistant: ")
    while not decoder.done:
        decoder.step()
    assert decoder.new_ids == plain(tiny.target, ids, 16)
    assert len(decoder.context.ids) > begun  # it went on from there


def test_a_chat_in_a_batch(tiny):
    engine = chat_engine(tiny, ("target", "drafter"))
    chats = [CHAT, CHAT[1:], "x = 1"]
    options = {"algorithm": "slrs", "num_draft_tokens": 3, "max_new_tokens": 12}
    assert [o.new_ids for o in engine.generate_batch(chats, **options)] == [
        engine.generate(chat, **options).new_ids for chat in chats
    ]


def test_long_prompts_of_one_token_over_and_over(tiny):
    """Acceptance statistics of a repetitive text match the run (BUGS D14)."""
    engine = tiny.engine()
    out = engine.generate(
        "The same words again. " * 12, algorithm="tli", num_draft_tokens=3, max_new_tokens=60
    )
    stats = out.stats
    assert stats.new_tokens == len(out.new_ids)
    assert stats.accepted + stats.steps >= stats.new_tokens > stats.accepted
    assert sum(stats.accepted_by_position) == stats.accepted
    assert torch.equal(out.sequences[0, -stats.new_tokens :], torch.tensor(out.new_ids))
