"""One half of a pair at run time: a tokenizer with its vocabulary and perhaps its model, and how it reads prompts."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hetspec.errors import IncompatiblePair, InvalidInput
from hetspec.runtime.models import CachedModel, Role
from hetspec.segment import Segmenter, begins_text_with, untruncated
from hetspec.vocab import Vocabulary

Chat = Sequence[dict[str, str]]


class Side:
    """A tokenizer with its vocabulary, and perhaps its model: one half of a pair at run time.

    Args:
        tokenizer: a transformers fast tokenizer, a `TokenizerSource` or a `tokenizers.Tokenizer`.
        model: a transformers causal language model, or None.
        name: for messages.
        eos_ids, turn_end_ids: as recorded in the pair.
        kept: rows of the model's LM head to compute; None for all.
        weights: the layout of the model's weights.
        role: how the model reads (`CachedModel`).
    """

    def __init__(
        self,
        tokenizer: Any,
        model: Any,
        *,
        name: str,
        eos_ids: tuple[int, ...],
        turn_end_ids: tuple[int, ...],
        kept: np.ndarray | None = None,
        weights: str = "own",
        role: Role | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(
            tokenizer, "tokenizer", tokenizer
        )
        if not hasattr(self.backend, "to_str"):
            raise IncompatiblePair(
                f"{type(tokenizer).__name__} of {name} is not a fast tokenizer.",
                "Load it with AutoTokenizer and a tokenizer.json.",
            )
        self.model = None if model is None else CachedModel(model, kept, weights=weights, role=role)
        self._recorded = (name, eos_ids, turn_end_ids)
        self._stamp: tuple[Any, ...] | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Re-reads the tokenizer if it or the model's rows changed since the last look; whether they did."""
        backend = self.backend
        stamp = (
            backend.get_vocab_size(True),
            len(backend.get_added_tokens_decoder()),
            repr(backend.normalizer),
            repr(backend.pre_tokenizer),
            backend.encode_special_tokens,
            bool(backend.truncation),
            bool(backend.padding),
            0 if self.model is None else self.model.rows,
        )
        if stamp == self._stamp:
            return False
        name, eos_ids, turn_end_ids = self._recorded
        self.vocabulary = Vocabulary.from_tokenizer(
            self.backend,
            name=name,
            rows=None if self.model is None else self.model.rows,
            eos_ids=eos_ids,
            turn_end_ids=turn_end_ids,
        )
        self.segmenter = Segmenter(self.backend, self.vocabulary)
        self.whole = untruncated(self.backend)  # for prompts
        self.begins_with = begins_text_with(self.whole)
        self._stamp = stamp
        self.__dict__.pop("transformers_tokenizer", None)
        return True

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer in the form transformers' own classes take."""
        if hasattr(self.tokenizer, "transformers_tokenizer"):
            return self.tokenizer.transformers_tokenizer()
        if hasattr(self.tokenizer, "backend_tokenizer"):
            return self.tokenizer
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self.backend)

    def chat_ids(self, chat: Chat) -> list[int] | None:
        """A chat through this side's own template, ready for the answer; None if it has no template."""
        tokenizer = self.transformers_tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return None
        try:
            rendered = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever a template raises
            raise InvalidInput(
                f"the chat template of {self.vocabulary.name} refuses this chat ({str(error).splitlines()[0]}).",
                "Change the messages or give the prompt as text.",
            ) from error
        return list(self.whole.encode(rendered, add_special_tokens=False).ids)


def make_side(
    model: Any,
    tokenizer: Any,
    identity: Any,
    role: Role,
    *,
    kept: np.ndarray | None = None,
    weights: str = "own",
    static: bool = False,
) -> Side:
    """A side from what the user gave, or from what the pair recorded; as transformers reads it if in fixed shapes."""
    if tokenizer is None:
        from hetspec.sources import hub_commit, load_tokenizer

        tokenizer = load_tokenizer(identity.name, revision=hub_commit(identity.revision))
    name = identity.name if identity is not None else role
    eos_ids = identity.eos_ids if identity is not None else ()
    turn_end_ids = identity.turn_end_ids if identity is not None else ()
    return Side(
        tokenizer,
        model,
        name=name,
        eos_ids=eos_ids,
        turn_end_ids=turn_end_ids,
        kept=kept,
        weights=weights,
        role=None if static else role,
    )


def first_bytes(text: bytes, target_adds: bool, drafter_adds: bool) -> bytes:
    """The first bytes as the drafter's tokenizer would see them (each side's dummy prefix is its own)."""
    if target_adds and not drafter_adds and text.startswith(b" "):
        return text[1:]
    if drafter_adds and not target_adds:
        return b" " + text
    return text


def is_chat(inputs: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(inputs, (list, tuple)) and bool(inputs) and isinstance(inputs[0], dict)


def read_prompt(inputs: Any, side: Side) -> list[int]:
    """Ids of a prompt in any accepted form."""
    if isinstance(inputs, str):
        return list(side.whole.encode(inputs).ids)
    if is_chat(inputs):
        ids = side.chat_ids(inputs)
        if ids is None:
            raise InvalidInput(
                f"{side.vocabulary.name} has no chat template.",
                "Give the prompt as text, or set tokenizer.chat_template.",
            )
        return ids
    if hasattr(inputs, "keys"):
        inputs, mask = _ids_and_mask(inputs, side)
        if mask is not None:
            rows = unpadded(inputs, mask)
            inputs = rows[0] if len(rows) == 1 else rows
    if hasattr(inputs, "tolist"):
        inputs = inputs.tolist()
    if isinstance(inputs, (list, tuple)):
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)):
            inputs = inputs[0]
        if all(isinstance(i, numbers.Integral) for i in inputs):
            return [int(i) for i in inputs]
        if not all(isinstance(i, (list, tuple, str)) for i in inputs):
            raise InvalidInput("the prompt's ids are not whole numbers.", "Give the ids of one prompt.")
        raise InvalidInput(
            f"a batch of {len(inputs)} prompts was given where one was expected.",
            "Use generate_batch.",
        )
    raise InvalidInput(f"a prompt of type {type(inputs).__name__}.", "Give text, token ids or a chat.")


def read_batch(inputs: Any) -> list[Any]:
    """The prompts of a batch, each in a form that `read_prompt` takes.

    Args:
        inputs: a list of prompts; ids [B, S]; or a mapping with `input_ids` and perhaps `attention_mask`.
    """
    if hasattr(inputs, "keys"):
        ids, mask = _ids_and_mask(inputs)
        if not hasattr(ids, "tolist") and (mask is None or all(all(row) for row in mask)):
            return list(ids)  # ragged, not padded
        return unpadded(ids, torch.ones_like(torch.as_tensor(ids)) if mask is None else mask)
    if hasattr(inputs, "tolist"):
        inputs = inputs.tolist()
    if not isinstance(inputs, (list, tuple)) or is_chat(inputs) or isinstance(inputs[:1], str):
        raise InvalidInput("one prompt was given where several were expected.", "Give a list of prompts.")
    if not inputs:
        raise InvalidInput("the batch is empty.", "Give at least one prompt.")
    if isinstance(inputs[0], numbers.Integral):
        raise InvalidInput(
            "the ids of one prompt were given where several were expected.", "Give a list of prompts."
        )
    return list(inputs)


def _ids_and_mask(inputs: Any, side: Side | None = None) -> tuple[Any, Any]:
    """`input_ids` and `attention_mask` of a tokenizer's output, which must hold nothing else that matters."""
    known = {"input_ids", "attention_mask"}
    types = inputs.get("token_type_ids")
    reads_types = side is not None and side.model is not None and side.model.reads("token_type_ids")
    if types is not None and not reads_types and not bool(torch.as_tensor(types).any()):
        known.add("token_type_ids")  # all of the one type there is
    odd = [k for k in inputs if k not in known and inputs[k] is not None]
    if odd or "input_ids" not in inputs:
        found = f"with {', '.join(map(repr, odd))}" if odd else "without 'input_ids'"
        raise InvalidInput(f"a prompt {found}.", "Give input_ids and attention_mask only.")
    return inputs["input_ids"], inputs.get("attention_mask")


def unpadded(ids: Any, mask: Any) -> list[list[int]]:
    """The rows of padded ids [B, S] (or one row [S]) without their padding, wherever it stands.

    Raises:
        InvalidInput: the mask has another shape, or holes inside a prompt.
    """
    ids, mask = (x if x.ndim == 2 else x[None] for x in (torch.as_tensor(ids), torch.as_tensor(mask)))
    if ids.shape != mask.shape:
        raise InvalidInput(
            f"the attention mask has the shape {list(mask.shape)}, the ids {list(ids.shape)}.",
            "Give one for each id.",
        )
    rows = []
    for row, seen in zip(ids, mask != 0, strict=True):
        at = torch.nonzero(seen).flatten()
        if len(at) and int(at[-1] - at[0]) + 1 != len(at):
            raise InvalidInput("an attention mask has holes inside its prompt.", "Mask padding only.")
        rows.append([int(i) for i in row[at]])
    return rows
