"""Attacks on a stored pair: a sound artifact is built, one function breaks it, loading must refuse it.

Where an attack is deeper than a flipped byte it recomputes every checksum, as somebody who has read our code
would. Each must end in exactly `InvalidArtifact` (or `ArtifactNotFound`), never in half an object.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from hetspec.artifact import PairArtifact
from hetspec.errors import ArtifactNotFound, HetspecError, InvalidArtifact
from tests.builders import small_pair

ROOT = Path(__file__).parent.parent.parent
KERNEL = "kernel-cosegment.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pair().save_pretrained(tmp_path_factory.mktemp("pristine") / "pair")


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A sound artifact of the test's own."""
    shutil.copytree(pristine, tmp_path / "pair")
    PairArtifact.from_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


def refused(folder: Path) -> str:
    """Loads, expecting exactly InvalidArtifact, quickly; the message."""
    started = time.perf_counter()
    with pytest.raises(HetspecError) as caught:
        PairArtifact.from_pretrained(folder)
    assert type(caught.value) is InvalidArtifact, repr(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert time.perf_counter() - started < 1
    return caught.value.message


# --- tools of the attacker


def canonical(config: object) -> bytes:
    return (json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode(
        "utf-8", "surrogatepass"
    )


def sealed(config: dict[str, Any]) -> bytes:
    """config.json with a right checksum of its own."""
    body = {key: value for key, value in config.items() if key != "sha256"}
    return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_bytes(sealed(config))


def put_blob(folder: Path, name: str, blob: bytes) -> None:
    """Replaces a file, and its checksum in the config."""
    (folder / name).write_bytes(blob)
    edit_config(folder, lambda config: config["files"].update({name: hashlib.sha256(blob).hexdigest()}))


def put_tensors(folder: Path, name: str, **changes: np.ndarray | None) -> None:
    """Replaces, adds or (None) removes tensors of a file."""
    tensors = safetensors_numpy.load((folder / name).read_bytes())
    tensors = {key: value for key, value in {**tensors, **changes}.items() if value is not None}
    put_blob(folder, name, safetensors_numpy.save(tensors))


def tensor(folder: Path, name: str, key: str) -> np.ndarray:
    return safetensors_numpy.load((folder / name).read_bytes())[key].copy()


def raw_safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def parts_of(blob: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", blob[:8])[0]
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


# --- the tools themselves


def test_the_attackers_tools_make_sound_artifacts(folder: Path) -> None:
    edit_config(folder, lambda config: config["provenance"].update(note="x"))
    put_tensors(folder, "map.safetensors")
    put_tensors(folder, KERNEL, mu=None)
    pair = PairArtifact.from_pretrained(folder)
    assert pair.provenance["note"] == "x"
    assert pair.kernels["cosegment"].mu is None


# --- flips


@pytest.mark.parametrize("name", ["config.json", "map.safetensors", KERNEL])
def test_every_flipped_byte_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    blob = path.read_bytes()
    assert len(blob) < 4000
    for at in range(len(blob)):
        for mask in (0x01, 0x20, 0x80):
            path.unlink()
            path.write_bytes(blob[:at] + bytes([blob[at] ^ mask]) + blob[at + 1 :])
            with pytest.raises(InvalidArtifact):
                PairArtifact.from_pretrained(folder)
    path.write_bytes(blob)
    PairArtifact.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "map.safetensors"])
def test_every_truncation_and_any_tail_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    blob = path.read_bytes()
    for broken in (
        *(blob[:n] for n in range(len(blob))),
        blob + b"\n",
        blob + b"\0",
        blob + blob,
        b" " + blob,
    ):
        path.write_bytes(broken)
        with pytest.raises(InvalidArtifact):
            PairArtifact.from_pretrained(folder)


def mutate(blob: bytes, draw: random.Random) -> bytes:
    """One to three random edits: a byte, a number, a cut, a repeat, a swap."""
    data = bytearray(blob)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        kind = draw.randrange(5)
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack(
                "<q", draw.choice([-1, 0, 1, 2**31, 2**63 - 1, draw.getrandbits(40)])
            )
        elif kind == 2 and len(data) > 20:
            del data[at : at + draw.randint(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randint(1, 9)]
        else:
            other = draw.randrange(len(data))
            data[at], data[other] = data[other], data[at]
    return bytes(data)


def load_files(config: bytes, files: dict[str, bytes], folder: Path) -> PairArtifact | None:
    """The artifact, None if refused; anything but InvalidArtifact escapes."""
    for name, blob in {**files, "config.json": config}.items():
        (folder / name).unlink()  # a new file: ext4 flushes one that is cut to nothing and written again
        (folder / name).write_bytes(blob)
    try:
        return PairArtifact.from_pretrained(folder)
    except InvalidArtifact:
        return None


def test_ten_thousand_random_mutations_never_give_another_error(folder: Path) -> None:
    draw = random.Random(20261130)
    files = {name: (folder / name).read_bytes() for name in ("map.safetensors", KERNEL)}
    config = json.loads((folder / "config.json").read_text())
    loaded = 0
    for n in range(10_000):
        broken = dict(files)
        blob = canonical(config)
        if n % 4 == 0:  # without mending the checksums: refused at the door
            blob = mutate(blob, draw)
        elif n % 4 == 1:  # a sealed config with a broken value
            copy = json.loads(canonical(config))
            place = copy[draw.choice(["target", "drafter", "figures", "provenance", "files"])]
            key = draw.choice(list(place))
            place[key] = draw.choice([None, -1, 10**30, "", "x" * 64, [], {}, [1, -1], True, 0.5, key])
            blob = sealed(copy)
        else:  # tensors broken, every checksum right
            name = draw.choice(list(files))
            broken[name] = mutate(files[name], draw)
            sums = {key: hashlib.sha256(value).hexdigest() for key, value in broken.items()}
            blob = sealed({**config, "files": sums})
        pair = load_files(blob, broken, folder)
        if pair is not None:
            loaded += 1
            assert pair.map.d2t.max() < pair.target.rows
            assert np.isfinite(pair.kernels["cosegment"].weights).all()
    assert 50 < loaded < 5000  # some mutations are harmless (mu, a name): the mill really reaches the inside


# --- config.json


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


CONFIG_BLOBS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "no object": b"[]\n",
    "a number": b"1\n",
    "a string": b'"format_version"\n',
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": "{}".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "ten thousand levels": deep(10_000),
    "ten thousand lists": b"[" * 10_000,
    "two million spaces": b" " * 2_000_000,
    "an enormous number": b'{"format_version": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("what", CONFIG_BLOBS)
def test_a_config_that_is_none_is_refused(folder: Path, what: str) -> None:
    (folder / "config.json").write_bytes(CONFIG_BLOBS[what])
    refused(folder)


def test_a_config_of_ten_megabytes_is_refused_unread(folder: Path) -> None:
    edit_config(folder, lambda config: config["provenance"].update(note="x" * 10_000_000))
    assert "expected at most" in refused(folder)


@pytest.mark.parametrize("levels", [50, 200, 500, 900, 990])
def test_deep_nesting_is_read_or_refused_cleanly(folder: Path, levels: int) -> None:
    def nest(config: dict[str, Any]) -> None:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        config["provenance"]["x"] = value

    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(10 * limit)  # the attacker's own
        edit_config(folder, nest)
    finally:
        sys.setrecursionlimit(limit)
    with contextlib.suppress(InvalidArtifact):  # and nothing else
        PairArtifact.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    [
        '{"format_version": 1, "format_version": 1}',
        '{"format_version": 1, "figures": {"a": 1, "a": 2}}',
        '{"format_version": NaN}',
        '{"format_version": 1, "figures": {"a": Infinity}}',
        '{"format_version": 1, "figures": {"a": -Infinity}}',
    ],
)
def test_what_is_not_strict_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "not readable as JSON" in refused(folder)


def spelled_otherwise(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replaces text of a config and mends its checksum over the replaced text."""

    def attack(folder: Path) -> None:
        path = folder / "config.json"
        edit_config(folder, lambda config: config["figures"].update(x=12345))
        blob = path.read_bytes()
        assert blob.count(old) == 1
        path.write_bytes(blob.replace(old, new))

    return attack


@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"12345.0", b"0012345", b"0x1", b'"\\ud800"', b"12345 "]
)
def test_numbers_and_strings_of_odd_spelling_are_refused(folder: Path, number: bytes) -> None:
    spelled_otherwise(b"12345", number)(folder)
    refused(folder)


CONFIG_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no version": lambda c: c.pop("format_version"),
    "a future version": lambda c: c.update(format_version=2),
    "version 0": lambda c: c.update(format_version=0),
    "version true": lambda c: c.update(format_version=True),
    "version 1.0": lambda c: c.update(format_version=1.0),
    "version in a list": lambda c: c.update(format_version=[1]),
    "an unknown key": lambda c: c.update(extra=1),
    "no target": lambda c: c.pop("target"),
    "no files": lambda c: c.pop("files"),
    "files empty": lambda c: c.update(files={}),
    "files in a list": lambda c: c.update(files=["map.safetensors"]),
    "figures in a list": lambda c: c.update(figures=[]),
    "provenance null": lambda c: c.update(provenance=None),
    "target is the drafter": lambda c: c.update(target=c["drafter"]),
    "target and drafter exchanged": lambda c: c.update(target=c["drafter"], drafter=c["target"]),
    "identity with another key": lambda c: c["target"].update(extra=1),
    "identity without a key": lambda c: c["target"].pop("style"),
    "rows as text": lambda c: c["target"].update(rows="9"),
    "rows as a float": lambda c: c["target"].update(rows=9.0),
    "rows true": lambda c: c["target"].update(rows=True),
    "rows negative": lambda c: c["target"].update(rows=-9),
    "rows too many": lambda c: c["target"].update(rows=10**18),
    "rows too few": lambda c: c["drafter"].update(rows=7),
    "tokens above rows": lambda c: c["target"].update(tokens=10),
    "no text tokens": lambda c: c["target"].update(text_tokens=0),
    "an end id outside": lambda c: c["target"].update(eos_ids=[9]),
    "an end id of -1": lambda c: c["target"].update(eos_ids=[-1]),
    "an end id true": lambda c: c["target"].update(eos_ids=[True]),
    "an end id as text": lambda c: c["target"].update(eos_ids=["6"]),
    "end ids null": lambda c: c["target"].update(eos_ids=None),
    "a name of 0": lambda c: c["target"].update(name=0),
    "a name with escapes": lambda c: c["target"].update(name="\x1b[2J"),
    "a name with a line end": lambda c: c["target"].update(name="a\nb"),
    "a name that is no text": lambda c: c["target"].update(name="\ud800"),
    "fingerprint in upper case": lambda c: c["target"].update(vocab_sha256="AB" * 32),
    "fingerprint short": lambda c: c["target"].update(vocab_sha256="ab" * 31),
    "fingerprint null": lambda c: c["target"].update(vocab_sha256=None),
    "file hash in upper case": lambda c: c["files"].update({KERNEL: c["files"][KERNEL].upper()}),
    "file hash short": lambda c: c["files"].update({KERNEL: c["files"][KERNEL][:-1]}),
    "file hash null": lambda c: c["files"].update({KERNEL: None}),
    "file hash of another file": lambda c: c["files"].update({KERNEL: c["files"]["map.safetensors"]}),
    "no map": lambda c: c["files"].pop("map.safetensors"),
    "a file that is not there": lambda c: c["files"].update({"kernel-mean.safetensors": "0" * 64}),
}


@pytest.mark.parametrize("what", CONFIG_EDITS)
def test_a_sealed_config_with_a_wrong_value_is_refused(folder: Path, what: str) -> None:
    edit_config(folder, CONFIG_EDITS[what])
    refused(folder)


@pytest.mark.parametrize("seal", [None, "", "0" * 64, 5])
def test_a_config_without_its_seal_is_refused(folder: Path, seal: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_bytes(canonical({**config, "sha256": seal}))
    assert "its own sha256" in refused(folder)


def test_a_config_in_another_spelling_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    assert "not spelled as it was saved" in refused(folder)


# --- paths

NAMES = [
    "../pair/map.safetensors",
    "/etc/passwd",
    "a/b",
    "C:\\x",
    "map.safetensors\0",
    "MAP.safetensors",
    "map.safetensors/",
    "./map.safetensors",
    "",
    ".",
    "config.json",
    "x" * 300,
    "kernel-../../etc/passwd.safetensors",
    "kernel-cosegment.pkl",
]


@pytest.mark.parametrize("name", NAMES)
def test_only_known_file_names_are_read(folder: Path, name: str) -> None:
    edit_config(folder, lambda config: config["files"].update({name: "0" * 64}))
    assert "is not one of" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "map.safetensors", KERNEL])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "fifo", "socket", "absent", "device"])
def test_only_regular_files_are_read(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = folder / name
    path.rename(tmp_path / name)
    if kind == "symlink":
        path.symlink_to(tmp_path / name)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nothing")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # reading it would wait for ever
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as end:
            here = Path.cwd()
            os.chdir(folder)  # socket names are short
            try:
                end.bind(name)
            finally:
                os.chdir(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    refused(folder)


def test_a_sparse_file_of_any_size_costs_nothing(folder: Path) -> None:
    with (folder / KERNEL).open("r+b") as handle:
        handle.truncate(1 << 40)
    assert "expected at most" in refused(folder)


@pytest.mark.parametrize("kind", ["absent", "file", "name too long", "no text"])
def test_what_is_no_directory_is_not_found(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 300 if kind == "name too long" else "pair")
    if kind == "file":
        path.write_bytes(b"")
    with pytest.raises(ArtifactNotFound):
        PairArtifact.from_pretrained("pair\0" if kind == "no text" else path)


def test_other_files_beside_it_are_ignored_and_not_opened(folder: Path) -> None:
    for name in ("pytorch_model.bin", "weights.pt", "code.pkl", "hetspec.py", "config.yaml", "map.npy"):
        os.mkfifo(folder / name)  # opening one would hang
    PairArtifact.from_pretrained(folder)


# --- tensors


def header_edit(
    change: Callable[[dict[str, Any]], object], name: str = "map.safetensors"
) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        header, data = parts_of((folder / name).read_bytes())
        change(header)
        put_blob(folder, name, raw_safetensors(json.dumps(header).encode(), data))

    return attack


def text_edit(old: bytes, new: bytes) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        blob = (folder / "map.safetensors").read_bytes()
        size = struct.unpack("<Q", blob[:8])[0]
        header = blob[8 : 8 + size]
        assert header.count(old) == 1, header
        put_blob(folder, "map.safetensors", raw_safetensors(header.replace(old, new), blob[8 + size :]))

    return attack


def whole(change: Callable[[bytes], bytes], name: str = "map.safetensors") -> Callable[[Path], None]:
    return lambda folder: put_blob(folder, name, change((folder / name).read_bytes()))


def set_tensor(
    name: str, key: str, change: Callable[[np.ndarray], np.ndarray | None]
) -> Callable[[Path], None]:
    return lambda folder: put_tensors(folder, name, **{key: change(tensor(folder, name, key))})


def setting(at: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[at] = value
        return array

    return change


def duplicate_names(folder: Path) -> None:
    """Two tensors of one name: which of them counts would be up to the parser."""
    header, data = parts_of((folder / "map.safetensors").read_bytes())
    entry = json.dumps(header["d2t"])
    text = json.dumps(header)[:-1] + f', "d2t": {entry}}}'
    put_blob(folder, "map.safetensors", raw_safetensors(text.encode(), data))


def overlapping(header: dict[str, Any]) -> None:
    header["first"]["data_offsets"] = header["d2t"]["data_offsets"]


def enormous(header: dict[str, Any]) -> None:
    header["weights"].update(shape=[10**12], data_offsets=[0, 4 * 10**12])


M, K = "map.safetensors", KERNEL
TENSOR_ATTACKS: dict[str, Callable[[Path], None]] = {
    "empty file": whole(lambda b: b""),
    "seven bytes": whole(lambda b: b[:7]),
    "a header of 2^63 bytes": whole(lambda b: struct.pack("<Q", 2**63) + b[8:]),
    "a header of 2^64-1 bytes": whole(lambda b: b"\xff" * 8 + b[8:]),
    "a header of 0 bytes": whole(lambda b: bytes(8) + b[8:]),
    "a header that ends early": whole(lambda b: struct.pack("<Q", 10) + b[8:]),
    "a header that is a list": whole(lambda b: raw_safetensors(b"[]", b"")),
    "a header that is a number": whole(lambda b: raw_safetensors(b"1", b"")),
    "a header of ten thousand levels": whole(lambda b: raw_safetensors(deep(10_000), b"")),
    "a header that is not UTF-8": whole(lambda b: raw_safetensors(b'{"\xff": 1}', b"")),
    "no tensors": whole(lambda b: raw_safetensors(b"{}", b"")),
    "a truncated tensor": whole(lambda b: b[:-4]),
    "trailing bytes": whole(lambda b: b + b"\0"),
    "a name twice": duplicate_names,
    "overlapping tensors": header_edit(overlapping),
    "an entry 10^12 long": header_edit(enormous, K),
    "metadata": header_edit(lambda h: h.update(__metadata__={"x": "y"})),
    "an entry without a type": header_edit(lambda h: h["d2t"].pop("dtype")),
    "an entry that is a number": header_edit(lambda h: h.update(d2t=1)),
    "negative offsets": header_edit(lambda h: h["d2t"].update(data_offsets=[-4, 28])),
    "a negative shape": header_edit(lambda h: h["d2t"].update(shape=[-8])),
    "an unknown type": text_edit(b'"d2t":{"dtype":"I32"', b'"d2t":{"dtype":"XYZ"'),
    "a pickle in its place": whole(lambda b: b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x02os\x94."),
    "a tensor missing": set_tensor(M, "first", lambda a: None),
    "a tensor too many": lambda f: put_tensors(f, M, extra=np.zeros(1, np.int32)),
    "the kernel in place of the map": lambda f: put_blob(f, M, (f / K).read_bytes()),
    "the map in place of the kernel": lambda f: put_blob(f, K, (f / M).read_bytes()),
    "d2t as int64": set_tensor(M, "d2t", lambda a: a.astype(np.int64)),
    "d2t as float": set_tensor(M, "d2t", lambda a: a.astype(np.float32)),
    "d2t as a matrix": set_tensor(M, "d2t", lambda a: a.reshape(2, -1)),
    "d2t too long": set_tensor(M, "d2t", lambda a: np.append(a, np.int32(-1))),
    "t2d too short": set_tensor(M, "t2d", lambda a: a[:-1]),
    "everything too short": lambda f: put_tensors(
        f, M, **{k: np.full(1, -1, np.int32) for k in ("d2t", "t2d", "first")}
    ),
    "everything empty": lambda f: put_tensors(
        f, M, **{k: np.zeros(0, np.int32) for k in ("d2t", "t2d", "first")}
    ),
    "d2t of -2": set_tensor(M, "d2t", setting(2, -2)),
    "d2t of V": set_tensor(M, "d2t", setting(2, 9)),
    "t2d of V": set_tensor(M, "t2d", setting(2, 8)),
    "first of V": set_tensor(M, "first", setting(0, 9)),
    "first of -2": set_tensor(M, "first", setting(0, -2)),
    "d2t and t2d exchanged": lambda f: put_tensors(f, M, d2t=tensor(f, M, "t2d"), t2d=tensor(f, M, "d2t")),
    "not inverse": set_tensor(M, "t2d", setting(0, 3)),
    "a mapped id without a preimage": set_tensor(M, "t2d", setting(0, -1)),
    "a zero-size tensor": lambda f: put_tensors(f, K, mu=np.zeros(0, np.float32)),
    "kernel indptr falling": set_tensor(K, "indptr", setting(2, 0)),
    "kernel indptr wrapping": set_tensor(
        K, "indptr", lambda a: np.array([*a[:2], 2**63 - 1, -(2**62), *a[4:]], np.int64)
    ),
    "kernel indptr short": set_tensor(K, "indptr", lambda a: a[:-1]),
    "kernel ids unsorted": set_tensor(K, "indices", lambda a: np.array([1, 3, 0, 3, 1, 4], np.int32)),
    "kernel id twice": set_tensor(K, "indices", lambda a: np.array([1, 3, 3, 3, 1, 4], np.int32)),
    "kernel id of V": set_tensor(K, "indices", setting(5, 9)),
    "kernel id of -1": set_tensor(K, "indices", setting(0, -1)),
    "kernel weight NaN": set_tensor(K, "weights", setting(0, np.nan)),
    "kernel weight infinite": set_tensor(K, "weights", setting(0, np.inf)),
    "kernel weight negative": set_tensor(
        K, "weights", lambda a: np.array([1, -0.25, 1.25, 1, 0.5, 0.5], np.float32)
    ),
    "kernel row of 0.9": set_tensor(K, "weights", setting(0, 0.9)),
    "kernel row of 0": set_tensor(K, "weights", setting(0, 0)),
    "kernel row of 2": set_tensor(K, "weights", setting(0, 2)),
    "kernel weights as float64": set_tensor(K, "weights", lambda a: a.astype(np.float64)),
    "mu negative": set_tensor(K, "mu", setting(0, -1)),
    "mu NaN": set_tensor(K, "mu", setting(0, np.nan)),
    "mu too short": set_tensor(K, "mu", lambda a: a[:-1]),
}


@pytest.mark.parametrize("what", TENSOR_ATTACKS)
def test_tensors_with_right_checksums_and_wrong_content_are_refused(folder: Path, what: str) -> None:
    TENSOR_ATTACKS[what](folder)
    refused(folder)


@pytest.mark.parametrize(
    "dtype",
    [
        "BOOL",
        "U8",
        "I8",
        "I16",
        "U16",
        "F16",
        "BF16",
        "U32",
        "F32",
        "F8_E4M3",
        "F8_E5M2",
        "I64",
        "F64",
        "C64",
    ],
)
def test_a_map_of_any_other_type_is_refused(folder: Path, dtype: str) -> None:
    header, data = parts_of((folder / "map.safetensors").read_bytes())
    size = {"1": 1, "8": 1, "16": 2, "32": 4, "64": 8}[
        "8" if dtype in ("BOOL", "U8", "I8") or dtype.startswith("F8") else dtype.lstrip("BUIFC")
    ]
    entry = header["d2t"]
    start, end = entry["data_offsets"]
    entry.update(dtype=dtype, shape=[(end - start) // size])
    put_blob(folder, "map.safetensors", raw_safetensors(json.dumps(header).encode(), data))
    refused(folder)


def test_parts_of_another_pair_are_refused(folder: Path, tmp_path: Path) -> None:
    from tests.toys import Toy

    other = small_pair(target=Toy([b"b", b"a", b"c", b"ab", b"ba", b"abc", b"d"], rows=9), kernel=False)
    other.save_pretrained(tmp_path / "other")
    shutil.copyfile(tmp_path / "other" / "map.safetensors", folder / "map.safetensors")
    assert "sha256" in refused(folder)  # the config is of this pair
    shutil.copyfile(tmp_path / "other" / "config.json", folder / "config.json")
    assert PairArtifact.from_pretrained(folder).target == other.target  # now it is wholly the other pair


# --- what loading touches


def test_loading_opens_nothing_but_the_listed_files(folder: Path) -> None:
    """In a process of its own, with every opened path recorded, and nothing written, imported or run."""
    code = """
import json, sys
from hetspec.artifact import PairArtifact
events = []
before = set(sys.modules)
watched = ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "exec", "compile", "import",
           "pickle.find_class", "socket.connect", "os.remove", "os.rename", "os.mkdir", "marshal.loads")
def hook(name, arguments):
    if name in watched:
        events.append((name, str(arguments[0])))
sys.addaudithook(hook)
PairArtifact.from_pretrained(sys.argv[1])
found = list(events)
print(json.dumps([found, sorted(set(sys.modules) - before)]))
"""
    (folder / "hetspec.py").write_text("raise SystemExit('imported')")
    (folder / "sitecustomize.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    events, modules = json.loads(done.stdout)
    names = ("config.json", "map.safetensors", KERNEL)
    assert sorted(map(tuple, events)) == sorted(("open", str(folder / name)) for name in names)
    assert modules == []


def test_hostile_sizes_cost_no_memory(folder: Path) -> None:
    header_edit(enormous, KERNEL)(folder)
    edit_config(folder, lambda config: config["target"].update(rows=10**12))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


# --- the code itself

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("numpy", "load"),
    ("os", "system"),
}


def offences(source: str) -> list[str]:
    """Uses of code that could run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(node.func.id)
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in FORBIDDEN_ATTRIBUTES:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module or "")
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("allow_pickle", "trust_remote_code", "shell")
            and ast.unparse(node.value) != "False"
        ):
            found.append(node.arg)
    return found


def test_the_search_for_dangerous_code_finds_it() -> None:
    bad = "import pickle\nfrom yaml import load\ntorch.load(x)\neval('1')\nf(allow_pickle=True)\nf(shell=x)"
    assert len(offences(bad)) == 6
    assert offences("f(trust_remote_code=False)\nmodel.eval()\nre.compile('x')") == []


@pytest.mark.parametrize("path", sorted((ROOT / "hetspec").rglob("*.py")), ids=lambda p: p.name)
def test_no_module_can_run_what_a_file_says(path: Path) -> None:
    assert offences(path.read_text()) == []
