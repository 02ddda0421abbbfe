"""Texts that a target writes, in shards that are made once: a stopped run goes on with the first missing shard.

A shard is a function of the seed and its number alone. It holds target ids; what a drafter reads of them is
decided by `hetspec.runtime.context`, as it is while generating.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hetspec.prep.tiny_prompts import Prompt

# Half of all shards are code, a third chat, the rest prose.
ORDER = ("code", "question", "prose", "own-code", "own-question", "code", "note", "own-code")
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of one row after the other: half of them greedy
OWN_BEGINNING = 48  # ids at most, drawn before a row of an "own" kind decodes at its own temperature
OWN_TEMPERATURE = 0.9
ROOM = 64  # positions a cache grows by
LONGEST_PROMPT = 96  # ids


@dataclass
class TextRow:
    """One text while it is written.

    Attributes:
        kind: of its prompt.
        prompt: target ids.
        temperature: 0 is greedy.
        made_up: ids still drawn at `OWN_TEMPERATURE`, whatever `temperature` says.
        after_turn: ids that follow the first end of turn, to open the answer; empty ends the text there.
        new: ids written so far.
        forced: ids to write next.
    """

    kind: str
    prompt: list[int]
    temperature: float
    made_up: int
    after_turn: list[int]
    new: list[int]
    forced: list[int]

    def push(self, token: int, eos: int) -> bool:
        """Takes the next id; whether the text goes on."""
        self.new.append(token)
        self.made_up = max(0, self.made_up - 1)
        if self.after_turn and (token == eos or not self.made_up):
            self.forced = self.after_turn if token == eos else [eos, *self.after_turn]
            self.after_turn, self.made_up = [], 0
            return True
        if self.forced:
            return True
        return token != eos


def shard_rows(prompts: dict[str, list[Prompt]], tokenizer: Any, number: int, batch: int) -> list[TextRow]:
    """The rows of a shard: the next prompts of the kind whose turn it is.

    Args:
        prompts: by kind.
        tokenizer: the target's, from transformers, with a chat template.
        number: of the shard.
        batch: rows.
    """
    kind = ORDER[number % len(ORDER)]
    turns = number // len(ORDER) * ORDER.count(kind) + ORDER[: number % len(ORDER)].count(kind)
    found = prompts[kind]
    rows = []
    for i in range(batch):
        prompt = found[(turns * batch + i) % len(found)]
        # A prompt that comes again is decoded at another temperature.
        temperature = TEMPERATURES[(i + (turns * batch + i) // len(found)) % len(TEMPERATURES)]
        rows.append(_row(prompt, tokenizer, temperature))
    return rows


def _row(prompt: Prompt, tokenizer: Any, temperature: float) -> TextRow:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    if prompt.kind not in ("question", "own-question"):
        ids = encode(prompt.text)[:LONGEST_PROMPT]
        own = OWN_BEGINNING if prompt.kind == "own-code" else 0
        return TextRow(prompt.kind, ids, temperature, own, [], [], [])
    mark = prompt.text or "?"
    whole = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
    )
    if prompt.text:
        return TextRow(prompt.kind, encode(whole), temperature, 0, [], [], [])
    before, _, after = whole.rpartition(mark)
    answer = encode(after)[1:]  # the end of turn is the target's to write
    return TextRow(prompt.kind, encode(before), temperature, OWN_BEGINNING, answer, [], [])


@torch.inference_mode()
def write_texts(
    model: Any,
    rows: Sequence[TextRow],
    max_new: int,
    generator: torch.Generator,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Decodes all rows side by side, up to `max_new` ids each; finished rows leave the batch.

    Args:
        model: the target, a transformers causal language model.
        rows: are written to.
        max_new: ids per row.
        generator: of the draws.
        progress: is told how many ids were written.
    """
    from transformers import DynamicCache

    eos = model.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    live = sorted(rows, key=lambda row: len(row.prompt))
    ended: set[int] = set()  # indices of `live` that stay until there are enough to move the cache
    width = max(len(row.prompt) for row in live)
    ids = torch.tensor([[eos] * (width - len(row.prompt)) + row.prompt for row in live])  # [B, S]
    mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in live])
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() for _ in cache.layers]
    for _ in range(max_new):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
        ).logits[:, -1]
        chosen = _choose(logits, live, generator)
        progress(len(live) - len(ended))
        ended |= {i for i, row in enumerate(live) if i not in ended and not row.push(int(chosen[i]), eos)}
        if len(ended) == len(live):
            return
        if len(ended) * 8 > len(live):
            keep = torch.tensor([i for i in range(len(live)) if i not in ended])
            live, mask, chosen = [live[i] for i in keep.tolist()], mask[keep], chosen[keep]
            cache.batch_select_indices(keep)
            ended = set()
        ids = chosen[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer with room for the next positions, so that a step does not copy what is there."""

    keys: Tensor
    values: Tensor
    room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, H, S, D]; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self.room is None or self.room[0].shape[-2] < stop:
            shape = (*key_states.shape[:2], stop + ROOM, key_states.shape[-1])
            fresh = (key_states.new_empty(shape), value_states.new_empty(shape))
            if start:
                fresh[0][:, :, :start], fresh[1][:, :, :start] = self.keys, self.values
            self.room = fresh
        self.room[0][:, :, start:stop], self.room[1][:, :, start:stop] = key_states, value_states
        self.keys, self.values = self.room[0][:, :, :stop], self.room[1][:, :, :stop]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows; the room is made anew with the next step."""
        self.room = None
        super().batch_select_indices(indices)


def _choose(logits: Tensor, rows: list[TextRow], generator: torch.Generator) -> Tensor:
    """The next id of every row [B]: the likeliest, one drawn at the row's temperature, or the one it must write."""
    chosen = logits.argmax(-1)
    temperatures = torch.tensor([OWN_TEMPERATURE if row.made_up else row.temperature for row in rows])
    drawn = torch.nonzero(temperatures > 0).flatten()
    if len(drawn):
        sums = (logits[drawn].float() / temperatures[drawn, None]).softmax(-1).cumsum(-1)
        at = torch.rand(len(drawn), 1, generator=generator) * sums[:, -1:]
        chosen[drawn] = torch.searchsorted(sums, at).flatten().clamp(max=logits.shape[-1] - 1)
    for i, row in enumerate(rows):
        if row.forced:
            chosen[i] = row.forced.pop(0)
    return chosen


def write_shard(
    path: Path,
    model: Any,
    rows: Sequence[TextRow],
    max_new: int,
    seed: Sequence[int],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes one shard: a line of JSON per text; the file appears whole or not at all."""
    state = int(np.random.SeedSequence(list(seed)).generate_state(1)[0])
    write_texts(model, rows, max_new, torch.Generator().manual_seed(state), progress)
    lines = [
        json.dumps({"kind": r.kind, "temperature": r.temperature, "prompt": r.prompt, "new": r.new}) + "\n"
        for r in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(lines), "utf-8")
    partial.replace(path)


def read_shards(folder: Path) -> list[dict[str, Any]]:
    """The texts of all finished shards, in order."""
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
