"""All randomness of a generation goes through one object with two methods.

`TorchRng` is the product's; tests put a scripted one in its place and walk every branch of the decode code.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rng(Protocol):
    """Where decisions come from."""

    def categorical(self, law: Tensor) -> int:
        """Draws an index with probability proportional to `law` [V]."""

    def accept(self, ratio: float) -> bool:
        """True with probability ``min(1, ratio)``; never for a ratio of 0."""


class TorchRng:
    """Randomness from a private generator; torch's global state is not touched.

    Args:
        seed: the same seed gives the same decisions; None takes a fresh one from the system.
        generator: a CPU generator to draw from instead.
    """

    def __init__(self, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        if generator is None:
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
        self.generator = generator

    def _uniform(self) -> float:
        # float64, since a float32 uniform is 0 once in 2^24 draws and cannot see probabilities below that.
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def categorical(self, law: Tensor) -> int:
        """Inverse of the cumulative law in float64; an index of probability 0 is never returned."""
        cumulative = law.detach().to("cpu", torch.float64).cumsum(0)
        total = float(cumulative[-1])
        if not total > 0 or total == float("inf"):
            raise ValueError(f"a law must have positive finite mass, not {total}")
        point = min(self._uniform() * total, float(torch.nextafter(cumulative[-1], cumulative[0] * 0)))
        return int(torch.searchsorted(cumulative, point, right=True))

    def accept(self, ratio: float) -> bool:
        """Strict comparison, so that a ratio of 0 never passes."""
        return ratio >= 1 or self._uniform() < ratio
