"""What a user asks of a generation, honoured exactly or refused by name."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

from hetspec.errors import InvalidInput
from hetspec.runtime.laws import Warping

HONOURED = frozenset(
    (
        *(
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "max_new_tokens",
            "max_length",
            "eos_token_id",
        ),
        *("max_time", "stop_strings", "output_scores", "output_logits"),
    )
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
# Fields that transformers turns into logits processors, which are then called position by position.
PROCESSED = frozenset(
    (
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "guidance_scale",
        "watermarking_config",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "top_h",
        "renormalize_logits",
    )
)
# Penalties that transformers does not have; as the OpenAI interface defines them.
COUNTED = ("presence_penalty", "frequency_penalty")
# Fields that do not touch the law of the output of a single prompt.
WITHOUT_EFFECT = frozenset(
    (
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "use_cache",
        "cache_implementation",  # the cache is hetspec's own
        "cache_config",
        "return_dict_in_generate",
        "is_assistant",
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
    """The settings of one generation that the decoding loop needs.

    Attributes:
        warping: the target's.
        eos_ids: ids that end the text.
        max_new_tokens, max_length: of new tokens, and of prompt and new tokens; at most one of them is set.
        processed: fields that transformers turns into logits processors.
        penalties: presence and frequency penalty.
        max_time: seconds, or None.
        stop_strings: texts that end the generation.
        scores, logits: whether to keep each token's processed scores or raw logits.
    """

    warping: Warping
    eos_ids: frozenset[int]
    max_new_tokens: int | None = None
    max_length: int | None = None
    processed: dict[str, Any] = field(default_factory=dict)
    penalties: tuple[float, float] = (0.0, 0.0)
    max_time: float | None = None
    stop_strings: tuple[str, ...] = ()
    scores: bool = False
    logits: bool = False

    def new_tokens(self, prompt_length: int) -> int:
        """How many tokens may be generated after a prompt of this length."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            return self.max_length - prompt_length
        return DEFAULT_NEW_TOKENS

    def for_transformers(self, max_length: int) -> dict[str, Any]:
        """Fields of a GenerationConfig from which transformers makes the same processors, warpers included."""
        eos: list[int] | None = sorted(self.eos_ids) or None
        fields: dict[str, Any] = {
            **self.processed,
            "max_length": max_length,
            "eos_token_id": eos,
            "pad_token_id": eos[0] if eos else 0,
            "do_sample": not self.warping.greedy,
        }
        if not self.warping.greedy:
            w = self.warping
            fields |= {
                "temperature": w.temperature,
                "top_k": w.top_k,
                "top_p": w.top_p,
                "min_p": w.min_p or None,
            }
        return fields


DEFAULT_NEW_TOKENS = 256


def from_generation_config(config: Any, overrides: dict[str, Any], defaults: Any = None) -> Options:
    """Reads a transformers `GenerationConfig`, with keyword arguments laid over it.

    As in transformers, decoding is greedy unless ``do_sample`` is set, and sampling keeps the 50 likeliest
    tokens unless ``top_k`` is given (0 or None in `overrides` switches it off).

    Args:
        config: a GenerationConfig; not changed.
        overrides: fields to replace.
        defaults: the model's own GenerationConfig, for fields that `config` leaves open.

    Raises:
        InvalidInput: an unknown field, or one set to something that is not honoured exactly.
    """
    values = {
        k: v for k, v in config.to_dict().items() if not k.startswith("_")
    }  # transformers' own notes have a "_"
    if defaults is not None:
        values |= {k: v for k, v in defaults.to_dict().items() if k in values and values[k] is None}
    for name, value in overrides.items():
        if name not in values and name not in HONOURED and name not in COUNTED:
            raise InvalidInput(
                f"unknown generation option {name!r}.", "See transformers.GenerationConfig for the names."
            )
        values[name] = value
    neutral = type(config)()._get_default_generation_params()
    set_ = {k: v for k, v in values.items() if not _is_off(k, v, neutral)}
    for name, value in set_.items():
        if name in HONOURED or name in PROCESSED or name in COUNTED or name in WITHOUT_EFFECT:
            continue
        hint = f"Leave it out, or pass {name}={neutral.get(name)!r}."
        if "assistant" in name:
            hint = "hetspec's own argument for the draft length is num_draft_tokens."
        raise InvalidInput(
            f"the generation option {name}={value!r} is not supported and is not ignored either.", hint
        )
    if not values.get("do_sample"):
        asked = [f"{n}={overrides[n]!r}" for n in SAMPLING if overrides.get(n) is not None]
        if asked:
            raise InvalidInput(
                f"{', '.join(asked)} without do_sample=True would have no effect.", "Pass do_sample=True."
            )
        warping = Warping(temperature=0.0)
    else:
        top_k = values.get("top_k")
        if "top_k" not in overrides and top_k is None:
            top_k = neutral["top_k"]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if not isinstance(values.get(name), (numbers.Real, type(None))):
                raise InvalidInput(f"{name} is {values[name]!r}, expected a number.")
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
    max_new, max_length = (
        values.get("max_new_tokens"),
        values.get("max_length"),
    )  # the first goes before the second
    for name, value in (("max_new_tokens", max_new), ("max_length", max_length)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidInput(f"{name} is {value!r}, expected a whole number of at least 1.")
    max_length = None if max_new is not None else max_length
    processed = {k: v for k, v in set_.items() if k in PROCESSED and not (warping.greedy and k in SAMPLING)}
    return Options(
        warping,
        frozenset(_ids(values.get("eos_token_id"))),
        max_new,
        max_length,
        processed,
        (_number("presence_penalty", set_), _number("frequency_penalty", set_)),
        _seconds(values.get("max_time")),
        _texts(set_.get("stop_strings")),
        bool(values.get("output_scores")),
        bool(values.get("output_logits")),
    )


def _is_off(name: str, value: Any, neutral: dict[str, Any]) -> bool:
    """Whether a field has its neutral value."""
    if value is None or value is False or (name in neutral and value == neutral[name]):
        return True
    return name not in neutral and isinstance(value, (int, float, list, tuple, str, dict)) and not value


def _number(name: str, values: dict[str, Any]) -> float:
    value = values.get(name, 0.0)
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidInput(f"{name} is {value!r}, expected a finite number.")
    return float(value)


def _seconds(value: Any) -> float | None:
    if value is not None and not (isinstance(value, numbers.Real) and float(value) > 0):
        raise InvalidInput(f"max_time is {value!r}, expected seconds, more than 0.")
    return None if value is None else float(value)


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (None,)
    )
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidInput(f"stop_strings is {value!r}, expected texts of at least one character.")
    return texts


def plain_law(temperature: float) -> dict[str, Any]:
    """Overrides that give the model's own law at a temperature, whatever its generation config says besides.

    Args:
        temperature: 0 for greedy.
    """
    off: dict[str, Any] = {
        **dict.fromkeys(PROCESSED),
        "max_length": None,
        "stop_strings": None,
        "max_time": None,
    }
    if temperature == 0:
        return {**off, "do_sample": False}
    return {**off, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _ids(value: Any) -> list[int]:
    """EOS ids given as a number, a sequence or a tensor."""
    if value is None:
        return []
    if hasattr(value, "tolist"):
        value = value.tolist()
    ids = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if not all(isinstance(i, numbers.Integral) and int(i) >= 0 for i in ids):
        raise InvalidInput(f"eos_token_id is {value!r}, expected a token id or a list of them.")
    return [int(i) for i in ids]
