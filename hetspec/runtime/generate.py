"""The user's functions: `generate`, `generate_batch` and `stream` on an engine made once for the same objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetspec.artifact import PairArtifact
from hetspec.runtime.engine import Chunk, Engine, GenerateOutput

# What `Engine` takes besides its models and their pair, and what it is if nobody says.
ENGINE_OPTIONS = {
    "target_tokenizer": None,
    "drafter_tokenizer": None,
    "full_head": False,
    "draft_weights": "auto",
    "target_weights": "own",
    "static": False,
}
_ENGINES: list[tuple[tuple[Any, ...], Engine]] = []  # the last few, so that a loop prepares its pair once
_KEPT_ENGINES = 2


def engine_of(target: Any, drafter: Any, pair: PairArtifact | None, options: dict[str, Any]) -> Engine:
    """An engine for these very objects, made once and kept while it is among the last ones used.

    Args:
        target, drafter, pair: see `Engine`.
        options: ENGINE_OPTIONS are taken out of it, what is left is for `Engine.decoder`.
    """
    own = {name: options.pop(name, default) for name, default in ENGINE_OPTIONS.items()}
    key = (target, drafter, pair, *own.values())
    for known, engine in _ENGINES:
        if all(a is b or (isinstance(a, str) and a == b) for a, b in zip(known, key, strict=True)):
            engine.check()
            return engine
    engine = Engine(target, drafter, pair, **own)
    _ENGINES.append((key, engine))
    del _ENGINES[:-_KEPT_ENGINES]
    return engine


def generate(
    target: Any, inputs: Any, *, drafter: Any = None, pair: PairArtifact | None = None, **options: Any
) -> GenerateOutput:
    """Generates from the target, losslessly, with the help of a drafter.

    Args:
        target: a transformers causal language model.
        inputs: text, ids or a chat; one prompt.
        drafter: the model that proposes.
        pair: the pair artifact (`hetspec.load_pair`).
        options: of `Engine` (tokenizers, `full_head`, `draft_weights`, `target_weights`, `static`), of `Engine.decoder`
            (`algorithm`, `num_draft_tokens`, `seed` and more, and every field of a generation config), and `streamer`.

    Raises:
        HetspecError: one of its kinds, saying what was found and what to do.
    """
    return engine_of(target, drafter, pair, options).generate(inputs, **options)


def generate_batch(
    target: Any, inputs: Any, *, drafter: Any = None, pair: PairArtifact | None = None, **options: Any
) -> list[GenerateOutput]:
    """`generate` for several prompts at once; see `Engine.generate_batch`."""
    return engine_of(target, drafter, pair, options).generate_batch(inputs, **options)


def stream(
    target: Any, inputs: Any, *, drafter: Any = None, pair: PairArtifact | None = None, **options: Any
) -> Iterator[Chunk]:
    """`generate` as an iterator of steps."""
    return engine_of(target, drafter, pair, options).stream(inputs, **options)
