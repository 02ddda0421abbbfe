"""Laws: pure mathematics on probability vectors. No models, no randomness, no state.

Letters (ALGORITHMS §0): `p` the target's law, `q` the drafter's, `pi` a proposal law over the target's
vocabulary; V a vocabulary's rows. Laws are float32 or wider and sum to 1 up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hetspec.errors import GenerationError, InvalidInput

TOP_P_HEAD = 1024  # most laws reach top_p within this many tokens, so a full sort is rarely needed


@dataclass(frozen=True)
class Warping:
    """How logits become a law. 0, 1.0 and 0.0 switch top_k, top_p and min_p off.

    Attributes:
        temperature: 0 means greedy decoding, its own branch everywhere.
        top_k: keep the k likeliest tokens (ties with the k-th stay).
        top_p: keep the smallest set of likeliest tokens with at least this mass.
        min_p: drop tokens less likely than this share of the likeliest one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, value, ok, expected in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
        ):
            if not ok:
                raise InvalidInput(f"{name} is {value}, expected {expected}.")

    @property
    def greedy(self) -> bool:
        """Whether decoding is by argmax."""
        return self.temperature == 0


def law(logits: Tensor, warping: Warping, whose: str = "the target") -> Tensor:
    """The law a model decodes from: temperature, then top-k, top-p, min-p, as transformers orders them.

    Args:
        logits: [..., V], any float dtype; computed in float32, or in float64 if given so.
        warping: temperature must be positive.
        whose: names the model in the error.

    Returns:
        [..., V] probabilities.

    Raises:
        GenerationError: the logits hold NaN or +inf, or no finite value.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    probabilities = torch.softmax(wide / warping.temperature, dim=-1)
    if not bool(torch.isfinite(probabilities.sum())):
        raise GenerationError(
            f"the logits of {whose} are not finite (NaN or infinity).",
            "Check the weights, or load the model in float32.",
        )
    return truncate(probabilities, warping)


def truncate(probabilities: Tensor, warping: Warping, head: int = TOP_P_HEAD) -> Tensor:
    """Applies top-k, top-p and min-p to a law and renormalises it.

    Args:
        probabilities: [..., V].
        warping: its temperature is ignored.
        head: likeliest tokens among which top-p's threshold is looked for first; with V or more, no value is looked
            at by the host.

    Returns:
        [..., V]; the input itself if nothing is switched on.
    """
    size = probabilities.shape[-1]
    kept = probabilities
    if 0 < warping.top_k < size:
        kth = kept.topk(warping.top_k, dim=-1).values[..., -1:]
        kept = _renormalised(kept, kept >= kth)
    if warping.top_p < 1:
        kept = _renormalised(kept, kept >= _top_p_threshold(kept, warping.top_p, head))
    if warping.min_p > 0:
        kept = _renormalised(kept, kept >= warping.min_p * kept.amax(dim=-1, keepdim=True))
    return kept


def _renormalised(probabilities: Tensor, keep: Tensor) -> Tensor:
    kept = torch.where(keep, probabilities, torch.zeros_like(probabilities))
    return kept / kept.sum(dim=-1, keepdim=True)


def _top_p_threshold(probabilities: Tensor, top_p: float, head: int) -> Tensor:
    """The probability of the last token inside the nucleus, [..., 1]; tokens tied with it stay."""
    head = min(head, probabilities.shape[-1])
    while True:
        values = probabilities.topk(head, dim=-1).values
        before = values.cumsum(dim=-1) - values  # mass of the strictly likelier tokens
        if head == probabilities.shape[-1] or bool((before[..., -1] >= top_p).all()):
            inside = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
            return values.gather(-1, inside - 1)
        head = min(head * 8, probabilities.shape[-1])


def surplus(w: float, p: Tensor, pi: Tensor) -> Tensor:
    """`max(0, w·p − π)`, [V], not normalised: what block verification draws from (Sun et al. 2403.10444).

    Args:
        w: chance that the draft was kept so far.
        p: [V] the target's law.
        pi: [V] the law the next candidate was drawn from.
    """
    return (w * p - pi).clamp_(min=0)


def residual(p: Tensor, pi: Tensor) -> Tensor:
    """What is drawn from after a rejection, `∝ max(0, p − π)` (Leviathan et al. 2211.17192, Algorithm 1).

    Args:
        p: [V] the target's law.
        pi: [V] the law the rejected candidate was drawn from (may sum to less than 1 with a *none* symbol).

    Returns:
        [V]; `p` itself where the difference vanishes in floats (a rejection then had probability 0).
    """
    rest = (p - pi).clamp_(min=0)
    total = rest.sum()
    return rest / total if float(total) > 0 else p


def acceptance(p: Tensor, pi: Tensor) -> Tensor:
    """Expected acceptance of one candidate, `Σ min(p, π) = 1 − TV(p, π)`; [...] from [..., V]."""
    return torch.minimum(p, pi).sum(dim=-1)


def argmax(logits: Tensor, whose: str = "the target") -> Tensor:
    """The greedy token of each row, int64[...] from [..., V]; the lowest id wins a tie.

    Raises:
        GenerationError: the best logit is not finite.
    """
    best = logits.argmax(dim=-1)
    top = logits.gather(-1, best.unsqueeze(-1))
    if not bool(torch.isfinite(top).all()):
        raise GenerationError(
            f"the logits of {whose} are not finite (NaN or infinity).",
            "Check the weights, or load the model in float32.",
        )
    return best
