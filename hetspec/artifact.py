"""The pair artifact: what hetspec stores about a (target, drafter) pair, and its directory format.

numpy only. Saving is atomic and never overwrites; loading checks everything (allow-listed regular files,
strict JSON, sha256, exact tensors, invariants) before an object exists. Nothing in a file is executed.
Knows nothing about models, MLflow or how the parts were computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from hetspec.errors import ArtifactNotFound, HetspecError, InvalidArtifact, StaleArtifact
from hetspec.vocab import Vocabulary

FORMAT_VERSION = 1
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 31  # a sparse file of any size costs an attacker nothing
REBUILD = "Rebuild it: hetspec-prep build-map TARGET DRAFTER."


# -- the parts ---------------------------------------------------------------------------------------------


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
            if not _is_sha256(value):
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
        prior: "cosegment", "covariance", "embedding" or "mean".
        indptr: int64[V_d + 1]; indices: int32[nnz], ascending in a row; weights: float32[nnz], rows sum to 1.
        mu: float32[V_t], the target's mean law, or None.
    """

    prior: str
    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    mu: np.ndarray | None = None

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


KERNEL_PRIORS = ("cosegment", "covariance", "embedding", "mean")


@dataclass(frozen=True)
class PairArtifact:
    """Everything prepared offline about one (target, drafter) pair.

    Attributes:
        target, drafter: the tokenizers it was built for.
        map: the intersection map.
        kernels: affinity kernels by prior.
        figures: numbers worth showing (counts, coverages, seconds), JSON values, nested by chart section.
        provenance: hetspec version, time, sources and settings of every stage, JSON values.
    """

    target: TokenizerIdentity
    drafter: TokenizerIdentity
    map: VocabularyMap
    kernels: dict[str, Kernel] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.map.d2t) != self.drafter.rows or len(self.map.t2d) != self.target.rows:
            raise InvalidArtifact(
                f"map is {len(self.map.d2t):,} → {len(self.map.t2d):,} ids but the pair has "
                f"{self.drafter.rows:,} drafter and {self.target.rows:,} target rows.",
                REBUILD,
            )
        for prior, kernel in self.kernels.items():
            if kernel.prior != prior or len(kernel.indptr) != self.drafter.rows + 1:
                raise InvalidArtifact(f"kernel-{prior} belongs to another pair.", REBUILD)
            if kernel.indices.size and kernel.indices.max() >= self.target.rows:
                raise InvalidArtifact(f"kernel-{prior} names target ids that do not exist.", REBUILD)
            if kernel.mu is not None and len(kernel.mu) != self.target.rows:
                raise InvalidArtifact(f"kernel-{prior}: mu has {len(kernel.mu)} entries.", REBUILD)

    @property
    def key(self) -> str:
        """The pair's key: the first 16 hex digits of both vocabulary fingerprints."""
        return f"{self.target.vocab_sha256[:16]}-{self.drafter.vocab_sha256[:16]}"

    def require(self, target: Vocabulary, drafter: Vocabulary) -> None:
        """Checks both tokenizers against the fingerprints (StaleArtifact otherwise)."""
        self.target.require(target, "target")
        self.drafter.require(drafter, "drafter")

    def save_pretrained(self, directory: str | Path) -> Path:
        """Writes the artifact to a new directory; all of it appears at once or nothing does.

        Args:
            directory: must not exist yet (artifacts are immutable).

        Raises:
            HetspecError: the directory exists or cannot be written.
        """
        final = Path(directory).absolute()
        if final.exists():
            raise _taken(final)
        temporary = None
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
            _write_all(self, temporary)
            temporary.chmod(0o755)
            temporary.rename(final)
            _fsync(final.parent)
        except OSError as error:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            if final.exists():  # another writer was first
                raise _taken(final) from None
            raise HetspecError(
                f"cannot write the pair artifact to {final}: {error.strerror or error}.",
                "Free space or choose a writable folder.",
            ) from error
        except BaseException:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> PairArtifact:
        """Loads an artifact after checking all of it.

        Raises:
            ArtifactNotFound: there is no such directory.
            InvalidArtifact: anything about it is not as it was saved.
        """
        folder = Path(directory)
        if not os.path.isdir(folder):  # noqa: PTH112 (Path.is_dir raises for names that are too long)
            raise ArtifactNotFound(
                f"{folder} is not a directory.", "Build it: hetspec-prep build-map TARGET DRAFTER."
            )
        config = _read_config(folder)
        blobs = {name: _read_checked(folder, name, digest) for name, digest in config["files"].items()}
        try:
            return cls(
                target=_identity(config["target"]),
                drafter=_identity(config["drafter"]),
                map=VocabularyMap(**_tensors(blobs["map.safetensors"], "map", ("d2t", "t2d", "first"))),
                kernels={
                    prior: Kernel(
                        prior=prior,
                        **_tensors(
                            blobs[f"kernel-{prior}.safetensors"],
                            f"kernel-{prior}",
                            ("indptr", "indices", "weights"),
                            ("mu",),
                        ),
                    )
                    for prior in KERNEL_PRIORS
                    if f"kernel-{prior}.safetensors" in blobs
                },
                figures=config["figures"],
                provenance=config["provenance"],
            )
        except InvalidArtifact as error:
            raise InvalidArtifact(f"{folder}: {error.message}", error.hint or REBUILD) from None


# -- writing -----------------------------------------------------------------------------------------------

ALLOWED_FILES = ("map.safetensors", *(f"kernel-{prior}.safetensors" for prior in KERNEL_PRIORS))
CONFIG_KEYS = {"format_version", "target", "drafter", "figures", "provenance", "files", "sha256"}


def _taken(directory: Path) -> HetspecError:
    return HetspecError(f"{directory} exists already; artifacts are immutable.", "Choose a new directory.")


def _parts(pair: PairArtifact) -> dict[str, dict[str, np.ndarray]]:
    """File name -> tensors of every part the pair has."""
    parts = {"map.safetensors": {"d2t": pair.map.d2t, "t2d": pair.map.t2d, "first": pair.map.first}}
    for prior, kernel in pair.kernels.items():
        tensors = {"indptr": kernel.indptr, "indices": kernel.indices, "weights": kernel.weights}
        if kernel.mu is not None:
            tensors["mu"] = kernel.mu
        parts[f"kernel-{prior}.safetensors"] = tensors
    return parts


def _write_all(pair: PairArtifact, folder: Path) -> None:
    digests = {}
    for name, tensors in sorted(_parts(pair).items()):
        blob = safetensors_numpy.save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
        _write_file(folder / name, blob)
        digests[name] = hashlib.sha256(blob).hexdigest()
    config = {
        "format_version": FORMAT_VERSION,
        "target": asdict(pair.target),
        "drafter": asdict(pair.drafter),
        "figures": pair.figures,
        "provenance": pair.provenance,
        "files": digests,
    }
    config["sha256"] = _config_sha256(config)
    blob = _canonical(config)
    if len(blob) > MAX_CONFIG_BYTES:
        raise HetspecError(
            f"the pair's figures and provenance take {len(blob):,} bytes, at most {MAX_CONFIG_BYTES:,} fit.",
            "Keep long lists out of them.",
        )
    _write_file(folder / "config.json", blob)
    _fsync(folder)


def _write_file(path: Path, blob: bytes) -> None:
    with path.open("xb") as handle:
        handle.write(blob)
        handle.flush()
        os.fsync(handle.fileno())
    path.chmod(0o644)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(config: dict[str, Any]) -> bytes:
    text = json.dumps(config, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode("utf-8")


def _config_sha256(config: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical({k: v for k, v in config.items() if k != "sha256"})).hexdigest()


# -- reading -----------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json strictly: no duplicate keys, no NaN, known version, canonical spelling, own hash."""

    def invalid(what: str) -> InvalidArtifact:
        return InvalidArtifact(f"{folder / 'config.json'}: {what}.", REBUILD)

    def constant(value: str) -> float:
        raise ValueError(f"{value} is not JSON")

    blob = _read_regular(folder, "config.json", MAX_CONFIG_BYTES)
    try:
        config = json.loads(blob.decode("utf-8"), object_pairs_hook=_unique, parse_constant=constant)
        canonical = _canonical(
            config
        )  # fails where JSON spells what UTF-8 or JSON itself cannot (1e999, \ud800)
    except (ValueError, RecursionError) as error:
        raise invalid(f"not readable as JSON ({str(error)[:80]})") from None
    if not isinstance(config, dict) or "format_version" not in config:
        raise invalid("no format_version, so this is no pair artifact")
    version = config["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidArtifact(
            f"{folder}: format version {version!r}, this hetspec reads {FORMAT_VERSION}.",
            "Install a matching hetspec or rebuild the pair.",
        )
    if set(config) != CONFIG_KEYS:
        raise invalid(f"keys {sorted(set(config) ^ CONFIG_KEYS)} missing or unknown")
    for key in ("target", "drafter", "figures", "provenance", "files"):
        if not isinstance(config[key], dict):
            raise invalid(f"{key} is not an object")
    if not isinstance(config["sha256"], str) or config["sha256"] != _config_sha256(config):
        raise invalid("its content does not match its own sha256 (edited or damaged)")
    if blob != canonical:
        raise invalid("not spelled as it was saved (edited or damaged)")
    files = config["files"]
    if "map.safetensors" not in files:
        raise invalid("no map.safetensors listed")
    for name, digest in files.items():
        if name not in ALLOWED_FILES:
            raise invalid(f"file name {name[:80]!r} is not one of {', '.join(ALLOWED_FILES)}")
        if not _is_sha256(digest):
            raise invalid(f"sha256 of {name} is not 64 lower-case hex digits")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused where a key stands twice (`json` would keep the last)."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("duplicate keys")
    return keys


def _read_regular(folder: Path, name: str, limit: int) -> bytes:
    path = folder / name
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise InvalidArtifact(f"{path} is not a regular file.", REBUILD)
        if info.st_size > limit:
            raise InvalidArtifact(f"{path} has {info.st_size:,} bytes, expected at most {limit:,}.", REBUILD)
        return path.read_bytes()
    except OSError as error:
        raise InvalidArtifact(f"{path} cannot be read: {error.strerror or error}.", REBUILD) from None


def _read_checked(folder: Path, name: str, digest: str) -> bytes:
    blob = _read_regular(folder, name, MAX_TENSOR_BYTES)
    found = hashlib.sha256(blob).hexdigest()
    if found != digest:
        raise InvalidArtifact(f"{folder / name}: sha256 {found[:12]}…, expected {digest[:12]}….", REBUILD)
    return blob


def _tensors(
    blob: bytes, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, which must be these and nothing else (no metadata, none twice)."""
    try:
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")], object_pairs_hook=_unique)
        if not set(required) <= set(header) <= {*required, *optional}:
            raise ValueError(f"tensors {sorted(header)}, expected {list(required)}")
        tensors: dict[str, np.ndarray] = safetensors_numpy.load(blob)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArtifact(f"{where}: {str(error)[:200]}.", REBUILD) from None
    return tensors


def _identity(record: dict[str, Any]) -> TokenizerIdentity:
    expected = {f.name for f in fields(TokenizerIdentity)}
    if set(record) != expected:
        raise InvalidArtifact(f"config.json: identity keys {sorted(set(record) ^ expected)}.", REBUILD)
    for key, kind in (
        ("rows", int),
        ("tokens", int),
        ("text_tokens", int),
        ("name", str),
        ("revision", str),
        ("style", str),
        ("vocab_sha256", str),
        ("behaviour_sha256", str),
    ):
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise InvalidArtifact(f"config.json: {key} is {record[key]!r}.", REBUILD)
    for key in ("eos_ids", "turn_end_ids"):
        value = record[key]
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise InvalidArtifact(f"config.json: {key} is {value!r}.", REBUILD)
    return TokenizerIdentity(
        **{**record, "eos_ids": tuple(record["eos_ids"]), "turn_end_ids": tuple(record["turn_end_ids"])}
    )


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
