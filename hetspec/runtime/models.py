"""Models with a rewindable memory: the only place that touches KV caches.

A `CachedModel` wraps a causal language model; a `Row` is one sequence in progress: it is fed new ids,
returns logits for the last of them, and can be cut back. Knows nothing about vocabularies or laws.
"""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hetspec.errors import StaleArtifact, UnsupportedModel


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
        kept: int[h], rows of the LM head to compute; all others have no probability. None for all.

    Raises:
        UnsupportedModel: the model is encoder-decoder, its state cannot be cropped, or its head not pruned.
    """

    def __init__(self, model: Any, kept: np.ndarray | None = None) -> None:
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
        self.kept = None if kept is None else torch.from_numpy(kept.astype(np.int64))
        self.reader = model if self.kept is None else with_pruned_head(model, self.kept)

    @property
    def rows(self) -> int:
        """V, width of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights a forward of one token reads; what a step costs on a memory-bound machine."""
        head = self.model.get_output_embeddings().weight
        dropped = 0 if self.kept is None else self.rows - len(self.kept)
        whole = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return int(whole - dropped * head.shape[1] * head.element_size())

    def new_row(self) -> ModelRow:
        """A fresh, empty sequence."""
        return ModelRow(self)


def with_pruned_head(model: Any, kept: Tensor) -> Any:
    """A view of a model that computes only some rows of its LM head; the model itself stays as it is.

    Modules and weights are shared, except the head; tied input embeddings stay whole. Scalings and soft caps that
    the model applies to its logits apply as before.

    Args:
        model: a transformers causal language model.
        kept: int64[h], rows of the head.

    Raises:
        UnsupportedModel: the head is not a plain linear layer in floating point.
        StaleArtifact: the head has fewer rows.
    """
    head = model.get_output_embeddings()
    weight: Any = getattr(head, "weight", None)
    if type(head) is not torch.nn.Linear or not weight.is_floating_point() or weight.is_meta:
        raise UnsupportedModel(
            f"the LM head of {type(model).__name__} is {type(head).__name__}, not a plain linear layer.",
            "Use the full head, or a drafter that is not quantised.",
        )
    if int(kept.max()) >= weight.shape[0]:
        raise StaleArtifact(
            f"the pair's pruned head names row {int(kept.max()):,} of the drafter, which has {weight.shape[0]:,}.",
            "Load the drafter the pair was built for.",
        )
    with torch.no_grad():
        sliced = torch.nn.Linear(
            head.in_features, len(kept), bias=head.bias is not None, device="meta", dtype=weight.dtype
        )
        rows = kept.to(weight.device)
        sliced.weight = torch.nn.Parameter(weight[rows], requires_grad=False)
        if head.bias is not None:
            sliced.bias = torch.nn.Parameter(head.bias[rows], requires_grad=False)
    path = next(name for name, module in model.named_modules() if module is head).split(".")
    view = parent = shallow_view(model)
    for name in path[:-1]:
        parent._modules[name] = shallow_view(parent._modules[name])
        parent = parent._modules[name]
    parent._modules[path[-1]] = sliced
    return view


def shallow_view(module: Any) -> Any:
    """A module of the same class that shares everything, with its own attributes and its own list of children."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


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
            logits: Tensor = model.reader(
                input_ids=tokens, use_cache=True, **{model.cache_argument: self._cache}, **extra
            ).logits[0, -keep:]
        self.length += len(ids)
        self.forwards += 1
        self.tokens_fed += len(ids)
        logits = logits.to("cpu")  # laws are computed on the host; no copy where the model is there too
        if model.kept is not None:
            if logits.shape[-1] != len(model.kept):
                raise UnsupportedModel(
                    f"{model.name} does not compute its logits with its LM head, so the head cannot be pruned.",
                    "Use the full head.",
                )
            whole = logits.new_full((keep, self.rows), -torch.inf)
            logits = whole.index_copy_(1, model.kept, logits)
        self.seconds += time.perf_counter() - started
        return logits

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` ids."""
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length
