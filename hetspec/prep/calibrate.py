"""Calibration: what target and drafter say about text, streamed into a few tables of bounded size.

Per target token the mean and variance of its probability and its frequency; for a sample of contexts the
likeliest tokens of both laws; for all contexts a sparse matrix `P` of the likeliest few, from which the
covariance kernel is built. Statistics, fits and tests each have texts of their own (`hetspec.prep.texts`).
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
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy
from scipy import sparse

from hetspec.artifact import Calibration, Contexts, LawTable, PairArtifact
from hetspec.errors import InvalidArtifact, InvalidInput
from hetspec.prep.documents import Document
from hetspec.prep.texts import FIT, HELD_OUT, RESERVED, STATISTICS
from hetspec.runtime import laws
from hetspec.runtime.context import DrafterContext
from hetspec.runtime.laws import Warping
from hetspec.runtime.sides import Side

CHUNK = 64  # positions whose laws are held at a time: V_t floats each


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

    def add(self, other: _Shard) -> None:
        """Adds another shard to this one."""
        for name in ("sum", "squares", "counts", "drafter_counts", "figures"):
            getattr(self, name).__iadd__(getattr(other, name))
        self.P += other.P
        for use in (FIT, HELD_OUT):
            self.p[use] += other.p[use]
            self.q[use] += other.q[use]
            self.documents[use] += other.documents[use]


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration made.

    Attributes:
        calibration: for the artifact.
        P: sparse float32 [contexts, V_t], the likeliest target probabilities in the contexts for statistics.
        figures: counts, seconds, memory; JSON values.
    """

    calibration: Calibration
    P: sparse.csr_array
    figures: dict[str, Any]


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

    The drafter reads each sampled context as it does while generating: its own tokens for the text so far, and
    nothing of what follows.

    Args:
        pair: for its map.
        target: with a model.
        drafter: with a model; None leaves the tables of `q` empty.
        documents: from `read_documents` or `sample_documents`; reserved ones are left out.
        settings: knobs.
        work: a folder where finished shards are kept; a later call with the same arguments goes on from there.
        progress: is told the target tokens done.

    Raises:
        InvalidInput: no text, or none left for one of the two splits.
    """
    started = time.perf_counter()
    for side in (target, drafter):  # weights are mapped and come into memory with the first forward
        if side is not None and side.model is not None:
            side.model.new_row().forward([0], keep=1)
    before = _peak_memory()
    documents = [document for document in documents if document.role != RESERVED]
    sizes = dict.fromkeys((STATISTICS, FIT, HELD_OUT), 0)
    for document in documents:
        sizes[document.role] += len(document.ids) - document.start
    wanted = sum(sizes.values())
    if not wanted:
        raise InvalidInput("there is no text to calibrate on.", "Give more text.")
    if not all(sizes.values()):
        raise InvalidInput(
            f"{len({d.number for d in documents})} texts are too few: statistics, fits and tests each need their own "
            f"(two of ten texts are for testing).",
            "Give more text, or more --tokens.",
        )
    strides = {
        FIT: max(1.0, sizes[FIT] / settings.fit),
        HELD_OUT: max(1.0, sizes[HELD_OUT] / settings.held_out),
    }
    total = _Shard.empty(pair.target.rows, pair.drafter.rows)
    done = fresh = 0
    for number, part in enumerate(_parts(documents, settings.shard_tokens)):
        path = None if work is None else work / f"shard-{number:05d}.safetensors"
        if path is not None and path.is_file():
            shard = _load_shard(path)
            done += sum(len(d.ids) - d.start for d in part)
        else:
            shard = _Shard.empty(pair.target.rows, pair.drafter.rows)
            for document in part:
                _read(document, pair, target, drafter, settings, strides.get(document.role), shard)
                done += len(document.ids) - document.start
                fresh += len(document.ids) - document.start
                progress(done)
            if path is not None:
                _save_shard(shard, path)
        total.add(shard)
        progress(done)
    figures = {
        "target_tokens": wanted,
        "held_out_tokens": sizes[HELD_OUT],
        "seconds": time.perf_counter() - started,
        "extra_memory_bytes": max(0, _peak_memory() - before),
    }
    figures["tokens_per_second"] = fresh / figures["seconds"]
    if drafter is not None and not (total.q[FIT] and total.q[HELD_OUT]):
        raise InvalidInput("no context of the text could be read by the drafter.", "Give more text.")
    return _result(total, figures)


def work_key(
    pair: PairArtifact, documents: Sequence[Document], settings: CalibrationSettings, models: str
) -> str:
    """Names the work folder: the same for the same pair, models, text and settings.

    Args:
        pair: its map counts too.
        documents: the text.
        settings: knobs.
        models: what was loaded, and how; two models can share a tokenizer.
    """
    digest = hashlib.sha256(f"{pair.key}{models}{json.dumps(asdict(settings))}".encode())
    digest.update(pair.map.d2t.tobytes())
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
    use, ids = document.role, list(document.ids)
    if use != HELD_OUT:  # heads are chosen by these counts and tested on the held-out texts
        np.add.at(shard.counts, ids[document.start :], 1)
        if drafter is not None:
            text = target.vocabulary.spell(ids[document.start :])
            np.add.at(shard.drafter_counts, drafter.segmenter.encode(text), 1)
    sampled = _sampled(document, stride)
    inside = torch.from_numpy(np.flatnonzero(pair.map.t2d >= 0))
    assert target.model is not None
    row = target.model.new_row()
    if document.start > 1:
        row.forward(ids[: document.start - 1], keep=1)
    for at in range(document.start - 1, len(ids) - 1, CHUNK):
        feed = ids[at : min(at + CHUNK, len(ids) - 1)]
        p = laws.law(row.forward(feed, keep=len(feed)), Warping(settings.temperature))
        p = p[:, : len(shard.sum)]  # a model may be padded otherwise than the pair was built with
        shard.figures[1] += len(feed)
        shard.figures[2] += float(p[:, inside].sum())
        if use == STATISTICS:
            rows = p.shape[1]
            shard.figures[0] += len(feed)
            shard.sum[:rows] += p.sum(0, dtype=torch.float64).numpy()
            shard.squares[:rows] += p.square().sum(0, dtype=torch.float64).numpy()
            shard.P += _likeliest(p, settings.top_sparse)
        here = [j for j in sampled if at <= j < at + len(feed)]
        if here:
            shard.p[use] += _likeliest(p[[j - at for j in here]], settings.top)
            shard.documents[use] += [document.number] * len(here)
    if drafter is not None and sampled:
        shard.q[use] += _drafter_laws(ids, sampled, pair, target, drafter, settings)


def _sampled(document: Document, stride: float | None) -> list[int]:
    """Positions of a document whose laws are kept; a position is the index of the last id read."""
    if stride is None:
        return []
    # The fractional part of the text's number decides where in the stride it begins, so that short texts count too.
    offset = (document.number * 0.6180339887) % 1.0
    positions = range(document.start - 1, len(document.ids) - 1)
    places = [math.floor(i / stride + offset) for i in range(-1, len(positions))]
    return [
        j for j, (before, here) in zip(positions, itertools.pairwise(places), strict=True) if here > before
    ]


def _drafter_laws(
    ids: list[int],
    positions: list[int],
    pair: PairArtifact,
    target: Side,
    drafter: Side,
    settings: CalibrationSettings,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The drafter's law at each position, read through the runtime's own context."""
    assert drafter.model is not None
    context = DrafterContext(drafter.model.new_row(), drafter.segmenter, drafter.begins_with)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    read = 0
    for j in positions:
        context.commit_ids(ids[read : j + 1], target.vocabulary)
        read = j + 1
        if not context.can_read():  # nothing to predict from yet
            rows.append((np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)))
            continue
        q = laws.law(context.next_logits(), Warping(settings.temperature), "the drafter")
        rows += _likeliest(q[None, : pair.drafter.rows], settings.top)
    return rows


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


def _result(total: _Shard, figures: dict[str, Any]) -> CalibrationResult:
    contexts, everywhere, inside = total.figures
    mean = total.sum / contexts
    P = table(total.P)
    splits = {
        use: Contexts(
            table(total.p[use]), table(total.q[use]), np.array(total.documents[use], dtype=np.int32)
        )
        for use in (FIT, HELD_OUT)
    }
    calibration = Calibration(
        mean=mean.astype(np.float32),
        variance=np.maximum(total.squares / contexts - mean**2, 0).astype(np.float32),
        counts=total.counts,
        drafter_counts=total.drafter_counts,
        fit=splits[FIT],
        held_out=splits[HELD_OUT],
    )
    figures |= {
        "contexts": int(everywhere),
        "fit_contexts": len(splits[FIT].p),
        "held_out_contexts": len(splits[HELD_OUT].p),
        "target_mass_in_intersection": min(1.0, inside / everywhere),  # float32 sums
        "kept_target_mass": _kept(splits[HELD_OUT].p),
        "kept_drafter_mass": _kept(splits[HELD_OUT].q),
        "P_bytes": int(P.masses.nbytes + P.ids.nbytes + P.indptr.nbytes),
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


def save_laws(P: sparse.csr_array, path: Path) -> Path:
    """Writes `P` for `load_laws`; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"indptr": P.indptr.astype(np.int64), "ids": P.indices.astype(np.int32), "masses": P.data}
    path.write_bytes(safetensors_numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))
    return path


def load_laws(path: Path, columns: int) -> sparse.csr_array:
    """Reads what `save_laws` wrote.

    Args:
        path: the file.
        columns: V_t.

    Raises:
        InvalidArtifact: it is damaged, or belongs to another target.
    """
    try:
        found = LawTable(**safetensors_numpy.load(path.read_bytes()))
        if len(found.ids) and found.ids.max() >= columns:
            raise InvalidArtifact(f"it names target ids beyond {columns:,} rows.")
    except (SafetensorError, TypeError, InvalidArtifact) as error:
        raise InvalidArtifact(f"{path}: {str(error)[:120]}.", "Run hetspec-prep calibrate again.") from None
    return as_matrix(found, columns)


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
    temporary = path.with_suffix(".part")
    temporary.write_bytes(safetensors_numpy.save({k: np.ascontiguousarray(v) for k, v in arrays.items()}))
    temporary.rename(path)


def _load_shard(path: Path) -> _Shard:
    found = safetensors_numpy.load(path.read_bytes())

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
