"""The functions of `hetspec.runtime.device_kernels` as Triton kernels for a GPU: same arguments, same results.

Each reads the target's law only where a proposal can reach it (no row of π is ever spread over the vocabulary) and
leaves one partial result per block, which a last small step adds up in a fixed order: no atomics, so that the same
seed gives the same text again.

Needs the extra `gpu`. With TRITON_INTERPRET=1 set before the first import the kernels run on the CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a row that one program works on
COLUMNS, ENTRIES = 64, 8  # a tile of the redistribution: columns and entries of each read at once


def redistribute(q: Tensor, offsets: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """`q·K` at the columns that K reaches; see `device_kernels.redistribute`."""
    count = len(offsets) - 1
    out = torch.empty(count, dtype=q.dtype, device=q.device)
    if count:
        grid = (triton.cdiv(count, COLUMNS),)
        _redistribute[grid](q, offsets, rows, weights, out, count, COLUMNS, ENTRIES)
    return out


def surplus_masses(p: Tensor, pi: Tensor, columns: Tensor, w: Tensor) -> Tensor:
    """`Σ max(0, w_j·p_j − π_j)` of each row; see `device_kernels.surplus_masses`."""
    k, width = pi.shape
    blocks = triton.cdiv(width, BLOCK)
    kept, surplus = torch.zeros(2, k, blocks, dtype=p.dtype, device=p.device)
    if k and width:
        _surplus_masses[(k, blocks)](
            p, pi, columns, w, kept, surplus, width, p.stride(0), pi.stride(0), blocks, BLOCK
        )
    masses: Tensor = (w - kept.sum(dim=1)).clamp(min=0) + surplus.sum(dim=1)
    return masses


def surplus_race(
    p: Tensor, pi: Tensor, column_of: Tensor, w: Tensor, row: Tensor, count: Tensor, noise: Tensor
) -> Tensor:
    """A draw from `∝ max(0, w_i·p_i − π_i)`, or from `p_i`; see `device_kernels.surplus_race`."""
    (k, width), vocabulary = pi.shape, p.shape[1]
    blocks = triton.cdiv(vocabulary, BLOCK)
    best, where = _partial_winners(2, blocks, p.device)
    left = torch.empty(blocks, dtype=p.dtype, device=p.device)
    _surplus_race[(blocks,)](
        p,
        pi,
        column_of,
        w,
        row,
        noise,
        best,
        where,
        left,
        k,
        width,
        vocabulary,
        p.stride(0),
        pi.stride(0),
        blocks,
        BLOCK,
    )
    winners = _winners(best, where)
    whole = (row >= count) | (left.sum() <= 0)
    return torch.where(whole, winners[1], winners[0])


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """The index with the largest weight/noise; see `device_kernels.race`."""
    width = weights.shape[-1]
    flat, draws = weights.reshape(-1, width), noise.expand_as(weights).reshape(-1, width)
    blocks = triton.cdiv(width, BLOCK)
    best, where = _partial_winners(len(flat), blocks, weights.device)
    _race[(len(flat), blocks)](
        flat, draws, best, where, width, flat.stride(0), draws.stride(0), blocks, BLOCK
    )
    return _winners(best, where).view(weights.shape[:-1])


def _partial_winners(rows: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the best score of every block and where it stands, [rows, blocks] each."""
    return (
        torch.empty(rows, blocks, dtype=torch.float64, device=device),
        torch.empty(rows, blocks, dtype=torch.int64, device=device),
    )


def _winners(best: Tensor, where: Tensor) -> Tensor:
    """int64[rows]; the first of equal scores."""
    return where.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _redistribute(q, offsets, rows, weights, out, count, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < count
    begin = tl.load(offsets + column, mask=inside, other=0)
    end = tl.load(offsets + column + 1, mask=inside, other=0)
    total = tl.zeros((COLUMNS,), dtype=out.dtype.element_ty)
    for first in range(0, tl.max(end - begin, axis=0), ENTRIES):
        at = begin[:, None] + first + tl.arange(0, ENTRIES)[None, :]
        mine = at < end[:, None]
        drafted = tl.load(q + tl.load(rows + at, mask=mine, other=0), mask=mine, other=0)
        total += tl.sum(drafted * tl.load(weights + at, mask=mine, other=0), axis=1)
    tl.store(out + column, total, mask=inside)


@triton.jit
def _surplus_masses(
    p, pi, columns, w, kept, surplus, width, p_stride, pi_stride, blocks, BLOCK: tl.constexpr
):
    j, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    column = tl.load(columns + place, mask=inside, other=0)
    # int64: a row's start passes 2^31 with few rows of a large vocabulary in some layouts.
    target = tl.load(w + j) * tl.load(p + j.to(tl.int64) * p_stride + column, mask=inside, other=0)
    proposed = tl.load(pi + j.to(tl.int64) * pi_stride + place, mask=inside, other=0)
    tl.store(kept + j * blocks + block, tl.sum(target, axis=0))
    tl.store(surplus + j * blocks + block, tl.sum(tl.maximum(target - proposed, 0), axis=0))


@triton.jit
def _leave_winner(weight, draws, inside, best, where, start):
    """Stores the best weight/draw of a block and where it stands; `start` is the block's first element."""
    score, at = tl.max(tl.where(inside, weight.to(tl.float64) / draws, -1.0), axis=0, return_indices=True)
    tl.store(best, score)
    tl.store(where, (start + at).to(tl.int64))


@triton.jit
def _surplus_race(
    p,
    pi,
    column_of,
    w,
    row,
    noise,
    best,
    where,
    left,
    k,
    width,
    vocabulary,
    p_stride,
    pi_stride,
    blocks,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    i = tl.load(row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    law = tl.load(p + i * p_stride + token, mask=inside, other=0)
    column = tl.load(column_of + token, mask=inside, other=width)
    # Row k has no candidate: its draw is from the whole law, whatever stands here.
    proposed = tl.load(pi + tl.minimum(i, k - 1) * pi_stride + column, mask=column < width, other=0)
    rest = tl.maximum(tl.load(w + i) * law - proposed, 0)
    tl.store(left + block, tl.sum(rest, axis=0))
    draws = tl.load(noise + token, mask=inside, other=1)
    _leave_winner(rest, draws, inside, best + block, where + block, block * BLOCK)
    _leave_winner(law, draws, inside, best + blocks + block, where + blocks + block, block * BLOCK)


@triton.jit
def _race(weights, noise, best, where, width, stride, noise_stride, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    weight = tl.load(weights + row.to(tl.int64) * stride + place, mask=inside, other=0)
    draws = tl.load(noise + row.to(tl.int64) * noise_stride + place, mask=inside, other=1)
    at = row * blocks + block
    _leave_winner(weight, draws, inside, best + at, where + at, block * BLOCK)
