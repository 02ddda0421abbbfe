"""Models read in fixed shapes from buffers of a fixed size, so that a GPU can replay a recorded step.

Rejected tokens are not cut out: the next read goes over them, and a position only ever sees positions up to its own.

Imports transformers, so it is imported where such a row is first needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hetspec.errors import UnsupportedModel
from hetspec.runtime.models import PROBE_TOLERANCE, ROUNDING, CachedModel, ModelRow

WIDTHS = (1, 2, 4, 8, 16)  # tokens of a recorded read; fewer are padded, more (prompts) are read as they are
CHUNK = 512  # most tokens of a prompt read at once: its mask is this times the buffer
SLACK = 32  # slots behind the capacity that padding may write to
LEAST_VISIBLE = 256


class Captured:
    """A call whose kernels are recorded at its first use and replayed from then on; off the GPU it is just made.

    Args:
        call: reads and writes the same tensors every time, and never asks one for a value.
        device: where it runs.
    """

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        self._call, self._device = call, device
        self._graph: Any = None

    def __call__(self) -> None:
        """Makes the call."""
        if self._device.type != "cuda":
            self._call()
            return
        with torch.cuda.device(self._device):
            if self._graph is None:
                self._graph = self._record()
            self._graph.replay()

    def _record(self) -> Any:
        # Twice on another stream first, as recording asks for: libraries allocate and tune in their first calls.
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            self._call()
            self._call()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call()
        return graph


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in a buffer of a fixed size.

    Args:
        reads: the model they belong to, which says where new ones go and how many are seen.
    """

    def __init__(self, reads: StaticModel) -> None:
        super().__init__()
        self._reads = reads

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Puts [1, heads, n, size] at the n positions of this read and returns all that is seen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = (self._room(x) for x in (key_states, value_states))
        self.keys.index_copy_(2, self._reads.slots, key_states)
        self.values.index_copy_(2, self._reads.slots, value_states)
        return self.keys[:, :, : self._reads.visible], self.values[:, :, : self._reads.visible]

    def _room(self, new: Tensor) -> Tensor:
        return new.new_zeros((*new.shape[:2], self._reads.capacity + SLACK, new.shape[-1]))


class StaticModel:
    """A model with the buffers of one sequence.

    Args:
        model: of one device.
        capacity: positions the buffers hold.

    Raises:
        UnsupportedModel: it is spread over several devices, has layers whose mask is not known here, or what it reads
            from buffers is not what it reads otherwise.
    """

    def __init__(self, model: CachedModel, capacity: int) -> None:
        self.model, self.device = model, torch.device(model.device)
        self.capacity = min(capacity, model.max_length)
        self.visible = self.capacity + SLACK
        self.slots = torch.arange(1, device=self.device)
        config = model.model.config.get_text_config()
        places = set((getattr(model.model, "hf_device_map", None) or {}).values())
        if len(places) > 1:
            raise UnsupportedModel(
                f"{model.name} is spread over {len(places)} devices, which a recorded step cannot be.",
                "Leave static decoding out.",
            )
        kinds = set(getattr(config, "layer_types", None) or ())
        if odd := kinds - {"full_attention", "sliding_attention"}:
            raise UnsupportedModel(
                f"{model.name} has layers of type {', '.join(sorted(odd))}, which static decoding has no mask for.",
                "Leave static decoding out.",
            )
        self._kinds = kinds
        used = getattr(config, "use_sliding_window", True)
        self._window = int(getattr(config, "sliding_window", None) or 0) if used else 0
        self._fixed: dict[tuple[int, int], tuple[Captured, Tensor, Tensor, list[Tensor]]] = {}
        self._cache = DynamicCache()
        self._cache.layers = [FixedLayer(self) for _ in range(config.num_hidden_layers)]
        self._probe()

    def _probe(self) -> None:
        """Checks that two short reads from the buffers give what the same reads give otherwise."""
        if self.capacity < 3:
            return
        ids = [i % self.model.rows for i in (5, 11, 17)]
        try:
            own, fixed = ModelRow(self.model), StaticRow(self)
            expected, found = (
                torch.cat([row.forward(ids[:2], 2), row.forward(ids[2:], 1)]).float() for row in (own, fixed)
            )
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedModel(
                f"{self.model.name} cannot be read in fixed shapes ({reason}).", "Leave static decoding out."
            ) from error
        seen = expected.isfinite() & found.isfinite()
        if not bool(seen.any()):
            return
        spread = float(expected[seen].max() - expected[seen].min())
        tolerance = PROBE_TOLERANCE.get(self.model.model.dtype, ROUNDING)
        if float((found - expected)[seen].abs().max()) > tolerance * spread:
            raise UnsupportedModel(
                f"{self.model.name} reads other logits from buffers of a fixed size.",
                "Leave static decoding out.",
            )

    def read(self, tokens: Tensor, positions: Tensor, keep: int | Tensor) -> Tensor:
        """One forward, without any look at a value.

        Args:
            tokens: int64[n] on the device.
            positions: int64[n], where they stand; what was there before is overwritten.
            keep: the last so many logits, or int64[m], those of these places among the n.

        Returns:
            [m, V, or h with a pruned head].
        """
        self.slots = positions
        extra: dict[str, Any] = {"logits_to_keep": keep} if self.model.keeps_logits else {}
        if self.model.reads("position_ids"):
            # Padding may stand behind the last position that a table of positions has.
            extra["position_ids"] = positions.clamp(max=self.model.max_length - 1)[None]
        with torch.inference_mode():
            logits: Tensor = self.model.reader(
                input_ids=tokens[None],
                attention_mask=self._masks(positions),
                use_cache=True,
                **{self.model.cache_argument: self._cache},
                **extra,
            ).logits[0]
        if self.model.keeps_logits:
            return logits
        return logits[-keep:] if isinstance(keep, int) else logits[keep]

    def _masks(self, positions: Tensor) -> Any:
        """What is added to the scores, [1, 1, n, visible]: for each kind of layer, where there are two."""
        behind = positions[:, None] - torch.arange(self.visible, device=self.device)
        seen = behind >= 0
        near = seen & (behind < self._window) if self._window else seen
        whole, window = (
            torch.zeros(kept.shape, dtype=self.model.model.dtype, device=self.device).masked_fill_(
                ~kept, torch.finfo(self.model.model.dtype).min
            )[None, None]
            for kept in (seen, near)
        )
        if "sliding_attention" in self._kinds:
            return {"full_attention": whole, "sliding_attention": window}
        return whole if self._kinds else window

    def see(self, length: int) -> None:
        """Lets reads see so many positions, rounded up, so that few different shapes occur."""
        visible = LEAST_VISIBLE
        while visible < length:
            visible *= 2
        self.visible = min(visible, self.capacity + SLACK)

    def read_ids(self, ids: list[int], start: int, keep: int) -> Tensor:
        """Reads ids at positions start, start+1, …; the logits after the last `keep` of them, on the device."""
        width = next((w for w in WIDTHS if w >= len(ids)), 0)
        self.see(start + (width or len(ids)))
        if not width:
            kept = []
            for at in range(0, len(ids), CHUNK):
                part = ids[at : at + CHUNK]
                self.see(start + at + len(part))
                places = torch.arange(start + at, start + at + len(part), device=self.device)
                tokens = torch.tensor(part).to(self.device, non_blocking=True)
                kept.append(self.read(tokens, places, min(keep, len(part))))
            return torch.cat(kept)[-keep:] if keep > len(part) else kept[-1]
        captured, tokens, positions, out = self._fixed_read(width)
        padded = ids + [ids[-1]] * (width - len(ids))
        tokens.copy_(torch.tensor(padded), non_blocking=True)
        positions.copy_(torch.arange(start, start + width), non_blocking=True)
        captured()
        return out[0][len(ids) - keep : len(ids)]

    def _fixed_read(self, width: int) -> tuple[Captured, Tensor, Tensor, list[Tensor]]:
        key = (width, self.visible)
        if key not in self._fixed:
            tokens = torch.zeros(width, dtype=torch.int64, device=self.device)
            positions = torch.arange(width, device=self.device)
            out: list[Tensor] = []
            visible = self.visible

            def call() -> None:
                self.visible = visible
                out[:] = [self.read(tokens, positions, width)]

            self._fixed[key] = Captured(call, self.device), tokens, positions, out
        return self._fixed[key]


class StaticRow:
    """One sequence in a `StaticModel` (a `models.Row`); it takes the buffers over from any row before."""

    def __init__(self, static: StaticModel) -> None:
        self.static = static
        self.rows, self.max_length = static.model.rows, static.capacity
        self.length = self.forwards = self.tokens_fed = 0
        self.seconds = 0.0

    def forward(self, ids: list[int], keep: int) -> Tensor:
        """Reads `ids` and returns the logits after the last `keep` of them, [keep, V] on the CPU."""
        assert 1 <= keep <= len(ids)
        started = time.perf_counter()
        logits = self.static.model.all_rows(self.static.read_ids(ids, self.length, keep))
        self._took(len(ids), started)
        return logits

    def feed(self, ids: list[int]) -> None:
        """Reads `ids` without waiting for anything."""
        if ids:
            started = time.perf_counter()
            self.static.read_ids(ids, self.length, 1)
            self._took(len(ids), started)

    def _took(self, tokens: int, started: float) -> None:
        self.length += tokens
        self.forwards += 1
        self.tokens_fed += tokens
        self.seconds += time.perf_counter() - started

    def crop(self, length: int) -> None:
        """Forgets everything after the first `length` ids: what comes next is written over it."""
        self.length = min(self.length, length)
