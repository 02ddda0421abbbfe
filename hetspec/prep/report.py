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

    from hetspec.prep.affinity import CosegmentResult

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
LONGEST = 16  # longer pieces share the last bar


def map_plots(pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> dict[str, Figure]:
    """The plots of a built map by file name.

    ``overview.png`` holds all of them and lies at the top, because the UI's compare page puts only top-level
    files of several runs side by side.
    """
    panels = {"intersection": _intersection, "coverage": _coverage, "piece_length": _piece_lengths}
    overview, grid = _figure(pair, rows=len(panels))
    plots = {"overview.png": overview}
    for axes, (name, draw) in zip(grid, panels.items(), strict=True):
        draw(axes, pair, target, drafter)
        plots[f"plots/{name}.png"], (single,) = _figure(pair)
        draw(single, pair, target, drafter)
    return plots


def kernel_plots(pair: PairArtifact, result: CosegmentResult) -> dict[str, Figure]:
    """The plots of a co-segmentation kernel by file name."""
    plots = {}
    for name, draw in (("affinity_counts", _row_counts), ("affinity_entropy", _row_entropies)):
        plots[f"plots/{name}.png"], (axes,) = _figure(pair)
        draw(axes, pair, result)
    return plots


def _row_counts(axes: Axes, pair: PairArtifact, result: CosegmentResult) -> None:
    axes.set_title("How often the text shows each drafter token", fontsize=12)
    counts = np.sort(result.counts[: pair.drafter.tokens])[::-1]
    seen = counts[counts > 0]
    axes.loglog(np.arange(1, len(seen) + 1), seen, color=BLUE)
    axes.set_xlabel("drafter token, by rank")
    axes.set_ylabel("co-segmentation counts")
    axes.text(
        0.98,
        0.95,
        f"{len(seen):,} of {pair.drafter.tokens:,} tokens seen\n{result.target_tokens:,} target tokens of text",
        transform=axes.transAxes,
        ha="right",
        va="top",
    )


def _row_entropies(axes: Axes, pair: PairArtifact, result: CosegmentResult) -> None:
    axes.set_title("How certain the kernel's rows are (rows seen in the text)", fontsize=12)
    kernel = result.kernel
    rows = np.repeat(np.arange(len(kernel.indptr) - 1), np.diff(kernel.indptr))
    weights = kernel.weights.astype(np.float64)
    safe = np.where(weights > 0, weights, 1.0)
    entropy = np.zeros(len(kernel.indptr) - 1)
    np.add.at(entropy, rows, -weights * np.log2(safe))
    seen = result.counts > 0
    bins = np.linspace(0, max(4.0, float(entropy.max(initial=0.0))), 33)
    total = max(1, int(result.counts.sum()))
    axes.hist(
        [entropy[seen], entropy[seen]],
        bins.tolist(),
        weights=[np.full(int(seen.sum()), 100 / max(1, int(seen.sum()))), 100 * result.counts[seen] / total],
        color=[BLUE, ORANGE],
        label=["share of rows", "share of the text's tokens"],
    )
    axes.set_xlabel("entropy of a row (bits)")
    axes.set_ylabel("share (%)")
    axes.legend(frameon=False)


def _figure(pair: PairArtifact, rows: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(8, 4.8 * rows), layout=ConstrainedLayoutEngine(h_pad=0.15 if rows > 1 else 0.05))
    grid = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"target {_short(pair.target.name)}   drafter {_short(pair.drafter.name)}   pair {pair.key}",
        fontsize=8,
        color="#555555",
        parse_math=False,
    )
    return figure, grid


def _short(name: str, length: int = 32) -> str:
    """The end of a long name, which is what tells paths and hub ids apart."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _lengths(vocabulary: Vocabulary) -> np.ndarray:
    """Bytes of each text token, clipped to LONGEST; 0 for the others."""
    lengths: np.ndarray = np.fromiter(map(len, vocabulary.pieces), np.int64, len(vocabulary.pieces))
    return lengths.clip(max=LONGEST)


def _piece_lengths(axes: Axes, pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> None:
    axes.set_title("Token lengths", fontsize=12)
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


def _length_axis(axes: Axes) -> None:
    axes.set_xticks(range(1, LONGEST + 1), [*map(str, range(1, LONGEST)), f"{LONGEST}+"])
    axes.set_xlabel("token length (bytes)")


def _intersection(axes: Axes, pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> None:
    axes.set_title("Text tokens shared byte for byte", fontsize=12)
    shared = int(pair.figures["map"]["intersection_count"])
    bars = (
        (f"target\n{_short(pair.target.name, 22)}", len(target.ids_by_bytes)),
        (f"drafter\n{_short(pair.drafter.name, 22)}", len(drafter.ids_by_bytes)),
    )
    widest = max(total for _, total in bars)
    for row, (_, total) in enumerate(bars):
        axes.barh(row, shared, color=BLUE, label="in both" if row == 0 else None)
        axes.barh(row, total - shared, left=shared, color=GREY, label="only here" if row == 0 else None)
        axes.text(
            total + 0.01 * widest,
            row,
            f"{shared:,} of {total:,}\n({100 * shared / max(1, total):.1f} %)",
            va="center",
        )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=9, parse_math=False)
    axes.tick_params(left=False)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1, widest) * 1.3)
    axes.set_xlabel("distinct byte strings")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _coverage(axes: Axes, pair: PairArtifact, target: Vocabulary, drafter: Vocabulary) -> None:
    axes.set_title("Share of tokens in the intersection, by length", fontsize=12)
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
    _legend_below(axes)
