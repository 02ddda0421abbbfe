"""Models with a rewindable memory: the only place that touches KV caches.

A `CachedModel` wraps a causal language model; a `Row` is one sequence in progress: it is fed new ids,
returns logits for the last of them, and can be cut back. Knows nothing about vocabularies or laws.
"""

from __future__ import annotations

import inspect
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from hetspec.errors import UnsupportedModel


class Row(Protocol):
    """One sequence in progress."""

    rows: int  # V, width of the logits
    max_length: int  # positions the model was made for
    length: int  # ids it has read
    forwards: int
    tokens_fed: int
    seconds: float

    def forward(self, ids: list[int], keep: int) -> Tensor:
        """Reads `ids` and returns the logits after the last `keep` of them, [keep, V]."""

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` ids."""


class CachedModel:
    """A transformers causal language model that can be read from several rows.

    Args:
        model: a decoder-only model; neither it nor its configuration is changed.

    Raises:
        UnsupportedModel: the model is encoder-decoder or its state cannot be cropped.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{name} is an encoder-decoder model.", "Use a decoder-only model.")
        if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
            raise UnsupportedModel(
                f"{name} ({type(model).__name__}) keeps a state that cannot be cropped after a rejection.",
                "Use a model with attention only.",
            )
        layer_types = set(getattr(config, "layer_types", None) or ())
        if odd := {t for t in layer_types if "attention" not in t or "linear" in t}:
            raise UnsupportedModel(
                f"{name} has layers of type {', '.join(sorted(odd))}, whose state cannot be cropped.",
                "Use a model with attention only.",
            )
        self.model = model
        self.name = name
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or 1 << 30)
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.keeps_logits = "logits_to_keep" in parameters
        self.device = model.device

    @property
    def rows(self) -> int:
        """V, width of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights a forward of one token reads; what a step costs on a memory-bound machine."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def new_row(self) -> ModelRow:
        """A fresh, empty sequence."""
        return ModelRow(self)


class ModelRow:
    """One sequence read by a `CachedModel`, with its KV cache."""

    def __init__(self, model: CachedModel) -> None:
        from transformers import DynamicCache

        self._model = model
        self.rows = model.rows
        self.max_length = model.max_length
        # Without a config every layer of the cache keeps all positions; sliding windows are then a matter of the
        # mask alone, and cropping is exact beyond the window (BUGS A10).
        self._cache = DynamicCache()
        self.length = 0
        self.forwards = 0
        self.tokens_fed = 0
        self.seconds = 0.0

    def forward(self, ids: list[int], keep: int) -> Tensor:
        """Reads `ids` and returns the logits after the last `keep` of them.

        Args:
            ids: at least one token id.
            keep: 1 ≤ keep ≤ len(ids).

        Returns:
            [keep, V] in the model's dtype, on the CPU.
        """
        assert 1 <= keep <= len(ids)
        started = time.perf_counter()
        model = self._model
        tokens = torch.tensor([ids], device=model.device)
        extra: dict[str, Any] = {"logits_to_keep": keep} if model.keeps_logits else {}
        with torch.inference_mode():
            logits: Tensor = model.model(
                input_ids=tokens, use_cache=True, **{model.cache_argument: self._cache}, **extra
            ).logits[0, -keep:]
        self.length += len(ids)
        self.forwards += 1
        self.tokens_fed += len(ids)
        logits = logits.to("cpu")  # laws are computed on the host; no copy where the model is there too
        self.seconds += time.perf_counter() - started
        return logits

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` ids."""
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length
