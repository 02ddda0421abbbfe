"""The parts of a pair artifact: frozen dataclasses, checked when built.

numpy only. Knows nothing about files, models or how the parts were computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetspec.errors import InvalidArtifact, StaleArtifact
from hetspec.vocab import Vocabulary

REBUILD = "Rebuild it: hetspec-prep build-map TARGET DRAFTER."


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer (and model head) a side of a pair was built for."""

    name: str
    revision: str
    rows: int
    tokens: int
    text_tokens: int
    eos_ids: tuple[int, ...]
    turn_end_ids: tuple[int, ...]
    style: str
    vocab_sha256: str
    behaviour_sha256: str

    def __post_init__(self) -> None:
        for name in ("name", "revision", "style"):
            value = getattr(self, name)
            if not value.isprintable():
                raise InvalidArtifact(f"the {name} {value!r} has control characters.", "Rename the source.")
        for name in ("vocab_sha256", "behaviour_sha256"):
            value = getattr(self, name)
            if not is_sha256(value):
                raise InvalidArtifact(f"{name} is {value!r}, expected 64 lower-case hex digits.", REBUILD)
        if not 0 < self.text_tokens <= self.tokens <= self.rows:
            raise InvalidArtifact(
                f"{self.name}: {self.text_tokens} text tokens, {self.tokens} tokens, {self.rows} rows: "
                "expected text ≤ tokens ≤ rows.",
                REBUILD,
            )
        for role in (*self.eos_ids, *self.turn_end_ids):
            if not 0 <= role < self.rows:
                raise InvalidArtifact(f"{self.name}: role id {role} outside 0..{self.rows - 1}.", REBUILD)

    @classmethod
    def of(cls, vocabulary: Vocabulary, revision: str = "") -> TokenizerIdentity:
        """The identity of a vocabulary."""
        return cls(
            name=vocabulary.name,
            revision=revision,
            rows=vocabulary.rows,
            tokens=len(vocabulary.pieces),
            text_tokens=vocabulary.text_tokens,
            eos_ids=vocabulary.eos_ids,
            turn_end_ids=vocabulary.turn_end_ids,
            style=vocabulary.style,
            vocab_sha256=vocabulary.vocab_sha256,
            behaviour_sha256=vocabulary.behaviour_sha256,
        )

    def require(self, vocabulary: Vocabulary, side: str) -> None:
        """Checks that a tokenizer is the one this identity was taken from.

        Raises:
            StaleArtifact: the vocabulary or the behaviour differs.
        """
        for what, mine, theirs in (
            ("vocabulary", self.vocab_sha256, vocabulary.vocab_sha256),
            ("segmentation", self.behaviour_sha256, vocabulary.behaviour_sha256),
        ):
            if mine != theirs:
                raise StaleArtifact(
                    f"the pair was built for {side} {what} {mine[:12]}… ({self.name}, {self.tokens:,} tokens) but "
                    f"this tokenizer is {theirs[:12]}… ({vocabulary.name}, {len(vocabulary.pieces):,} tokens).",
                    REBUILD,
                )
        if vocabulary.rows < self.tokens:
            raise StaleArtifact(
                f"the {side} model has {vocabulary.rows:,} rows, fewer than the pair's {self.tokens:,} tokens.",
                REBUILD,
            )


@dataclass(frozen=True)
class VocabularyMap:
    """The byte-exact intersection map between two vocabularies (ALGORITHMS: I = T ∩ D).

    Attributes:
        d2t: int32[V_d], the target id with the same bytes or role; −1 for none. Several drafter ids may
            share a target id: their masses add.
        t2d: int32[V_t], the preferred drafter preimage; −1 for none.
        first: int32[V_d], the first target token of the drafter token's bytes (SLRS-4b's image); −1 for none.
    """

    d2t: np.ndarray
    t2d: np.ndarray
    first: np.ndarray

    def __post_init__(self) -> None:
        for name in ("d2t", "t2d", "first"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1:
                raise InvalidArtifact(f"map: {name} is {array.dtype}{list(array.shape)}, expected int32[V].")
        if self.first.shape != self.d2t.shape:
            raise InvalidArtifact("map: d2t and first differ in length.", REBUILD)
        for name, array, limit in (
            ("d2t", self.d2t, len(self.t2d)),
            ("t2d", self.t2d, len(self.d2t)),
            ("first", self.first, len(self.t2d)),
        ):
            if array.size and (array.min() < -1 or array.max() >= limit):
                raise InvalidArtifact(f"map: {name} holds ids outside −1..{limit - 1}.", REBUILD)
        mapped = np.flatnonzero(self.t2d >= 0)
        if not np.array_equal(self.d2t[self.t2d[mapped]], mapped):
            raise InvalidArtifact("map: d2t[t2d[x]] = x does not hold.", REBUILD)
        reachable = np.zeros(len(self.t2d), dtype=bool)
        reachable[self.d2t[self.d2t >= 0]] = True
        if not np.array_equal(reachable, self.t2d >= 0):
            raise InvalidArtifact("map: a mapped target id has no preferred preimage.", REBUILD)

    def widened(self, target_rows: int, drafter_rows: int) -> VocabularyMap:
        """The map for models with other numbers of padding rows than it was built with.

        Raises:
            StaleArtifact: a mapped id has no row.
        """

        def fit(array: np.ndarray, rows: int, limit: int) -> np.ndarray:
            if (array[rows:] >= 0).any() or (array >= limit).any():
                raise StaleArtifact(
                    f"the map names ids beyond the models' {target_rows:,} target and {drafter_rows:,} drafter rows.",
                    REBUILD,
                )
            return np.concatenate([array[:rows], np.full(max(0, rows - len(array)), -1, dtype=np.int32)])

        if (target_rows, drafter_rows) == (len(self.t2d), len(self.d2t)):
            return self
        return VocabularyMap(
            d2t=fit(self.d2t, drafter_rows, target_rows),
            t2d=fit(self.t2d, target_rows, drafter_rows),
            first=fit(self.first, drafter_rows, target_rows),
        )


@dataclass(frozen=True)
class Kernel:
    """A sparse non-negative matrix from drafter ids to target ids, `π = normalise(q·K)` (ALGORITHMS §6).

    Attributes:
        prior: one of KERNEL_PRIORS.
        indptr: int64[V_d + 1]; indices: int32[nnz], ascending in a row; weights: float32[nnz], rows sum to 1.
        mu: float32[V_t], the target's mean law, or None.
        fit: float64[2], (θ, λ) fitted for the drafter's whole head, or None where nothing was fitted.
        head_fit: the same for the pruned head that lies in the same artifact.
        counts: int64[V_d], observations behind each row, or None where rows were not counted.
    """

    prior: str
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    mu: np.ndarray | None = None
    fit: np.ndarray | None = None
    head_fit: np.ndarray | None = None
    counts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.prior not in KERNEL_PRIORS:
            raise InvalidArtifact(f"kernel prior {self.prior!r}, expected one of {', '.join(KERNEL_PRIORS)}.")
        where = f"kernel-{self.prior}"
        for name, dtype in (("indptr", np.int64), ("indices", np.int32), ("weights", np.float32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise InvalidArtifact(f"{where}: {name} is {array.dtype}{list(array.shape)}.", REBUILD)
        indptr, nnz = self.indptr, len(self.indices)
        # Compared, not subtracted: a difference of two hostile int64 can wrap around to look positive.
        if len(indptr) < 2 or indptr[0] != 0 or indptr[-1] != nnz or (indptr[1:] < indptr[:-1]).any():
            raise InvalidArtifact(f"{where}: indptr is not monotone from 0 to {nnz}.", REBUILD)
        if len(self.weights) != nnz:
            raise InvalidArtifact(f"{where}: {nnz} indices but {len(self.weights)} weights.", REBUILD)
        if nnz:
            if self.indices.min() < 0:
                raise InvalidArtifact(f"{where}: negative target id.", REBUILD)
            if not np.isfinite(self.weights).all() or self.weights.min() < 0:
                raise InvalidArtifact(f"{where}: weights must be finite and ≥ 0.", REBUILD)
            steps = np.diff(self.indices.astype(np.int64))
            starts = indptr[1:-1]
            inner = np.ones(nnz, dtype=bool)
            inner[starts[starts < nnz]] = False
            if (steps[inner[1:]] <= 0).any():
                raise InvalidArtifact(f"{where}: target ids of a row must ascend strictly.", REBUILD)
            filled = np.diff(indptr) > 0
            sums = np.add.reduceat(self.weights.astype(np.float64), indptr[:-1][filled])
            if (np.abs(sums - 1) > 1e-6).any():
                raise InvalidArtifact(f"{where}: rows must sum to 1 or be empty.", REBUILD)
        if self.mu is not None:
            mu = self.mu
            if mu.dtype != np.float32 or mu.ndim != 1 or not np.isfinite(mu).all() or (mu < 0).any():
                raise InvalidArtifact(f"{where}: mu must be float32, finite and ≥ 0.", REBUILD)
        counts = self.counts
        if counts is not None and (
            counts.dtype != np.int64 or counts.shape != (len(indptr) - 1,) or (counts < 0).any()
        ):
            raise InvalidArtifact(f"{where}: counts must be int64[V_d] and ≥ 0.", REBUILD)
        for name in ("fit", "head_fit"):
            fit = getattr(self, name)
            if fit is not None and not (
                fit.dtype == np.float64 and fit.shape == (2,) and (fit >= 0).all() and fit.sum() <= 1 + 1e-9
            ):
                raise InvalidArtifact(f"{where}: {name} must be θ, λ ≥ 0 with θ + λ ≤ 1.", REBUILD)

    def row_maxima(self) -> np.ndarray:
        """The largest weight of every row, float64[V_d]; 0 for empty rows. 1 means the row leaves nothing open."""
        largest = np.zeros(len(self.indptr) - 1)
        filled = np.flatnonzero(np.diff(self.indptr))
        if len(filled):
            largest[filled] = np.maximum.reduceat(self.weights, self.indptr[filled])
        return largest

    def weight_of(self, columns: np.ndarray) -> np.ndarray:
        """`K(d, columns[d])` for every drafter id d, float64[V_d]; 0 where there is no such entry."""
        found = np.zeros(len(self.indptr) - 1)
        rows = np.repeat(np.arange(len(found)), np.diff(self.indptr))
        hit = self.indices == columns[rows]
        found[rows[hit]] = self.weights[hit]
        return found


KERNEL_PRIORS = ("cosegment", "covariance", "embedding", "mean", "mixture")


@dataclass(frozen=True)
class LawTable:
    """Next-token laws of n contexts, the likeliest tokens of each; what is left out of a row is its tail.

    Attributes:
        indptr: int64[n + 1]; ids: int32[nnz], ascending in a row; masses: float32[nnz].
    """

    indptr: np.ndarray
    ids: np.ndarray
    masses: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("indptr", np.int64), ("ids", np.int32), ("masses", np.float32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise InvalidArtifact(f"law table: {name} is {array.dtype}{list(array.shape)}.", REBUILD)
        indptr, nnz = self.indptr, len(self.ids)
        if len(indptr) < 1 or indptr[0] != 0 or indptr[-1] != nnz or (indptr[1:] < indptr[:-1]).any():
            raise InvalidArtifact(f"law table: indptr is not monotone from 0 to {nnz}.", REBUILD)
        if len(self.masses) != nnz or not np.isfinite(self.masses).all() or (self.masses < 0).any():
            raise InvalidArtifact("law table: masses must be finite, ≥ 0 and one for each id.", REBUILD)
        if nnz:
            inner = np.ones(nnz, dtype=bool)
            inner[indptr[1:-1][indptr[1:-1] < nnz]] = False
            if self.ids.min() < 0 or (np.diff(self.ids.astype(np.int64))[inner[1:]] <= 0).any():
                raise InvalidArtifact("law table: ids of a row must ascend strictly.", REBUILD)
            filled = np.diff(indptr) > 0
            if (np.add.reduceat(self.masses.astype(np.float64), indptr[:-1][filled]) > 1 + 1e-3).any():
                raise InvalidArtifact("law table: a row sums to more than 1.", REBUILD)

    def __len__(self) -> int:
        return len(self.indptr) - 1


@dataclass(frozen=True)
class Contexts:
    """Contexts in which the laws of both models are known.

    Attributes:
        p: the target's laws, by target id.
        q: the drafter's laws, by drafter id; without rows where no drafter was run.
        documents: int32[n], the text each context stands in.
    """

    p: LawTable
    q: LawTable
    documents: np.ndarray

    def __post_init__(self) -> None:
        if self.documents.dtype != np.int32 or self.documents.shape != (len(self.p),):
            raise InvalidArtifact("contexts: documents must be int32, one for each context.", REBUILD)
        if len(self.q) not in (0, len(self.p)):
            raise InvalidArtifact(f"contexts: {len(self.p)} target but {len(self.q)} drafter laws.", REBUILD)


@dataclass(frozen=True)
class Calibration:
    """What the models say about calibration text (`hetspec-prep calibrate`).

    Attributes:
        mean, variance: float32[V_t] of the target's next-token probabilities, in the texts for statistics.
        counts: int64[V_t], target tokens of the texts not held out; drafter_counts: int64[V_d], the drafter's.
        fit: contexts that weights may be fitted on.
        held_out: contexts of other texts, which nothing is ever fitted on.
    """

    mean: np.ndarray
    variance: np.ndarray
    counts: np.ndarray
    drafter_counts: np.ndarray
    fit: Contexts
    held_out: Contexts

    def __post_init__(self) -> None:
        for name, dtype in (
            ("mean", np.float32),
            ("variance", np.float32),
            ("counts", np.int64),
            ("drafter_counts", np.int64),
        ):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
                raise InvalidArtifact(f"calibration: {name} must be {dtype.__name__}[V], finite and ≥ 0.")
        if not len(self.mean) == len(self.variance) == len(self.counts):
            raise InvalidArtifact("calibration: mean, variance and counts differ in length.", REBUILD)
        if np.intersect1d(self.fit.documents, self.held_out.documents).size:
            raise InvalidArtifact("calibration: a held-out text was also fitted on.", REBUILD)
        for contexts in (self.fit, self.held_out):
            for ids, rows in ((contexts.p.ids, len(self.mean)), (contexts.q.ids, len(self.drafter_counts))):
                if ids.size and ids.max() >= rows:
                    raise InvalidArtifact("calibration: a law names ids that do not exist.", REBUILD)


@dataclass(frozen=True)
class PrunedHead:
    """The rows of the drafter's LM head that are kept.

    Attributes:
        kept: int32[h], drafter ids, strictly ascending.
    """

    kept: np.ndarray

    def __post_init__(self) -> None:
        kept = self.kept
        if kept.dtype != np.int32 or kept.ndim != 1 or not len(kept):
            raise InvalidArtifact(
                f"head: kept is {kept.dtype}{list(kept.shape)}, expected int32[h].", REBUILD
            )
        if kept[0] < 0 or (np.diff(kept.astype(np.int64)) <= 0).any():
            raise InvalidArtifact("head: kept ids must ascend strictly from 0.", REBUILD)


@dataclass(frozen=True)
class StopTable:
    """Where target tokens end, byte by byte (ALGORITHMS §4c): for each node of the target's byte trie but the root,
    the probability that the token ends before the node's byte, given that this byte comes next.

    Attributes:
        stop: float32[N], by node of `hetspec.runtime.trie.ByteTrie`; 0 at the root, whose entry means nothing.
        counts: int64[N], how often the byte came there in the text.
    """

    stop: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.stop.dtype != np.float32 or self.stop.ndim != 1 or not len(self.stop):
            raise InvalidArtifact(f"stops: stop is {self.stop.dtype}{list(self.stop.shape)}.", REBUILD)
        if not np.isfinite(self.stop).all() or (self.stop < 0).any() or (self.stop > 1).any():
            raise InvalidArtifact("stops: probabilities must lie in 0..1.", REBUILD)
        if self.counts.dtype != np.int64 or self.counts.shape != self.stop.shape or (self.counts < 0).any():
            raise InvalidArtifact("stops: counts must be int64, ≥ 0 and one for each node.", REBUILD)


def is_sha256(value: object) -> bool:
    """Whether a value is a digest as this package writes them."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
