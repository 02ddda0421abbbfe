"""The stored pair: what is saved is what is loaded, all of it or nothing, and only for its own tokenizers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetspec.artifact import Kernel, PairArtifact, VocabularyMap
from hetspec.errors import ArtifactNotFound, HetspecError, InvalidArtifact, StaleArtifact
from tests.builders import DRAFTER, TARGET, small_pair
from tests.toys import Toy

ROOT = Path(__file__).parent.parent


def equal(one: PairArtifact, two: PairArtifact) -> bool:
    """Whether two artifacts agree in everything, to the last bit."""
    arrays = [(getattr(one.map, n), getattr(two.map, n)) for n in ("d2t", "t2d", "first")]
    for prior, kernel in one.kernels.items():
        other = two.kernels[prior]
        arrays += [(getattr(kernel, n), getattr(other, n)) for n in ("indptr", "indices", "weights")]
        for name in ("fit", "head_fit", "counts"):
            mine, theirs = getattr(kernel, name), getattr(other, name)
            if (mine is None) != (theirs is None):
                return False
            arrays += [(mine, theirs)] if mine is not None else []
        if (kernel.mu is None) != (other.mu is None):
            return False
        if kernel.mu is not None:
            arrays.append((kernel.mu, other.mu))
    rest = [
        (
            p.target,
            p.drafter,
            p.figures,
            p.provenance,
            sorted(p.kernels),
            [k.prior for k in p.kernels.values()],
        )
        for p in (one, two)
    ]
    same = all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays)
    return same and rest[0] == rest[1]


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


# --- round trips


@pytest.mark.parametrize("kernel", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, kernel: bool) -> None:
    pair = small_pair(kernel=kernel)
    folder = pair.save_pretrained(tmp_path / "new" / "pair")
    assert folder == tmp_path / "new" / "pair"
    assert equal(PairArtifact.from_pretrained(folder), pair)
    assert equal(PairArtifact.from_pretrained(str(folder)), pair)


def test_a_loaded_artifact_saves_to_the_same_bytes(tmp_path: Path) -> None:
    first = small_pair().save_pretrained(tmp_path / "a")
    second = small_pair().save_pretrained(tmp_path / "b")
    third = PairArtifact.from_pretrained(first).save_pretrained(tmp_path / "c")
    assert digest(first) == digest(second) == digest(third)
    assert set(digest(first)) == {"config.json", "map.safetensors", "kernel-cosegment.safetensors"}


def test_bytes_do_not_depend_on_hash_seeds_or_the_order_of_keys(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.builders import small_pair; from dataclasses import replace;"
        "replace(small_pair(), figures={c: 1 for c in {'x', 'y', 'z', 'w'}}).save_pretrained(sys.argv[1])"
    )
    run_python(code, str(tmp_path / "1"), PYTHONHASHSEED="1")
    replace(small_pair(), figures=dict.fromkeys("wzyx", 1)).save_pretrained(tmp_path / "2")
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    folder = small_pair().save_pretrained(tmp_path / "pair")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o644}


@given(st.lists(st.lists(st.integers(0, 8), max_size=5, unique=True), min_size=8, max_size=8), st.booleans())
def test_any_kernel_survives(rows, with_mu):
    indices = np.array([t for row in rows for t in sorted(row)], dtype=np.int32)
    weights = np.array([1 / len(row) for row in rows for _ in row], dtype=np.float32)
    mu = np.linspace(0, 1, 9, dtype=np.float32) if with_mu else None
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    kernel = Kernel("mean", indptr=indptr, indices=indices, weights=weights, mu=mu)
    pair = replace(small_pair(kernel=False), kernels={"mean": kernel})
    with contextlib.ExitStack() as stack:
        import tempfile

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pair"
        assert equal(PairArtifact.from_pretrained(pair.save_pretrained(folder)), pair)


def test_text_of_any_script_survives(tmp_path: Path) -> None:
    pair = small_pair()
    pair = replace(
        pair,
        target=replace(pair.target, name="模型/ü ← x"),
        figures={"text": "é😀\n\x00</script>", "nested": {"list": [1, 2.5, None, True, "x"]}},
    )
    assert equal(PairArtifact.from_pretrained(pair.save_pretrained(tmp_path / "é dir")), pair)


# --- only for its own tokenizers


def test_its_own_tokenizers_are_accepted() -> None:
    small_pair().require(TARGET.vocabulary, DRAFTER.vocabulary)
    padded = Toy([b"a", b"b", b"c", b"ab", b"ba", b"abc"], rows=64)  # another head, the same tokenizer
    small_pair().require(padded.vocabulary, DRAFTER.vocabulary)


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_a_changed_tokenizer_is_refused_with_both_fingerprints(side: str) -> None:
    pair = small_pair()
    other = Toy([b"a", b"b", b"c", b"ab", b"ba", b"abd"]).vocabulary
    given_ = (other, DRAFTER.vocabulary) if side == "target" else (TARGET.vocabulary, other)
    with pytest.raises(StaleArtifact) as caught:
        pair.require(*given_)
    assert getattr(pair, side).vocab_sha256[:12] in caught.value.message
    assert other.vocab_sha256[:12] in caught.value.message
    assert f"{side} vocabulary" in caught.value.message
    assert "build-map" in caught.value.hint
    assert caught.value.exit_code == 3


def test_the_same_vocabulary_cut_otherwise_is_refused() -> None:
    pair = small_pair()
    other = replace(TARGET.vocabulary, behaviour_sha256="0" * 64)
    with pytest.raises(StaleArtifact, match="target segmentation") as caught:
        pair.require(other, DRAFTER.vocabulary)
    assert "000000000000…" in caught.value.message
    assert pair.target.behaviour_sha256[:12] in caught.value.message


def test_swapped_tokenizers_are_refused() -> None:
    with pytest.raises(StaleArtifact):
        small_pair().require(DRAFTER.vocabulary, TARGET.vocabulary)


# --- all or nothing


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    folder = small_pair().save_pretrained(tmp_path / "pair")
    before = digest(folder)
    with pytest.raises(HetspecError, match="exists already"):
        small_pair(kernel=False).save_pretrained(folder)
    assert digest(folder) == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(HetspecError, match="exists already"):
            small_pair().save_pretrained(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "pair"]


@pytest.mark.parametrize("place", ["/proc/pair", "/dev/null/pair", "/sys/kernel/a/b"])
def test_an_unwritable_place_is_one_line(place: str) -> None:
    with pytest.raises(HetspecError, match="cannot write the pair artifact") as caught:
        small_pair().save_pretrained(place)
    assert "\n" not in str(caught.value)


def test_figures_that_do_not_fit_are_refused_before_anything_appears(tmp_path: Path) -> None:
    with pytest.raises(HetspecError, match="figures and provenance take"):
        replace(small_pair(), figures={"x": "y" * (1 << 20)}).save_pretrained(tmp_path / "pair")
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(small_pair(), figures={"x": float("nan")}).save_pretrained(tmp_path / "pair")
    assert list(tmp_path.iterdir()) == []


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    code = """
import resource, sys
from hetspec.errors import HetspecError
from tests.builders import small_pair
pair = small_pair()
for size in (0, 1, 100, 300, 500, 1000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        pair.save_pretrained(sys.argv[1])
    except HetspecError as error:
        print(error.message)
"""
    done = run_python(code, str(tmp_path / "pair"))
    assert done.stdout.count("cannot write the pair artifact") == 6
    assert "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_of_many_writers_of_one_name_exactly_one_wins(tmp_path: Path) -> None:
    """Forked after everything is imported, released together, so that they really meet."""
    target = tmp_path / "pair"
    pairs = [replace(small_pair(), figures={"writer": n}) for n in range(8)]
    for round_ in range(5):
        folder = target.with_name(f"pair{round_}")
        ready, go = os.pipe(), os.pipe()
        children = []
        for pair in pairs:
            child = os.fork()
            if child == 0:
                os.close(go[1])
                os.write(ready[1], b".")
                os.read(go[0], 1)  # until the parent closes it
                try:
                    pair.save_pretrained(folder)
                except HetspecError as error:
                    os._exit(1 if "exists already" in error.message else 2)
                except BaseException:
                    os._exit(3)
                os._exit(0)
            children.append(child)
        for _ in children:
            os.read(ready[0], 1)
        for end in (*ready, *go):
            os.close(end)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) == [0] + [1] * 7
        assert PairArtifact.from_pretrained(folder).figures["writer"] == codes.index(0)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"pair{n}" for n in range(5)]


def test_a_killed_writer_leaves_a_whole_artifact_or_none(tmp_path: Path) -> None:
    pair = small_pair()
    started = time.perf_counter()
    pair.save_pretrained(tmp_path / "timed")
    reach = 3 * (time.perf_counter() - started)
    draw = random.Random(0)
    outcomes = {True: 0, False: 0}
    for n in range(60):
        folder = tmp_path / f"pair{n}"
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                pair.save_pretrained(folder)
                time.sleep(10)
            os._exit(0)
        time.sleep(draw.uniform(0, reach))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcomes[folder.exists()] += 1
        reach *= 0.8 if folder.exists() else 1.25  # a busy machine writes more slowly than the first time
        if folder.exists():
            assert equal(PairArtifact.from_pretrained(folder), pair)
        else:
            with pytest.raises(ArtifactNotFound):
                PairArtifact.from_pretrained(folder)
            assert equal(
                PairArtifact.from_pretrained(pair.save_pretrained(folder)), pair
            )  # debris does not block
    assert min(outcomes.values()) >= 3, f"the kills did not hit both sides: {outcomes}"


# --- the parts check themselves

MAP = {"d2t": [1, 0, -1, 1], "t2d": [1, 0, -1], "first": [1, 0, 2, 1]}


def vocabulary_map(dtype=np.int32, **changes) -> VocabularyMap:
    return VocabularyMap(**{k: np.array(v, dtype=dtype) for k, v in {**MAP, **changes}.items()})


def test_a_sound_map_may_send_several_drafter_ids_to_one_target_id() -> None:
    vocabulary_map()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": np.int64}, "expected int32"),
        ({"d2t": [[1, 0], [1, 0]]}, "expected int32"),
        ({"d2t": [1, 0, -1, 3]}, "d2t holds ids outside"),
        ({"d2t": [1, 0, -2, 1]}, "d2t holds ids outside"),
        ({"t2d": [1, 4, -1]}, "t2d holds ids outside"),
        ({"t2d": [1, 0, -2]}, "t2d holds ids outside"),
        ({"first": [1, 0, 3, 1]}, "first holds ids outside"),
        ({"first": [1, 0, 2]}, "differ in length"),
        ({"t2d": [1, 1, -1]}, "d2t\\[t2d\\[x\\]\\] = x does not hold"),
        ({"t2d": [1, 0, 2]}, "d2t\\[t2d\\[x\\]\\] = x does not hold"),
        ({"t2d": [1, -1, -1]}, "no preferred preimage"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(InvalidArtifact, match=message):
        vocabulary_map(**changes)


def kernel(**changes) -> Kernel:
    parts = {
        "prior": "cosegment",
        "indptr": np.array([0, 2, 2, 3], dtype=np.int64),
        "indices": np.array([1, 4, 0], dtype=np.int32),
        "weights": np.array([0.25, 0.75, 1.0], dtype=np.float32),
    }
    return Kernel(**{**parts, **changes})


def i64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


BAD_KERNELS = {
    "unknown prior": {"prior": "../x"},
    "indptr of another type": {"indptr": i32(0, 2, 2, 3)},
    "indices of another type": {"indices": i64(1, 4, 0)},
    "weights of another type": {"weights": np.array([0.25, 0.75, 1.0])},
    "weights in a matrix": {"weights": f32(0.25, 0.75, 1.0).reshape(1, 3)},
    "no rows": {"indptr": i64(0), "indices": i32(), "weights": f32()},
    "indptr not from 0": {"indptr": i64(1, 2, 2, 3)},
    "indptr beyond the end": {"indptr": i64(0, 2, 2, 4)},
    "indptr short of the end": {"indptr": i64(0, 2, 2, 2)},
    "indptr falling": {"indptr": i64(0, 3, 2, 3)},
    "indptr that wraps around": {"indptr": i64(0, 2**63 - 1, -(2**62), 3)},
    "a weight missing": {"weights": f32(0.25, 0.75)},
    "ids unsorted": {"indices": i32(4, 1, 0)},
    "an id twice": {"indices": i32(4, 4, 0)},
    "a negative id": {"indices": i32(-1, 4, 0)},
    "a NaN": {"weights": f32(0.25, np.nan, 1.0)},
    "an infinity": {"weights": f32(0.25, np.inf, 1.0)},
    "a negative weight": {"weights": f32(-0.25, 1.25, 1.0)},
    "a row of 0.9": {"weights": f32(0.25, 0.65, 1.0)},
    "a row of 0": {"weights": f32(0.25, 0.75, 0.0)},
    "a row of 2": {"weights": f32(0.25, 0.75, 2.0)},
    "mu of another type": {"mu": np.ones(5)},
    "mu with a NaN": {"mu": f32(np.nan)},
    "mu negative": {"mu": f32(-1.0)},
}


@pytest.mark.parametrize("what", BAD_KERNELS)
def test_a_kernel_that_is_no_set_of_laws_is_refused(what: str) -> None:
    kernel()
    with pytest.raises(InvalidArtifact, match="kernel"):
        kernel(**BAD_KERNELS[what])


def test_a_row_starts_anew_whatever_the_row_before_ended_with() -> None:
    kernel(indptr=i64(0, 1, 1, 2), indices=i32(4, 0), weights=f32(1, 1))
    kernel(indptr=i64(0, 0, 0, 0), indices=i32(), weights=f32())


@pytest.mark.parametrize(
    "change",
    [
        lambda p: {"map": vocabulary_map()},
        lambda p: {"kernels": {"mean": p.kernels["cosegment"]}},
        lambda p: {"kernels": {"cosegment": kernel()}},
        lambda p: {
            "kernels": {"cosegment": kernel(indptr=i64(*[0] * 8, 1), indices=i32(9), weights=f32(1.0))}
        },
        lambda p: {"kernels": {"cosegment": replace(p.kernels["cosegment"], mu=np.ones(3, np.float32))}},
        lambda p: {"target": replace(p.target, rows=10)},
    ],
    ids=["map", "prior", "kernel rows", "kernel ids", "mu", "rows"],
)
def test_parts_of_different_pairs_are_refused(change) -> None:
    pair = small_pair()
    with pytest.raises(InvalidArtifact):
        replace(pair, **change(pair))


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_sha256": "0" * 63},
        {"vocab_sha256": "A" * 64},
        {"behaviour_sha256": ""},
        {"rows": 3},
        {"tokens": 1 << 40},
        {"text_tokens": 0},
        {"text_tokens": -1},
        {"eos_ids": (99,)},
        {"turn_end_ids": (-1,)},
        {"name": "two\nlines"},
        {"name": "\x1b[31mred"},
        {"revision": "\udcff"},
    ],
)
def test_an_identity_that_cannot_be_is_refused(change: dict) -> None:
    with pytest.raises(InvalidArtifact):
        replace(small_pair().target, **change)


def test_the_key_names_both_vocabularies() -> None:
    pair = small_pair()
    assert pair.key == f"{pair.target.vocab_sha256[:16]}-{pair.drafter.vocab_sha256[:16]}"
