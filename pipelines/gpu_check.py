"""Is hetspec right on this device, and where does its time go? One script of a few minutes, no network.

gpu_check.py [--device cuda] [--draft-device …] [--small] [--out gpu_check.json] [--seconds 200]
Makes random models of real sizes (a 7B-class target with 128k ids, drafters of the 0.5B and the 135M class and one with
256k ids), with real vocabularies, and checks, in growing caches and in fixed shapes (`static`): every
algorithm's greedy text against transformers' own on the same device, the law of sampled first tokens (χ²), the kernels
against their torch twins, and that a recorded step waits for the device once. Then it times drafter steps, target
passes of 1 to 8 tokens, recorded steps, and whole texts side by side with transformers' loop. What random models accept
means nothing: the times of the parts are what counts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hetspec.artifact import PairArtifact, TokenizerIdentity
from hetspec.console import quiet_libraries
from hetspec.prep.intersect import build_map
from hetspec.runtime import device_kernels, laws, static_step
from hetspec.runtime.engine import Engine
from hetspec.runtime.laws import Warping
from hetspec.runtime.static_step import StaticStep
from hetspec.segment import Segmenter
from hetspec.vocab import Vocabulary, byte_alphabet

PROMPT = "The quick brown fox jumps over the lazy dog, and then "
LENGTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Size:
    """A Llama model's shape, and whose vocabulary it has; rows without a token are padding."""

    name: str
    vocabulary: str
    rows: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def parameters(self) -> int:
        """Without norms; input embedding and head tied."""
        size = self.hidden // self.heads
        attention = self.hidden * size * (2 * self.heads + 2 * self.kv_heads)
        return self.rows * self.hidden + self.layers * (attention + 3 * self.hidden * self.inner)

    def make(self, device: str, dtype: torch.dtype) -> Any:
        """A random model, made on its device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.rows,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            dtype=dtype,
        )
        torch.manual_seed(self.rows + self.layers)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return model.eval()


REAL = (
    Size("target-7b", "deepseek", 128_000, 4096, 32, 32, 8, 11_008),
    Size("drafter-0.5b", "qwen", 152_000, 896, 24, 14, 2, 4864),
    Size("drafter-135m", "smollm2", 49_152, 576, 30, 9, 3, 1536),
    Size("drafter-270m", "qwen", 262_144, 640, 18, 4, 1, 2048),
)
SMALL = (
    Size("target-small", "deepseek", 3000, 128, 4, 4, 2, 256),
    Size("drafter-small", "qwen", 2000, 64, 2, 4, 2, 128),
    Size("drafter-tiny", "smollm2", 1000, 32, 1, 2, 1, 64),
)


def main() -> int:
    """Runs the check; 0 if everything was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draft-device", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: there is no CUDA device; --device cpu --small proves the script.", file=sys.stderr)
        return 2
    ends = time.monotonic() + arguments.seconds
    sizes = SMALL if arguments.small else REAL
    draft_device = arguments.draft_device or arguments.device
    dtype = getattr(torch, arguments.dtype)
    report: dict[str, Any] = {"machine": machine(arguments.device), "dtype": arguments.dtype, "pairs": []}
    report["kernels"] = kernels(
        arguments.device, ((3000, 1000),) if arguments.small else ((128_000, 49_152), (262_144, 152_000))
    )
    report["bytes_per_second"] = bandwidth(arguments.device, 2**24 if arguments.small else 2**31)
    target = sizes[0].make(arguments.device, dtype)
    for size in sizes[1:]:
        if time.monotonic() > ends:
            report["pairs"].append({"drafter": size.name, "left_out": "the time is over"})
            continue
        pair = Pair(sizes[0], target, size, size.make(draft_device, dtype))
        found = {"drafter": size.name, **pair.exactness(), **pair.one_wait(), **pair.times(ends)}
        found["right"] = found["right"] and found["one_wait"] is not False
        found["cost_model"] = cost_model(sizes[0], size, dtype, report["bytes_per_second"])
        report["pairs"].append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    report["right"] = all(p.get("right", True) for p in [*report["pairs"], *report["kernels"]])
    text = json.dumps(report, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["right"] else 1


def machine(device: str) -> dict[str, Any]:
    """What it ran on."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def vocabulary(name: str, most: int) -> Tokenizer:
    """A real byte-level vocabulary (`pack_vocabularies.py`), its first `most` tokens: all bytes, then one per merge."""
    packed = (Path(__file__).parent / "vocabularies" / f"{name}.merges.xz").read_bytes()
    merges = [tuple(line.split(" ")) for line in lzma.decompress(packed).decode().split("\n")]
    merges = merges[: max(0, most - 256)]
    tokens = dict.fromkeys([*byte_alphabet().values(), *map("".join, merges)])
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Pair:
    """A target and a drafter with their map, on their devices."""

    def __init__(self, target_size: Size, target: Any, drafter_size: Size, drafter: Any) -> None:
        tokenizers = [vocabulary(size.vocabulary, size.rows) for size in (target_size, drafter_size)]
        sides = [
            Vocabulary.from_tokenizer(tokenizer, name=size.name, rows=size.rows, eos_ids=())
            for tokenizer, size in zip(tokenizers, (target_size, drafter_size), strict=True)
        ]
        mapping = build_map(sides[0], sides[1], Segmenter(tokenizers[0], sides[0]))
        artifact = PairArtifact(
            target=TokenizerIdentity.of(sides[0]), drafter=TokenizerIdentity.of(sides[1]), map=mapping
        )
        self.target, self.drafter = target, drafter
        names = {"target_tokenizer": tokenizers[0], "drafter_tokenizer": tokenizers[1]}
        self.engine = Engine(target, drafter, artifact, **names)
        self.static = Engine(target, drafter, artifact, static=True, **names)

    def exactness(self, tokens: int = 24, draws: int = 200) -> dict[str, Any]:
        """Greedy texts against transformers', and the law of sampled first tokens."""
        engine = self.engine
        ids = torch.tensor([engine.decoder(PROMPT, algorithm="none", max_new_tokens=1).ids])
        ids = ids.to(self.target.device)
        with torch.inference_mode():
            plain = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
            )
        plain = [int(t) for t in plain[0, ids.shape[1] :]]
        greedy = {}
        for form, runner in (("", engine), ("static-", self.static)):
            for algorithm in ("none", "slem", "tli", "slrs"):
                out = runner.generate(PROMPT, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=tokens)
                same = next(
                    (i for i, (a, b) in enumerate(zip(out.new_ids, plain, strict=True)) if a != b), tokens
                )
                greedy[form + algorithm] = same
        # A sharp law, so that the χ² has something to see; tokens expected less than 5 times share a cell.
        warping = Warping(temperature=0.25, top_k=20)
        decoder = engine.decoder(PROMPT, algorithm="none", max_new_tokens=1)
        p = laws.law(decoder.target.forward(decoder.ids, keep=1)[0], warping).double().cpu()
        chi2 = {
            name: _chi2(runner, p, draws, verify)
            for name, runner, verify in (
                ("block", engine, "block"),
                ("static-token", self.static, "token"),
                ("static-block", self.static, "block"),
            )
        }
        freedom = max(1, int((draws * p >= 5).sum()))
        lawful = max(chi2.values()) < freedom + 6 * (2 * freedom) ** 0.5
        # In half precision texts may part at a near-tie; another algorithm's must not part earlier than plain's own.
        exact = self.target.dtype == torch.float32 or self.target.device.type == "cpu"
        right = lawful and (min(greedy.values()) == tokens or not exact)
        return {"greedy_same_tokens": greedy, "chi2": chi2, "freedom": freedom, "right": right}

    def one_wait(self) -> dict[str, Any]:
        """Whether recorded steps, greedy and sampled, run without any wait that torch can see; None off CUDA."""
        calls, right = 0, True
        honest = StaticStep.__call__

        def watched(step: StaticStep, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            torch.cuda.set_sync_debug_mode("error")  # an event's own wait, the one there is, is not counted
            try:
                return honest(step, *arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        sampled = {"do_sample": True, "temperature": 0.5}
        together = self.target.device == self.drafter.device
        for options in ({}, sampled):
            settings = {"algorithm": "tli", "num_draft_tokens": 3, "max_new_tokens": 16, **options}
            self.static.generate(PROMPT, **settings)  # records the steps
            if self.target.device.type == "cuda" and together:
                try:
                    with mock.patch.object(StaticStep, "__call__", watched):
                        self.static.generate(PROMPT, **settings)
                except RuntimeError as error:  # torch's, for a wait
                    print(f"a recorded step waits: {error}", file=sys.stderr, flush=True)
                    right = False
        return {"one_wait": right if calls else None, "watched_steps": calls}

    def times(self, ends: float) -> dict[str, Any]:
        """Milliseconds of the parts, and tokens per second of whole loops."""
        engine = self.engine
        found: dict[str, Any] = {"pass_ms": {}, "draft_step_ms": 0.0}
        for side, name in ((engine.target, "pass_ms"), (engine.drafter, "draft_step_ms")):
            assert side is not None
            assert side.model is not None
            row = side.model.new_row()
            row.forward([65 + i % 26 for i in range(256)], 1)

            def read(n: int, row: Any = row) -> None:
                row.forward([70] * n, n)
                row.crop(256)

            if name == "pass_ms":
                found[name] = {str(n): self._median(lambda n=n: read(n)) for n in LENGTHS}  # type: ignore[misc]
            else:
                found[name] = self._median(lambda: read(1))
        speed = {}
        for name in ("transformers", "none", "slem", "tli", "static-none", "static-tli"):
            if time.monotonic() > ends:
                break
            if name.startswith("static"):
                self._speed(name)  # records the steps
            speed[name] = self._speed(name)
        return {**found, "static_step_ms": self._step_times(), "tokens_per_second": speed}

    def _step_times(self) -> dict[str, float]:
        """Median milliseconds of a recorded step by draft length, as its user waits for it."""
        found = {}
        honest = StaticStep.__call__
        for k in (0, 1, 3, 5):
            taken: list[float] = []

            def timed(step: StaticStep, *arguments: Any, taken: list[float] = taken) -> Any:
                started = time.perf_counter()
                answer = honest(step, *arguments)
                taken.append(1000 * (time.perf_counter() - started))
                return answer

            settings = {"algorithm": "tli" if k else "none", "max_new_tokens": 16}
            settings |= {"num_draft_tokens": k} if k else {}
            self.static.generate(PROMPT, **settings)
            with mock.patch.object(StaticStep, "__call__", timed):
                self.static.generate(PROMPT, **settings)
            if taken:
                found[str(k)] = statistics.median(taken)
        return found

    def _speed(self, name: str, tokens: int = 32) -> float:
        started = time.perf_counter()
        if name == "transformers":
            ids = torch.tensor([self.engine.decoder(PROMPT, algorithm="none", max_new_tokens=1).ids])
            ids = ids.to(self.target.device)
            with torch.inference_mode():
                self.target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
                )
        else:
            runner = self.static if name.startswith("static-") else self.engine
            algorithm = name.removeprefix("static-")
            runner.generate(PROMPT, algorithm=algorithm, num_draft_tokens=3, max_new_tokens=tokens)
        self._wait()
        return tokens / (time.perf_counter() - started)

    def _median(self, call: Callable[[], Any]) -> float:
        return median_ms(call, self.target.device)

    def _wait(self) -> None:
        wait(self.target.device)


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median milliseconds of a call and what it has started on the device."""
    call()
    taken = []
    for _ in range(repeats):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


def wait(device: torch.device) -> None:
    """Waits for everything started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _chi2(runner: Engine, p: torch.Tensor, draws: int, verify: str) -> float:
    """χ² of the first tokens of sampled texts; those expected less than 5 times share a cell."""
    counts = torch.zeros_like(p)
    options = {"do_sample": True, "temperature": 0.25, "top_k": 20, "verify": verify}
    for seed in range(draws):
        out = runner.generate(
            PROMPT, algorithm="tli", num_draft_tokens=2, max_new_tokens=3, seed=seed, **options
        )
        counts[out.new_ids[0]] += 1
    big = draws * p >= 5
    cells = [(float(counts[i]), float(draws * p[i])) for i in torch.nonzero(big).flatten()]
    cells.append((float(counts[~big].sum()), max(float(draws * p[~big].sum()), 1e-9)))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted > 1e-6)


def kernels(name: str, sizes: tuple[tuple[int, int], ...], k: int = 5) -> list[dict[str, Any]]:
    """The arithmetic that this device uses against its torch form, and both times, for (V, V_d) of `sizes`."""
    device = torch.device(name)
    used = static_step.arithmetic(device)
    found = []
    for rows, drafter_rows in sizes:
        generator = torch.Generator(device).manual_seed(rows)

        def law(*shape: int, g: torch.Generator = generator) -> torch.Tensor:
            return torch.softmax(4 * torch.randn(*shape, device=device, generator=g), dim=-1)

        columns = torch.randperm(rows, device=device, generator=generator)[: rows // 2].sort().values
        width = len(columns)
        column_of = torch.full((rows,), width, dtype=torch.int64, device=device)
        column_of[columns] = torch.arange(width, device=device)
        entries = torch.randint(0, 4, (width,), device=device, generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), entries.cumsum(0)])
        nnz = int(offsets[-1])
        sources = torch.randint(0, drafter_rows, (nnz,), device=device, generator=generator)
        weights = torch.rand(nnz, device=device, generator=generator)
        p, pi, w = law(k + 1, rows), law(k, width), torch.linspace(1, 0.5, k + 1, device=device)
        noise = torch.empty(rows, dtype=torch.float64, device=device).exponential_(generator=generator)
        place = [torch.tensor([i], device=device) for i in (2, k)]
        calls = {
            "redistribute": (law(drafter_rows), offsets, sources, weights),
            "surplus_masses": (p[:k], pi, columns, w[:k]),
            "surplus_race": (p, pi, column_of, w, *place, noise),
            "race": (p[0], noise),
        }
        result: dict[str, Any] = {"rows": rows, "drafter_rows": drafter_rows, "module": used.__name__}
        result["ms"], result["torch_ms"], right = {}, {}, True
        for function, arguments in calls.items():
            here, twin = getattr(used, function), getattr(device_kernels, function)
            right &= torch.allclose(here(*arguments), twin(*arguments), rtol=1e-4, atol=1e-6)
            result["ms"][function] = median_ms(lambda f=here, a=arguments: f(*a), device)  # type: ignore[misc]
            result["torch_ms"][function] = median_ms(lambda f=twin, a=arguments: f(*a), device)  # type: ignore[misc]
        found.append({**result, "right": right})
    return found


def bandwidth(name: str, size: int) -> float:
    """Bytes per second that the device reads: sums over `size` bytes."""
    device = torch.device(name)
    data = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    return size / (median_ms(data.sum, device) / 1000)


def cost_model(target: Size, drafter: Size, dtype: torch.dtype, speed: float = 0.0) -> dict[str, Any]:
    """What a step must cost, from counts.

    A step of draft length k reads the target once and the drafter k times (the first read takes the committed tokens
    along), so weights / bandwidth bounds its time from below; launches matter where they are not recorded in a graph.

    Args:
        target, drafter: shapes.
        dtype: of the weights.
        speed: bytes per second of the device; 0 leaves out the bounds.
    """
    width = torch.finfo(dtype).bits // 8
    per_layer = 14  # kernels of an unfused Llama layer: norms, projections, rope, attention, gate, adds
    arithmetic = 25  # of ours per drafted token: softmax, q·K, normalise, race, table look-ups
    verdict = 40  # softmax, ratios, surplus, race, the answer
    steps = {}
    for k in (0, 1, 3, 5):
        read = width * (target.parameters + k * drafter.parameters)
        launches = per_layer * (target.layers + k * drafter.layers) + k * arithmetic + verdict
        steps[str(k)] = {
            "bytes": read,
            "launches": launches,
            "waits": {"static": 1, "dynamic": k + 1},
            "bytes_to_host": {
                "static": 8 * (k + 4),
                "dynamic": width * ((k + 1) * target.rows + k * drafter.rows),
            },
        }
        if speed:
            steps[str(k)]["bound_ms"] = 1000 * read / speed
    return {
        "target_bytes": target.parameters * width,
        "drafter_bytes": drafter.parameters * width,
        "steps": steps,
        "shapes": [asdict(target), asdict(drafter)],
    }


if __name__ == "__main__":
    sys.exit(main())
