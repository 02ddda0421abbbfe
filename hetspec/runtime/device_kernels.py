"""The arithmetic of a static step, on tensors that stay on their device: no value is ever asked for by the host.

Letters: `p` target, `pi` proposal; V the target's rows, H the target ids a proposal can reach ("columns", ascending),
k the draft length. Everything here is the plain torch form; `hetspec.runtime.triton_kernels` has the same functions as
Triton kernels for a GPU, and is compared with these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def redistribute(q: Tensor, offsets: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """`q·K` at the columns that K reaches, without atomics: every column gathers its own entries.

    Args:
        q: float[V_d].
        offsets: int64[H+1], where each column's entries begin (K by columns).
        rows: int64[nnz], the drafter id of each entry.
        weights: [nnz], in q's dtype.

    Returns:
        [H] in q's dtype.
    """
    return torch.segment_reduce(q[rows] * weights, "sum", offsets=offsets, initial=0, unsafe=True)


def surplus_masses(p: Tensor, pi: Tensor, columns: Tensor, w: Tensor) -> Tensor:
    """`Σ max(0, w_j·p_j − π_j)` of each row, from p at the columns alone.

    Args:
        p: [k, V], rows of mass 1.
        pi: [k, H].
        columns: int64[H].
        w: [k].

    Returns:
        [k].
    """
    kept = p.index_select(1, columns) * w[:, None]
    outside = (w - kept.sum(dim=1)).clamp(min=0)
    return outside + (kept - pi).clamp(min=0).sum(dim=1)


def surplus_race(
    p: Tensor, pi: Tensor, column_of: Tensor, w: Tensor, row: Tensor, count: Tensor, noise: Tensor
) -> Tensor:
    """Draws from `∝ max(0, w_i·p_i − π_i)` for row i, or from `p_i` if i is the count or nothing is left.

    The token with the largest `weight/noise` wins: with exponential noise that is a draw by the weights.

    Args:
        p: [k+1, V].
        pi: [k, H].
        column_of: int64[V], place of each target id among the columns, H where it has none.
        w: [k+1].
        row: int64[1], i.
        count: int64[1], candidates proposed: row `count` is drawn from as it is.
        noise: float64[V], positive.

    Returns:
        int64[1].
    """
    law = p.index_select(0, row)[0]
    last = len(pi) - 1
    pi_row = pi.index_select(0, row.clamp(max=last))[0]
    padded = torch.cat([pi_row, pi_row.new_zeros(1)])  # ids without a column lose nothing
    rest = (w.index_select(0, row) * law - padded[column_of]).clamp(min=0)
    whole = (row >= count) | (rest.sum() <= 0)
    return race(torch.where(whole, law, rest), noise)[None]


def race(weights: Tensor, noise: Tensor) -> Tensor:
    """The index with the largest weight/noise, int64[...] from [..., n]: exponential noise draws by the weights."""
    return (weights.double() / noise).argmax(dim=-1)
