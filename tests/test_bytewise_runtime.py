"""SLRS for drafters that write bytes on real (small, random) models: texts, refusals, and the commands around it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from hetspec.artifact import PairArtifact, TokenizerIdentity
from hetspec.errors import IncompatiblePair, InvalidArtifact, InvalidInput
from hetspec.parts import StopTable
from hetspec.prep.intersect import build_map
from hetspec.prep.stops import stop_table
from hetspec.runtime.bytewise import BytewiseSLRS
from hetspec.runtime.engine import Engine
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary
from tests.builders import full_byte_bpe
from tests.test_cli import one_object
from tests.test_cli_generate import PROMPT, Models
from tests.test_runtime import CODE, PROMPTS, PROSE, TinyPair, plain
from tests.toys import tiny_model, trained_bpe


class BytePair:
    """A trained BPE target with a byte-level Llama, both random."""

    def __init__(self, positions: int = 512) -> None:
        self.target_tokenizer, self.drafter_tokenizer = trained_bpe([CODE, PROSE], 420), full_byte_bpe()
        self.target = tiny_model("llama", 432, seed=1, eos=0)
        self.drafter = tiny_model("llama", 260, seed=2, eos=256, positions=positions)
        t = Vocabulary.from_tokenizer(self.target_tokenizer, name="t", rows=432, eos_ids=(0,))
        d = Vocabulary.from_tokenizer(self.drafter_tokenizer, name="d", rows=260, eos_ids=(256,))
        segmenter = Segmenter(self.target_tokenizer, t)
        self.pair = PairArtifact(
            target=TokenizerIdentity.of(t),
            drafter=TokenizerIdentity.of(d),
            map=build_map(t, d, segmenter),
            stops=stop_table(t, segmenter, [CODE.encode()]).table,
        )

    def engine(self, pair: PairArtifact | None = None) -> Engine:
        return Engine(
            self.target,
            self.drafter,
            pair or self.pair,
            target_tokenizer=self.target_tokenizer,
            drafter_tokenizer=self.drafter_tokenizer,
        )


@pytest.fixture(scope="module")
def bytes_pair() -> BytePair:
    return BytePair()


@pytest.fixture(scope="module")
def engine(bytes_pair):
    return bytes_pair.engine()


# -- texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4])
def test_greedy_text_is_the_targets_own(bytes_pair, engine, n):
    for prompt in PROMPTS:
        ids = bytes_pair.target_tokenizer.encode(prompt).ids
        out = engine.generate(
            prompt, algorithm="slrs", slrs_form="bytes", num_draft_tokens=n, max_new_tokens=20
        )
        assert out.new_ids == plain(bytes_pair.target, ids, 20)
        assert out.stats.proposed > 0


@pytest.mark.parametrize("positions", [8, 24, 40])
def test_a_short_window_stops_drafting_not_decoding(positions):
    pair = BytePair(positions)
    prompt = PROMPTS[0]
    out = pair.engine().generate(
        prompt, algorithm="slrs", slrs_form="bytes", num_draft_tokens=3, max_new_tokens=24
    )
    assert out.new_ids == plain(pair.target, pair.target_tokenizer.encode(prompt).ids, 24)


SAMPLED = {"algorithm": "slrs", "slrs_form": "bytes", "num_draft_tokens": 4, "do_sample": True, "top_k": 0}


def test_a_seed_repeats_alone_and_in_a_batch(engine):
    alone = [
        engine.generate(prompt, seed=5 + row, max_new_tokens=16, **SAMPLED).new_ids
        for row, prompt in enumerate(PROMPTS[:3])
    ]
    assert alone[0] == engine.generate(PROMPTS[0], seed=5, max_new_tokens=16, **SAMPLED).new_ids
    rows = engine.generate_batch(PROMPTS[:3], seed=5, max_new_tokens=16, **SAMPLED)
    assert [row.new_ids for row in rows] == alone


def test_the_psi_of_each_candidate_is_what_a_fresh_reading_gives(engine, monkeypatch):
    """The walk's product of draws, step by step with a cache, against one teacher-forced pass (float64)."""
    seen, honest = [], BytewiseSLRS.propose

    def spy(self, context, behind, n, rng):
        proposal = honest(self, context, behind, n, rng)
        for t, law in zip(proposal.ids, proposal.laws, strict=True):
            if self.walk.settings.target.bytes_of(t):
                seen.append((law[t], law._compute(t)))
        return proposal

    monkeypatch.setattr(BytewiseSLRS, "propose", spy)
    engine.generate(PROMPTS[0], seed=1, max_new_tokens=24, **SAMPLED)
    assert len(seen) > 10
    walked, read = np.array(seen).T
    assert np.allclose(walked, read, rtol=1e-9, atol=0)


def test_processors_and_stop_strings_go_with_it(engine):
    options = {"repetition_penalty": 1.3, "max_new_tokens": 16, "stop_strings": ["zz"]}
    expected = engine.generate(PROMPTS[0], algorithm="none", **options).new_ids
    found = engine.generate(PROMPTS[0], algorithm="slrs", slrs_form="bytes", num_draft_tokens=3, **options)
    assert found.new_ids == expected


def test_a_law_that_is_the_targets_is_always_accepted(bytes_pair):
    """Target and drafter the same byte model: the trie is flat, so ψ = q = p and nothing is rejected."""
    side, model = bytes_pair.drafter_tokenizer, bytes_pair.drafter
    v = Vocabulary.from_tokenizer(side, name="d", rows=260, eos_ids=(256,))
    segmenter = Segmenter(side, v)
    whole = PairArtifact(
        target=TokenizerIdentity.of(v),
        drafter=TokenizerIdentity.of(v),
        map=build_map(v, v, segmenter),
        stops=stop_table(v, segmenter, []).table,
    )
    engine = Engine(model, model, whole, target_tokenizer=side, drafter_tokenizer=side)
    out = engine.generate(
        "ab", seed=0, max_new_tokens=24, bad_words_ids=[[257], [258], [259]], **SAMPLED
    )  # padded rows have mass in a random model
    assert out.stats.acceptance_rate > 0.9


# -- what is refused, by name --------------------------------------------------------------------------------------


def test_auto_is_bytes_where_it_can_be(bytes_pair, engine):
    assert engine._tools.form("auto") == "bytes"
    assert (
        bytes_pair.engine(dataclasses.replace(bytes_pair.pair, stops=None))._tools.form("auto") == "lookahead"
    )


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({"stops": None}, {}, IncompatiblePair, "no stop table"),
        ({}, {"verify": "block"}, InvalidInput, "block verification cannot use"),
        (
            {"stops": StopTable(np.zeros(5, dtype=np.float32), np.zeros(5, dtype=np.int64))},
            {},
            InvalidArtifact,
            "5 nodes",
        ),
    ],
)
def test_what_is_missing_is_named(bytes_pair, change, options, error, message):
    engine = bytes_pair.engine(dataclasses.replace(bytes_pair.pair, **change))
    with pytest.raises(error, match=message):
        engine.generate("x", algorithm="slrs", slrs_form="bytes", max_new_tokens=4, **options)


def test_a_drafter_with_longer_tokens_is_refused():
    with pytest.raises(IncompatiblePair, match="single bytes"):
        TinyPair().engine().generate("x", algorithm="slrs", slrs_form="bytes", max_new_tokens=4)


# -- the part and the commands -------------------------------------------------------------------------------------


def test_the_table_is_stored_and_read_again(bytes_pair, tmp_path):
    again = PairArtifact.from_pretrained(bytes_pair.pair.save_pretrained(tmp_path / "pair"))
    assert again.parts == ["map", "stops"]
    assert again.stops.stop.tobytes() == bytes_pair.pair.stops.stop.tobytes()
    assert again.stops.counts.tobytes() == bytes_pair.pair.stops.counts.tobytes()


@pytest.mark.parametrize(
    ("stop", "counts", "message"),
    [
        (np.array([0, 1.5], dtype=np.float32), np.zeros(2, dtype=np.int64), "0..1"),
        (np.array([0, -0.1], dtype=np.float32), np.zeros(2, dtype=np.int64), "0..1"),
        (np.array([0, np.nan], dtype=np.float32), np.zeros(2, dtype=np.int64), "0..1"),
        (np.zeros(2), np.zeros(2, dtype=np.int64), "float64"),
        (np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64), "stop is"),
        (np.zeros(2, dtype=np.float32), np.zeros(3, dtype=np.int64), "one for each node"),
        (np.zeros(2, dtype=np.float32), np.array([0, -1]), "one for each node"),
    ],
)
def test_a_table_that_cannot_be_is_refused(stop, counts, message):
    with pytest.raises(InvalidArtifact, match=message):
        StopTable(stop, counts)


class ByteModels(Models):
    """The commands' pair with a byte drafter in the drafter's place."""

    def __init__(self, folder: Path, database: Path) -> None:
        (folder / "mlflow.db").write_bytes(database.read_bytes())
        self.uri, self.folder = f"sqlite:///{folder / 'mlflow.db'}", folder
        self.names = [str(folder / "target"), str(folder / "bytes")]
        for home, tokenizer, rows, eos in (
            (self.names[0], trained_bpe([CODE, PROSE], 420), 432, 0),
            (self.names[1], full_byte_bpe(), 257, 256),
        ):
            tiny_model("llama", rows, 3, eos=eos).save_pretrained(home)
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(home)
        self.text = str(folder / "text.txt")
        Path(self.text).write_text(CODE[:20000])
        self.map = one_object(self.prep("build-map", *self.names, "--text", self.text, "--json"))


@pytest.fixture(scope="module")
def models(tmp_path_factory, empty_database):
    transformers.utils.logging.disable_progress_bar()
    return ByteModels(tmp_path_factory.mktemp("models"), empty_database)


def test_from_text_to_tokens_through_the_commands(models):
    bytewise = ("--algorithm", "slrs", "--slrs-form", "bytes", "--max-new-tokens", "12", "--prompt", PROMPT)
    refused = models.generate(*bytewise, "--json")
    assert refused.returncode != 0
    assert "--prior stops" in json.loads(refused.stdout)["error"]["hint"]
    built = one_object(
        models.prep(
            "build-affinity", " ".join(models.names), "--prior", "stops", "--text", models.text, "--json"
        )
    )
    assert built["parent_run"] == models.map["run_id"]
    assert built["stops"]["target_tokens"] > 1000
    shown = one_object(models.prep("show", built["run_id"], "--json"))
    assert shown["parts"] == ["map", "stops"]
    assert one_object(models.prep("verify", built["run_id"], "--json"))["valid"] is True
    expected = one_object(
        models.generate("--algorithm", "none", "--max-new-tokens", "12", "--prompt", PROMPT, "--json")
    )
    found = one_object(models.generate(*bytewise, "--num-draft-tokens", "3", "--json"))
    assert found["ids"] == expected["ids"]
    assert found["stats"]["proposed"] > 0
