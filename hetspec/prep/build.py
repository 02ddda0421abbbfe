"""Building a pair from two tokenizer sources: map, figures, provenance. Loads no weights."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetspec import __version__
from hetspec.artifact import Calibration, Kernel, PairArtifact, StopTable, TokenizerIdentity
from hetspec.errors import InvalidInput
from hetspec.prep.affinity import TOP_PER_ROW, CosegmentResult, cosegment, kernel_figures
from hetspec.prep.intersect import build_map, corpus_coverage, map_figures
from hetspec.prep.stops import stop_table
from hetspec.segment import Segmenter
from hetspec.sources import TokenizerSource
from hetspec.vocab import Vocabulary

# What `fitted` notes about a kernel.
FIT_FIGURES = frozenset(
    (
        *("theta", "lam", "fitted_theta", "fitted_lam", "fit_value", "fit_bound", "held_out_rate"),
        *("held_out_tli_rate", "gain", "gain_low", "gain_high", "head", "row_fit_curve"),
    )
)
CORPUS_BYTES = 2_000_000  # enough for coverages to three digits


@dataclass(frozen=True)
class PreparedTokenizer:
    """One tokenizer, read: its source, its vocabulary, its segmenter."""

    source: TokenizerSource
    vocabulary: Vocabulary
    segmenter: Segmenter


def prepare(source: TokenizerSource) -> PreparedTokenizer:
    """Reads a tokenizer into bytes."""
    vocabulary = Vocabulary.from_tokenizer(
        source.tokenizer,
        name=source.name,
        rows=source.rows,
        eos_ids=source.eos_ids,
        turn_end_ids=source.turn_end_ids,
    )
    return PreparedTokenizer(source, vocabulary, Segmenter(source.tokenizer, vocabulary))


def build_pair(
    target: PreparedTokenizer,
    drafter: PreparedTokenizer,
    texts: Sequence[str],
    corpus_name: str,
    say: Callable[[str], None] = lambda _: None,
) -> PairArtifact:
    """Builds the intersection map of a pair and measures what it covers.

    Args:
        target, drafter: the two tokenizers.
        texts: running text whose coverage is measured; may be empty.
        corpus_name: what to call it.
        say: is told what happens.
    """
    started = time.perf_counter()
    say("intersecting the vocabularies")
    mapping = build_map(target.vocabulary, drafter.vocabulary, target.segmenter)
    figures: dict[str, Any] = {"map": asdict(map_figures(mapping, target.vocabulary, drafter.vocabulary))}
    say(f"measuring coverage on {corpus_name}")
    corpus = [text.encode() for text in texts]
    figures["corpus"] = {
        "name": corpus_name,
        "bytes": sum(map(len, corpus)),
        "target_covered": corpus_coverage(corpus, target.segmenter, mapping.t2d >= 0, target.vocabulary),
        "drafter_covered": corpus_coverage(corpus, drafter.segmenter, mapping.d2t >= 0, drafter.vocabulary),
    }
    figures["seconds"] = time.perf_counter() - started
    return PairArtifact(
        target=TokenizerIdentity.of(target.vocabulary, target.source.revision),
        drafter=TokenizerIdentity.of(drafter.vocabulary, drafter.source.revision),
        map=mapping,
        figures=figures,
        provenance={
            "hetspec_version": __version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "stages": ["build-map"],
            "target_notes": list(target.vocabulary.notes),
            "drafter_notes": list(drafter.vocabulary.notes),
        },
    )


def extend(
    pair: PairArtifact,
    *,
    stage: str,
    figures: dict[str, Any],
    settings: dict[str, Any],
    kernels: dict[str, Kernel] | None = None,
    calibration: Calibration | None = None,
    stops: StopTable | None = None,
) -> PairArtifact:
    """A new artifact with the parts of an old one and some more; the old one is left as it is.

    Args:
        pair: the old artifact.
        stage: the command that adds the parts.
        figures: one level of nesting is merged.
        settings: recorded in the provenance.
        kernels: added to, or put in the place of, the old ones.
        calibration, stops: put in the place of the old ones.
    """
    if pair.head is not None and kernels:
        _keep_head(pair, kernels)
    merged = dict(pair.figures)
    for section, values in figures.items():
        merged[section] = {**merged.get(section, {}), **values}
    provenance = {
        **pair.provenance,
        "hetspec_version": __version__,
        "stages": [*pair.provenance.get("stages", []), stage],
        stage: {
            **settings,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    }
    return dataclasses.replace(
        pair,
        kernels={**pair.kernels, **(kernels or {})},
        calibration=calibration or pair.calibration,
        stops=stops or pair.stops,
        figures=merged,
        provenance=provenance,
    )


def _keep_head(pair: PairArtifact, kernels: dict[str, Kernel]) -> None:
    """Refuses kernels that reach other drafter ids than the pruned head was chosen from."""
    bare = {
        prior: dataclasses.replace(kernel, head_fit=None)
        for prior, kernel in {**pair.kernels, **kernels}.items()
    }
    new = dataclasses.replace(pair, head=None, kernels=bare)
    if not np.array_equal(new.reachable, pair.reachable):
        raise InvalidInput(
            "the pair's pruned head was chosen without this kernel, which reaches other drafter tokens.",
            "Build kernels first and prune last: name the run before pruning.",
        )


def recalibrated(
    pair: PairArtifact, calibration: Calibration, *, figures: dict[str, Any], settings: dict[str, Any]
) -> PairArtifact:
    """A pair with a new calibration; whatever the old one decided is taken away, and weights are fitted anew.

    Args:
        pair: the old artifact.
        calibration: of both models, or of the target alone (then nothing is fitted).
        figures: of the calibration.
        settings: recorded in the provenance.
    """
    kernels = {
        prior: dataclasses.replace(kernel, mu=calibration.mean, fit=None, head_fit=None)
        for prior, kernel in pair.kernels.items()
    }
    affinity = {
        prior: {name: value for name, value in known.items() if name not in FIT_FIGURES}
        for prior, known in pair.figures.get("affinity", {}).items()
    }
    kept = {name: value for name, value in pair.figures.items() if name not in ("calibration", "prune")}
    bare = dataclasses.replace(
        pair, kernels=kernels, figures={**kept, **({"affinity": affinity} if affinity else {})}
    )
    new = extend(
        bare, stage="calibrate", calibration=calibration, figures={"calibration": figures}, settings=settings
    )
    if len(calibration.fit.q):
        for prior in kernels:
            new = fitted(new, prior)
    return new


def add_cosegment(
    pair: PairArtifact,
    target: PreparedTokenizer,
    drafter: PreparedTokenizer,
    texts: Sequence[str],
    names: Sequence[str],
    *,
    smoothing: float = 1.0,
    top: int = TOP_PER_ROW,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[PairArtifact, CosegmentResult]:
    """A pair with a co-segmentation kernel counted on texts; the given one is left as it is.

    Args:
        pair: the old artifact.
        target, drafter: its tokenizers.
        texts: the corpus.
        names: what to call its parts.
        smoothing, top, progress: see `cosegment`.
    """
    started = time.perf_counter()
    result = cosegment(
        pair.map,
        target.segmenter,
        drafter.segmenter,
        (text.encode() for text in texts),
        smoothing=smoothing,
        top=top,
        progress=progress,
    )
    seconds = time.perf_counter() - started
    figures = kernel_figures(result, pair.map, drafter.vocabulary)
    figures |= {
        "texts": " ".join(names),
        "seconds": seconds,
        "tokens_per_second": result.target_tokens / seconds,
    }
    settings = {"prior": "cosegment", "texts": list(names), "smoothing": smoothing, "top": top}
    new = extend(
        pair,
        stage="build-affinity",
        kernels={"cosegment": result.kernel},
        figures={"affinity": {"cosegment": figures}},
        settings=settings,
    )
    return new, result


def add_stops(
    pair: PairArtifact,
    target: PreparedTokenizer,
    texts: Sequence[str],
    names: Sequence[str],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> PairArtifact:
    """A pair with a table of where target tokens end; the given one is left as it is.

    Args:
        pair: the old artifact.
        target: its target's tokenizer.
        texts: the corpus.
        names: what to call its parts.
        progress: is told the bytes done so far.
    """
    started = time.perf_counter()
    result = stop_table(
        target.vocabulary, target.segmenter, (text.encode() for text in texts), progress=progress
    )
    seconds = time.perf_counter() - started
    figures = {
        "texts": " ".join(names),
        "target_tokens": result.target_tokens,
        "nodes": len(result.table.stop),
        "decided": result.decided,
        "seconds": seconds,
        "tokens_per_second": result.target_tokens / seconds,
    }
    return extend(
        pair,
        stage="build-affinity",
        stops=result.table,
        figures={"stops": figures},
        settings={"prior": "stops", "texts": list(names)},
    )


def add_kernel(
    pair: PairArtifact, kernel: Kernel, knobs: dict[str, float], *, top: int, seconds: float
) -> PairArtifact:
    """A pair with one more kernel; the given one is left as it is.

    Args:
        pair: the old artifact.
        kernel: to be added.
        knobs: how it was made.
        top: entries kept per row.
        seconds: it took.
    """
    figures = {
        "prior": kernel.prior,
        "nnz": len(kernel.indices),
        "reached_targets": len(np.unique(kernel.indices)),
        "seconds": seconds,
        **knobs,
    }
    return extend(
        pair,
        stage="build-affinity",
        kernels={kernel.prior: kernel},
        figures={"affinity": {kernel.prior: figures}},
        settings={"prior": kernel.prior, "top": top, **knobs},
    )


def fitted(pair: PairArtifact, prior: str, *, rows: bool = False) -> PairArtifact:
    """The pair with the weights of one kernel fitted to its calibration, and the held-out gain noted.

    Args:
        pair: with that kernel and a calibration that ran the drafter.
        prior: which kernel.
        rows: fit the kernel's entries too.
    """
    from hetspec.prep import weights  # numba and scipy's optimiser are slow to import

    started = time.perf_counter()
    calibration = weights.require_contexts(pair)
    kernel = dataclasses.replace(pair.kernels[prior], mu=calibration.mean, fit=None, head_fit=None)
    noted: dict[str, Any] = {}
    if rows:
        kernel, curve = weights.with_fitted_rows(pair, kernel)
        noted["row_fit_curve"] = curve
    fit = weights.fit_kernel(pair, kernel)
    kernel = weights.weighted(kernel, fit)
    noted |= asdict(fit)
    if pair.head is not None:
        head_fit = weights.fit_kernel(pair, kernel, pair.head.kept)
        kernel = weights.weighted(kernel, head_fit, head=True)
        noted["head"] = asdict(head_fit)
    affinity = {**pair.figures.get("affinity", {})}
    known = affinity.get(prior, {})
    affinity[prior] = {
        **known,
        **noted,
        "nnz": len(kernel.indices),
        "seconds": known.get("seconds", 0.0) + time.perf_counter() - started,
    }
    return dataclasses.replace(
        pair, kernels={**pair.kernels, prior: kernel}, figures={**pair.figures, "affinity": affinity}
    )


def summary(pair: PairArtifact) -> str:
    """A few lines of markdown about a pair, shown as the description of its run."""
    figures, corpus = pair.figures["map"], pair.figures["corpus"]
    return (
        f"- target: {pair.target.style}, {pair.target.text_tokens:,} text tokens\n"
        f"- drafter: {pair.drafter.style}, {pair.drafter.text_tokens:,} text tokens\n"
        f"- shared byte for byte: {figures['intersection_count']:,} tokens\n"
        f"- running text ({corpus['name']}): {100 * corpus['target_covered']:.1f} % of the target's tokens covered\n"
    )


def corpus(texts: Sequence[str], limit: int = CORPUS_BYTES) -> list[str]:
    """An even sample of texts with about `limit` characters in all; texts longer than that are cut up first."""
    parts = [part for text in texts for part in _blocks(text, limit if len(text) <= limit else limit // 64)]
    total = sum(map(len, parts))
    stride = max(1, total // limit)
    return parts[::stride]


def _blocks(text: str, size: int) -> Iterator[str]:
    """A text in blocks of about `size` characters, cut at line ends where there are any."""
    start, size = 0, max(1, size)
    while start < len(text):
        end = text.find("\n", start + size - 1, start + 2 * size) + 1 or start + size
        yield text[start:end]
        start = end


def most_frequent_unmapped(
    pair: PairArtifact, target: PreparedTokenizer, texts: Sequence[str], top: int = 50
) -> list[dict[str, Any]]:
    """The target tokens outside the intersection that the text uses most: what the drafter cannot propose."""
    counts: dict[int, int] = {}
    for ids in target.segmenter.encode_batch([text.encode() for text in texts]):
        for t in ids:
            if pair.map.t2d[t] < 0:
                counts[t] = counts.get(t, 0) + 1
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:top]
    return [{"id": t, "bytes": repr(target.vocabulary.pieces[t])[1:], "count": n} for t, n in ranked]
