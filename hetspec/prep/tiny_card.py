"""The model card of a tiny drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetspec.prep.tiny_train import Shape, Trained

_TEXTS = {
    "written": "written by SmolLM2-135M-Instruct (Apache-2.0): half greedy, half at temperatures 0.7 and 1",
    "stdlib": "the Python standard library (PSF-2.0)",
    "passages": "Wikipedia passages of google/boolq (CC-BY-SA-3.0)",
}


def card(
    name: str,
    shape: Shape,
    trained: Trained,
    counts: Mapping[str, tuple[int, int]],
    held_out: Mapping[str, float],
    measured: Mapping[str, Sequence[Any]],
    command: str,
) -> str:
    """The card as Markdown.

    Args:
        name, shape: of the drafter.
        trained: the model and how long it was trained.
        counts: documents and ids by source, "held out" among them.
        held_out: from `tiny_train.held_out`.
        measured: rows of `runtime.bench.compare` by kind of prompt.
        command: that made it.
    """
    parameters = sum(p.numel() for p in trained.model.parameters())
    unit = "bytes" if shape.vocabulary == 257 else "byte-level BPE"
    lines = [
        "---\nlicense: apache-2.0\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
        f"# {name}: a tiny drafter for SmolLM2-135M-Instruct\n",
        f"{parameters / 1e6:.1f} M parameters, Llama architecture, {shape.vocabulary:,} ids ({unit}), "
        f"a window of {shape.window:,} ids, bfloat16. It drafts for speculative decoding; by itself it is of no use.",
        "It reads plain text after `<|im_end|>`, which begins a text and ends it or a turn of a chat. "
        "No other control token of the target exists in its vocabulary.\n",
        "## Data\n",
        "| text | documents | ids |\n|---|---|---|",
        *(f"| {_TEXTS[k]} | {counts[k][0]:,} | {counts[k][1]:,} |" for k in _TEXTS),
        "\nThe prompts the target wrote from: heads of standard library functions, openings of the passages, notes and "
        "chat questions made from templates, and functions and questions that it made up itself. Kept out by document "
        "or function name: HumanEval, the prompts of `hetspec/prompts.py` and of the demonstration, and the passages "
        "they are cut from.\n",
        "## Training\n",
        f"{trained.steps:,} steps, {trained.tokens / 1e6:.1f} M ids, {trained.seconds / 60:.0f} minutes on one CPU "
        "thread; Muon and AdamW, cosine, cross-entropy, bfloat16 with float32 master weights. The windows of a step "
        "follow from the seed, the number of steps from the clock.\n",
        f"    {command}\n",
        "## Held out\n",
        f"{counts['held out'][0]:,} texts by the target ({held_out['bytes']:,.0f} bytes), none trained on: "
        f"loss {held_out['loss']:.3f} per id, {held_out['bits_per_byte']:.3f} bits per byte, "
        f"{100 * held_out['right']:.1f} % of ids right.\n",
    ]
    if measured:
        lines += [
            "## With SmolLM2-135M-Instruct\n",
            "Greedy, draft length 5, 64 new tokens, bfloat16, one thread; medians over the prompts kept out.\n",
            "| prompts | algorithm | tokens per target pass | accepted | speed against plain |\n|---|---|---|---|---|",
        ]
        for kind, rows in measured.items():
            for row in rows:
                accepted = row.acceptance_measured
                lines.append(
                    f"| {row.prompts} {kind} | {row.name} | {row.tokens_per_target_pass:.2f} | "
                    f"{'' if accepted is None else f'{accepted:.2f}'} | {row.ratio_to_plain:.2f} |"
                )
    return "\n".join(lines).rstrip() + "\n"
