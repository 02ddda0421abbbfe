"""Tokenizer files of other formats as `tokenizers.Tokenizer`: tiktoken, Tekken, SentencePiece, GGUF.

Knows formats only; where the files come from is `hetspec.packaged`'s and `hetspec.sources`' business.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hetspec.errors import UnsupportedTokenizer

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = CL100K_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_SPLIT = QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN_CONTROLS = [
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
]

# --- tokenizer files -----------------------------------------------------------------------------


def file_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Build a tokenizer from a file, whose kind is told from its content.

    Args:
        path: a tokenizer.json, Tekken JSON, tiktoken, SentencePiece or GGUF file. A tiktoken file does not
            say how it splits text; the number of ranks tells the known ones, others get cl100k's pattern.

    Raises:
        UnsupportedTokenizer: damaged, or of no known kind.
    """
    data = b""
    try:
        with path.open("rb") as handle:
            if handle.read(4) == b"GGUF":
                return gguf_tokenizer(read_gguf(path)[0])
        data = path.read_bytes()
        if not data:
            raise UnsupportedTokenizer(f"{path} is empty.")
        if data.lstrip()[:1] == b"{":
            return _json_tokenizer(data)
        if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", data[:4096]):
            ranks = parse_tiktoken(data)
            split, nfc = _TIKTOKEN_SPLITS.get(len(ranks), (CL100K_SPLIT, False))
            return ranks_tokenizer(ranks, split, nfc=nfc)
        return sentencepiece_tokenizer(data)
    except UnsupportedTokenizer as error:
        raise UnsupportedTokenizer(f"{path}: {error.message}", error.hint) from None
    except OSError as error:
        raise UnsupportedTokenizer(f"{path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # the tokenizers library raises bare Exception
        why = " ".join(str(error).split())[:160]
        raise UnsupportedTokenizer(f"{path} is damaged or not a tokenizer: {why}.") from None


_TIKTOKEN_SPLITS = {
    50256: (GPT2_SPLIT, False),
    50257: (GPT2_SPLIT, False),
    151643: (QWEN_SPLIT, True),
    248044: (QWEN35_SPLIT, True),
    199998: (O200K_SPLIT, False),
    200000: (O200K_SPLIT, False),
}


def _json_tokenizer(data: bytes) -> tokenizers.Tokenizer:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UnsupportedTokenizer(f"the JSON is damaged or cut off ({error}).") from None
    if "model" in value and "added_tokens" in value:
        return tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    if "config" in value and "vocab" in value:
        return _tekken_tokenizer(value)
    raise UnsupportedTokenizer("JSON, but neither a tokenizer.json nor a Tekken file.")


def _tekken_tokenizer(value: dict[str, Any]) -> tokenizers.Tokenizer:
    config = value["config"]
    reserved = int(config["default_num_special_tokens"])
    listed = value.get("special_tokens")
    names = [str(item["token_str"]) for item in listed] if listed else list(TEKKEN_CONTROLS)
    names = names[:reserved] + [f"<SPECIAL_{i}>" for i in range(len(names), reserved)]
    count = int(config["default_vocab_size"]) - reserved
    ranks = {
        base64.b64decode(item["token_bytes"]): reserved + int(item["rank"]) for item in value["vocab"][:count]
    }
    return ranks_tokenizer(ranks, str(config["pattern"]), names, first_control=0)


def parse_tiktoken(data: bytes) -> dict[bytes, int]:
    """Read a tiktoken file: one `base64 rank` per line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            # Whisper's file ends in "= 50256": an empty token, which only keeps its id from being given away
            ranks[b"" if token == b"=" else base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UnsupportedTokenizer(f"line {number} is not `base64 rank`, the file is damaged.") from None
    missing = sum(bytes([b]) not in ranks for b in range(256))
    if missing or len(set(ranks.values())) != len(ranks):
        raise UnsupportedTokenizer(f"the ranks lack {missing} single bytes or repeat; the file is damaged.")
    return ranks


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for every byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def ranks_tokenizer(
    ranks: Mapping[bytes, int],
    split: str,
    controls: Sequence[str] = (),
    *,
    nfc: bool = False,
    first_control: int = -1,
) -> tokenizers.Tokenizer:
    """Byte-level BPE from tiktoken ranks.

    tiktoken joins any two neighbours whose concatenation has a rank, so every split of a token into two
    tokens becomes a merge, ordered by the rank of the result, as transformers does it.
    """
    characters = _byte_characters()
    shown = {token: "".join([characters[b] for b in token]) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(shown[a], shown[b]) for a, b in pairs]
    vocabulary = {shown[token]: rank for token, rank in ranks.items() if token}
    start = max(ranks.values()) + 1 if first_control < 0 else first_control
    added = [(start + i, AddedToken(name, normalized=False, special=True)) for i, name in enumerate(controls)]
    return _byte_level(vocabulary, merges, added, _split_bytes(split), nfc=nfc, ignore_merges=True)


def _split_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


def _byte_level(
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    added: Iterable[tuple[int, AddedToken]],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    added = sorted(added, key=lambda item: item[0])
    # Ids right behind the vocabulary are given by order of adding; any other id must be in the vocabulary.
    if added and added[0][0] != len(vocabulary):
        vocabulary = vocabulary | {token.content: index for index, token in added}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges), ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _add(tokenizer, added)


def _add(tokenizer: tokenizers.Tokenizer, added: Iterable[tuple[int, AddedToken]]) -> tokenizers.Tokenizer:
    added = list(added)
    for special in (True, False):  # one call each: a call per token would rebuild the matcher every time
        if special:
            tokenizer.add_special_tokens([token for _, token in added if token.special])
        elif any(not token.special for _, token in added):
            tokenizer.add_tokens([token for _, token in added if not token.special])
    wrong = [t.content for index, t in added if tokenizer.token_to_id(t.content) != index]
    if wrong:
        raise UnsupportedTokenizer(f"{len(wrong)} added tokens do not keep their ids (first {wrong[0]!r}).")
    return tokenizer


# SentencePiece and GGUF number the types of pieces alike.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def sentencepiece_tokenizer(data: bytes) -> tokenizers.Tokenizer:
    """BPE or Unigram from a SentencePiece model file."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise UnsupportedTokenizer(
            "reading a SentencePiece file needs the package sentencepiece.", "Install hetspec[models]."
        ) from None
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise UnsupportedTokenizer("no tokenizer file of a known kind, or cut off.") from None
    if not proto.pieces or not proto.HasField("trainer_spec"):  # it follows the pieces: cut off without it
        raise UnsupportedTokenizer("no tokenizer file of a known kind, or cut off.")
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    prefix = bool(normalizer.add_dummy_prefix)
    if trainer.model_type == trainer.BPE:
        bos = trainer.bos_piece if trainer.bos_id >= 0 else ""
        tokenizer = _piece_tokenizer(pieces, prefix=prefix, byte_fallback=trainer.byte_fallback, bos=bos)
    elif trainer.model_type == trainer.UNIGRAM:
        unknown = [i for i, piece in enumerate(pieces) if piece[2] == _UNKNOWN]
        model = models.Unigram([(p, s) for p, s, _ in pieces], unknown[0], trainer.byte_fallback)
        tokenizer = _finish_pieces(tokenizers.Tokenizer(model), pieces, prefix=prefix)
    else:
        raise UnsupportedTokenizer(
            "a SentencePiece model of words or characters.", "BPE and Unigram are supported."
        )
    before: list[normalizers.Normalizer] = []
    if normalizer.precompiled_charsmap:
        before.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        before.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        before.append(normalizers.Replace(Regex(" {2,}"), " "))
    if before:
        tokenizer.normalizer = normalizers.Sequence([*before, tokenizer.normalizer])
    return tokenizer


def _piece_tokenizer(
    pieces: Sequence[tuple[str, float, int]], *, prefix: bool, byte_fallback: bool, bos: str
) -> tokenizers.Tokenizer:
    """SentencePiece BPE. User-defined pieces rank first, whatever score is stored with them."""
    vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    scored: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind not in (_NORMAL, _USER):
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        scored += [(0.0 if kind == _USER else score, len(a), len(b), a, b) for a, b in pairs]
    scored.sort(key=lambda item: item[:3], reverse=True)
    merges = [(a, b) for *_, a, b in scored]
    unknown = next((piece for piece, _, kind in pieces if kind == _UNKNOWN or piece == "<unk>"), None)
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = _finish_pieces(tokenizers.Tokenizer(model), pieces, prefix=prefix)
    if bos in vocabulary:
        single, pair = f"{bos}:0 $A:0", f"{bos}:0 $A:0 {bos}:1 $B:1"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _finish_pieces(
    tokenizer: tokenizers.Tokenizer, pieces: Sequence[tuple[str, float, int]], *, prefix: bool
) -> tokenizers.Tokenizer:
    escape = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = escape
    tokenizer.decoder = decoders.Sequence(steps)
    kinds = (_UNKNOWN, _CONTROL, _USER)
    return _add(tokenizer, [(i, _added(p, kind)) for i, (p, _, kind) in enumerate(pieces) if kind in kinds])


# Upstream (Gemma, Qwen) adds these as ordinary added tokens though GGUF calls them control tokens …
_PLAIN_CONTROLS = re.compile(
    r"<unused\d+>|<mask>|<\|fim_(prefix|middle|suffix|pad)\|>|<\|(repo_name|file_sep)\|>"
)
# … and these as special though GGUF calls them user-defined.
_SPECIAL_USER = {"<start_of_image>", "<end_of_image>"}


def _added(content: str, kind: int) -> AddedToken:
    special = kind in (_UNKNOWN, _CONTROL) and not _PLAIN_CONTROLS.fullmatch(content)
    return AddedToken(content, normalized=False, special=special or content in _SPECIAL_USER)


# --- GGUF ----------------------------------------------------------------------------------------

_GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Read a GGUF file's metadata and tensor shapes, no weights; far quicker than the `gguf` package."""
    size = path.stat().st_size
    try:
        with path.open("rb") as handle:
            magic, version, tensors, keys = struct.unpack("<4sIQQ", handle.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise UnsupportedTokenizer(f"GGUF version {version}, expected 2 or 3.")
            metadata: dict[str, Any] = {}
            for _ in range(keys):
                key = _gguf_string(handle, size)
                metadata[key] = _gguf_value(handle, _gguf_number(handle, "I"), size)
            shapes: dict[str, tuple[int, ...]] = {}
            for _ in range(tensors):
                name = _gguf_string(handle, size)
                dims = _gguf_number(handle, "I")
                shapes[name] = struct.unpack(f"<{dims}Q", handle.read(8 * dims))
                handle.seek(12, os.SEEK_CUR)  # type and offset
            return metadata, shapes
    except (struct.error, ValueError, KeyError, MemoryError, OverflowError):
        raise UnsupportedTokenizer("the GGUF header is damaged or cut off.") from None


def _gguf_number(handle: IO[bytes], code: str) -> int:
    return int(struct.unpack(f"<{code}", handle.read(struct.calcsize(code)))[0])


def _gguf_string(handle: IO[bytes], size: int) -> str:
    length = _gguf_number(handle, "Q")
    if length > size:
        raise ValueError
    raw = handle.read(length)
    if len(raw) != length:
        raise ValueError
    return raw.decode("utf-8")


def _gguf_value(handle: IO[bytes], kind: int, size: int) -> Any:
    if kind == 8:
        return _gguf_string(handle, size)
    if kind != 9:
        code = "<" + _GGUF_NUMBERS[kind]
        return struct.unpack(code, handle.read(struct.calcsize(code)))[0]
    kind, count = _gguf_number(handle, "I"), _gguf_number(handle, "Q")
    if count > size:
        raise ValueError
    if kind in (8, 9):
        return [_gguf_value(handle, kind, size) for _ in range(count)]
    code = f"<{count}{_GGUF_NUMBERS[kind]}"
    return list(struct.unpack(code, handle.read(struct.calcsize(code))))


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer that a GGUF file describes, with what transformers' conversion loses.

    That is: the pre-tokenizer by name (SmolLM2 splits digits), Qwen's NFC, user-defined pieces as added
    tokens (Gemma's runs of newlines and spaces, HTML tags), and padding rows kept out of the vocabulary.

    Raises:
        UnsupportedTokenizer: a kind or pre-tokenizer whose behaviour is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not tokens or not types or len(tokens) != len(types):
        raise UnsupportedTokenizer("the GGUF file holds no tokenizer.")
    if model == "llama":
        scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
        # GGUF stores user-defined pieces with real spaces, SentencePiece with its own
        shown = [t.replace(" ", "▁") if kind == _USER else t for t, kind in zip(tokens, types, strict=True)]
        bos_id = metadata.get("tokenizer.ggml.bos_token_id", -1)
        bos = shown[bos_id] if metadata.get("tokenizer.ggml.add_bos_token", True) and bos_id >= 0 else ""
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        pieces = list(zip(shown, scores, types, strict=True))
        tokenizer = _piece_tokenizer(pieces, prefix=prefix, byte_fallback=_BYTE in types, bos=bos)
        if not prefix:  # as upstream Gemma has it; no text holds a space by then, so it splits nothing
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        return tokenizer
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if model != "gpt2" or pre not in _GGUF_PRE_TOKENIZERS:
        known = ", ".join(sorted(_GGUF_PRE_TOKENIZERS))
        raise UnsupportedTokenizer(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not known (known: {known}).",
            "Give the model's own tokenizer.json instead.",
        )
    vocabulary = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    added = [
        (i, _added(t, k))
        for i, (t, k) in enumerate(zip(tokens, types, strict=True))
        if k in (_CONTROL, _USER)
    ]
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", [])]
    pre_tokenizer, nfc, ignore_merges = _GGUF_PRE_TOKENIZERS[pre]()
    return _byte_level(vocabulary, merges, added, pre_tokenizer, nfc=nfc, ignore_merges=ignore_merges)


def _merge(line: str) -> tuple[str, str]:
    left, right = line.split(" ")
    return left, right


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])


_GGUF_PRE_TOKENIZERS: dict[str, Callable[[], tuple[pre_tokenizers.PreTokenizer, bool, bool]]] = {
    # name: (pre-tokenizer, NFC, ignore merges for whole words)
    "gpt-2": lambda: (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True), False, False),
    "smollm": lambda: (_digits_then_bytes(), False, False),
    "qwen2": lambda: (_split_bytes(QWEN_SPLIT), True, False),
    "llama-bpe": lambda: (_split_bytes(CL100K_SPLIT), False, True),
}
