"""The Triton kernels in Triton's interpreter against their torch twins, their compilation for a GPU, and mutants."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetspec.runtime import device_kernels
from tests.kernel_cases import case

pytest.importorskip("triton", reason="the extra `gpu` is not installed: make test-triton")

from hetspec.runtime import static_step, triton_kernels
from tests.test_runtime import TinyPair

SIZES = [
    {},
    {"vocabulary": 5000, "width": 2300, "drafter": 1500, "k": 5},
    {"vocabulary": 1024, "width": 1024, "drafter": 64, "k": 1},
]


def agree(kernels, dtype: torch.dtype, size: dict[str, int]) -> None:
    """Raises AssertionError where the kernels and the torch forms differ."""
    given = case(dtype, **{"k": 4, **size})
    k, vocabulary = len(given.pi), given.p.shape[1]
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    spread = (given.q, given.offsets, given.rows, given.weights)
    torch.testing.assert_close(kernels.redistribute(*spread), device_kernels.redistribute(*spread), **close)
    rows = given.p[1:k], given.pi[1:], given.columns, given.w[1:k]
    torch.testing.assert_close(kernels.surplus_masses(*rows), device_kernels.surplus_masses(*rows), **close)
    generator = torch.Generator().manual_seed(1)
    for row in range(k + 1):
        for count in (k, row):
            for w in (given.w, given.w, given.w, given.w, given.w * 0):
                noise = torch.empty(vocabulary, dtype=torch.float64).exponential_(generator=generator)
                place = torch.tensor([row]), torch.tensor([count])
                arguments = given.p, given.pi, given.column_of, w, *place, noise
                assert kernels.surplus_race(*arguments).equal(device_kernels.surplus_race(*arguments))
    noise = torch.empty(k + 1, vocabulary, dtype=torch.float64).exponential_(generator=generator)
    for weights, draws in ((given.p, noise), (given.p[0], noise[0]), (given.p, noise[0])):
        assert kernels.race(weights, draws).equal(device_kernels.race(weights, draws))


def agree_at_every_size(kernels, dtype: torch.dtype) -> None:
    """`agree` below, at and above the size of a block."""
    for size in SIZES:
        agree(kernels, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_kernels_equal_their_torch_twins(dtype):
    agree_at_every_size(triton_kernels, dtype)


MUTANTS = {
    "entries beyond the first tile are lost": ("tl.max(end - begin, axis=0), ENTRIES", "ENTRIES, ENTRIES"),
    "a column loses its last entry": ("mine = at < end[:, None]", "mine = at < end[:, None] - 1"),
    "the surplus is not clipped": ("tl.maximum(target - proposed, 0)", "target - proposed"),
    "the weight of the row is forgotten": ("tl.load(w + i) * law - proposed", "law - proposed"),
    "pi of the next row": ("tl.minimum(i, k - 1)", "tl.minimum(i + 1, k - 1)"),
    "what no proposal reaches is lost": ("mask=column < width, other=0)", "mask=column < width, other=2)"),
    "the place within the block alone": ("(start + at)", "at"),
    "whatever is left, the whole law": ("| (left.sum() <= 0)", "| (left.sum() >= 0)"),
    "nothing left is a draw from nothing": ("| (left.sum() <= 0)", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_rejects_a_planted_fault(name, tmp_path):
    good, bad = MUTANTS[name]
    text = Path(triton_kernels.__file__).read_text(encoding="utf-8")
    assert good in text
    path = tmp_path / "mutant_kernels.py"
    path.write_text(text.replace(good, bad), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant_kernels", path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    with pytest.raises(AssertionError):
        agree_at_every_size(mutant, torch.float64)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_static_decoding_by_the_kernels_writes_the_same_text(verification, monkeypatch):
    tiny = TinyPair().with_kernel()

    def texts(kernels) -> list[list[int]]:
        monkeypatch.setattr(static_step, "arithmetic", lambda device: kernels)
        engine = tiny.engine(static=True)
        sampled = {"do_sample": True, "temperature": 0.8, "verify": verification}
        return [
            engine.generate(
                "def main", algorithm=name, num_draft_tokens=3, max_new_tokens=12, seed=5, **sampled
            ).new_ids
            for name in ("none", "tli", "rdk")
        ]

    calls = []
    honest = triton_kernels.surplus_race
    monkeypatch.setattr(triton_kernels, "surplus_race", lambda *a: calls.append(1) or honest(*a))
    assert texts(triton_kernels) == texts(device_kernels)
    assert calls


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hetspec.runtime import triton_kernels as kernels

pointers = dict(
    _redistribute=dict(q="R", offsets="*i64", rows="*i64", weights="R", out="R", count="i32"),
    _surplus_masses=dict(p="R", pi="R", columns="*i64", w="R", kept="R", surplus="R", width="i32", p_stride="i32",
                         pi_stride="i32", blocks="i32"),
    _surplus_race=dict(p="R", pi="R", column_of="*i64", w="R", row="*i64", noise="*fp64", best="*fp64", where="*i64",
                       left="R", k="i32", width="i32", vocabulary="i32", p_stride="i32", pi_stride="i32", blocks="i32"),
    _race=dict(weights="R", noise="*fp64", best="*fp64", where="*i64", width="i32", stride="i32", noise_stride="i32",
               blocks="i32"),
)
sizes = dict(BLOCK=kernels.BLOCK, COLUMNS=kernels.COLUMNS, ENTRIES=kernels.ENTRIES)
for name, types in pointers.items():
    function = getattr(kernels, name)
    constants = {n: sizes[n] for n in function.arg_names if n in sizes}
    for real in ("*fp32", "*fp64"):
        signature = {n: (real if t == "R" else t) for n, t in types.items()}
        signature.update({n: "constexpr" for n in constants})
        for capability in (80, 90):
            places = {(function.arg_names.index(n),): value for n, value in constants.items()}
            source = ASTSource(function, signature, constexprs=places)
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            print(name, real, capability, len(built.asm["cubin"]))
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16
