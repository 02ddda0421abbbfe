"""The Qwen models, run by hand (marker large: `make test-large`); bfloat16, minutes to an hour on a CPU."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from hetspec.runtime import laws, verify
from hetspec.sources import named_texts
from tests.test_models_real import PROSE, RealPair, excess_surprise

pytestmark = [pytest.mark.large, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def qwen():
    return RealPair("qwen2.5-coder-1.5b", "smollm2-135m", dtype=torch.bfloat16)


def humaneval(count):
    prompts = named_texts("humaneval")
    return prompts[:: len(prompts) // count][:count]


def test_greedy_differs_from_plain_only_at_near_ties(qwen):
    for prompt in [*humaneval(5), *PROSE]:
        plain = qwen.engine.generate(prompt, algorithm="none", max_new_tokens=48)
        for algorithm in ("slem", "tli"):
            out = qwen.engine.generate(prompt, algorithm=algorithm, num_draft_tokens=5, max_new_tokens=48)
            if out.new_ids == plain.new_ids:
                continue
            same = next(i for i, (a, b) in enumerate(zip(out.new_ids, plain.new_ids, strict=False)) if a != b)
            context = plain.sequences[:, : plain.sequences.shape[1] - len(plain.new_ids) + same]
            top = qwen.target(context).logits[0, -1].float().topk(2)
            assert set(top.indices.tolist()) == {out.new_ids[same], plain.new_ids[same]}
            assert float(top.values[0] - top.values[1]) <= 0.25, (
                "more than a rounding error of bfloat16 apart"
            )


def test_slem_commits_enough_tokens_per_pass(qwen):
    passes = [
        qwen.engine.generate(
            prompt, algorithm="slem", num_draft_tokens=5, max_new_tokens=64
        ).stats.tokens_per_target_pass
        for prompt in humaneval(12)
    ]
    print("SLEM, draft length 5, tokens per target pass:", [round(x, 2) for x in passes])
    assert statistics.mean(passes) >= 2.7


def test_tli_sampling_has_the_acceptance_and_the_text_of_its_laws(qwen, monkeypatch):
    expected, honest = [], verify._verify_token

    def spy(candidates, proposal_laws, logits, warping, rng, none=None):
        verdict = honest(candidates, proposal_laws, logits, warping, rng, none)
        for j in range(min(verdict.accepted + 1, len(candidates))):
            expected.append(float(laws.acceptance(laws.law(logits[j], warping), proposal_laws[j])))
        return verdict

    monkeypatch.setattr(verify, "_verify_token", spy)
    accepted = judged = steps = tokens = 0
    surprise: dict[str, list[float]] = {"none": [0.0, 0.0, 0], "tli": [0.0, 0.0, 0]}
    for seed, prompt in enumerate(humaneval(10)):
        for algorithm, sums in surprise.items():
            out = qwen.engine.generate(
                prompt,
                algorithm=algorithm,
                verify="token",
                num_draft_tokens=5,
                max_new_tokens=48,
                do_sample=True,
                top_k=0,
                seed=100 + seed,
            )
            excess, variance = excess_surprise(qwen.target, out)
            sums[0], sums[1], sums[2] = sums[0] + excess, sums[1] + variance, sums[2] + len(out.new_ids)
            if algorithm == "tli":
                accepted += out.stats.accepted
                judged += sum(out.stats.proposed_by_position)
                steps, tokens = steps + out.stats.steps, tokens + out.stats.new_tokens
    mean = sum(expected) / judged
    spread = math.sqrt(sum(a * (1 - a) for a in expected)) / judged
    print(
        f"TLI, temperature 1: accepted {accepted / judged:.3f}, laws say {mean:.3f} ± {spread:.3f}; "
        f"{tokens / steps:.2f} tokens per target pass"
    )
    scores = {name: excess / math.sqrt(variance) for name, (excess, variance, _) in surprise.items()}
    print(
        "excess surprise in standard deviations:", scores, "tokens:", {n: v[2] for n, v in surprise.items()}
    )
    assert abs(accepted / judged - mean) < 4 * spread
    assert max(map(abs, scores.values())) < 5
