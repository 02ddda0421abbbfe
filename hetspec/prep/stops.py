"""Where target tokens end, byte by byte, counted on text (ALGORITHMS §4c; reconstruction). No model is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from hetspec.parts import StopTable
from hetspec.prep.affinity import batches
from hetspec.runtime.trie import ByteTrie
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary

PRIOR_COUNT, PRIOR_STOP = 1.0, 0.2  # tokenizers like long tokens: an unseen byte rather goes on


@dataclass(frozen=True)
class StopResult:
    """A stop table and where it comes from.

    Attributes:
        table: by node of the target's byte trie.
        target_tokens: size of the text.
        decided: share of the text's bytes that come after a whole token and could go on, for which the table gives
            what happened at least 0.9.
    """

    table: StopTable
    target_tokens: int
    decided: float


def stop_table(
    target: Vocabulary,
    segmenter: Segmenter,
    texts: Iterable[bytes],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> StopResult:
    """Counts, wherever a byte could lengthen a whole token, whether the tokenizer ended the token before it.

    Args:
        target: the target's vocabulary.
        segmenter: of its tokenizer.
        texts: UTF-8 texts of any number and size.
        progress: is told the bytes done so far.
    """
    trie = ByteTrie.of(target.pieces)
    parent = np.repeat(np.arange(len(trie)), np.diff(trie.first))
    keys = parent * 256 + trie.byte[1:]  # of the nodes 1, 2, …; ascending
    node_of = np.full(len(target.pieces), -1)
    named = np.flatnonzero(trie.token >= 0)
    node_of[trie.token[named]] = named
    first_byte = np.array([piece[0] if piece else -1 for piece in target.pieces])  # −1: none
    passed, ended = np.zeros(len(trie), np.int64), np.zeros(len(trie), np.int64)
    tokens = done = 0
    for batch in batches(texts):
        for ids in segmenter.encode_batch(batch):
            nodes = node_of[np.asarray(ids, dtype=np.int64)]
            np.add.at(passed, nodes[nodes >= 0], 1)
            before, following = nodes[:-1], first_byte[np.asarray(ids[1:], dtype=np.int64)]
            wanted = before * 256 + following
            at = np.searchsorted(keys, wanted)
            hit = (before >= 0) & (following >= 0) & (keys[np.minimum(at, len(keys) - 1)] == wanted)
            np.add.at(ended, 1 + at[hit], 1)
            tokens += len(ids)
        done += sum(map(len, batch))
        progress(done)
    for node in range(len(trie) - 1, 0, -1):  # what passes a node has passed its parent; children come last
        passed[parent[node - 1]] += passed[node]
    return _result(trie, parent, passed, ended, tokens)


def _result(
    trie: ByteTrie, parent: np.ndarray, passed: np.ndarray, ended: np.ndarray, tokens: int
) -> StopResult:
    """Probabilities from counts, where a token ends at the parent; 0 elsewhere."""
    inner = np.zeros(len(trie), dtype=bool)
    inner[1:] = trie.token[parent] >= 0
    counts = np.where(inner, passed + ended, 0)
    stop = np.where(inner, (ended + PRIOR_COUNT * PRIOR_STOP) / (counts + PRIOR_COUNT), 0.0)
    sure = (stop >= 0.9) * ended + (stop <= 0.1) * passed
    decided = float((sure * inner).sum() / max(1, counts.sum()))
    return StopResult(StopTable(stop.astype(np.float32), counts.astype(np.int64)), tokens, decided)
