"""Calibration text as target tokens: texts read from somewhere, or written by the target itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hetspec.errors import InvalidInput
from hetspec.prep.texts import role_of
from hetspec.runtime.sides import Side, read_prompt

BATCH = 8  # prompts continued at a time
SPREAD = 50  # texts that a calibration is spread over at least, where there are as many and each gives SHORTEST tokens
SHORTEST = 128
LONGEST_PROMPT = 512  # tokens of a prompt that are read; the end of a longer one


@dataclass(frozen=True)
class Document:
    """One text in the target's tokens.

    Attributes:
        number: of the text in its collection; parts of one text share it.
        role: what the text may be used for.
        ids: target ids, beginning as the target's tokenizer begins a text.
        start: the first id whose law counts (those before are the prompt), at least 1.
    """

    number: int
    role: str
    ids: tuple[int, ...]
    start: int


def read_documents(texts: Sequence[str], target: Side, *, window: int, limit: int) -> list[Document]:
    """Texts cut into windows of target tokens.

    Args:
        texts: any number of texts.
        target: whose tokens.
        window: tokens per document at most.
        limit: target tokens wanted in all; an even sample of the texts is taken.
    """
    assert target.model is not None
    window = min(window, target.model.max_length)
    wanted = limit * 4  # about 4 characters a token; too many rather than too few
    stride = max(1, sum(map(len, texts)) // max(1, wanted))
    most = max(min(window, SHORTEST), limit // SPREAD)  # of one text
    start = max(1, len(target.begins_with))
    size = max(1, window - len(target.begins_with))
    documents: list[Document] = []
    total = 0
    for number in [i for offset in range(stride) for i in range(offset, len(texts), stride)]:
        ids = target.segmenter.encode(texts[number].encode("utf-8", "replace"))[: min(most, limit - total)]
        for at in range(0, len(ids), size):
            part = (*target.begins_with, *ids[at : at + size])
            if len(part) > start:
                documents.append(Document(number, role_of(texts[number]), part, start))
                total += len(part) - start
        if total >= limit:
            break
    return documents


def sample_documents(
    prompts: Sequence[Any],
    target: Side,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    store: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Document]:
    """The target's own continuations of prompts, drawn from its plain law (greedy at temperature 0), in batches.

    Args:
        prompts: text, ids or chats.
        target: the model and its tokenizer.
        max_new_tokens: per prompt; a continuation ends earlier at an end-of-text token.
        temperature: of the draws; nothing else warps the law.
        seed: of the first batch.
        store: a JSON-lines file in which finished documents are kept and found again.
        progress: is told the finished documents.
    """
    known = _stored(store)
    assert target.model is not None
    room = target.model.max_length - max_new_tokens
    if room < 1:
        raise InvalidInput(
            f"{max_new_tokens} new tokens do not fit the target's context of {target.model.max_length}.",
            "Ask for fewer.",
        )
    read = [_ending(read_prompt(prompt, target), target, min(room, LONGEST_PROMPT)) for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(read[i]))  # little padding in a batch
    for first in range(0, len(by_length), BATCH):
        batch = [i for i in by_length[first : first + BATCH] if i not in known]
        if batch:
            new = _continue([read[i] for i in batch], target, max_new_tokens, temperature, seed + first)
            found = [
                Document(i, role_of(str(prompts[i])), (*read[i], *ids), len(read[i]))
                for i, ids in zip(batch, new, strict=True)
                if ids
            ]
            known |= {document.number: document for document in found}
            if store is not None:
                with store.open("a", encoding="utf-8") as handle:
                    handle.writelines(json.dumps(asdict(document)) + "\n" for document in found)
        progress(min(len(by_length), first + BATCH))
    return [known[i] for i in range(len(prompts)) if i in known]


def _ending(ids: list[int], target: Side, most: int) -> list[int]:
    """The last `most` ids of a prompt, behind what begins a text."""
    begins = target.begins_with
    if len(ids) <= most or len(begins) >= most:
        return ids[-most:]
    return [*begins, *ids[len(begins) - most :]]


def _stored(store: Path | None) -> dict[int, Document]:
    if store is None or not store.is_file():
        return {}
    found = {}
    for line in store.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was cut short
            continue
        found[record["number"]] = Document(
            record["number"], record["role"], tuple(record["ids"]), record["start"]
        )
    return found


def _continue(
    prompts: list[list[int]], target: Side, max_new_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """New ids of each prompt, up to and with the first end-of-text token."""
    from transformers import GenerationConfig

    assert target.model is not None
    model = target.model.model
    longest = max(map(len, prompts))
    own = model.generation_config.eos_token_id
    ends = sorted(
        {
            *target.vocabulary.eos_ids,
            *target.vocabulary.turn_end_ids,
            *((own,) if isinstance(own, int) else own or ()),
        }
    )
    pad = ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=target.model.device)
    mask = torch.tensor(
        [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=target.model.device
    )
    law: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        **law, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=pad
    )
    # transformers fills what a given config leaves open from the model's own, penalties and min-p included.
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    finally:
        model.generation_config = kept
    return [_until(row, set(ends)) for row in out]


def _until(ids: list[int], ends: set[int]) -> list[int]:
    for i, t in enumerate(ids):
        if t in ends:
            return ids[: i + 1]
    return ids
