"""How the cost of a step grows with the context, the vocabulary and the batch.

scaling.py PAIR_RUN [--out DIR] [--contexts 512,1024,2048,4096,8192] [--vocabularies …] [--batches 1,4,16] [--repeats 7]
Contexts are real texts read by the pair's models; a step is one draft of three tokens and its verification, and only
what is not inside the two models counts as ours. Vocabularies are laws of that many entries, verified and redistributed
by the product's own functions. Batches run the pair's models on several prompts at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetspec.console import load, load_engine, quiet_libraries
from hetspec.errors import HetspecError
from hetspec.prompts import prompts_of
from hetspec.runtime.laws import Warping
from hetspec.runtime.rng import TorchRng
from hetspec.runtime.verify import Proposal, verify

DRAFT_LENGTH = 3
STEPS = 8


def main() -> int:
    """Runs the measurements; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("artifacts/scaling"))
    parser.add_argument("--contexts", default="512,1024,2048,4096,8000")
    parser.add_argument("--vocabularies", default="8192,32768,65536,131072,262144")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--algorithm", default="slrs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        artifact, _, _ = load(arguments.pair, "", prefer="kernel-")
        engine = load_engine(artifact, dtype=arguments.dtype)
        found = {
            "vocabulary": [vocabulary_cost(n, arguments.repeats) for n in numbers(arguments.vocabularies)],
            "context": [context_cost(engine, n, arguments.algorithm) for n in numbers(arguments.contexts)],
            "batch": [batch_cost(engine, n, arguments.algorithm) for n in numbers(arguments.batches)],
        }
    except HetspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "scaling.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found, arguments.out / "scaling.png")
    for kind, rows in found.items():
        for row in rows:
            print(f"{kind:<11}" + "  ".join(f"{k} {v:,.3g}" for k, v in row.items()))
        print(f"{kind:<11}ours grows like size^{exponent(rows):.2f}")
    return 0


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(word) for word in text.split(",")]


def context_cost(engine: Any, tokens: int, algorithm: str) -> dict[str, float]:
    """Milliseconds of a step after a text of so many tokens, in the models and outside."""
    text = "\n\n".join(str(prompt) for prompt in prompts_of("long", 8))
    ids = engine.target.backend.encode(text, add_special_tokens=False).ids[:tokens]
    limit = min(side.model.max_length for side in (engine.target, engine.drafter))
    ids = ids[: limit - (STEPS + 2) * (DRAFT_LENGTH + 1) - 1]
    decoder = engine.decoder(
        ids,
        algorithm=algorithm,
        num_draft_tokens=DRAFT_LENGTH,
        max_new_tokens=10 * STEPS,
        seed=0,
        do_sample=True,
        draft_window=len(ids) + 10 * STEPS,
    )
    for _ in range(2):  # the target reads the prompt, then the drafter
        decoder.step()
    before, started = dict(decoder.stats.seconds), time.perf_counter()
    forwards = decoder.stats.drafter_forwards
    for _ in range(STEPS):
        decoder.step()
    total = time.perf_counter() - started
    spent = {part: decoder.stats.seconds[part] - before[part] for part in ("target", "drafter")}
    per = 1000 / STEPS
    return {
        "size": float(len(ids)),
        "target_ms": per * spent["target"],
        "drafter_forward_ms": 1000 * spent["drafter"] / max(1, decoder.stats.drafter_forwards - forwards),
        "ours_ms": per * (total - sum(spent.values())),
    }


def vocabulary_cost(size: int, repeats: int) -> dict[str, float]:
    """Milliseconds to verify a draft of three at this vocabulary size, by sampling method."""
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(DRAFT_LENGTH + 1, size, generator=generator)
    laws = torch.softmax(4 * torch.randn(DRAFT_LENGTH, size, generator=generator), dim=-1).to(torch.float64)
    ids = [int(law.argmax()) for law in laws]

    def judged(warping: Warping) -> Callable[[], Any]:
        return lambda: verify(Proposal(ids, list(laws)), logits, warping, TorchRng(0), "block")

    def matched() -> Any:
        return verify(Proposal(ids), logits, Warping(temperature=0), TorchRng(0))

    return {
        "size": float(size),
        "greedy_ms": median_ms(matched, repeats),
        "top_k_top_p_ms": median_ms(judged(Warping(top_k=50, top_p=0.95)), repeats),
        "ours_ms": median_ms(judged(Warping()), repeats),
    }


def batch_cost(engine: Any, rows: int, algorithm: str) -> dict[str, float]:
    """Milliseconds per committed token of one row, in the models and outside."""
    prompts = prompts_of("code", rows)
    options = {
        "algorithm": algorithm,
        "num_draft_tokens": DRAFT_LENGTH,
        "do_sample": False,
        "eos_token_id": [],
    }
    started = time.perf_counter()
    first = engine.generate_batch(prompts, max_new_tokens=2, **options)
    middle = time.perf_counter()
    whole = engine.generate_batch(prompts, max_new_tokens=2 + STEPS, **options)
    seconds = (time.perf_counter() - middle) - (middle - started)
    new = sum(out.stats.new_tokens for out in whole) - sum(out.stats.new_tokens for out in first)
    inside = [
        sum(out.stats.seconds[p] for out in outs for p in ("target", "drafter")) for outs in (first, whole)
    ]
    return {
        "size": float(rows),
        "tokens_per_second": new / seconds,
        "ours_ms": 1000 * max(0.0, seconds - (inside[1] - inside[0])) / STEPS,
    }


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of a call, after one to warm up."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


def exponent(rows: list[dict[str, float]]) -> float:
    """Slope of log cost over log size."""
    sizes = np.log([row["size"] for row in rows])
    costs = np.log([max(row["ours_ms"], 1e-3) for row in rows])
    return float(np.polyfit(sizes, costs, 1)[0]) if len(rows) > 1 else 0.0


def plot(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """One panel for each kind, all costs of a row as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    for place, (kind, rows) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(1, len(found), place)
        axes.set_title(f"{kind}: ours grows like size^{exponent(rows):.2f}")
        for name in (n for n in rows[0] if n != "size"):
            axes.plot([r["size"] for r in rows], [r[name] for r in rows], "o-", label=name.replace("_", " "))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel({"context": "tokens", "vocabulary": "entries", "batch": "rows"}[kind])
        axes.set_ylabel("milliseconds per step")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
