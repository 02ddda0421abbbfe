"""What the newer parts of an artifact refuse to be, and that loading refuses it too."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from hetspec.artifact import (
    Calibration,
    Contexts,
    Kernel,
    LawTable,
    PairArtifact,
    PrunedHead,
    _canonical,
    _config_sha256,
)
from hetspec.errors import InvalidArtifact
from hetspec.prep.calibrate import table
from tests.builders import DRAFTER, TARGET, small_pair

V_T, V_D = TARGET.vocabulary.rows, DRAFTER.vocabulary.rows


def laws(rows: list[list[tuple[int, float]]]) -> LawTable:
    return table(
        [
            (np.array([i for i, _ in row], dtype=np.int32), np.array([m for _, m in row], dtype=np.float32))
            for row in rows
        ]
    )


def contexts(*documents: int) -> Contexts:
    p = laws([[(0, 0.5), (3, 0.25)] for _ in documents])
    q = laws([[(1, 0.75)] for _ in documents])
    return Contexts(p, q, np.array(documents, dtype=np.int32))


def calibration(**changes: object) -> Calibration:
    whole = {
        "mean": np.full(V_T, 1 / V_T, dtype=np.float32),
        "variance": np.zeros(V_T, dtype=np.float32),
        "counts": np.arange(V_T, dtype=np.int64),
        "drafter_counts": np.arange(V_D, dtype=np.int64),
        "fit": contexts(0, 0, 1),
        "held_out": contexts(2, 5),
    }
    return Calibration(**{**whole, **changes})


def complete() -> PairArtifact:
    pair = dataclasses.replace(small_pair(), calibration=calibration())
    head = PrunedHead(np.flatnonzero(pair.reachable).astype(np.int32))
    kernel = dataclasses.replace(
        pair.kernels["cosegment"],
        fit=np.array([0.1, 0.5]),
        head_fit=np.array([0.0, 0.0]),
        counts=np.arange(V_D, dtype=np.int64),
    )
    return dataclasses.replace(pair, head=head, kernels={"cosegment": kernel})


def test_every_part_comes_back_as_it_was(tmp_path: Path) -> None:
    pair = complete()
    again = PairArtifact.from_pretrained(pair.save_pretrained(tmp_path / "pair"))
    assert again.parts == pair.parts == ["map", "kernel-cosegment", "calibration", "head"]
    again.require(TARGET.vocabulary, DRAFTER.vocabulary)

    def arrays(part: object) -> list[np.ndarray]:
        found = []
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            value = getattr(part, field.name)
            found += [value] if isinstance(value, np.ndarray) else []
            found += arrays(value) if dataclasses.is_dataclass(value) else []
        return found

    for name in ("calibration", "head"):
        mine, theirs = arrays(getattr(pair, name)), arrays(getattr(again, name))
        assert len(mine) == len(theirs) > 0
        assert all(
            a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrunedHead(np.array([], dtype=np.int32)), "kept is"),
        (lambda: PrunedHead(np.array([1, 1], dtype=np.int32)), "ascend strictly"),
        (lambda: PrunedHead(np.array([-1, 1], dtype=np.int32)), "ascend strictly"),
        (lambda: PrunedHead(np.array([0, 1], dtype=np.int64)), "kept is"),
        (lambda: laws([[(3, 0.5), (1, 0.1)]]), "ascend strictly"),
        (lambda: laws([[(3, 0.9), (4, 0.2)]]), "more than 1"),
        (lambda: laws([[(3, -0.1)]]), "finite, ≥ 0"),
        (lambda: laws([[(3, float("nan"))]]), "finite, ≥ 0"),
        (lambda: dataclasses.replace(laws([[(3, 0.5)]]), indptr=np.array([0, 2])), "monotone"),
        (lambda: Contexts(laws([[(0, 1.0)]]), laws([]), np.array([0, 1], dtype=np.int32)), "one for each"),
        (lambda: Contexts(laws([[(0, 1.0)]] * 3), laws([[(0, 1.0)]]), np.zeros(3, dtype=np.int32)), "3 target but 1"),
        (lambda: calibration(mean=np.full(V_T, -1, dtype=np.float32)), "finite and ≥ 0"),
        (lambda: calibration(counts=np.zeros(V_T + 1, dtype=np.int64)), "differ in length"),
        (lambda: calibration(held_out=contexts(1, 7)), "also fitted on"),
        (
            lambda: calibration(
                fit=Contexts(laws([[(V_T, 1.0)]]), laws([[(0, 1.0)]]), np.zeros(1, dtype=np.int32))
            ),
            "do not exist",
        ),
        (lambda: dataclasses.replace(complete().kernels["cosegment"], fit=np.array([0.6, 0.5])), "θ"),
        (lambda: dataclasses.replace(complete().kernels["cosegment"], fit=np.array([-0.1, 0.5])), "θ"),
        (lambda: dataclasses.replace(complete().kernels["cosegment"], fit=np.array([np.nan, 0.5])), "θ"),
        (lambda: dataclasses.replace(complete().kernels["cosegment"], counts=np.zeros(2, dtype=np.int64)), "counts"),
        (lambda: dataclasses.replace(complete(), head=None), "not there"),
        (lambda: dataclasses.replace(complete(), head=PrunedHead(np.array([0, 99], dtype=np.int32))), "drafter rows"),
        (lambda: dataclasses.replace(complete(), head=PrunedHead(np.array([0, 1], dtype=np.int32))), "end-of-text"),
        (
            lambda: dataclasses.replace(
                complete(), calibration=calibration(drafter_counts=np.zeros(3, dtype=np.int64))
            ),
            "another pair|do not exist",
        ),
    ],
)  # fmt: skip
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidArtifact, match=message):
        make()  # type: ignore[operator]


def test_a_head_without_the_drafters_bytes_is_refused() -> None:
    pair = complete()
    assert pair.head is not None
    single = [d for d, piece in enumerate(DRAFTER.vocabulary.pieces) if len(piece) == 1 and pair.reachable[d]]
    kept = np.setdiff1d(pair.head.kept, single[:1]).astype(np.int32)
    broken = dataclasses.replace(pair, head=PrunedHead(kept))
    with pytest.raises(InvalidArtifact, match="single-byte"):
        broken.require(TARGET.vocabulary, DRAFTER.vocabulary)


@pytest.mark.parametrize(
    "name", ["calibration.safetensors", "head.safetensors", "kernel-cosegment.safetensors"]
)
def test_edited_parts_are_refused_even_with_new_checksums(tmp_path: Path, name: str) -> None:
    import json

    folder = complete().save_pretrained(tmp_path / "pair")
    path = folder / name
    tensors = safetensors_numpy.load(path.read_bytes())
    key = {"calibration.safetensors": "fit_documents", "head.safetensors": "kept"}.get(name, "fit")
    tensors[key] = tensors[key] + 2  # held-out texts among the fitted ones; ids out of range; θ + λ > 1
    blob = safetensors_numpy.save(tensors)
    path.write_bytes(blob)
    config = json.loads((folder / "config.json").read_text())
    config["files"][name] = hashlib.sha256(blob).hexdigest()
    config["sha256"] = _config_sha256(config)
    (folder / "config.json").write_bytes(_canonical(config))
    with pytest.raises(InvalidArtifact):
        PairArtifact.from_pretrained(folder)


def test_kernels_take_their_prior_from_the_closed_list() -> None:
    with pytest.raises(InvalidArtifact, match="expected one of"):
        Kernel("luck", np.array([0, 0]), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))
