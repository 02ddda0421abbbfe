"""Calibration: what target and drafter say about text, streamed into a few tables of bounded size.

Per target token the mean and variance of its probability and its frequency; for a sample of contexts the
likeliest tokens of both laws; for all contexts a sparse matrix `P` of the likeliest few, from which the
covariance kernel is built. Texts have roles by their number, so that nothing is judged on what it was made
from: three of five for the statistics, one for fitting weights, one held out for testing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from hetspec.artifact import Calibration, Contexts, LawTable, PairArtifact
from hetspec.errors import InvalidInput
from hetspec.prep.documents import Document
from hetspec.runtime import laws
from hetspec.runtime.laws import Warping
from hetspec.runtime.sides import Side

CHUNK = 64  # positions whose laws are held at a time: V_t floats each
STATISTICS, FIT, HELD_OUT = "statistics", "fit", "held_out"


@dataclass(frozen=True)
class CalibrationSettings:
    """Knobs of a calibration.

    Attributes:
        temperature: of both laws.
        top: likeliest tokens kept of the sampled contexts' laws.
        top_sparse: likeliest tokens kept of every context in `P`.
        fit, held_out: contexts sampled for fitting and for testing.
        shard_tokens: target tokens between two savings of the state.
    """

    temperature: float = 1.0
    top: int = 512
    top_sparse: int = 64
    fit: int = 2000
    held_out: int = 1000
    shard_tokens: int = 8192


@dataclass
class _Shard:
    """Sums over some documents; shards of a calibration add up to it."""

    sum: np.ndarray  # float64[V_t]
    squares: np.ndarray
    counts: np.ndarray  # int64[V_t]
    drafter_counts: np.ndarray  # int64[V_d]
    figures: np.ndarray  # float64: contexts, contexts of all texts, Σ p(I)
    P: list[tuple[np.ndarray, np.ndarray]]
    p: dict[str, list[tuple[np.ndarray, np.ndarray]]]  # by role: (ids, masses) of each sampled context
    q: dict[str, list[tuple[np.ndarray, np.ndarray]]]
    documents: dict[str, list[int]]

    @classmethod
    def empty(cls, target_rows: int, drafter_rows: int) -> _Shard:
        def both() -> dict[str, list[Any]]:
            return {FIT: [], HELD_OUT: []}

        return cls(
            np.zeros(target_rows),
            np.zeros(target_rows),
            np.zeros(target_rows, dtype=np.int64),
            np.zeros(drafter_rows, dtype=np.int64),
            np.zeros(3),
            [],
            both(),
            both(),
            both(),
        )


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration made.

    Attributes:
        calibration: for the artifact.
        P: sparse float32 [contexts, V_t], the likeliest target probabilities of every context not held out.
        figures: counts, seconds, memory; JSON values.
    """

    calibration: Calibration
    P: sparse.csr_array
    figures: dict[str, Any]


def role(number: int) -> str:
    """What a text is used for."""
    return (STATISTICS, STATISTICS, STATISTICS, FIT, HELD_OUT)[number % 5]


def calibrate(
    pair: PairArtifact,
    target: Side,
    drafter: Side | None,
    documents: Sequence[Document],
    settings: CalibrationSettings = CalibrationSettings(),
    *,
    work: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> CalibrationResult:
    """Runs the target over documents, and the drafter over the sampled ones among them.

    The drafter's law is taken where its own tokenisation of the text has a boundary with the target's.

    Args:
        pair: for its map.
        target: with a model.
        drafter: with a model; None leaves the tables of `q` empty.
        documents: from `read_documents` or `sample_documents`.
        settings: knobs.
        work: a folder where finished shards are kept; a later call with the same arguments goes on from there.
        progress: is told the target tokens done.

    Raises:
        InvalidInput: no text, or none left for one of the two splits.
    """
    started = time.perf_counter()
    before = _peak_memory()
    sizes = dict.fromkeys((STATISTICS, FIT, HELD_OUT), 0)
    for document in documents:
        sizes[role(document.number)] += len(document.ids) - document.start
    wanted = sum(sizes.values())
    if not wanted:
        raise InvalidInput("there is no text to calibrate on.", "Give more text.")
    if not all(sizes.values()):
        raise InvalidInput(
            f"{len({d.number for d in documents})} texts are too few: one of five is held out for testing, "
            "one of five is for fitting.",
            "Give at least five texts.",
        )
    strides = {
        FIT: max(1.0, sizes[FIT] / settings.fit),
        HELD_OUT: max(1.0, sizes[HELD_OUT] / settings.held_out),
    }
    shards: list[_Shard] = []
    done = 0
    for number, part in enumerate(_parts(documents, settings.shard_tokens)):
        path = None if work is None else work / f"shard-{number:05d}.npz"
        if path is not None and path.is_file():
            shard = _load_shard(path)
            done += sum(len(d.ids) - d.start for d in part)
        else:
            shard = _Shard.empty(pair.target.rows, pair.drafter.rows)
            for document in part:
                _read(document, pair, target, drafter, settings, strides.get(role(document.number)), shard)
                done += len(document.ids) - document.start
                progress(done)
            if path is not None:
                _save_shard(shard, path)
        shards.append(shard)
        progress(done)
    figures = {
        "target_tokens": wanted,
        "held_out_tokens": sizes[HELD_OUT],
        "seconds": time.perf_counter() - started,
        "extra_memory_bytes": max(0, _peak_memory() - before),
    }
    return _result(shards, settings, figures)


def work_key(pair: PairArtifact, documents: Sequence[Document], settings: CalibrationSettings) -> str:
    """Names the work folder: the same for the same pair, text and settings."""
    digest = hashlib.sha256(f"{pair.key}{json.dumps(asdict(settings))}".encode())
    for document in documents:
        digest.update(repr(document).encode())
    return digest.hexdigest()[:16]


def discard(work: Path) -> None:
    """Deletes the shards of a finished calibration."""
    shutil.rmtree(work, ignore_errors=True)


def _parts(documents: Sequence[Document], tokens: int) -> list[list[Document]]:
    parts: list[list[Document]] = [[]]
    size = 0
    for document in documents:
        if size >= tokens:
            parts.append([])
            size = 0
        parts[-1].append(document)
        size += len(document.ids) - document.start
    return parts


def _read(
    document: Document,
    pair: PairArtifact,
    target: Side,
    drafter: Side | None,
    settings: CalibrationSettings,
    stride: float | None,
    shard: _Shard,
) -> None:
    """Adds one document to a shard; no `stride` means none of its contexts are sampled."""
    use = role(document.number)
    ids = document.ids
    np.add.at(shard.counts, list(ids[document.start :]), 1)
    sampled, drafted = _sampled(document, target, drafter, stride, shard)
    inside = torch.from_numpy(np.flatnonzero(pair.map.t2d >= 0))
    assert target.model is not None
    row = target.model.new_row()
    if document.start > 1:
        row.forward(list(ids[: document.start - 1]), keep=1)
    for at in range(document.start - 1, len(ids) - 1, CHUNK):
        feed = list(ids[at : min(at + CHUNK, len(ids) - 1)])
        p = laws.law(row.forward(feed, keep=len(feed)), Warping(settings.temperature))
        shard.figures[1] += len(feed)
        shard.figures[2] += float(p[:, inside].sum())
        if use == STATISTICS:
            shard.figures[0] += len(feed)
            rows = min(
                p.shape[1], len(shard.sum)
            )  # a model may be padded otherwise than the pair was built with
            shard.sum[:rows] += p[:, :rows].sum(0, dtype=torch.float64).numpy()
            shard.squares[:rows] += p[:, :rows].square().sum(0, dtype=torch.float64).numpy()
            shard.P += _likeliest(p, settings.top_sparse)
        here = [j for j in sampled if at <= j < at + len(feed)]
        if here:
            shard.p[use] += _likeliest(p[[j - at for j in here]], settings.top)
            shard.documents[use] += [document.number] * len(here)
    if drafter is not None and sampled:
        _read_drafter(drafted, drafter, settings, use, shard)


def _sampled(
    document: Document, target: Side, drafter: Side | None, stride: float | None, shard: _Shard
) -> tuple[list[int], tuple[list[int], list[int]]]:
    """Positions of a document whose laws are kept, and the drafter's ids with the positions that match.

    A position is the index of the last id read. Without a drafter any will do; with one its tokenisation must
    have a boundary there.
    """
    start, ids = document.start, document.ids
    positions = list(range(start - 1, len(ids) - 1))
    own: list[int] = []
    boundary: dict[int, int] = {}
    if drafter is not None:
        text = target.vocabulary.spell(ids)
        own = drafter.segmenter.encode(text)
        ends = drafter.segmenter.ends(text, own)
        if ends is None:
            return [], ([], [])
        lead = len(drafter.begins_with)
        boundary = {int(end): lead + i for i, end in enumerate(ends)}
        if lead:
            boundary[0] = lead - 1
        lengths = np.cumsum([len(target.vocabulary.bytes_of(t)) for t in ids])
        first = int(lengths[start - 1])
        np.add.at(shard.drafter_counts, [d for d, end in zip(own, ends, strict=True) if end > first], 1)
        positions = [j for j in positions if int(lengths[j]) in boundary]
        own = [*drafter.begins_with, *own]
    if stride is None:
        return [], ([], [])
    # The fractional part of the text's number decides where in the stride it begins, so that short texts count too.
    offset = (document.number * 0.6180339887) % 1.0
    places = [math.floor(i / stride + offset) for i in range(-1, len(positions))]
    chosen = [
        j for j, (before, here) in zip(positions, itertools.pairwise(places), strict=True) if here > before
    ]
    if drafter is None:
        return chosen, ([], [])
    return chosen, (own, [boundary[int(lengths[j])] for j in chosen])


def _read_drafter(
    drafted: tuple[list[int], list[int]],
    drafter: Side,
    settings: CalibrationSettings,
    use: str,
    shard: _Shard,
) -> None:
    own, wanted = drafted
    assert drafter.model is not None
    row = drafter.model.new_row()
    last = max(wanted) + 1
    for at in range(0, last, CHUNK):
        feed = own[at : min(at + CHUNK, last)]
        logits = row.forward(feed, keep=len(feed))
        here = [j - at for j in wanted if at <= j < at + len(feed)]
        if here:
            q = laws.law(logits[here], Warping(settings.temperature), "the drafter")
            shard.q[use] += _likeliest(q, settings.top)


def _likeliest(rows: torch.Tensor, top: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids ascending, masses) of the `top` likeliest entries of each row, zeros left out."""
    masses, ids = rows.topk(min(top, rows.shape[1]), dim=1)
    ids, order = ids.sort(dim=1)
    masses = masses.gather(1, order)
    return [
        (i[m > 0].numpy().astype(np.int32), m[m > 0].numpy().astype(np.float32))
        for i, m in zip(ids, masses, strict=True)
    ]


# -- putting shards together ----------------------------------------------------------------------------------


def _result(
    shards: list[_Shard], settings: CalibrationSettings, figures: dict[str, Any]
) -> CalibrationResult:
    contexts, everywhere, inside = np.sum([shard.figures for shard in shards], axis=0)
    added = {
        name: np.sum([getattr(shard, name) for shard in shards], axis=0)
        for name in ("sum", "squares", "counts", "drafter_counts")
    }
    mean = added["sum"] / contexts
    P = table([row for shard in shards for row in shard.P])
    splits = {
        use: Contexts(
            table([row for shard in shards for row in shard.p[use]]),
            table([row for shard in shards for row in shard.q[use]]),
            np.array([n for shard in shards for n in shard.documents[use]], dtype=np.int32),
        )
        for use in (FIT, HELD_OUT)
    }
    calibration = Calibration(
        mean=mean.astype(np.float32),
        variance=np.maximum(added["squares"] / contexts - mean**2, 0).astype(np.float32),
        counts=added["counts"],
        drafter_counts=added["drafter_counts"],
        fit=splits[FIT],
        held_out=splits[HELD_OUT],
    )
    figures |= {
        "contexts": int(everywhere),
        "fit_contexts": len(splits[FIT].p),
        "held_out_contexts": len(splits[HELD_OUT].p),
        "target_mass_in_intersection": inside / everywhere,
        "kept_target_mass": _kept(splits[HELD_OUT].p),
        "kept_drafter_mass": _kept(splits[HELD_OUT].q),
        "P_bytes": int(P.masses.nbytes + P.ids.nbytes + P.indptr.nbytes),
        "tokens_per_second": figures["target_tokens"] / figures["seconds"],
    }
    return CalibrationResult(calibration, as_matrix(P, len(mean)), figures)


def _kept(law: LawTable) -> float:
    """Mean mass of the rows of a table: what the entries left out did not take away."""
    return float(law.masses.sum(dtype=np.float64) / len(law)) if len(law) else 0.0


def table(rows: list[tuple[np.ndarray, np.ndarray]]) -> LawTable:
    """A law table of (ids, masses) rows."""
    indptr = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])]).astype(np.int64)
    ids = np.concatenate([i for i, _ in rows]) if rows else np.zeros(0, dtype=np.int32)
    masses = np.concatenate([m for _, m in rows]) if rows else np.zeros(0, dtype=np.float32)
    return LawTable(indptr, ids.astype(np.int32), masses.astype(np.float32))


def as_matrix(law: LawTable, columns: int) -> sparse.csr_array:
    """A law table as a sparse matrix [contexts, columns]."""
    return sparse.csr_array((law.masses, law.ids, law.indptr), shape=(len(law), columns))


def _save_shard(shard: _Shard, path: Path) -> None:
    """Written beside its place and renamed: a shard is there wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for name in ("sum", "squares", "counts", "drafter_counts", "figures"):
        arrays[name] = getattr(shard, name)
    tables = {"P": shard.P}
    for use in (FIT, HELD_OUT):
        tables |= {f"{use}_p": shard.p[use], f"{use}_q": shard.q[use]}
        arrays[f"{use}_documents"] = np.array(shard.documents[use], dtype=np.int32)
    for name, rows in tables.items():
        arrays |= {f"{name}_{f.name}": getattr(table(rows), f.name) for f in dataclasses.fields(LawTable)}
    temporary = path.with_suffix(".part.npz")
    np.savez(temporary, **arrays)  # type: ignore[arg-type]
    temporary.rename(path)


def _load_shard(path: Path) -> _Shard:
    with np.load(path, allow_pickle=False) as found:

        def rows(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
            indptr, ids, masses = (found[f"{name}_{part}"] for part in ("indptr", "ids", "masses"))
            return [(ids[a:b], masses[a:b]) for a, b in itertools.pairwise(indptr)]

        both = (FIT, HELD_OUT)
        return _Shard(
            **{name: found[name] for name in ("sum", "squares", "counts", "drafter_counts", "figures")},
            P=rows("P"),
            p={use: rows(f"{use}_p") for use in both},
            q={use: rows(f"{use}_q") for use in both},
            documents={use: found[f"{use}_documents"].tolist() for use in both},
        )


def _peak_memory() -> int:
    """Peak resident bytes of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
