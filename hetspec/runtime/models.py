"""Models with a rewindable memory: the only place that touches KV caches.

A `CachedModel` wraps a causal language model; a `Row` is one sequence in progress: it is fed new ids,
returns logits for the last of them, and can be cut back. Knows nothing about vocabularies or laws.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hetspec.errors import HetspecError, StaleArtifact, UnsupportedModel
from hetspec.runtime.threads import ShortReads
from hetspec.runtime.views import shallow_view
from hetspec.runtime.weights import WIDE, relaid_view, step_bytes


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


# What cropped and fresh logits may differ by, as a share of their spread: rounding, several times over.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
ROUNDING = 0.1  # of half precision
LOOKED_AT = 16  # positions of the text that the number of threads is tried on
Role = Literal["target", "drafter"]
_PROBED: weakref.WeakSet[Any] = weakref.WeakSet()  # models that have passed


class CachedModel:
    """A transformers causal language model that can be read from several rows.

    Args:
        model: a decoder-only model; neither it nor its configuration is changed.
        kept: int[h], rows of the LM head to compute; all others have no probability. None for all.
        weights: the layout of the weights it reads (`weights.relaid_view`).
        role: "target" to read several tokens bit for bit as one by one where that can be had, "drafter" to round
            short reads as is fastest (`hetspec.runtime.attention`, `hetspec.runtime.fused`); None to read as
            transformers does.

    Raises:
        UnsupportedModel: the model is encoder-decoder, its state cannot be cropped, or its head not pruned.
    """

    def __init__(
        self, model: Any, kept: np.ndarray | None = None, *, weights: str = "own", role: Role | None = None
    ) -> None:
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
        if self.cache_argument not in parameters:
            raise UnsupportedModel(
                f"{name} ({type(model).__name__}) has no KV cache.", "Use a model with one."
            )
        self.keeps_logits = "logits_to_keep" in parameters
        self._parameters = frozenset(parameters)
        self.device = model.device
        self.kept = None if kept is None else torch.from_numpy(kept.astype(np.int64))
        reader = model if self.kept is None else with_pruned_head(model, self.kept)
        if role == "drafter":
            from hetspec.runtime.attention import drafter_view

            reader = drafter_view(reader)  # first: fused layers keep the ones they are made from
        self.reader = self._prompt_reader = relaid_view(reader, weights, fuse=role == "drafter")
        self.prompt_alone = False  # whether prompts are read by themselves, as plain decoding reads them
        if role == "target":
            from hetspec.runtime.attention import is_plain, prompt_view, target_view

            whole = self.reader
            self.reader, self._prompt_reader = target_view(whole), prompt_view(whole)
            self.prompt_alone = is_plain(whole)
        self._short_reads = ShortReads()
        if model not in _PROBED:
            self._probe()
            _PROBED.add(model)

    def _probe(self) -> None:
        """Checks on three short reads that a cropped cache gives what a fresh one gives.

        Whatever a model's configuration says, this is what every rejection relies on. A recurrent state, attention
        that looks ahead or a cache of the model's own shows here.
        """
        first, second, third = (i % self.rows for i in (5, 11, 17))
        if self.max_length < 2:
            return
        try:
            row, fresh = ModelRow(self), ModelRow(self)
            row.forward([first, second], keep=1)
            row.crop(1)
            cropped = row.forward([third], keep=1)[0].float()
            expected = fresh.forward([first, third], keep=1)[0].float()
        except HetspecError:
            raise
        except Exception as error:  # whatever a model raises when its cache is not of the kind it wants
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UnsupportedModel(
                f"{self.name} ({type(self.model).__name__}) cannot be read step by step with a plain KV cache "
                f"({reason[0]}).",
                "Use a model that transformers can decode with a DynamicCache.",
            ) from error
        seen = expected.isfinite() & cropped.isfinite()
        if not bool(seen.any()):  # NaN weights have an error of their own
            return
        spread = float(expected[seen].max() - expected[seen].min())
        off = float((cropped - expected)[seen].abs().max())
        rounding = PROBE_TOLERANCE.get(self.model.dtype, ROUNDING) * spread
        if (
            self.quantised
        ):  # what two ways to read the same tokens differ by says how coarse its arithmetic is
            step = ModelRow(self)
            step.forward([first], keep=1)
            stepwise = step.forward([third], keep=1)[0].float()
            rounding = max(ROUNDING * spread, 4 * float((stepwise - expected)[seen].abs().max()))
        if off > rounding:
            raise UnsupportedModel(
                f"{self.name} ({type(self.model).__name__}) does not forget what is cropped from its cache: its logits "
                f"are off by {off:.3g} of {spread:.3g}.",
                "Call model.eval(): it is in training mode."
                if self.model.training
                else "Use a model with causal attention only.",
            )

    @property
    def quantised(self) -> bool:
        """Whether any part of the model computes with quantised weights or activations."""
        return bool(getattr(self.model, "is_quantized", False)) or any(
            "quant" in type(module).__module__.lower() for module in self.model.modules()
        )

    @property
    def rows(self) -> int:
        """V, width of the logits."""
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return int(weight.shape[0])
        found = getattr(head, "out_features", None) or self.model.config.get_text_config().vocab_size
        return int(found)  # a quantised head packs its weight, or makes it a method

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights a forward of one token reads; what a step costs on a memory-bound machine."""
        whole = step_bytes(self._prompt_reader)
        embedding = self.model.get_input_embeddings().weight
        tied = getattr(self._prompt_reader.get_output_embeddings(), "weight", None) is embedding
        return int(whole if tied else whole - embedding.numel() * embedding.element_size())

    def new_row(self) -> ModelRow:
        """A fresh, empty sequence."""
        return ModelRow(self)

    def read(self, tokens: Tensor, cache: Any, keep: int, **where: Tensor) -> Tensor:
        """One forward.

        Args:
            tokens: int64[B, n].
            cache: of the same B sequences; grows by n.
            keep: positions to return.
            where: attention mask and position ids, where they do not follow from the cache.

        Returns:
            [B, keep, V or h] in the model's dtype, on its device.
        """
        extra: dict[str, Any] = {"logits_to_keep": keep} if self.keeps_logits else {}
        short = self.device.type == "cpu" and tokens.numel() < WIDE and self.max_length >= LOOKED_AT
        threads = self._short_reads(self._look()) if short else contextlib.nullcontext()
        with torch.inference_mode(), threads:
            reader = self.reader if cache.get_seq_length() else self._prompt_reader
            logits: Tensor = reader(
                input_ids=tokens.to(self.device),
                use_cache=True,
                **{self.cache_argument: cache},
                **{k: v.to(self.device) for k, v in where.items()},
                **extra,
            ).logits
        return logits[:, -keep:]

    def _look(self) -> Callable[[], object]:
        """A short read of a text of its own."""
        row: list[ModelRow] = []

        def look() -> None:
            if not row or row[0].length > LOOKED_AT - 2:
                row[:] = [ModelRow(self)]
                row[0].forward([5 % self.rows, 11 % self.rows], keep=1)
            row[0].forward([17 % self.rows], keep=1)

        return look

    def all_rows(self, logits: Tensor) -> Tensor:
        """Logits of one sequence, [n, V], on the CPU where laws are computed; a pruned head's dropped rows are −inf."""
        logits = logits.to("cpu")
        if self.kept is None:
            return logits
        if logits.shape[-1] != len(self.kept):
            raise UnsupportedModel(
                f"{self.name} does not compute its logits with its LM head, so the head cannot be pruned.",
                "Use the full head.",
            )
        whole = logits.new_full((len(logits), self.rows), -torch.inf)
        return whole.index_copy_(1, self.kept, logits)

    @property
    def rope_boundary(self) -> int:
        """Length from which longrope reads a text with other rotary factors; 0 if there is none."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        kind = rope.get("rope_type") or rope.get("type")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", 0
        )
        return int(original or 0) if kind == "longrope" else 0

    @functools.cached_property
    def joins(self) -> bool:
        """Whether rows of different lengths can be read in one padded forward: tried once, on two short ones.

        Models that count positions by the cache's length, or by rules of their own, cannot.
        """
        if not self.reads("attention_mask") or self.rope_boundary or self.max_length < 8:
            return False
        texts = [[i % self.rows for i in text] for text in ((5, 11, 17, 23), (7,))]
        new = [i % self.rows for i in (13, 19)]
        rows = [ModelRow(self) for _ in texts]
        for row, text in zip(rows, texts, strict=True):
            row.forward(text, keep=1)
        readings = [Reading(row, new, 2) for row in rows]
        try:
            _read_padded(self, readings)
        except Exception:  # whatever a model makes of padding it was not written for
            return False
        for reading, text in zip(readings, texts, strict=True):
            alone = ModelRow(self)
            alone.forward(text, keep=1)
            expected = alone.forward(new, keep=2)
            assert reading.logits is not None
            if not self._close(reading.logits, expected, 1.0 if self.quantised else None):
                return False
        return True

    def _close(self, found: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
        """Whether logits differ by rounding only; where none are finite there is nothing to compare."""
        seen = expected.isfinite() & found.isfinite()
        if not bool(seen.any()):
            return True
        spread = float((expected[seen].max() - expected[seen].min()).float())
        off = float((found - expected)[seen].abs().max())
        limit = PROBE_TOLERANCE.get(self.model.dtype, ROUNDING) if tolerance is None else tolerance
        return off <= limit * spread

    def reads(self, argument: str) -> bool:
        """Whether the forward takes an argument of this name."""
        return argument in self._parameters


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


class ModelRow:
    """One sequence read by a `CachedModel`, with its KV cache."""

    def __init__(self, model: CachedModel) -> None:
        from hetspec.runtime.cache import new_cache

        self._model = model
        self.rows = model.rows
        self.max_length = model.max_length
        self.cache = new_cache()
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
        where = {}
        if self._model.reads(
            "position_ids"
        ):  # as transformers' `generate` passes them, whatever a model's default is
            where["position_ids"] = torch.arange(self.length, self.length + len(ids))[None]
        logits = self._model.read(torch.tensor([ids]), self.cache, keep, **where)[0]
        logits = self._model.all_rows(logits)
        self.took(len(ids), time.perf_counter() - started)
        return logits

    def took(self, tokens: int, seconds: float) -> None:
        """Counts a forward."""
        self.length += tokens
        self.forwards += 1
        self.tokens_fed += tokens
        self.seconds += seconds

    def forget(self) -> None:
        """Forgets everything, and gives the memory back."""
        from hetspec.runtime.cache import new_cache

        self.cache, self.length = new_cache(), 0

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` ids."""
        if length < self.length:
            self.cache.crop(length - self.length)
            self.length = length


@dataclass
class Reading:
    """A forward that a row asks for, and then its answer.

    Attributes:
        row: the sequence.
        ids, keep: as in `ModelRow.forward`.
        logits: [keep, V].
    """

    row: ModelRow
    ids: list[int]
    keep: int
    logits: Tensor | None = None


def read_together(model: CachedModel, readings: Sequence[Reading]) -> None:
    """Answers the readings of several rows with one padded forward; first readings (prompts) go one by one.

    Every row keeps its own cache. They are padded on the left to one length for the forward, which copies them once
    (what a batch costs beside the forward itself), and cut back to views afterwards. New ids are padded on the right,
    so that within a row columns and positions differ by a constant, as sliding windows need. The padding on the right
    is not masked: causality hides it from what is real, and a masked query would give NaN.

    Args:
        model: of all the rows.
        readings: at most one per row; their `logits` are filled in.
    """
    width = max(len(r.ids) for r in readings)
    joint = [r for r in readings if r.row.length and r.row.length + width <= model.max_length]
    if len(joint) < 2 or not model.joins:
        joint = []
    for reading in readings:
        if not any(reading is r for r in joint):
            reading.logits = ModelRow.forward(reading.row, reading.ids, reading.keep)
    if joint:
        _read_padded(model, joint)


def _read_padded(model: CachedModel, joint: Sequence[Reading]) -> None:
    """One padded forward for rows that have read something."""
    started = time.perf_counter()
    lengths = torch.tensor([[r.row.length] for r in joint])
    longest = int(lengths.max())
    cache = _padded_cache([r.row.cache for r in joint], longest)
    width = max(len(r.ids) for r in joint)
    tokens = torch.tensor([r.ids + [r.ids[-1]] * (width - len(r.ids)) for r in joint])
    where = {"attention_mask": (torch.arange(longest + width) >= longest - lengths).long()}
    if model.reads("position_ids"):
        where["position_ids"] = lengths + torch.arange(width)
    logits = model.read(tokens, cache, width, **where)
    for b, r in enumerate(joint):
        for mine, ours in zip(r.row.cache.layers, cache.layers, strict=True):
            if mine.is_initialized:
                columns = slice(longest - r.row.length, longest + len(r.ids))
                mine.keys, mine.values = ours.keys[b : b + 1, :, columns], ours.values[b : b + 1, :, columns]
        r.logits = model.all_rows(logits[b, len(r.ids) - r.keep : len(r.ids)])
    seconds = (time.perf_counter() - started) / len(joint)
    for r in joint:
        r.row.took(len(r.ids), seconds)


def _padded_cache(caches: Sequence[Any], longest: int) -> Any:
    """One cache of several sequences, each padded on the left to the longest."""
    from transformers import DynamicCache

    def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
        _, heads, _, size = tensors[0].shape
        joined = tensors[0].new_zeros(len(tensors), heads, longest, size)
        for b, tensor in enumerate(tensors):
            joined[b, :, longest - tensor.shape[2] :] = tensor[0]
        return joined

    padded = DynamicCache()
    with torch.inference_mode():
        for number, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
            if layers[0].is_initialized:
                keys = side_by_side([layer.keys for layer in layers])
                padded.update(keys, side_by_side([layer.values for layer in layers]), number)
    return padded
