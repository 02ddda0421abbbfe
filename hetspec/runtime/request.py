"""What is asked for: the target's law and where the text ends, and how candidates are made and judged."""

from __future__ import annotations

import json
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetspec.errors import InvalidInput
from hetspec.runtime.context import DRAFT_WINDOW, LEAST_WINDOW
from hetspec.runtime.laws import Warping
from hetspec.runtime.processors import Processing
from hetspec.runtime.verify import METHODS


@dataclass(frozen=True)
class Task:
    """What is asked of the target: its law, and where the text ends.

    Attributes:
        warping: the target's.
        processing: logits processors and stopping criteria.
        eos_ids: ids that end the text.
        max_new_tokens: at least one.
        keep_scores, keep_logits: whether each token's processed scores and raw logits are kept.
    """

    warping: Warping
    processing: Processing
    eos_ids: frozenset[int]
    max_new_tokens: int
    keep_scores: bool = False
    keep_logits: bool = False


@dataclass(frozen=True)
class Drafting:
    """How candidates are made and judged; none of it touches the output's law. See `Engine.decoder`."""

    algorithm: str = "auto"
    num_draft_tokens: int | str = "auto"
    slrs_form: str = "auto"
    prior: str = "auto"
    verify: str = ""
    draft_temperature: float | None = None
    draft_top_k: int = 0
    draft_top_p: float = 1.0
    draft_window: int = DRAFT_WINDOW

    def __post_init__(self) -> None:
        if not isinstance(self.draft_window, int) or self.draft_window < LEAST_WINDOW:
            raise InvalidInput(
                f"draft_window is {self.draft_window!r}, expected {LEAST_WINDOW} or more.",
                f"Leave it out for {DRAFT_WINDOW:,}.",
            )

    def warping(self, target: Warping) -> Warping:
        """The drafter's, beside the target's.

        Raises:
            InvalidInput: it was asked for and would have no effect, or is out of range.
        """
        asked = (self.draft_temperature, self.draft_top_k, self.draft_top_p)
        if self.algorithm in ("slem", "none") and asked != (None, 0, 1.0):
            raise InvalidInput(
                f"a draft temperature, top-k or top-p has no effect with the algorithm {self.algorithm}.",
                "Leave it out.",
            )
        return Warping(
            temperature=_draft_temperature(self.draft_temperature, target),
            top_k=self.draft_top_k,
            top_p=self.draft_top_p,
        )


def config_of(given: Any, own: Any) -> Any:
    """A GenerationConfig: the given one, or read from a file or directory, or the model's own."""
    if given is None:
        return own
    if not isinstance(given, (str, Path)):
        return given
    path = Path(given)
    try:
        if path.is_dir():
            return type(own).from_pretrained(path)
        return type(own).from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is not a generation config ({str(error).strip().splitlines()[0]}).",
            "Give a generation_config.json or the directory it is in.",
        ) from error


def calls_of(name: str, given: Any) -> tuple[Any, ...]:
    """A list of processors or criteria; None is none."""
    calls = () if given is None else given
    if callable(calls) and not hasattr(calls, "__iter__"):
        raise InvalidInput(f"{name} is a single {type(given).__name__}.", "Give a list of them.")
    if not hasattr(calls, "__iter__") or not all(map(callable, calls)):
        raise InvalidInput(f"{name} is {given!r}, expected a list of callables.")
    return tuple(calls)


def check_draws(seed: Any, generator: Any, rng: Any = None) -> None:
    """At most one source of draws, of the right kind."""
    if sum(x is not None for x in (seed, generator, rng)) > 1:
        raise InvalidInput("give only one of seed, generator and rng.")
    if seed is not None and (not isinstance(seed, numbers.Integral) or isinstance(seed, bool)):
        raise InvalidInput(f"seed is {seed!r}, expected a whole number.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidInput(f"generator is a {type(generator).__name__}, expected a torch.Generator.")


def method_of(verify: str, processing: Processing) -> str:
    """The verification to use."""
    if verify not in ("", *METHODS):
        raise InvalidInput(f"unknown verification {verify!r}.", f"Choose one of {', '.join(METHODS)}.")
    if not verify:
        return "block" if processing.stateless else "token"
    if verify == "block" and not processing.stateless:
        raise InvalidInput(
            "block verification asks logits processors about positions that may be rejected, which a processor that "
            f"keeps a state does not survive ({processing.names}).",
            "Use verify='token', or leave it out.",
        )
    return verify


def _draft_temperature(asked: float | None, warping: Warping) -> float:
    if asked is not None:
        if not asked > 0:
            raise InvalidInput(f"draft_temperature is {asked}, expected more than 0.")
        return asked
    return 1.0 if warping.greedy else warping.temperature
