"""Small real tokenizers, table models and the scripted Rng that walks every branch of the decode code."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import lru_cache

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary, byte_alphabet

ALPHABET = byte_alphabet()


def spelled(text: bytes) -> str:
    """Bytes in the GPT-2 alphabet."""
    return "".join(ALPHABET[b] for b in text)


def byte_bpe(tokens: list[bytes], controls: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly these tokens, in this id order; merges in order of the list."""
    vocab = {spelled(t): i for i, t in enumerate(tokens)}
    merges = []
    for token in tokens:
        for cut in range(1, len(token)):
            if token[:cut] in tokens and token[cut:] in tokens:
                merges.append((spelled(token[:cut]), spelled(token[cut:])))
                break
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(controls))
    return tokenizer


class Toy:
    """A toy tokenizer with its vocabulary and segmenter."""

    def __init__(self, tokens: list[bytes], eos: bool = True, rows: int | None = None) -> None:
        self.tokenizer = byte_bpe(tokens, ("<eos>",) if eos else ())
        self.eos_ids = (len(tokens),) if eos else ()
        self.vocabulary = Vocabulary.from_tokenizer(
            self.tokenizer, name="toy", rows=rows, eos_ids=self.eos_ids
        )
        self.segmenter = Segmenter(self.tokenizer, self.vocabulary)


@lru_cache(maxsize=1 << 16)
def table_logits(seed: str, ids: tuple[int, ...], rows: int, zeros: tuple[int, ...]) -> Tensor:
    digest = hashlib.sha256(f"{seed}{ids}".encode()).digest()
    logits = torch.from_numpy(np.random.default_rng(list(digest[:8])).normal(size=rows) * 1.5)
    logits[list(zeros)] = -torch.inf
    return logits


class TableRow:
    """A `Row` whose logits are a fixed pseudo-random function of all the ids it has read.

    The law depends on the whole sequence, so a stale or misaligned cache shows.
    """

    def __init__(self, rows: int, seed: str, zeros: tuple[int, ...] = ()) -> None:
        self.rows, self.seed, self.zeros = rows, seed, zeros
        self.max_length = 1 << 20
        self.read: list[int] = []
        self.forwards = self.tokens_fed = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        return len(self.read)

    def logits_after(self, ids: list[int]) -> Tensor:
        return table_logits(self.seed, tuple(ids), self.rows, self.zeros)

    def forward(self, ids: list[int], keep: int) -> Tensor:
        assert 1 <= keep <= len(ids)
        self.forwards += 1
        self.tokens_fed += len(ids)
        self.read += ids
        last = len(self.read)
        return torch.stack([self.logits_after(self.read[: last - keep + 1 + j]) for j in range(keep)])

    def crop(self, length: int) -> None:
        del self.read[length:]


class Branch(Exception):
    """Raised at the end of the tape with the probabilities of the next decision."""

    def __init__(self, law: list[float]) -> None:
        self.law = law


class TapeRng:
    """Replays scripted decisions and multiplies their probabilities."""

    def __init__(self, tape: tuple[int, ...]) -> None:
        self.tape, self.position, self.probability = tape, 0, 1.0

    def _next(self, law: list[float]) -> int:
        if self.position == len(self.tape):
            raise Branch(law)
        choice = self.tape[self.position]
        self.position += 1
        self.probability *= law[choice]
        return choice

    def categorical(self, law: Tensor) -> int:
        wide = law.double()
        return self._next((wide / wide.sum()).tolist())

    def accept(self, ratio: float) -> bool:
        ratio = min(1.0, ratio)
        return bool(self._next([1 - ratio, ratio]))


def enumerate_law(run: Callable[[TapeRng], Hashable]) -> dict[Hashable, float]:
    """The exact law of what `run` returns, over every branch of its decisions."""
    law: dict[Hashable, float] = defaultdict(float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        tape = todo.pop()
        rng = TapeRng(tape)
        try:
            law[run(rng)] += rng.probability
        except Branch as branch:
            todo += [(*tape, i) for i, p in enumerate(branch.law) if p > 0]
    return dict(law)


def compose(step: Callable[[tuple[int, ...]], dict], n: int, ends: frozenset[int]) -> dict:
    """Joint law of the first n ids from the law of one step per context; stops at an id of `ends`."""
    memo: dict[tuple[int, ...], dict] = {}
    law: dict[tuple[int, ...], float] = defaultdict(float)
    todo: dict[tuple[int, ...], float] = {(): 1.0}
    while todo:
        following: dict[tuple[int, ...], float] = defaultdict(float)
        for context, probability in todo.items():
            if context not in memo:
                memo[context] = step(context)
            for committed, q in memo[context].items():
                ids = (context + committed)[:n]
                if len(ids) >= n or ids[-1] in ends:
                    law[ids] += probability * q
                else:
                    following[ids] += probability * q
        todo = dict(following)
    return dict(law)


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in set(a) | set(b)) / 2


def trained_bpe(texts: list[str], size: int) -> Tokenizer:
    """A real byte-level BPE tokenizer with an <eos>, trained in process."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tiny_model(
    kind: str,
    rows: int,
    seed: int,
    eos: int | None = 0,
    positions: int = 512,
    window: int = 8,
    std: float | None = None,
):
    """A random model of a real architecture in float64.

    With `std` every matrix is drawn as wide: attention then matters, and a wrong position or mask changes the text.
    """
    import transformers

    shared = {"vocab_size": rows, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=positions, **shared)
            model = transformers.GPT2LMHeadModel(config)
        elif kind == "gemma3":
            config = transformers.Gemma3TextConfig(
                **sizes,
                **shared,
                head_dim=8,
                sliding_window=window,
                layer_types=["sliding_attention", "full_attention"],
            )
            model = transformers.Gemma3ForCausalLM(config)
        elif kind == "mistral":
            model = transformers.MistralForCausalLM(
                transformers.MistralConfig(**sizes, **shared, sliding_window=window)
            )
        elif kind == "bloom":  # ALiBi
            model = transformers.BloomForCausalLM(
                transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **shared)
            )
        elif kind == "mpt":  # ALiBi, another implementation
            config = transformers.MptConfig(
                d_model=32, n_layers=2, n_heads=4, max_seq_len=positions, **shared
            )
            model = transformers.MptForCausalLM(config)
        elif kind == "opt":  # learned positions counted from the attention mask
            config = transformers.OPTConfig(
                **{**sizes, "ffn_dim": 48}, **{**shared, "pad_token_id": 1}, word_embed_proj_dim=32
            )
            model = transformers.OPTForCausalLM(config)
        elif kind == "gemma2":  # soft-capped logits, windows in every other layer
            config = transformers.Gemma2Config(**sizes, **shared, head_dim=8, sliding_window=window)
            model = transformers.Gemma2ForCausalLM(config)
        elif kind == "neox":  # rotary on a part of each head
            config = transformers.GPTNeoXConfig(**sizes, **shared)
            model = transformers.GPTNeoXForCausalLM(config)
        elif kind == "mixtral":  # experts
            config = transformers.MixtralConfig(
                **sizes, **shared, num_local_experts=4, num_experts_per_tok=2, sliding_window=window
            )
            model = transformers.MixtralForCausalLM(config)
            model.set_experts_implementation("eager")  # the fast one has no float64
        else:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **shared))
        if std is not None:
            for p in model.parameters():
                if p.ndim > 1:
                    p.data.normal_(std=std)
        # Spread the logits: a random head is nearly uniform, and near-ties hide mistakes.
        model.get_output_embeddings().weight.data.normal_(std=0.6)
    model.generation_config.eos_token_id = eos
    return model.double().eval()
