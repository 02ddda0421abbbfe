"""Affinity kernels: which target token is meant when the drafter's token is d.

Co-segmentation (reconstruction, ALGORITHMS §5): text is tokenised both ways, and wherever both tokenizers
have a boundary, (drafter token that starts there, target token that starts there) is counted. No model is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from hetspec.artifact import Kernel, VocabularyMap
from hetspec.segment import Segmenter
from hetspec.vocab import Kind, Vocabulary

BATCH_BYTES = 1 << 20  # text tokenised at a time; memory does not grow with the corpus
PIECE_BYTES = 1 << 16  # longer texts are cut at line ends
TOP_PER_ROW = 64


@dataclass(frozen=True)
class CosegmentResult:
    """A co-segmentation kernel and where it comes from.

    Attributes:
        kernel: rows sum to 1; empty for drafter ids without any image.
        counts: int64[V_d], co-segmentation counts behind each row (0: only the smoothing).
        target_tokens, drafter_tokens: size of the text.
        common_boundaries: boundaries both tokenizers have.
        skipped_bytes: text that one of them spells differently (normalisers, missing bytes).
        text_sha256: of the text used.
    """

    kernel: Kernel
    counts: np.ndarray
    target_tokens: int
    drafter_tokens: int
    common_boundaries: int
    skipped_bytes: int
    text_sha256: str


def cosegment(
    mapping: VocabularyMap,
    target: Segmenter,
    drafter: Segmenter,
    texts: Iterable[bytes],
    *,
    smoothing: float = 1.0,
    top: int = TOP_PER_ROW,
    progress: Callable[[int], None] = lambda _: None,
) -> CosegmentResult:
    """Counts co-segmentations over a stream of texts and normalises the rows.

    Args:
        mapping: its `first` gives the image that is counted `smoothing` times for every drafter token.
        target, drafter: the two tokenizers.
        texts: UTF-8 texts of any number and size.
        smoothing: pseudo-counts of the image; keeps rows with few counts near the image.
        top: entries kept per row.
        progress: is told the bytes done so far.
    """
    shape = (len(mapping.d2t), len(mapping.t2d))
    counts = sparse.csr_array(shape, dtype=np.int64)
    digest = hashlib.sha256()
    totals = np.zeros(4, dtype=np.int64)  # target tokens, drafter tokens, common boundaries, skipped bytes
    done = 0
    for batch in batches(texts):
        for text in batch:
            digest.update(text)
            done += len(text)
        batch_counts, batch_totals = _count(batch, target, drafter, shape)
        counts = counts + batch_counts
        totals += batch_totals
        progress(done)
    kernel = smoothed_kernel(counts, mapping, drafter.vocabulary, smoothing=smoothing, top=top)
    assert kernel.counts is not None
    return CosegmentResult(
        kernel=kernel,
        counts=kernel.counts,
        target_tokens=int(totals[0]),
        drafter_tokens=int(totals[1]),
        common_boundaries=int(totals[2]),
        skipped_bytes=int(totals[3]),
        text_sha256=digest.hexdigest(),
    )


def batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Texts cut to pieces at line ends, in batches of about BATCH_BYTES."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        for piece in _pieces(text):
            batch.append(piece)
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: bytes) -> Iterator[bytes]:
    start = 0
    while len(text) - start > PIECE_BYTES:
        cut = text.rfind(b"\n", start, start + PIECE_BYTES) + 1
        if cut <= start:  # no line end: after a character
            cut = start + PIECE_BYTES
            while text[cut] & 0xC0 == 0x80:
                cut -= 1
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _count(
    batch: list[bytes], target: Segmenter, drafter: Segmenter, shape: tuple[int, int]
) -> tuple[sparse.csr_array, np.ndarray]:
    """Counts of one batch, sparse int64[V_d, V_t]."""
    rows, columns = [], []
    totals = np.zeros(4, dtype=np.int64)
    for text, ids_t, ids_d in zip(
        batch, target.encode_batch(batch), drafter.encode_batch(batch), strict=True
    ):
        ends_t, ends_d = target.ends(text, ids_t), drafter.ends(text, ids_d)
        if ends_t is None or ends_d is None:
            totals[3] += len(text)
            continue
        d, t = common_starts(np.asarray(ids_d), ends_d, np.asarray(ids_t), ends_t)
        rows.append(d)
        columns.append(t)
        totals[:3] += (len(ids_t), len(ids_d), len(d))
    if not rows:
        return sparse.csr_array(shape, dtype=np.int64), totals
    d, t = np.concatenate(rows), np.concatenate(columns)
    pairs, n = np.unique(d.astype(np.int64) * shape[1] + t, return_counts=True)
    return sparse.csr_array((n, (pairs // shape[1], pairs % shape[1])), shape=shape, dtype=np.int64), totals


def common_starts(
    ids_d: np.ndarray, ends_d: np.ndarray, ids_t: np.ndarray, ends_t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(drafter token, target token) that start at each boundary common to both, int[·] twice.

    Args:
        ids_d, ids_t: token ids of one text.
        ends_d, ends_t: byte offset after each of them, ascending.
    """
    starts_d = np.concatenate([[0], ends_d[:-1]])
    starts_t = np.concatenate([[0], ends_t[:-1]])
    at = np.searchsorted(starts_t, starts_d)
    at_safe = np.minimum(at, len(starts_t) - 1)
    common = starts_t[at_safe] == starts_d
    return ids_d[common], ids_t[at_safe[common]]


def smoothed_kernel(
    counts: sparse.csr_array, mapping: VocabularyMap, drafter: Vocabulary, *, smoothing: float, top: int
) -> Kernel:
    """Rows of counts plus `smoothing` times the image, the `top` largest entries, normalised.

    Control tokens keep their role's image alone.
    """
    images = np.where(mapping.first >= 0, mapping.first, mapping.d2t)
    with_image = np.flatnonzero(images >= 0)
    image = sparse.csr_array(
        (np.full(len(with_image), smoothing), (with_image, images[with_image])), shape=counts.shape
    )
    text = np.zeros(counts.shape[0])
    text[: len(drafter.kinds)] = drafter.kinds <= Kind.BYTE
    total = sparse.csr_array(sparse.diags_array(text) @ counts.astype(np.float64) + image)
    total.sum_duplicates()
    total.eliminate_zeros()
    total = _top_per_row(total, top)
    sums = np.asarray(total.sum(axis=1)).ravel()
    total.data /= np.repeat(sums, np.diff(total.indptr))
    total.sort_indices()
    return Kernel(
        prior="cosegment",
        indptr=total.indptr.astype(np.int64),
        indices=total.indices.astype(np.int32),
        weights=total.data.astype(np.float32),
        counts=np.asarray(counts.sum(axis=1)).ravel().astype(np.int64),
    )


def _top_per_row(matrix: sparse.csr_array, top: int) -> sparse.csr_array:
    """Keeps the `top` largest entries of each row (ties: the lower column)."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((matrix.indices, -matrix.data, rows))
    rank = np.arange(len(order)) - matrix.indptr[:-1][rows[order]]
    keep = order[rank < top]
    return sparse.csr_array((matrix.data[keep], (rows[keep], matrix.indices[keep])), shape=matrix.shape)


def kernel_figures(
    result: CosegmentResult, mapping: VocabularyMap, drafter: Vocabulary
) -> dict[str, float | int | str]:
    """What is worth showing about a kernel."""
    text = np.flatnonzero(drafter.kinds <= Kind.BYTE)
    kernel = result.kernel
    sizes = np.diff(kernel.indptr)
    certainty = kernel.weight_of(mapping.first)
    seen = result.counts[text] > 0
    uncertain = certainty < 0.95
    total = max(1, int(result.counts.sum()))
    return {
        "prior": kernel.prior,
        "nnz": len(kernel.indices),
        "rows_seen_fraction": float(seen.mean()) if len(seen) else 0.0,
        "entries_per_seen_row": float(sizes[text][seen].mean()) if seen.any() else 0.0,
        "image_mass": float((certainty * result.counts).sum() / total),
        "uncertain_mass": float((uncertain * result.counts).sum() / total),
        "reached_targets": len(np.unique(kernel.indices)),
        "target_tokens": result.target_tokens,
        "drafter_tokens": result.drafter_tokens,
        "common_boundaries": result.common_boundaries,
        "skipped_bytes": result.skipped_bytes,
        "text_sha256": result.text_sha256,
    }
