"""Tiny drafters: their tokenizers, their shapes, and a training loop that can be stopped at any time.

The training text is what a drafter reads while generating: decoded bytes, and one control token that begins a
text and ends it or a turn of a chat. Learning rates follow the seconds trained so far, which a checkpoint keeps;
the windows of a step follow from the seed and the number of the step.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional

from hetspec.runtime.context import spell_prompt

END = "<|im_end|>"
BYTES_LIMIT = 8 * 2**20  # of the saved weights
WARM_UP = 0.03  # share of the time
MUON_RATE, ADAM_RATE = 0.02, 6e-3  # highest learning rates

Optimizers = list[tuple[torch.optim.Optimizer, float]]  # each with its highest rate


@dataclass(frozen=True)
class Shape:
    """A drafter.

    Attributes:
        vocabulary: ids, the control token included; 257 is a token for every byte.
        hidden, layers, heads, intermediate: of the Llama architecture, embeddings tied.
        window: ids it reads at most.
    """

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    window: int


SHAPES = {
    "tiny-bpe": Shape(4096, 320, 2, 4, 896, 512),
    "tiny-bytes": Shape(257, 320, 3, 4, 896, 1024),
}


# --- tokenizers ----------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer, digits apart; with 257 ids it has no merges and spells bytes.

    Args:
        texts: to count pairs on.
        vocabulary: ids, the control token included.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary <= len(alphabet) + 1:
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary - 1, initial_alphabet=alphabet, max_token_length=24, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.decoder = decoders.ByteLevel()
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the control token."""
    found = tokenizer.token_to_id(END)
    assert found is not None
    return found


def save_tokenizer(tokenizer: Tokenizer, shape: Shape, folder: Path) -> None:
    """Writes the files that `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": END for role in ("bos", "eos", "pad")},
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.window,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


# --- what is read ---------------------------------------------------------------------------------


def written_parts(text: Mapping[str, Any], pieces: tuple[bytes, ...], eos: int) -> list[str | None]:
    """A text by the target as a drafter reads it: decoded runs, None for an end of turn.

    The prompt of a text that is no chat is a run of its own.

    Args:
        text: a line of a shard.
        pieces: the target's bytes by id.
        eos: the target's end of turn.
    """
    parts = [part for key in ("prompt", "new") for part in spell_prompt(pieces, text[key], {eos: -1})]
    return [None if isinstance(part, int) else part.decode("utf-8", "ignore") for part in parts]


def encode_stream(documents: Iterable[Sequence[str | None]], tokenizer: Tokenizer) -> np.ndarray:
    """All documents in one row of ids [N], the control token before each."""
    end = end_id(tokenizer)
    ids: list[int] = []
    for parts in documents:
        ids.append(end)
        for part in parts:
            ids += [end] if part is None else tokenizer.encode(part, add_special_tokens=False).ids
    return np.array([*ids, end], dtype=np.int16)


@dataclass(frozen=True)
class Source:
    """A stream of ids and the share of windows that come from it."""

    ids: np.ndarray
    share: float


def windows(sources: Sequence[Source], count: int, length: int, seed: Sequence[int]) -> torch.Tensor:
    """Windows [count, length + 1], drawn anew from the seed."""
    rng = np.random.default_rng(list(seed))
    shares = np.array([source.share for source in sources])
    rows = []
    for chosen in rng.choice(len(sources), size=count, p=shares / shares.sum()):
        ids = sources[chosen].ids
        at = int(rng.integers(0, max(1, len(ids) - length)))
        row = ids[at : at + length + 1]
        rows.append(np.pad(row, (0, length + 1 - len(row)), mode="wrap"))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSettings:
    """Knobs of a training.

    Attributes:
        minutes: of training, earlier runs included; the learning rate ends there.
        batch: ids per step.
        length: ids of the longest windows.
        seed: of the first weights and of the windows.
        save_seconds: between two checkpoints.
        compile: let torch compile the model; needs a C++ compiler.
    """

    minutes: float
    batch: int
    length: int
    seed: int = 0
    save_seconds: float = 60
    compile: bool = False


@dataclass
class Trained:
    """A model with what is known about its training."""

    model: Any
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


def new_model(shape: Shape, end: int, seed: int) -> Any:
    """A Llama model with fresh weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads // 2,
            max_position_embeddings=shape.window,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=None,  # it would keep its embedding from being trained
        )
    )


def train(
    model: Any,
    sources: Sequence[Source],
    settings: TrainingSettings,
    checkpoint: Path,
    progress: Callable[[Trained, float], None] = lambda trained, loss: None,
) -> Trained:
    """Trains until the minutes are used up, from the checkpoint on where there is one.

    Forward and backward run in bfloat16, the optimizer on float32 weights.

    Args:
        model: from `new_model`; is changed.
        sources: what windows are drawn from.
        settings: knobs.
        checkpoint: a file, replaced as a whole every minute and at the end, also when interrupted.
        progress: is told the state and the loss after each step.
    """
    optimizers = _optimizers(model)
    trained = _restore(model, optimizers, checkpoint)
    half = copy.deepcopy(model).to(torch.bfloat16).train()
    pairs = list(zip(model.parameters(), half.parameters(), strict=True))
    judge = torch.compile(_loss) if settings.compile else _loss
    limit, saved = settings.minutes * 60, trained.seconds
    try:
        while trained.seconds < limit:
            started = time.perf_counter()
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * schedule(trained.seconds / limit)
            # Most steps read half a window, which costs less; every fourth reads all of it.
            length = settings.length if trained.steps % 4 == 3 else settings.length // 2
            count = settings.batch // length
            loss = judge(half, windows(sources, count, length, [settings.seed, trained.steps]))
            torch.autograd.backward(loss)
            for p, low in pairs:
                assert low.grad is not None
                p.grad, low.grad = low.grad.float(), None
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in optimizers:
                optimizer.step()
            with torch.no_grad():
                for p, low in pairs:
                    low.copy_(p)
            trained.steps += 1
            trained.tokens += count * length
            trained.seconds += time.perf_counter() - started
            progress(trained, loss.item())
            if trained.seconds - saved > settings.save_seconds:
                _save(trained, optimizers, checkpoint)
                saved = trained.seconds
    finally:
        if trained.seconds > saved:
            _save(trained, optimizers, checkpoint)
    model.eval()
    return trained


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def schedule(done: float) -> float:
    """The learning rate as a share of the highest: a short rise, then half a cosine down to a hundredth."""
    if done < WARM_UP:
        return 0.02 + 0.98 * done / WARM_UP
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


def _optimizers(model: Any) -> Optimizers:
    """Muon for the matrices between the embeddings, AdamW for the rest."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        (torch.optim.Muon(inner, lr=MUON_RATE, weight_decay=0.05), MUON_RATE),
        (torch.optim.AdamW(outer, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True), ADAM_RATE),
    ]


def _save(trained: Trained, optimizers: Optimizers, path: Path) -> None:
    names = {p: name for name, p in trained.model.named_parameters()}
    tensors = {f"model.{name}": p.detach() for p, name in names.items()}
    for optimizer, _ in optimizers:
        for p, state in optimizer.state.items():
            tensors |= {f"{key}.{names[p]}": value for key, value in state.items()}
    figures = {"steps": trained.steps, "seconds": trained.seconds, "tokens": trained.tokens}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    save_file(tensors, partial, metadata={"figures": json.dumps(figures)})
    partial.replace(path)


def _restore(model: Any, optimizers: Optimizers, path: Path) -> Trained:
    if not path.exists():
        return Trained(model)
    with safe_open(path, "pt") as file:
        figures = json.loads(file.metadata()["figures"])
    named = dict(model.named_parameters())
    owner = {p: optimizer for optimizer, _ in optimizers for g in optimizer.param_groups for p in g["params"]}
    for key, value in load_file(path).items():
        kind, _, name = key.partition(".")
        p = named[name]
        if kind == "model":
            p.data.copy_(value)
        else:
            owner[p].state[p][kind] = value
    return Trained(model, **figures)


# --- what it is worth -----------------------------------------------------------------------------


@torch.inference_mode()
def held_out(
    model: Any, texts: Sequence[Sequence[str | None]], tokenizer: Tokenizer, window: int
) -> dict[str, float]:
    """Loss per id and per byte of what follows the prompts, on texts that were not trained on.

    Args:
        model: in eval mode.
        texts: documents whose first part is their prompt.
        tokenizer: of the model.
        window: ids read at most; the rest of a text is left out.
    """
    from hetspec.vocab import Vocabulary

    pieces = Vocabulary.from_tokenizer(tokenizer, name="tiny").pieces
    nats, right, count, length = 0.0, 0, 0, 0
    for parts in texts:
        prompt, whole = (encode_stream([p], tokenizer)[:window] for p in (parts[:1], parts))
        start = len(prompt) - 1  # without the end that closes every stream
        ids = torch.from_numpy(whole[:-1].astype(np.int64))
        if len(ids) <= start:
            continue
        logits = model(ids[None, :-1]).logits[0, start - 1 :].float()
        nats += float(functional.cross_entropy(logits, ids[start:], reduction="sum"))
        right += int((logits.argmax(-1) == ids[start:]).sum())
        count += len(ids) - start
        length += sum(len(pieces[i]) for i in ids[start:].tolist())
    return {
        "loss": nats / max(count, 1),
        "bits_per_byte": nats / math.log(2) / max(length, 1),
        "right": right / max(count, 1),
        "bytes": float(length),
    }


def save_drafter(model: Any, folder: Path) -> Path:
    """Saves the weights in bfloat16, replacing the file of an earlier training; returns the file."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    partial = folder / ".partial"
    half.save_pretrained(partial)
    size = (partial / "model.safetensors").stat().st_size
    assert size <= BYTES_LIMIT, f"{size:,} bytes of weights"
    for file in partial.iterdir():
        file.chmod(0o644)
        file.replace(folder / file.name)
    partial.rmdir()
    return folder / "model.safetensors"
