"""Losslessness as numbers a user can check on their own pair: greedy identity, first-token laws, re-scored text.

The shipped decoding loop is what runs; only the models' answers are remembered, so that thousands of steps from one
context cost a few forwards. Letters: `p` target, `q` drafter, `pi` proposal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from hetspec.runtime import laws
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import Row
from hetspec.runtime.options import plain_law

CELLS = 40  # likeliest tokens with a cell of their own in the χ² tests
FEWEST = 5.0  # expected count below which cells are pooled
SUSPICIOUS = 1e-4  # smallest p-value taken for chance, divided by the number of tests
FAR = 5.0  # standard deviations of a heavy-tailed sum


# -- greedy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """Where a greedy text left plain decoding.

    Attributes:
        prompt, algorithm, position: which text, and the new token at which it differs.
        expected, found: target ids.
        gap: of their logits in a fresh forward over the shared text; None where one text ends and the other goes on.
        rounding: what two forwards of this dtype may differ by.
        near_tie: whether the gap is within rounding: no fault.
    """

    prompt: int
    algorithm: str
    position: int
    expected: int
    found: int
    gap: float | None
    rounding: float
    near_tie: bool


def audit_greedy(
    engine: Engine,
    prompts: Sequence[Any],
    algorithms: Sequence[str],
    *,
    max_new_tokens: int,
    num_draft_tokens: int,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Compares greedy texts with transformers' own `generate`, token by token.

    Args:
        engine: models and pair.
        prompts: text, ids or chats.
        algorithms: to be compared.
        max_new_tokens, num_draft_tokens: of every text.
        progress: is told the texts done.

    Returns:
        {"texts", "identical", "near_ties", "different", "mismatches"}.
    """
    mismatches: list[Mismatch] = []
    done = 0
    for number, prompt in enumerate(prompts):
        reference = engine.decoder(prompt, algorithm="none", **plain_law(0))
        expected = _transformers_greedy(engine, reference.ids, reference.eos_ids, max_new_tokens)
        for algorithm in algorithms:
            out = engine.generate(
                prompt,
                algorithm=algorithm,
                num_draft_tokens=num_draft_tokens,
                max_new_tokens=max_new_tokens,
                **plain_law(0),
            )
            if out.new_ids != expected:
                mismatches.append(_mismatch(engine, number, algorithm, reference.ids, expected, out.new_ids))
            done += 1
            progress(done)
    near = sum(m.near_tie for m in mismatches)
    return {
        "texts": done,
        "identical": done - len(mismatches),
        "near_ties": near,
        "different": len(mismatches) - near,
        "mismatches": [asdict(m) for m in mismatches],
    }


def _transformers_greedy(
    engine: Engine, prompt: list[int], eos_ids: frozenset[int], max_new_tokens: int
) -> list[int]:
    from transformers import GenerationConfig

    assert engine.target.model is not None
    model = engine.target.model.model
    ids = torch.tensor([prompt], device=engine.target.model.device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(eos_ids) or None, pad_token_id=0
    )
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.generation_config = kept
    return list(out[0, len(prompt) :].tolist())


def _mismatch(
    engine: Engine, number: int, algorithm: str, prompt: list[int], expected: list[int], found: list[int]
) -> Mismatch:
    """Looks at the first differing token with a fresh forward."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    assert engine.target.model is not None
    if at >= min(len(expected), len(found)):  # one text ends where the other goes on: never a rounding error
        return Mismatch(number, algorithm, at, -1, -1, None, 0.0, False)
    logits = engine.target.model.new_row().forward([*prompt, *expected[:at]], keep=1)[0]
    eps = torch.finfo(engine.target.model.model.dtype).eps
    a, b = float(logits[expected[at]]), float(logits[found[at]])
    best = float(logits.max())
    # Each logit is a sum over the width of the model, kept in this dtype: a few units in the last place of the largest.
    rounding = 4 * eps * max(1.0, float(logits.abs().max()))
    near = max(best - a, best - b) <= rounding
    return Mismatch(number, algorithm, at, expected[at], found[at], abs(a - b), rounding, near)


# -- the law of the first token ------------------------------------------------------------------------------------


class Memory:
    """A model's answers by the ids it was asked about."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._read: list[int] = []  # what the row has read
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, ids: list[int], keep: int) -> Tensor:
        """Logits [keep, V] after the last ids of this whole text; the model is asked only for texts not seen before."""
        ends = [len(ids) - keep + 1 + j for j in range(keep)]
        keys = [tuple(ids[:end]) for end in ends]
        if any(key not in self._known for key in keys):
            shared, most = 0, min(len(self._read), ends[0] - 1)
            while shared < most and self._read[shared] == ids[shared]:
                shared += 1
            self.row.crop(shared)
            self._known.update(zip(keys, self.row.forward(ids[shared:], keep=keep), strict=True))
            self._read = list(ids)
        return torch.stack([self._known[key] for key in keys])


class MemoRow:
    """A `Row` on top of a memory, so that every step can begin anew at no cost."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.rows, self.max_length = memory.row.rows, memory.row.max_length
        self.read: list[int] = []
        self.length = self.forwards = self.tokens_fed = 0
        self.seconds = 0.0

    def forward(self, ids: list[int], keep: int) -> Tensor:
        """As `Row.forward`."""
        self.read += ids
        self.length = len(self.read)
        return self._memory.logits(self.read, keep)

    def crop(self, length: int) -> None:
        """As `Row.crop`."""
        del self.read[length:]
        self.length = len(self.read)


@dataclass(frozen=True)
class FirstToken:
    """A χ² test of the first committed token against the target's exact law.

    Attributes:
        prompt, algorithm: what was sampled.
        samples: first steps run.
        statistic, degrees, p_value: of the test.
    """

    prompt: int
    algorithm: str
    samples: int
    statistic: float
    degrees: int
    p_value: float


def audit_first_token(
    engine: Engine,
    prompt: Any,
    number: int,
    algorithm: str,
    *,
    samples: int,
    temperature: float,
    num_draft_tokens: int,
    seed: int,
) -> FirstToken:
    """Runs the first step many times and compares what it commits first with the target's law.

    Args:
        engine: models and pair.
        prompt: text, ids or a chat.
        number: of the prompt, for the record.
        algorithm: the one to be tested.
        samples: steps.
        temperature: positive.
        num_draft_tokens: drafted in each step.
        seed: of the first step; one more for each next.
    """
    target = drafter = None
    counts: dict[int, int] = {}
    prompt_ids: list[int] = []
    for i in range(samples):
        decoder = engine.decoder(
            prompt,
            algorithm=algorithm,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=num_draft_tokens + 2,
            seed=seed + i,
            **plain_law(temperature),
        )
        target = target or Memory(decoder.target)
        decoder.target = MemoRow(target)
        if decoder.context is not None:
            drafter = drafter or Memory(decoder.context.row)
            decoder.context.row = MemoRow(drafter)
        prompt_ids = list(decoder.ids)
        first = decoder.step()[0]
        counts[first] = counts.get(first, 0) + 1
    assert engine.target.model is not None
    logits = engine.target.model.new_row().forward(prompt_ids, keep=1)[0]
    p = laws.law(logits, Warping(temperature)).double()
    return FirstToken(number, algorithm, samples, *chi_square(counts, p / p.sum()))


def least_certain(engine: Engine, prompts: Sequence[Any], n: int, temperature: float) -> list[int]:
    """The numbers of the n prompts after which the target's law has the most entropy: where a χ² can see most."""
    assert engine.target.model is not None
    entropies = []
    for prompt in prompts:
        ids = engine.decoder(prompt, algorithm="none", max_new_tokens=1, **plain_law(temperature)).ids
        p = laws.law(engine.target.model.new_row().forward(ids, keep=1)[0], Warping(temperature)).double()
        entropies.append(float(torch.special.entr(p).sum()))
    return sorted(np.argsort(entropies)[::-1][:n].tolist())


def chi_square(counts: dict[int, int], p: Tensor) -> tuple[float, int, float]:
    """χ² of observed counts against a law: the likeliest tokens have cells, the rest shares one.

    Args:
        counts: by token id.
        p: [V] the exact law.

    Returns:
        (statistic, degrees of freedom, p-value).
    """
    n = sum(counts.values())
    masses, ids = p.topk(min(CELLS, len(p)))
    cells = [(int(i), float(m)) for i, m in zip(ids, masses, strict=True) if n * float(m) >= FEWEST]
    inside = {i for i, _ in cells}
    observed = [counts.get(i, 0) for i, _ in cells]
    expected = [n * m for _, m in cells]
    rest = max(0.0, 1 - sum(m for _, m in cells))
    others = sum(c for i, c in counts.items() if i not in inside)
    if n * rest >= FEWEST or not cells:
        observed, expected = [*observed, others], [*expected, max(n * rest, 1e-9)]
    elif others:  # too rare for a cell of its own: with the rarest that has one
        observed[-1] += others
        expected[-1] += n * rest
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = max(1, len(observed) - 1)
    return float(statistic), degrees, float(chi2.sf(statistic, degrees))


# -- whole texts, re-scored ----------------------------------------------------------------------------------------


def audit_text(
    engine: Engine,
    prompts: Sequence[Any],
    algorithm: str,
    *,
    temperature: float,
    max_new_tokens: int,
    num_draft_tokens: int,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Samples texts and scores every token under a fresh target forward.

    Given what precedes it, a token of the target's law has expected surprise equal to the law's entropy, and a uniform
    rank: both are summed up over all tokens, whatever way the texts take.

    Args:
        engine: models and pair.
        prompts: text, ids or chats.
        algorithm: the one to be tested.
        temperature: positive.
        max_new_tokens, num_draft_tokens: of every text.
        seed: of the first text.
        progress: is told the texts done.

    Returns:
        {"algorithm", "tokens", "mean_nll", "mean_entropy", "z", "rank_p_value"}.
    """
    excess = variance = nll = entropy = 0.0
    bins = np.zeros(20)
    random = np.random.default_rng(seed)
    for number, prompt in enumerate(prompts):
        out = engine.generate(
            prompt,
            algorithm=algorithm,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            seed=seed + number,
            **plain_law(temperature),
        )
        assert engine.target.model is not None
        ids = out.sequences[0].tolist()
        logits = engine.target.model.new_row().forward(ids, keep=len(out.new_ids) + 1)[:-1]
        for x, row in zip(out.new_ids, logits, strict=True):
            p = laws.law(row, Warping(temperature)).double()
            p = p / p.sum()
            log_p = torch.where(p > 0, p.log(), torch.zeros_like(p))
            h = float(-(p * log_p).sum())
            surprise = -math.log(max(float(p[x]), 1e-300))
            excess += surprise - h
            variance += float((p * log_p.square()).sum()) - h * h
            nll, entropy = nll + surprise, entropy + h
            rank = float(p[p > p[x]].sum()) + random.random() * float(p[p == p[x]].sum())
            bins[min(19, int(20 * rank))] += 1
        progress(number + 1)
    n = max(1.0, bins.sum())
    statistic = float(((bins - n / 20) ** 2 / (n / 20)).sum())
    return {
        "algorithm": algorithm,
        "tokens": int(bins.sum()),
        "mean_nll": nll / n,
        "mean_entropy": entropy / n,
        "z": excess / math.sqrt(max(variance, 1e-12)),
        "rank_p_value": float(chi2.sf(statistic, 19)),
    }


def verdict(greedy: dict[str, Any], first: Sequence[FirstToken], texts: Sequence[dict[str, Any]]) -> str:
    """ "lossless" where nothing speaks against it, else "not lossless"."""
    tests = max(1, len(first) + len(texts))
    p_values = [f.p_value for f in first] + [t["rank_p_value"] for t in texts]
    fine = (
        greedy["different"] == 0
        and all(p > SUSPICIOUS / tests for p in p_values)
        and all(abs(t["z"]) < FAR for t in texts)
    )
    return "lossless" if fine else "not lossless"
