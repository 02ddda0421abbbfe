"""Contestants side by side on one engine: what they accept, what a pass yields, what it costs.

Acceptance is given twice: as measured while generating, and by direct computation of `Σ min(p, π)` for the
first candidate after every prefix of the same text, which has the target's law whoever drafted it. Both should agree
(up to the positions that are never judged: those after a wholly accepted draft); where the measured one falls
short, the drafter's context is at fault.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from hetspec.runtime import laws
from hetspec.runtime.algorithms import BEHIND_TOKENS
from hetspec.runtime.decode import DecodeStats
from hetspec.runtime.engine import Engine, GenerateOutput
from hetspec.runtime.options import plain_law
from hetspec.runtime.rng import TorchRng
from hetspec.runtime.verify import PointwiseLaw

LIKELIEST = 64  # tokens an overlap is summed over where a law is known token by token


@dataclass(frozen=True)
class Contestant:
    """One way of decoding: a name and the options of `Engine.decoder` that make it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


CONTESTANTS = (
    Contestant("none", {"algorithm": "none"}),
    Contestant("slem", {"algorithm": "slem"}),
    Contestant("tli", {"algorithm": "tli"}),
    Contestant("slrs-first", {"algorithm": "slrs", "slrs_form": "first"}),
    Contestant("cosegment", {"algorithm": "rdk"}),
    Contestant("slrs", {"algorithm": "slrs"}),
)


@dataclass(frozen=True)
class Row:
    """One contestant's figures over all prompts.

    Attributes:
        acceptance_direct: mean `Σ min(p, π)` of the first candidate (share of equal argmax at temperature 0).
        acceptance_measured: accepted share of the judged candidates while generating.
        ratio_to_plain: median over prompts of tokens/s against plain decoding of the same prompt.
        identical: prompts whose greedy text equals plain decoding (None when sampling).
    """

    name: str
    prompts: int
    acceptance_direct: float | None
    acceptance_measured: float | None
    tokens_per_target_pass: float
    drafter_forwards_per_candidate: float | None
    tokens_per_second: float
    ratio_to_plain: float
    align_share: float
    identical: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def compare(
    engine: Engine,
    prompts: Sequence[Any],
    *,
    contestants: Sequence[Contestant] = CONTESTANTS,
    temperature: float = 0.0,
    num_draft_tokens: int = 5,
    max_new_tokens: int = 48,
    verify: str = "token",
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Runs every contestant on every prompt, alternating, the first one (plain decoding) as the reference.

    Args:
        engine: two models and their pair.
        prompts: text or ids.
        contestants: the first must be plain decoding.
        temperature: 0 for greedy.
        num_draft_tokens, max_new_tokens: the same for all.
        verify: "token", whose accepted share is what `Σ min(p, π)` predicts; block verification accepts more.
        seed: of the first prompt; one more for each next.
        say: is told every result.
    """
    sampling = plain_law(temperature)
    outputs: dict[str, list[GenerateOutput]] = {c.name: [] for c in contestants}
    direct: dict[str, list[float]] = {c.name: [] for c in contestants}
    for number, prompt in enumerate(prompts):
        for contestant in contestants:
            out = engine.generate(
                prompt,
                num_draft_tokens=num_draft_tokens,
                max_new_tokens=max_new_tokens,
                verify=verify,
                seed=seed + number,
                **sampling,
                **contestant.options,
            )
            outputs[contestant.name].append(out)
            say(
                f"prompt {number + 1}/{len(prompts)} {contestant.name}: "
                f"{out.stats.tokens_per_target_pass:.2f} per pass, {out.stats.tokens_per_second:.1f} tokens/s"
            )
        for contestant in contestants[
            1:
        ]:  # each on its own text: sampled texts differ more than algorithms do
            text = outputs[contestant.name][-1].new_ids
            direct[contestant.name] += direct_acceptance(
                engine, prompt, text, contestant, sampling, num_draft_tokens
            )
    plain = outputs[contestants[0].name]
    return [_row(c, outputs[c.name], direct[c.name], plain, greedy=temperature == 0) for c in contestants]


def direct_acceptance(
    engine: Engine,
    prompt: Any,
    text: Sequence[int],
    contestant: Contestant,
    sampling: dict[str, Any],
    num_draft_tokens: int,
) -> list[float]:
    """Acceptance of the first candidate after every prefix of `text`, from the laws alone.

    `Σ min(p, π)` where the contestant has laws, `p(candidate)` for guesses; at temperature 0, 1.0 where the
    candidate is the target's argmax. Prefixes with no candidate count 0.
    """
    decoder = engine.decoder(prompt, seed=0, **sampling, **contestant.options)
    context, ids = decoder.context, decoder.ids
    assert context is not None
    logits = decoder.target.forward([*ids, *text], keep=len(text) + 1)[:-1]
    rng = TorchRng(0)
    values = []
    for t, row in zip(text, logits, strict=True):
        # One law is enough to judge; a guess is cut short if the drafter may not go on.
        n = num_draft_tokens if decoder.algorithm.name == "slem" else 1
        proposal = decoder.algorithm.propose(context, ids[-BEHIND_TOKENS:], n, rng)
        if not proposal.ids:
            values.append(0.0)
        elif decoder.warping.greedy:
            values.append(float(int(laws.argmax(row)) == proposal.ids[0]))
        else:
            p = laws.law(row, decoder.warping)
            guess = proposal.laws is None
            values.append(float(p[proposal.ids[0]]) if guess else _overlap(p, proposal.laws[0]))  # type: ignore[index]
        ids = [*ids, t]
        context.commit_ids([t], engine.target.vocabulary)
    return values


def _overlap(p: Tensor, pi: Tensor | PointwiseLaw) -> float:
    """`Σ min(p, π)`; of a law known token by token, over the target's likeliest tokens."""
    if isinstance(pi, Tensor):
        return float(laws.acceptance(p, pi))
    masses, ids = p.topk(min(LIKELIEST, len(p)))
    return sum(min(float(mass), pi[int(x)]) for mass, x in zip(masses, ids, strict=True) if mass > 1e-4)


def _row(
    contestant: Contestant,
    runs: list[GenerateOutput],
    direct: list[float],
    plain: list[GenerateOutput],
    *,
    greedy: bool,
) -> Row:
    stats: list[DecodeStats] = [run.stats for run in runs]
    judged = sum(sum(s.proposed_by_position) for s in stats)
    proposed = sum(s.proposed for s in stats)
    ratios = [
        run.stats.tokens_per_second / reference.stats.tokens_per_second
        for run, reference in zip(runs, plain, strict=True)
    ]
    return Row(
        name=contestant.name,
        prompts=len(runs),
        acceptance_direct=statistics.mean(direct) if direct else None,
        acceptance_measured=sum(s.accepted for s in stats) / judged if judged else None,
        tokens_per_target_pass=sum(s.new_tokens for s in stats) / sum(s.steps for s in stats),
        drafter_forwards_per_candidate=sum(s.drafter_forwards for s in stats) / proposed
        if proposed
        else None,
        tokens_per_second=statistics.median(s.tokens_per_second for s in stats),
        ratio_to_plain=statistics.median(ratios),
        align_share=sum(s.seconds["align"] for s in stats) / sum(s.total_seconds for s in stats),
        identical=sum(a.new_ids == b.new_ids for a, b in zip(runs, plain, strict=True)) if greedy else None,
    )
