"""Small tokenizers of every supported kind, small pairs, and hypothesis strategies for them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hetspec.artifact import Kernel, PairArtifact, TokenizerIdentity
from hetspec.prep.intersect import build_map
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary
from tests.toys import Toy, byte_bpe, spelled

ALL_BYTES = [bytes([b]) for b in range(256)]


@dataclass(frozen=True)
class Side:
    """A tokenizer, read."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    segmenter: Segmenter


def read(tokenizer: Tokenizer, **roles: Any) -> Side:
    """A tokenizer with its vocabulary and segmenter."""
    vocabulary = Vocabulary.from_tokenizer(tokenizer, **roles)
    return Side(tokenizer, vocabulary, Segmenter(tokenizer, vocabulary))


def full_byte_bpe(words: tuple[str, ...] = (), controls: tuple[str, ...] = ("<eos>",)) -> Tokenizer:
    """Byte-level BPE over all 256 bytes plus these words (every prefix of a word is a token too)."""
    tokens = list(ALL_BYTES)
    for word in words:
        data = word.encode()
        tokens += [data[:n] for n in range(2, len(data) + 1) if data[:n] not in tokens]
    return byte_bpe(tokens, controls)


def sentencepiece_bpe(
    words: tuple[str, ...] = ("▁the", "▁a", "é"), *, fallback: bool = True, scheme: str = "always"
) -> Tokenizer:
    """BPE in SentencePiece's manner: `▁` for space, `<0x..>` byte tokens, `<unk>`, `<s>` and `</s>`."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{b:02X}>" for b in range(256)] if fallback else []
    pieces += ["▁", *map(chr, range(33, 127)), "\n"]
    merges = []
    for word in words:
        for n in range(1, len(word) + 1):
            pieces += [part for part in {word[n - 1]: 0, word[:n]: 0} if part not in pieces]
            if n > 1 and (merge := (word[: n - 1], word[n - 1])) not in merges:
                merges.append(merge)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def trained_sentencepiece(kind: str, **options: Any) -> bytes:
    """A tiny SentencePiece model, really trained."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps", "over the lazy dog", "a b c d e f g"] * 20),
        model_writer=written,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        **{
            "vocab_size": 330,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            **options,
        },
    )
    return written.getvalue()


def wordpiece(cleanup: bool = True) -> Tokenizer:
    """A WordPiece tokenizer like BERT's, lower-casing."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", "the", "##re", "do", "n", "##'", "t", "'", "s"]
    pieces += [".", ",", "!", "?", "##ing", "is", "cafe"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def respelled(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    """The tokenizer with top-level parts of its JSON replaced; ``model__x`` replaces ``model["x"]``."""
    spec = json.loads(tokenizer.to_str())
    for key, value in changes.items():
        part, _, inner = key.partition("__")
        if inner:
            spec[part][inner] = value
        else:
            spec[part] = value
    return Tokenizer.from_str(json.dumps(spec))


def literal(content: str, *, special: bool = False) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)


# -- strategies ----------------------------------------------------------------------------------------------

CONTROLS = ("<eos>", "<|im_end|>", "s>a", "☃")  # overlapping ones and a single character among them
_SEEDS = [*b"ab <", 0xC3, 0xA9, 0xF0, 0x9F]  # merges start from few bytes, so that vocabularies overlap


@st.composite
def byte_bpe_tokenizers(draw: st.DrawFn, max_merges: int = 40, controls: tuple[str, ...] = ()) -> Tokenizer:
    """Random but well-formed byte-level BPE: 256 byte symbols, random merges, shuffled ids."""
    tokens = list(ALL_BYTES)
    known = set(tokens)
    merges = []
    pool = [bytes([b]) for b in _SEEDS]
    picks = st.tuples(st.integers(0, 1 << 16), st.integers(0, 1 << 16))
    for x, y in draw(st.lists(picks, max_size=max_merges)):
        left, right = pool[x % len(pool)], pool[y % len(pool)]
        if left + right not in known and len(left + right) <= 12:
            merges.append((spelled(left), spelled(right)))
            tokens.append(left + right)
            pool.append(left + right)
            known.add(left + right)
    order = np.random.default_rng(draw(st.integers(0, 1 << 16))).permutation(len(tokens))
    vocab = {spelled(token): int(i) for token, i in zip(tokens, order, strict=True)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=draw(st.booleans()))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([literal(c, special=True) for c in controls])
    return tokenizer


def relabelled(tokenizer: Tokenizer, order: np.ndarray) -> Tokenizer:
    """The same byte-level BPE tokenizer with id i of its model renamed to order[i]."""
    spec = json.loads(tokenizer.to_str())
    return respelled(
        tokenizer, model__vocab={piece: int(order[i]) for piece, i in spec["model"]["vocab"].items()}
    )


# Texts in which merges, controls, broken characters and other bytes all occur often.
fragments = st.sampled_from(
    [b"a", b"b", b" ", b"<", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xff", "é😀".encode()]
    + [control.encode() for control in CONTROLS]
)
byte_strings = st.one_of(st.binary(max_size=24), st.lists(fragments, max_size=12).map(b"".join))


# The metrics of a built map, which no other stage may add to or take from.
MAP_METRICS = {
    *(f"vocab/{side}_{what}" for side in ("target", "drafter") for what in ("rows", "text_tokens")),
    *("map/intersection_count", "map/target_frac", "map/drafter_frac", "map/first_frac"),
    *("map/duplicates_count", "map/controls_mapped_count"),
    *("corpus/target_covered_frac", "corpus/drafter_covered_frac"),
    *("cost/build_seconds", "cost/artifact_bytes"),
}


# -- pairs ---------------------------------------------------------------------------------------------------

TARGET = Toy([b"a", b"b", b"c", b"ab", b"ba", b"abc"], rows=9)
DRAFTER = Toy([b"b", b"a", b"d", b"ab", b"bb"], rows=8)


def small_pair(*, kernel: bool = True, target: Toy = TARGET, drafter: Toy = DRAFTER) -> PairArtifact:
    """A complete artifact of two toy tokenizers, with a kernel."""
    kernels = {}
    if kernel:
        kernels["cosegment"] = Kernel(
            prior="cosegment",
            indptr=np.array([0, 1, 3, 3, 4, 6] + [6] * (drafter.vocabulary.rows - 5), dtype=np.int64),
            indices=np.array([1, 0, 3, 3, 1, 4], dtype=np.int32),
            weights=np.array([1, 0.25, 0.75, 1, 0.5, 0.5], dtype=np.float32),
            mu=np.full(target.vocabulary.rows, 1 / target.vocabulary.rows, dtype=np.float32),
        )
    return PairArtifact(
        target=TokenizerIdentity.of(target.vocabulary, "sha256:t"),
        drafter=TokenizerIdentity.of(drafter.vocabulary, "sha256:d"),
        map=build_map(target.vocabulary, drafter.vocabulary, target.segmenter),
        kernels=kernels,
        figures={"seconds": 0.5},
        provenance={"stages": ["build-map"]},
    )
