"""Plots of a pair, as matplotlib figures with the object API (no global state, no screen).

One-colour, colour-blind safe; units on the axes; the pair and its key in the footer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetspec.artifact import PairArtifact
from hetspec.vocab import Kind, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hetspec.prep.affinity import CosegmentResult
    from hetspec.prep.fit import Interval
    from hetspec.prep.predict import Prediction

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


def cosegment_plots(pair: PairArtifact, result: CosegmentResult) -> dict[str, Figure]:
    """The plots of a co-segmentation count by file name."""
    plots = {}
    for name, draw in (("affinity_counts", _row_counts), ("affinity_entropy", _row_entropies)):
        plots[f"plots/{name}.png"], (axes,) = _figure(pair)
        draw(axes, pair, result)
    return plots


def kernel_plots(pair: PairArtifact, prior: str) -> dict[str, Figure]:
    """The plots of any kernel by file name: how full its rows are, how certain, and what it brought."""
    plots = {}
    if len(pair.kernels[prior].indices):
        plots[f"plots/{prior}_sparsity.png"], (axes,) = _figure(pair)
        _sparsity(axes, pair, prior)
    if "gain" in pair.figures["affinity"][prior]:
        plots["plots/affinity_held_out.png"], (axes,) = _figure(pair)
        _held_out(axes, pair)
    return plots


def _sparsity(axes: Axes, pair: PairArtifact, prior: str) -> None:
    axes.set_title(f"How full the rows of the {prior} kernel are", fontsize=12)
    kernel = pair.kernels[prior]
    sizes = np.sort(np.diff(kernel.indptr))[::-1]
    sizes = sizes[sizes > 0]
    axes.semilogx(np.arange(1, len(sizes) + 1), sizes, color=BLUE)
    axes.set_xlabel("drafter token, by rank")
    axes.set_ylabel("target tokens in its row")
    axes.set_ylim(0, None)
    possible = pair.drafter.rows * pair.target.rows
    axes.text(
        0.98,
        0.95,
        f"{len(kernel.indices):,} entries, {100 * len(kernel.indices) / possible:.4f} % of all\n"
        f"{len(sizes):,} of {pair.drafter.rows:,} rows have any",
        transform=axes.transAxes,
        ha="right",
        va="top",
    )


def _held_out(axes: Axes, pair: PairArtifact) -> None:
    axes.set_title("Acceptance on held-out text: kernels against TLI", fontsize=12)
    found = {p: f for p, f in pair.figures["affinity"].items() if "gain" in f}
    for row, figures in enumerate(found.values()):
        base = figures["held_out_tli_rate"]
        axes.barh(row, base + figures["gain"], color=BLUE)
        error = [[figures["gain"] - figures["gain_low"]], [figures["gain_high"] - figures["gain"]]]
        axes.errorbar(base + figures["gain"], row, xerr=error, color="black", capsize=4)
        axes.axvline(base, color=ORANGE, linestyle=":", label="TLI" if row == 0 else None)
        axes.text(0.01, row, f"θ {figures['theta']:.3f}  λ {figures['lam']:.3f}", va="center", color="white")
    axes.set_yticks(range(len(found)), list(found))
    axes.set_xlabel("mean Σ min(p, π), gain with its 95 % interval over texts")
    _legend_below(axes)


def stops_plots(pair: PairArtifact) -> dict[str, Figure]:
    """How sure the stop table is: the text's bytes by the probability that the token ends before them."""
    assert pair.stops is not None
    figure, (axes,) = _figure(pair)
    axes.set_title("Does the target's token end before this byte?", fontsize=12)
    edges = np.linspace(0, 1, 21)
    counts, _ = np.histogram(pair.stops.stop, edges, weights=pair.stops.counts)
    share = 100 * counts / max(1, counts.sum())
    axes.bar(edges[:-1] + 0.025, share, 0.045, color=BLUE)
    axes.set_xlabel("stop probability, given the byte")
    axes.set_ylabel("share of bytes that could lengthen a whole token (%)")
    return {"plots/stops.png": figure}


def calibration_plots(pair: PairArtifact) -> dict[str, Figure]:
    """How much of the target's mass its likeliest tokens hold, and what of it the drafter can propose."""
    assert pair.calibration is not None
    plots = {}
    plots["plots/target_mass.png"], (axes,) = _figure(pair)
    axes.set_title("Target mass held by its likeliest tokens (calibration text)", fontsize=12)
    mean = pair.calibration.mean.astype(np.float64)
    inside = pair.map.t2d >= 0
    for colour, label, mass in (
        (BLUE, "all target tokens", np.sort(mean)[::-1]),
        (ORANGE, "tokens in the intersection", np.sort(mean[inside])[::-1]),
    ):
        style = "-" if colour == BLUE else "--"
        axes.semilogx(np.arange(1, len(mass) + 1), 100 * np.cumsum(mass), style, color=colour, label=label)
    axes.set_xlabel("tokens, likeliest first")
    axes.set_ylabel("mean probability held (%)")
    axes.set_ylim(0, 102)
    axes.legend(frameon=False)
    return plots


def prune_plots(pair: PairArtifact) -> dict[str, Figure]:
    """Acceptance and time against the rows kept of the drafter's head."""
    curve = pair.figures["prune"]["curve"]
    sizes = [point["size"] for point in curve]
    chosen = pair.figures["prune"]["size"]
    plots = {}
    plots["plots/prune_acceptance.png"], (axes,) = _figure(pair)
    axes.set_title("Acceptance on held-out text against the rows kept", fontsize=12)
    axes.plot(
        sizes, [p["target_mass"] for p in curve], "o:", color=GREY, label="target mass kept, the limit of TLI"
    )
    axes.plot(sizes, [p["tli"] for p in curve], "o-", color=BLUE, label="TLI")
    for marker, prior in zip("s^vDP", curve[0]["rdk"], strict=False):
        axes.plot(sizes, [p["rdk"][prior] for p in curve], f"{marker}-", alpha=0.8, label=f"RDK, {prior}")
    axes.set_ylabel("mean Σ min(p, π)")
    axes.set_ylim(0, 1.02)
    _size_axis(axes, chosen)
    if curve[0]["step_seconds"] is not None:
        plots["plots/prune_speed.png"], (axes,) = _figure(pair)
        axes.set_title("Time of a drafter step and predicted speed-up against the rows kept", fontsize=12)
        whole = curve[-1]["step_seconds"]
        axes.plot(
            sizes, [p["step_seconds"] / whole for p in curve], "o-", color=BLUE, label="step, whole head = 1"
        )
        axes.plot(
            sizes,
            [p["speedup"] for p in curve],
            "s-",
            color=ORANGE,
            label="predicted speed-up over plain decoding",
        )
        axes.set_ylabel("ratio")
        axes.set_ylim(0, None)
        _size_axis(axes, chosen)
    return plots


def _size_axis(axes: Axes, chosen: int) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelsize=8, rotation=30)
    axes.axvline(chosen, color="black", linewidth=0.8, linestyle="--", label=f"chosen: {chosen:,}")
    axes.set_xlabel("rows kept of the drafter's LM head")
    axes.legend(frameon=False, fontsize=9)


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


def prediction_plot(pair: PairArtifact, found: Sequence[Prediction]) -> Figure:
    """Predicted speed-up of each algorithm against the draft length."""
    figure, (axes,) = _figure(pair)
    axes.set_title("Predicted speed-up over plain decoding", fontsize=12)
    for marker, colour, p in zip(
        "os^vDP", (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", GREY), found, strict=False
    ):
        lengths = sorted(p.speedup)
        axes.plot(lengths, [p.speedup[n].mean for n in lengths], f"{marker}-", color=colour, label=p.name)
        axes.fill_between(
            lengths,
            [p.speedup[n].low for n in lengths],
            [p.speedup[n].high for n in lengths],
            color=colour,
            alpha=0.1,
        )
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("draft length")
    axes.set_ylabel("ratio (band: 95 % over texts)")
    axes.legend(frameon=False)
    return figure


PARTS = {"target": BLUE, "drafter": ORANGE, "verify": "#009E73", "align": "#CC79A7", "other": GREY}


def speed_plots(pair: PairArtifact, title: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """A race's outcome: ratios to plain decoding with their quartiles, and where hetspec's time went.

    Args:
        pair: what raced.
        title: of both plots.
        rows: of one kind of prompts, from `race.summary`.
    """
    from hetspec.runtime.race import is_theirs  # imports torch

    speed, (axes,) = _figure(pair)
    axes.set_title(f"Tokens per second over transformers' plain decoding: {title}", fontsize=12)
    places = np.arange(len(rows))[::-1]
    ratios = [row["ratio_to_plain"] for row in rows]
    middle = np.array([r["median"] for r in ratios])
    reach = [middle - [r["low"] for r in ratios], [r["high"] for r in ratios] - middle]
    colours = [ORANGE if is_theirs(row["name"]) else BLUE for row in rows]
    axes.barh(places, middle, color=colours, xerr=np.maximum(reach, 0), capsize=3, ecolor="black")
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.set_xlabel("ratio, median over prompts (bars: quartiles; blue: hetspec, orange: transformers)")
    found = {"plots/speed.png": speed}
    own = [row for row in rows if row["shares"]]
    if own:
        time, (axes,) = _figure(pair)
        axes.set_title(f"Where the time went: {title}", fontsize=12)
        places, left = np.arange(len(own))[::-1], np.zeros(len(own))
        for part, colour in PARTS.items():
            share = np.array([100 * row["shares"][part] for row in own])
            axes.barh(places, share, left=left, color=colour, label=part)
            left = left + share
        axes.set_yticks(places, [row["name"] for row in own])
        axes.set_xlabel("share of the time (%)")
        axes.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, -0.12))
        found["plots/time.png"] = time
    return found


def measured_plot(
    pair: PairArtifact, found: Sequence[Prediction], measured: Mapping[str, Interval], length: int
) -> Figure:
    """Predicted against measured tokens per target pass, one point for each algorithm."""
    figure, (axes,) = _figure(pair)
    axes.set_title(f"Predicted and measured tokens per target pass, draft length {length}", fontsize=12)
    most = 1.0
    for p in found:
        x, y = p.tokens_per_pass[length], measured[p.name]
        axes.errorbar(
            x.mean,
            y.mean,
            xerr=[[x.mean - x.low], [x.high - x.mean]],
            yerr=[[y.mean - y.low], [y.high - y.mean]],
            fmt="o",
            capsize=3,
            label=p.name,
        )
        most = max(most, x.high, y.high)
    line = np.array([1.0, most * 1.05])
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, 0.9 * line, 1.1 * line, color=GREY, alpha=0.2, label="±10 %")
    axes.set_xlabel("predicted (bars: 95 % over texts)")
    axes.set_ylabel("measured, other prompts")
    axes.legend(frameon=False)
    return figure
