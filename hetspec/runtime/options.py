"""What a user asks of a generation, honoured exactly or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetspec.errors import InvalidInput
from hetspec.runtime.laws import Warping

HONOURED = frozenset(
    ("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length", "eos_token_id")
)
# Fields that do not touch the law of the output of a single prompt.
WITHOUT_EFFECT = frozenset(
    (
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "_from_model_config",
        "use_cache",
        "return_dict_in_generate",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_early_exit",
        "max_matching_ngram_size",
        "disable_compile",
        "compile_config",
        "low_memory",
        "early_stopping",  # beams only, and beams are refused
        "length_penalty",
        "diversity_penalty",
    )
)


@dataclass(frozen=True)
class Options:
    """The settings of one generation that the decoding loop needs."""

    warping: Warping
    eos_ids: frozenset[int]
    max_new_tokens: int | None
    max_length: int | None

    def new_tokens(self, prompt_length: int) -> int:
        """How many tokens may be generated after a prompt of this length."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return self.max_length - prompt_length
        return DEFAULT_NEW_TOKENS


DEFAULT_NEW_TOKENS = 256


def from_generation_config(config: Any, overrides: dict[str, Any]) -> Options:
    """Reads a transformers `GenerationConfig`, with keyword arguments laid over it.

    As in transformers, decoding is greedy unless ``do_sample`` is set, and sampling keeps the 50 likeliest
    tokens unless ``top_k`` is given (0 or None in `overrides` switches it off).

    Args:
        config: a GenerationConfig; not changed.
        overrides: fields to replace.

    Raises:
        InvalidInput: an unknown field, or one set to something that is not honoured exactly.
    """
    values = dict(config.to_dict())
    for name, value in overrides.items():
        if name not in values and name not in HONOURED:
            raise InvalidInput(
                f"unknown generation option {name!r}.", "See transformers.GenerationConfig for the names."
            )
        values[name] = value
    neutral = type(config)()._get_default_generation_params()
    for name, value in values.items():
        if name in HONOURED or name in WITHOUT_EFFECT or value is None or value == neutral.get(name):
            continue
        if value is False or (value in ((), [], 0, 0.0) and name not in neutral):
            continue
        raise InvalidInput(
            f"the generation option {name}={value!r} is not supported, and ignoring it would change the output.",
            f"Leave it out, or pass {name}={neutral.get(name)!r}.",
        )
    if not values.get("do_sample"):
        warping = Warping(temperature=0.0)
    else:
        top_k = values.get("top_k")
        if "top_k" not in overrides and top_k is None:
            top_k = neutral["top_k"]
        warping = Warping(
            temperature=1.0 if values.get("temperature") is None else float(values["temperature"]),
            top_k=int(top_k or 0),
            top_p=1.0 if values.get("top_p") is None else float(values["top_p"]),
            min_p=float(values.get("min_p") or 0.0),
        )
        if warping.greedy:
            raise InvalidInput(
                "temperature is 0 with do_sample=True.", "Use do_sample=False for greedy decoding."
            )
    max_new = values.get("max_new_tokens")
    if max_new is not None and max_new < 1:
        raise InvalidInput(f"max_new_tokens is {max_new}, expected at least 1.")
    max_length = None if max_new is not None else values.get("max_length")
    return Options(warping, frozenset(_ids(values.get("eos_token_id"))), max_new, max_length)


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(i) for i in value]
