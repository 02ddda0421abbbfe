"""Random inputs for the arithmetic of a static step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One step's tensors; the letters of `hetspec.runtime.device_kernels`."""

    q: Tensor
    offsets: Tensor
    rows: Tensor
    weights: Tensor
    columns: Tensor
    column_of: Tensor
    p: Tensor
    pi: Tensor
    w: Tensor


def case(
    dtype: torch.dtype, *, vocabulary: int = 60, width: int = 37, drafter: int = 41, k: int = 4, seed: int = 0
) -> Case:
    """Peaked laws, columns that nothing or very much reaches, weights below 1."""
    generator = torch.Generator().manual_seed(seed)

    def laws(*shape: int) -> Tensor:
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return torch.softmax(2 * noise, dim=-1).to(dtype)

    sizes = torch.randint(0, 6, (width,), generator=generator)
    sizes[width // 2] = 5 * drafter
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    entries = int(offsets[-1])
    columns = torch.randperm(vocabulary, generator=generator)[:width].sort().values
    column_of = torch.full((vocabulary,), width, dtype=torch.int64)
    column_of[columns] = torch.arange(width)
    return Case(
        q=laws(drafter),
        offsets=offsets,
        rows=torch.randint(0, drafter, (entries,), generator=generator),
        weights=torch.rand(entries, generator=generator).to(dtype),
        columns=columns,
        column_of=column_of,
        p=laws(k + 1, vocabulary),
        pi=laws(k, width),
        w=torch.linspace(1, 0.4, k + 1, dtype=torch.float64).to(dtype),
    )
