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

from hetspec.errors import ArtifactNotFound, HetspecError, InvalidArtifact
from hetspec.parts import (
    KERNEL_PRIORS,
    REBUILD,
    Calibration,
    Contexts,
    Kernel,
    LawTable,
    PrunedHead,
    StopTable,
    TokenizerIdentity,
    VocabularyMap,
    is_sha256,
)
from hetspec.vocab import Vocabulary

__all__ = [
    "Calibration",
    "Contexts",
    "Kernel",
    "LawTable",
    "PairArtifact",
    "PrunedHead",
    "StopTable",
    "TokenizerIdentity",
    "VocabularyMap",
]

FORMAT_VERSION = 1
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSOR_BYTES = 1 << 31  # a sparse file of any size costs an attacker nothing


@dataclass(frozen=True)
class PairArtifact:
    """Everything prepared offline about one (target, drafter) pair.

    Attributes:
        target, drafter: the tokenizers it was built for.
        map: the intersection map.
        kernels: affinity kernels by prior.
        calibration: what the models say about calibration text, or None.
        head: the rows kept of the drafter's LM head, or None for all.
        stops: where target tokens end byte by byte, or None.
        figures: numbers worth showing (counts, coverages, seconds), JSON values, nested by chart section.
        provenance: hetspec version, time, sources and settings of every stage, JSON values.
    """

    target: TokenizerIdentity
    drafter: TokenizerIdentity
    map: VocabularyMap
    kernels: dict[str, Kernel] = field(default_factory=dict)
    calibration: Calibration | None = None
    head: PrunedHead | None = None
    stops: StopTable | None = None
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
            if kernel.head_fit is not None and self.head is None:
                raise InvalidArtifact(
                    f"kernel-{prior} is fitted to a pruned head that is not there.", REBUILD
                )
        if self.calibration is not None and (
            len(self.calibration.mean) != self.target.rows
            or len(self.calibration.drafter_counts) != self.drafter.rows
        ):
            raise InvalidArtifact("calibration belongs to another pair.", REBUILD)
        if self.head is not None:
            self._check_head(self.head.kept)

    def _check_head(self, kept: np.ndarray) -> None:
        if kept[-1] >= self.drafter.rows:
            raise InvalidArtifact(f"head: id {kept[-1]} of {self.drafter.rows:,} drafter rows.", REBUILD)
        reachable = self.reachable
        if not reachable[kept].all():
            raise InvalidArtifact("head: it keeps ids that lead to no target token.", REBUILD)
        ends = [d for d in (*self.drafter.eos_ids, *self.drafter.turn_end_ids) if reachable[d]]
        if not np.isin(ends, kept).all():
            raise InvalidArtifact("head: an end-of-text or end-of-turn token is missing.", REBUILD)

    @property
    def reachable(self) -> np.ndarray:
        """bool[V_d]: drafter ids with a non-empty row in the map or in a kernel."""
        found: np.ndarray = (self.map.d2t >= 0) | (self.map.first >= 0)
        for kernel in self.kernels.values():
            found = found | (np.diff(kernel.indptr) > 0)
        return found

    @property
    def parts(self) -> list[str]:
        """Names of the parts it has."""
        optional = {"calibration": self.calibration, "head": self.head, "stops": self.stops}
        return [
            "map",
            *(f"kernel-{prior}" for prior in self.kernels),
            *(name for name, part in optional.items() if part is not None),
        ]

    @property
    def key(self) -> str:
        """The pair's key: the first 16 hex digits of both vocabulary fingerprints."""
        return f"{self.target.vocab_sha256[:16]}-{self.drafter.vocab_sha256[:16]}"

    def require(self, target: Vocabulary, drafter: Vocabulary) -> None:
        """Checks both tokenizers against the fingerprints (StaleArtifact otherwise)."""
        self.target.require(target, "target")
        self.drafter.require(drafter, "drafter")
        if self.head is not None:
            single = np.array(
                [d for d, piece in enumerate(drafter.pieces) if len(piece) == 1], dtype=np.int64
            )
            if not np.isin(single[self.reachable[single]], self.head.kept).all():
                raise InvalidArtifact("head: a single-byte token of the drafter is missing.", REBUILD)

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
                **_read_parts(blobs),
                figures=config["figures"],
                provenance=config["provenance"],
            )
        except InvalidArtifact as error:
            raise InvalidArtifact(f"{folder}: {error.message}", error.hint or REBUILD) from None


# -- writing -----------------------------------------------------------------------------------------------

ALLOWED_FILES = (
    "map.safetensors",
    *(f"kernel-{prior}.safetensors" for prior in KERNEL_PRIORS),
    "calibration.safetensors",
    "head.safetensors",
    "stops.safetensors",
)
_MAP = ("d2t", "t2d", "first")
_KERNEL, _KERNEL_OPTIONAL = ("indptr", "indices", "weights"), ("mu", "fit", "head_fit", "counts")
_STOPS = ("stop", "counts")
_TOKEN_FIGURES = ("mean", "variance", "counts", "drafter_counts")
_LAWS = ("p_indptr", "p_ids", "p_masses", "q_indptr", "q_ids", "q_masses", "documents")
_CALIBRATION = (*_TOKEN_FIGURES, *(f"{split}_{name}" for split in ("fit", "held_out") for name in _LAWS))
CONFIG_KEYS = {"format_version", "target", "drafter", "figures", "provenance", "files", "sha256"}


def _taken(directory: Path) -> HetspecError:
    return HetspecError(f"{directory} exists already; artifacts are immutable.", "Choose a new directory.")


def _parts(pair: PairArtifact) -> dict[str, dict[str, np.ndarray]]:
    """File name -> tensors of every part the pair has."""
    parts = {"map.safetensors": {name: getattr(pair.map, name) for name in _MAP}}
    for prior, kernel in pair.kernels.items():
        tensors = {name: getattr(kernel, name) for name in (*_KERNEL, *_KERNEL_OPTIONAL)}
        parts[f"kernel-{prior}.safetensors"] = {k: v for k, v in tensors.items() if v is not None}
    if pair.calibration is not None:
        calibration = pair.calibration
        tensors = {name: getattr(calibration, name) for name in _TOKEN_FIGURES}
        for split in ("fit", "held_out"):
            contexts: Contexts = getattr(calibration, split)
            for letter in ("p", "q"):
                for name in ("indptr", "ids", "masses"):
                    tensors[f"{split}_{letter}_{name}"] = getattr(getattr(contexts, letter), name)
            tensors[f"{split}_documents"] = contexts.documents
        parts["calibration.safetensors"] = tensors
    if pair.head is not None:
        parts["head.safetensors"] = {"kept": pair.head.kept}
    if pair.stops is not None:
        parts["stops.safetensors"] = {name: getattr(pair.stops, name) for name in _STOPS}
    return parts


def _write_all(pair: PairArtifact, folder: Path) -> None:
    digests = {}
    for name, tensors in sorted(_parts(pair).items()):
        blob = safetensors_numpy.save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
        if len(blob) > MAX_TENSOR_BYTES:
            raise HetspecError(
                f"{name} would take {len(blob):,} bytes, at most {MAX_TENSOR_BYTES:,} can be loaded again.",
                "Keep fewer contexts, or fewer entries per row.",
            )
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
        if not is_sha256(digest):
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


def _read_parts(blobs: dict[str, bytes]) -> dict[str, Any]:
    """The parts in these files, checked, by the name of the artifact's field."""
    parts: dict[str, Any] = {"map": VocabularyMap(**_tensors(blobs["map.safetensors"], "map", _MAP))}
    parts["kernels"] = {
        prior: Kernel(prior=prior, **_tensors(blob, f"kernel-{prior}", _KERNEL, _KERNEL_OPTIONAL))
        for prior in KERNEL_PRIORS
        if (blob := blobs.get(f"kernel-{prior}.safetensors")) is not None
    }
    if "calibration.safetensors" in blobs:
        found = _tensors(blobs["calibration.safetensors"], "calibration", _CALIBRATION)
        figures = {name: found[name] for name in _TOKEN_FIGURES}
        parts["calibration"] = Calibration(
            **figures, fit=_contexts(found, "fit"), held_out=_contexts(found, "held_out")
        )
    if "head.safetensors" in blobs:
        parts["head"] = PrunedHead(**_tensors(blobs["head.safetensors"], "head", ("kept",)))
    if "stops.safetensors" in blobs:
        parts["stops"] = StopTable(**_tensors(blobs["stops.safetensors"], "stops", _STOPS))
    return parts


def _contexts(found: dict[str, np.ndarray], split: str) -> Contexts:
    p, q = (
        LawTable(*(found[f"{split}_{letter}_{name}"] for name in ("indptr", "ids", "masses")))
        for letter in ("p", "q")
    )
    return Contexts(p, q, found[f"{split}_documents"])


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
