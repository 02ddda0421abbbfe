"""The shipped tiny drafters, and the pipeline that makes them, in tiny."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hetspec.prep import tiny_train
from hetspec.prep.tiny_prompts import KeptOut, Prompt, function_heads
from hetspec.prep.tiny_texts import TextRow, read_shards, shard_rows, write_shard, write_texts
from hetspec.prep.tiny_train import Shape, Source, Trained, TrainingSettings
from hetspec.sources import load_tokenizer
from hetspec.vocab import Vocabulary

DRAFTERS = Path(__file__).parent.parent / "artifacts" / "drafters"
SHIPPED = ("tiny-bpe", "tiny-bytes")
TINY = Shape(300, 32, 1, 2, 64, 32)
TEXTS = ["def f(x):\n    return x + 1\n", "It's 12345 o'clock, naïve façade — 你好 😀\n\n  and  spaces"]


# --- what is shipped -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafter_loads_and_is_small(name: str) -> None:
    folder = DRAFTERS / name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size <= tiny_train.BYTES_LIMIT
    assert tokenizer.is_fast
    assert len(tokenizer) == model.config.vocab_size == tiny_train.SHAPES[name].vocabulary
    assert tokenizer.eos_token_id == model.config.eos_token_id
    card = (folder / "README.md").read_text("utf-8")
    assert "license: apache-2.0" in card
    assert "bits per byte" in card


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tokenizer_spells_every_byte(name: str) -> None:
    source = load_tokenizer(str(DRAFTERS / name))
    vocabulary = Vocabulary.from_tokenizer(source.tokenizer, name=name, eos_ids=source.eos_ids)
    assert {bytes([b]) for b in range(256)} <= set(vocabulary.pieces)
    rng = random.Random(0)
    texts = [
        *TEXTS,
        "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(160, 50000)])) for _ in range(500)),
    ]
    for text in texts:
        ids = source.tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.spell(ids) == text.encode()
        assert source.tokenizer.encode(text).ids == [source.eos_ids[0], *ids]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafter_predicts_english_better_than_chance(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(DRAFTERS / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DRAFTERS / name)
    text = "The most important thing to know is that the number of people in the world is"
    ids = tokenizer(text, return_tensors="pt").input_ids
    nats = float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
    assert nats / np.log(2) / len(text) < 3.0  # bits per byte


# --- how it is made ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    """A target with random weights, and its tokenizer with a chat template."""
    tokenizer = tiny_train.train_tokenizer(TEXTS, TINY.vocabulary)
    end = tiny_train.end_id(tokenizer)
    shape = Shape(tokenizer.get_vocab_size(), 32, 2, 2, 64, 512)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tiny_train.END, unk_token=None)
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{{ '\nassistant\n' }}"
    )
    return tiny_train.new_model(shape, end, 1).eval(), wrapped


def test_greedy_rows_of_a_batch_are_what_generate_makes(target: tuple[Any, Any]) -> None:
    model, _ = target
    rows = [TextRow("code", list(range(9, 12 + n)), (0.0, 1.0)[n % 2], 0, [], [], []) for n in range(20)]
    write_texts(model, rows, 12, torch.Generator().manual_seed(0))
    for row in rows[::2]:
        ids = torch.tensor([row.prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert out[0, len(row.prompt) :].tolist() == row.new


def test_a_row_that_asks_itself_opens_the_answer(target: tuple[Any, Any]) -> None:
    _, tokenizer = target
    (row,) = shard_rows({"own-question": [Prompt("own-question", "")]}, tokenizer, 4, 1)
    eos = tokenizer.eos_token_id
    assert tokenizer.decode(row.prompt) == "user\n"
    assert row.push(50, eos)
    assert row.push(eos, eos)
    opening = list(row.forced)
    assert tokenizer.decode(opening) == "\nassistant\n"
    while row.forced:
        assert row.push(row.forced.pop(0), eos)
    assert row.new == [50, eos, *opening]
    assert not row.push(eos, eos)


def test_a_shard_follows_from_its_seed(target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = target
    prompts = {"code": [Prompt("code", text) for text in TEXTS]}
    for name in ("a", "b"):
        write_shard(tmp_path / name / "00000.jsonl", model, shard_rows(prompts, tokenizer, 0, 8), 6, [3, 0])
    first, second = ((tmp_path / name / "00000.jsonl").read_text() for name in ("a", "b"))
    assert first == second
    assert not list(tmp_path.rglob("*.tmp"))
    texts = read_shards(tmp_path / "a")
    assert [text["temperature"] for text in texts[:4]] == [0.0, 0.0, 1.0, 0.0]  # the second round is shifted
    assert json.loads(first.splitlines()[0])["prompt"] == texts[0]["prompt"]


def test_what_is_kept_out_is_found_by_name_and_by_beginning() -> None:
    measured = "Binary search finds an element in a sorted list by halving the range again and again."
    kept_out = KeptOut([f"# Note\n\n{measured}", "def area(x):\n    ..."])
    assert kept_out.forbids(measured.upper())
    assert kept_out.forbids("class A:\n    def area(self): ...")
    assert not kept_out.forbids("Another text about binary search and other things that one can search.")
    source = 'def area(x):\n    """No."""\n\ndef edge(x: int) -> int:\n    """Yes."""\n'
    assert function_heads([source, source], kept_out) == [
        Prompt("code", 'def edge(x: int) -> int:\n    """Yes."""\n')
    ]


def test_a_drafter_reads_text_and_ends_of_turns() -> None:
    text = {"prompt": [0, 2, 1], "new": [3, 2]}
    assert tiny_train.written_parts(text, (b"a", b"b", b"", b"c"), 2) == ["a", None, "b", "c", None]
    tokenizer = tiny_train.train_tokenizer([], 257)
    end = tiny_train.end_id(tokenizer)
    ids = tiny_train.encode_stream([["ab", None, "c"]], tokenizer)
    assert ids.tolist() == [end, *tokenizer.encode("ab", add_special_tokens=False).ids, end, ids[4], end]


def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path) -> None:
    ids = np.arange(4000, dtype=np.int16) % 290
    checkpoint = tmp_path / "checkpoint.safetensors"

    def run(minutes: float, stop_at: int = -1) -> Trained:
        def progress(trained: Trained, loss: float) -> None:
            if trained.steps == stop_at:
                raise KeyboardInterrupt

        settings = TrainingSettings(minutes, batch=64, length=16)
        model = tiny_train.new_model(TINY, 299, 0)
        return tiny_train.train(model, [Source(ids, 1.0)], settings, checkpoint, progress)

    with pytest.raises(KeyboardInterrupt):
        run(60, stop_at=5)
    half = run(0)  # no time left: what the checkpoint holds
    assert half.steps == 5
    done = run(half.seconds / 60 + 0.02)
    assert done.steps > 5
    assert done.tokens == done.steps * 64
    again = run(0)
    assert again.steps == done.steps
    for p, q in zip(again.model.parameters(), done.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not list(tmp_path.glob("*.tmp"))
