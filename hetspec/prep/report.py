"""Plots of a pair, as matplotlib figures with the object API (no global state, no screen).

One-colour, colour-blind safe; units on the axes; the pair and its key in the footer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hetspec.artifact import PairArtifact
from hetspec.vocab import Kind, Vocabulary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
LONGEST = 16  # longer pieces share the last bar


def map_plots(pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> dict[str, Figure]:
    """The plots of a built map by file name."""
    return {
        "plots/piece_length.png": _piece_lengths(pair, target, drafter),
        "plots/intersection.png": _intersection(pair, target, drafter),
        "plots/coverage.png": _coverage(pair, target, drafter),
    }


def _figure(pair: PairArtifact, title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"target {pair.target.name}   drafter {pair.drafter.name}   pair {pair.key}",
        fontsize=8,
        color="#555555",
    )
    return figure, axes


def _lengths(vocabulary: Vocabulary) -> np.ndarray:
    """Bytes of each text token, clipped to LONGEST; 0 for the others."""
    lengths: np.ndarray = np.fromiter(map(len, vocabulary.pieces), np.int64, len(vocabulary.pieces))
    return lengths.clip(max=LONGEST)


def _piece_lengths(pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> Figure:
    figure, axes = _figure(pair, "Token lengths")
    width = 0.42
    for offset, colour, label, vocabulary in (
        (-width / 2, BLUE, f"target ({pair.target.text_tokens:,} text tokens)", target),
        (width / 2, ORANGE, f"drafter ({pair.drafter.text_tokens:,} text tokens)", drafter),
    ):
        counts = np.bincount(_lengths(vocabulary), minlength=LONGEST + 1)[1:]
        share = 100 * counts / max(1, counts.sum())
        axes.bar(np.arange(1, LONGEST + 1) + offset, share, width, color=colour, label=label)
    _length_axis(axes)
    axes.set_ylabel("share of text tokens (%)")
    axes.legend(frameon=False)
    return figure


def _length_axis(axes: Axes) -> None:
    axes.set_xticks(range(1, LONGEST + 1), [*map(str, range(1, LONGEST)), f"{LONGEST}+"])
    axes.set_xlabel("token length (bytes)")


def _intersection(pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> Figure:
    figure, axes = _figure(pair, "Text tokens shared byte for byte")
    shared = int(pair.figures["map"]["intersection_count"])
    bars = (
        (f"target\n{pair.target.name}", len(target.ids_by_bytes)),
        (f"drafter\n{pair.drafter.name}", len(drafter.ids_by_bytes)),
    )
    for row, (label, total) in enumerate(bars):
        axes.barh(row, shared, color=BLUE, label="in both" if row == 0 else None)
        axes.barh(row, total - shared, left=shared, color=GREY, label="only here" if row == 0 else None)
        axes.text(
            total * 1.01, row, f"{shared:,} of {total:,}\n({100 * shared / max(1, total):.1f} %)", va="center"
        )
        axes.text(
            -0.01, row, label, va="center", ha="right", transform=axes.get_yaxis_transform(), fontsize=9
        )
    axes.set_yticks([])
    axes.set_xlim(0, max(total for _, total in bars) * 1.25)
    axes.set_xlabel("distinct byte strings")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return figure


def _coverage(pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> Figure:
    figure, axes = _figure(pair, "Share of tokens in the intersection, by length")
    positions = np.arange(1, LONGEST + 1)
    for colour, label, vocabulary, mapped in (
        (BLUE, "target", target, pair.map.t2d >= 0),
        (ORANGE, "drafter", drafter, pair.map.d2t >= 0),
    ):
        lengths = _lengths(vocabulary)
        text = vocabulary.kinds <= Kind.BYTE
        counts = np.bincount(lengths[text], minlength=LONGEST + 1)[1:]
        hits = np.bincount(lengths[text & mapped[: len(lengths)]], minlength=LONGEST + 1)[1:]
        share = np.divide(100 * hits, counts, out=np.full(LONGEST, np.nan), where=counts > 0)
        axes.plot(positions, share, "o-", color=colour, label=f"{label} tokens")
    corpus = pair.figures["corpus"]
    if corpus["bytes"]:
        for colour, label, value in (
            (BLUE, "target", corpus["target_covered"]),
            (ORANGE, "drafter", corpus["drafter_covered"]),
        ):
            axes.axhline(
                100 * value, color=colour, linestyle=":", label=f"{label}, running text: {100 * value:.1f} %"
            )
    _length_axis(axes)
    axes.set_ylim(0, 105)
    axes.set_ylabel("share in the intersection (%)")
    axes.legend(frameon=False, fontsize=9)
    return figure
