"""The intersection map of two vocabularies: which ids spell the same bytes (ALGORITHMS §2, §9).

Text tokens match by bytes; control tokens match by role only, never by string.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetspec.artifact import VocabularyMap
from hetspec.segment import Segmenter
from hetspec.vocab import Kind, Vocabulary


def build_map(target: Vocabulary, drafter: Vocabulary, segmenter: Segmenter) -> VocabularyMap:
    """Builds the byte-exact map and SLRS-4b's image of every drafter token.

    Args:
        target: the target's vocabulary, V_t rows.
        drafter: the drafter's vocabulary, V_d rows.
        segmenter: of the target's tokenizer, for ``first``.

    Returns:
        d2t int32[V_d], t2d int32[V_t], first int32[V_d]; −1 where there is none.
    """
    d2t = np.full(drafter.rows, -1, dtype=np.int32)
    t2d = np.full(target.rows, -1, dtype=np.int32)
    first = np.full(drafter.rows, -1, dtype=np.int32)
    for piece, drafter_ids in drafter.ids_by_bytes.items():
        target_ids = target.ids_by_bytes.get(piece)
        if target_ids:
            # All drafter ids with these bytes go to the one preferred target id, so their masses add.
            d2t[drafter_ids] = target_ids[0]
            t2d[target_ids[0]] = drafter_ids[0]
    for d, t in roles(target, drafter):
        d2t[d] = first[d] = t
        if t2d[t] < 0:
            t2d[t] = d
    text_ids = np.flatnonzero(drafter.kinds <= Kind.BYTE)
    segmentations = segmenter.encode_batch([drafter.pieces[d] for d in text_ids])
    for d, ids in zip(text_ids.tolist(), segmentations, strict=True):
        # A normaliser can make the target start with something the drafter token does not spell: no image.
        if ids and target.pieces[ids[0]] and drafter.pieces[d].startswith(target.pieces[ids[0]]):
            first[d] = ids[0]
    return VocabularyMap(d2t=d2t, t2d=t2d, first=first)


def roles(target: Vocabulary, drafter: Vocabulary) -> list[tuple[int, int]]:
    """Pairs (drafter id, target id) of control tokens with the same role.

    End of turn goes to end of turn and end of text to end of text where both exist, else to whatever
    ends a generation on the other side. Pairs of the same role come first.
    """

    def split(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
        turn = list(vocabulary.turn_end_ids)
        return turn, [i for i in vocabulary.eos_ids if i not in turn]

    target_turn, target_text = split(target)
    drafter_turn, drafter_text = split(drafter)
    same, other = [], []
    for ids, images, substitutes in (
        (drafter_turn, target_turn, target_text),
        (drafter_text, target_text, target_turn),
    ):
        if images:
            same += [(d, images[0]) for d in ids]
        elif substitutes:
            other += [(d, substitutes[0]) for d in ids]
    return same + other


@dataclass(frozen=True)
class MapFigures:
    """What a map covers. Counts are of text tokens; control roles are counted apart.

    Attributes:
        intersection_count: distinct target text tokens with a drafter preimage of the same bytes.
        target_fraction: intersection_count / target text tokens with distinct bytes.
        drafter_fraction: drafter text tokens that are mapped / drafter text tokens.
        duplicates: drafter text tokens that share their target id with a preferred preimage.
        controls_mapped: control tokens mapped by role.
        first_fraction: drafter text tokens that have a first target token.
    """

    intersection_count: int
    target_fraction: float
    drafter_fraction: float
    duplicates: int
    controls_mapped: int
    first_fraction: float


def map_figures(mapping: VocabularyMap, target: Vocabulary, drafter: Vocabulary) -> MapFigures:
    """Counts what a map covers."""
    text_d = np.flatnonzero(drafter.kinds <= Kind.BYTE)
    mapped_d = text_d[mapping.d2t[text_d] >= 0]
    images = np.unique(mapping.d2t[mapped_d])
    controls = np.flatnonzero(drafter.kinds == Kind.CONTROL)
    return MapFigures(
        intersection_count=len(images),
        target_fraction=len(images) / max(1, len(target.ids_by_bytes)),
        drafter_fraction=len(mapped_d) / max(1, len(text_d)),
        duplicates=len(mapped_d) - len(images),
        controls_mapped=int((mapping.d2t[controls] >= 0).sum()),
        first_fraction=float((mapping.first[text_d] >= 0).mean()) if len(text_d) else 0.0,
    )


def corpus_coverage(
    texts: Iterable[bytes], segmenter: Segmenter, mapped: np.ndarray, vocabulary: Vocabulary
) -> float:
    """Share of a running text's tokens that are mapped, 0..1 (NaN-free: 0 for no text).

    Args:
        texts: the corpus.
        segmenter: of the side that is counted.
        mapped: bool[rows], whether an id of that side is in the map.
        vocabulary: of that side.
    """
    counts = np.zeros(vocabulary.rows, dtype=np.int64)
    for ids in segmenter.encode_batch(list(texts)):
        counts += np.bincount(ids, minlength=vocabulary.rows)
    total = int(counts.sum())
    return float(counts[mapped].sum() / total) if total else 0.0
