"""A KV cache that is written in place: transformers' own dynamic cache copies all it holds in every forward.

Imports transformers, so it is imported where a cache is first needed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64  # positions


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer at the start of a buffer with room to grow; `keys` and `values` are views of it.

    Growing by a half whenever the room ends costs each position a constant number of copies. Cropping only shortens
    the views, as in the parent class; what comes next overwrites what was cropped.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends [B, heads, n, size] and returns all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._appended("keys", self.keys, key_states)
        self.values = self._appended("values", self.values, value_states)
        return self.keys, self.values

    def _appended(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        length = held.shape[-2] if held.numel() else 0
        total = length + new.shape[-2]
        room = self._room.get(name)
        # A view put here from outside (a row cut out of a batch) is not at the start of this room.
        ours = room is not None and (not length or held.data_ptr() == room.data_ptr())
        if room is None or not ours or room.shape[-2] < total or room.shape[:2] != new.shape[:2]:
            wanted = max(LEAST_ROOM, total + total // 2)
            room = new.new_empty((*new.shape[:-2], wanted, new.shape[-1]))
            if length:
                room[..., :length, :] = held
            self._room[name] = room
        room[..., length:total, :] = new
        return room[..., :total, :]

    def reset(self) -> None:
        """Forgets everything, and gives the memory back."""
        super().reset()
        self._room = {}


def new_cache() -> Any:
    """An empty cache in which every layer keeps all positions.

    It is made without a configuration, so sliding windows are a matter of the mask alone, and cropping is exact beyond
    the window (BUGS A10).
    """
    cache = DynamicCache()
    cache.layer_class_to_replicate = GrowingLayer
    return cache
