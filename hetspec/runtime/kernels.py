"""Proposal laws as sparse products `π = q·K` and their mixtures (ALGORITHMS §5, §6).

Letters: `q` drafter, `q'` the TLI law (q restricted to the intersection I and normalised), `π` proposal;
V_t, V_d rows of the two vocabularies.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hetspec.artifact import Kernel


class Proposer(Protocol):
    """Anything that turns the drafter's law into a proposal over the target's vocabulary."""

    width: int  # V_t

    def apply(self, q: Tensor) -> Tensor:
        """An unnormalised proposal, [V_t] from [V_d]."""


class TargetKernel:
    """A sparse non-negative matrix from drafter ids to target ids on the device, for `q·K` (ALGORITHMS §6).

    Args:
        rows, columns, weights: of the non-zero entries, any order; int64, int64, float.
        width: V_t.
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, width: int) -> None:
        self.rows = torch.from_numpy(rows.astype(np.int64))
        self.columns = torch.from_numpy(columns.astype(np.int64))
        self.weights = torch.from_numpy(weights.astype(np.float64))
        self.width = width

    @classmethod
    def from_map(cls, images: np.ndarray, width: int) -> TargetKernel:
        """The 0/1 matrix of a partial map (−1: none), as TLI and SLRS-4b use it."""
        rows = np.flatnonzero(images >= 0)
        return cls(rows, images[rows], np.ones(len(rows)), width)

    @classmethod
    def from_kernel(cls, kernel: Kernel, width: int) -> TargetKernel:
        """A stored kernel."""
        rows = np.repeat(np.arange(len(kernel.indptr) - 1), np.diff(kernel.indptr))
        inside = kernel.indices < width  # a model may have fewer padding rows than the pair was built with
        return cls(rows[inside], kernel.indices[inside], kernel.weights[inside], width)

    def restricted(self, kept: np.ndarray) -> TargetKernel:
        """Only the rows of these drafter ids, which are all that a pruned head can give mass to."""
        inside = np.isin(self.rows.numpy(), kept)
        return TargetKernel(
            self.rows.numpy()[inside],
            self.columns.numpy()[inside],
            self.weights.double().numpy()[inside],
            self.width,
        )

    def apply(self, q: Tensor) -> Tensor:
        """`q·K`, [V_t] from [V_d]; masses of drafter ids with one image add."""
        if self.weights.dtype != q.dtype:
            self.weights = self.weights.to(q.dtype)
        return torch.zeros(self.width, dtype=q.dtype).index_add_(0, self.columns, q[self.rows] * self.weights)


class Redistribution:
    """RDK's general law `π = (1−θ−λ)·q' + λ·q'K + θ·μ̃` (ALGORITHMS §5; Timor et al. 2506.03206 in spirit).

    Each of the three is a law of its own; `q'K` is `q·K` normalised, so that a kernel with rows for drafter
    tokens outside I uses them. Where one of the three has no mass the others keep theirs.

    Args:
        intersection: the 0/1 map of TLI.
        kernel: K, or None.
        cold: [V_t], μ̃, the target's mean law outside I; or None.
        theta, lam: θ and λ, ≥ 0 with θ + λ ≤ 1.
    """

    def __init__(
        self,
        intersection: TargetKernel,
        kernel: TargetKernel | None,
        cold: Tensor | None,
        theta: float,
        lam: float,
    ) -> None:
        assert 0 <= theta <= 1
        assert 0 <= lam <= 1
        assert theta + lam <= 1 + 1e-9
        self.intersection, self.kernel, self.cold = intersection, kernel, cold
        self.theta = theta if cold is not None else 0.0
        self.lam = lam if kernel is not None else 0.0
        self.width = intersection.width

    def apply(self, q: Tensor) -> Tensor:
        """π up to a factor, [V_t] from [V_d]."""
        pi = torch.zeros(self.width, dtype=q.dtype)
        identity = max(0.0, 1 - self.theta - self.lam)
        if identity > 0:
            _add(pi, self.intersection.apply(q), identity)
        if self.lam > 0:
            assert self.kernel is not None
            _add(pi, self.kernel.apply(q), self.lam)
        if self.theta > 0:
            assert self.cold is not None
            if self.cold.dtype != q.dtype:
                self.cold = self.cold.to(q.dtype)
            pi.add_(self.cold, alpha=self.theta)
        return pi


def _add(pi: Tensor, law: Tensor, weight: float) -> None:
    """Adds `weight` times the law, normalised; nothing if it has no mass."""
    total = float(law.sum())
    if total > 0:
        pi.add_(law, alpha=weight / total)


def cold_law(mu: np.ndarray, reached: np.ndarray) -> Tensor | None:
    """μ̃: the mean law restricted to the target ids TLI cannot reach, [V_t] float64; None if it has no mass there.

    Args:
        mu: float[V_t], the target's mean next-token law.
        reached: bool[V_t], ids in I (with a pruned head: images of the kept ids).
    """
    cold = np.where(reached, 0.0, mu.astype(np.float64))
    total = cold.sum()
    return torch.from_numpy(cold / total) if total > 0 else None


def redistribution(
    kernel: Kernel,
    intersection: TargetKernel,
    *,
    kept: np.ndarray | None = None,
    theta: float | None = None,
    lam: float | None = None,
) -> Redistribution:
    """The law of a stored kernel with the weights fitted for the head in use.

    Without fitted weights all of the mass goes through the kernel (`λ = 1`).

    Args:
        kernel: as stored.
        intersection: the map, restricted to the kept ids if the head is pruned.
        kept: the ids of the head in use, if that is the pruned one.
        theta, lam: other weights than the stored ones.
    """
    fit = kernel.fit if kept is None else kernel.head_fit
    if theta is None or lam is None:
        theta, lam = (0.0, 1.0) if fit is None else (float(fit[0]), float(fit[1]))
    width = intersection.width
    matrix = TargetKernel.from_kernel(kernel, width) if len(kernel.indices) else None
    if matrix is not None and kept is not None:
        matrix = matrix.restricted(kept)
    cold = None
    if kernel.mu is not None:
        reached = np.zeros(width, dtype=bool)
        reached[intersection.columns.numpy()] = True
        mu = np.zeros(width, dtype=np.float32)
        mu[: len(kernel.mu)] = kernel.mu[:width]
        cold = cold_law(mu, reached)
    return Redistribution(intersection, matrix, cold, theta, lam)
