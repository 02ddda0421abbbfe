"""Logits processors and stopping criteria, each applied with its position's own prefix.

What transformers' own decoding would do with an option is not repeated here: its `generate` is asked to prepare
the processors, and they are called as it would call them. A position's processors run only once the candidates
before it stand, so even one that keeps a state sees exactly the calls of plain decoding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hetspec.errors import GenerationError, InvalidInput
from hetspec.runtime.laws import Warping
from hetspec.runtime.options import Options
from hetspec.runtime.sides import Side
from hetspec.runtime.views import shallow_view

Processor: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (ids [1, S], scores [1, V]) -> scores [1, V]
Criterion: TypeAlias = Callable[..., Any]  # (ids [1, S], scores) -> whether to stop

# Processors of transformers whose answer depends on the arguments alone. Any other may keep a state.
STATELESS = frozenset(
    (
        "SequenceBiasLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
        "WatermarkLogitsProcessor",
    )
)


@dataclass(frozen=True)
class Processing:
    """What is done to the target's logits and asked of its text, beside the warping.

    Attributes:
        processors: called in turn.
        criteria: any of them ends the generation.
        device: where the processors expect their tensors.
    """

    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    device: torch.device | str = "cpu"

    @property
    def names(self) -> str:
        """What the processors that may keep a state are called."""
        return ", ".join(_name(p) for p in self.processors if not Processing((p,)).stateless)

    @property
    def stateless(self) -> bool:
        """Whether every processor may be asked about positions that are rejected afterwards."""
        calls = [getattr(p, "call", p) for p in self.processors]  # of a row of a batch, the batch's own
        return all(
            isinstance(c, CountPenalty)
            or (type(c).__module__.startswith("transformers.") and type(c).__name__ in STATELESS)
            for c in calls
        )

    def scores(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        """The logits [V] after `ids` as the processors leave them, float32 or wider.

        Raises:
            InvalidInput: a processor fails, or returns something else than scores.
            GenerationError: they forbid every token.
        """
        wide = logits if logits.dtype == torch.float64 else logits.float()
        with torch.no_grad():
            prefix = torch.tensor([list(ids)], device=self.device)
            scores = wide.to(self.device, copy=True)[None]
            for processor in self.processors:
                scores = _called(processor, prefix, scores)
                if not isinstance(scores, Tensor) or tuple(scores.shape) != (1, *logits.shape):
                    found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise InvalidInput(
                        f"a logits processor returned scores of shape {found}, expected {[1, *logits.shape]}.",
                        f"It was {_name(processor)}.",
                    )
        if bool((scores == -torch.inf).all()):
            raise GenerationError(
                "the logits processors forbid every token.",
                f"They were {', '.join(map(_name, self.processors))}.",
            )
        return scores[0].to(logits.device)

    def stops(self, ids: Sequence[int], scores: tuple[Tensor, ...] | None) -> str:
        """Why the text ends with its last id: the name of a criterion, or "". All are asked, as transformers does."""
        with torch.no_grad():
            prefix = torch.tensor([list(ids)], device=self.device)
            said = [(c, bool(torch.as_tensor(_called(c, prefix, scores)).all())) for c in self.criteria]
        return next((_reason(criterion) for criterion, stop in said if stop), "")


def _name(call: Any) -> str:
    return type(getattr(call, "call", call)).__name__


def _called(call: Any, prefix: Tensor, scores: Any) -> Any:
    """A processor's or criterion's answer; one of transformers' that fails on an option's value is named."""
    try:
        answer = call(prefix, scores)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        if not type(getattr(call, "call", call)).__module__.startswith("transformers."):
            raise  # the user's own: the traceback is theirs
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"{_name(call)} failed ({reason}).", "Check the option it comes from.") from error
    if answer is None:
        raise InvalidInput(f"{_name(call)} returned nothing.", "Return the scores, or whether to stop.")
    return answer


NO_PROCESSING = Processing()


def _reason(criterion: Criterion) -> str:
    names = {"MaxTimeCriteria": "time", "StopStringCriteria": "stop string", "MaxLengthCriteria": "length"}
    return names.get(type(getattr(criterion, "call", criterion)).__name__, "criterion")


class ProcessedLogits(Sequence[Tensor]):
    """The rows of one step as the processors leave them, each computed once, when it is first asked for.

    Row j is asked for when candidates 1..j stand. Processors that keep a state then get their calls in the order of
    plain decoding, the criteria's in between: a criterion may look at what a processor has seen.

    Args:
        logits: [n+1, V] of the target.
        processing: what is done to them.
        ids: the committed ids.
        candidates: the n drafted after them.
        eos_ids: a row after one of them, or after a text that a criterion has ended, is never used, and left as it is.
        scores: of the committed tokens, for the criteria; None where they are not kept.

    Attributes:
        said: what the criteria said after each candidate that they were asked about.
    """

    def __init__(
        self,
        logits: Tensor,
        processing: Processing,
        ids: list[int],
        candidates: list[int],
        eos_ids: frozenset[int],
        scores: list[Tensor] | None = None,
    ) -> None:
        self.logits, self.processing, self.ids, self.candidates = logits, processing, list(ids), candidates
        self.said: dict[int, str] = {}
        self._scores = scores
        self._alternate = bool(processing.criteria) and not processing.stateless
        self._last = next((j for j, t in enumerate(candidates) if t in eos_ids), len(candidates))
        self._rows: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """n + 1."""
        return len(self.logits)

    def __getitem__(self, j: Any) -> Any:
        """Row j, [V]."""
        if j in self._rows:
            return self._rows[j]
        prefix = [*self.ids, *self.candidates[:j]]
        if self._alternate and j and j - 1 not in self.said:
            kept = None
            if self._scores is not None:
                kept = tuple(s[None] for s in (*self._scores, *(self._rows[i] for i in range(j))))
            self.said[j - 1] = self.processing.stops(prefix, kept)
            if self.said[j - 1]:
                self._last = min(self._last, j - 1)
        if j > self._last:
            return self.logits[j]
        self._rows[j] = self.processing.scores(prefix, self.logits[j])
        return self._rows[j]


class CountPenalty:
    """Presence and frequency penalties as the OpenAI interface defines them, over the generated tokens.

    `score(x) −= presence·1[count(x) > 0] + frequency·count(x)`.

    Args:
        prompt_length: ids that do not count.
        presence, frequency: any finite numbers; 0 is off.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] after ids [1, S]."""
        used, counts = torch.unique(ids[0, self.prompt_length :], return_counts=True)
        scores = scores.clone()
        scores[0, used] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores


def prepare(
    model: Any, ids: list[int], fields: dict[str, Any], processors: Sequence[Processor], **arguments: Any
) -> list[Processor]:
    """The processors that transformers' `generate` would use, warpers included, for one prompt on the CPU.

    Args:
        model: the target, not changed.
        ids: the prompt.
        fields: of a `GenerationConfig`; what is left out is off, whatever the model's own config says.
        processors: the user's own.
        arguments: further arguments of `generate`.

    Raises:
        InvalidInput: transformers refuses a value.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    view = shallow_view(model)
    view.generation_config = GenerationConfig()
    try:
        prepared: list[Processor] = view.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            generation_config=GenerationConfig(**fields),
            logits_processor=LogitsProcessorList(processors),
            custom_generate=_hand_over,
            **arguments,
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise InvalidInput(
            f"transformers refuses these generation options: {str(error).strip().splitlines()[0]}"
        ) from error
    return prepared


def _hand_over(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> list[Processor]:
    return list(logits_processor)


def stop_criteria(options: Options, side: Side, own: Sequence[Criterion]) -> list[Criterion]:
    """transformers' criteria for `max_time` and `stop_strings`, unless the user brings one of that type.

    Raises:
        InvalidInput: stop strings, and no transformers tokenizer to read them with.
    """
    from transformers import MaxTimeCriteria, StopStringCriteria

    found: list[Criterion] = []
    types = {type(criterion) for criterion in own}
    if options.max_time is not None and MaxTimeCriteria not in types:
        found.append(MaxTimeCriteria(max_time=options.max_time))
    if options.stop_strings and StopStringCriteria not in types:
        found.append(StopStringCriteria(side.transformers_tokenizer, list(options.stop_strings)))
    return found


def ends_of(
    criteria: Sequence[Criterion], eos_ids: frozenset[int], limit: int, prompt_length: int
) -> tuple[frozenset[int], int]:
    """EOS ids and the most new tokens; criteria of those types replace them, as in transformers."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            eos_ids = frozenset(int(i) for i in criterion.eos_token_id.flatten())
        elif isinstance(criterion, MaxLengthCriteria):
            limit = criterion.max_length - prompt_length
    return eos_ids, limit


def of_one_row(criterion: Criterion) -> Criterion:
    """A criterion for one row of a batch: a copy of the user's own, which may keep a state."""
    if type(criterion).__module__.startswith("transformers."):
        return criterion
    try:
        return copy.deepcopy(criterion)
    except Exception as error:  # whatever it holds
        raise InvalidInput(
            f"the stopping criterion {_name(criterion)} cannot be copied, and several prompts cannot share one.",
            "Generate from one prompt at a time.",
        ) from error


def apart(
    processors: Sequence[Processor], *, greedy: bool, scores: bool
) -> tuple[tuple[Processor, ...], Warping]:
    """A prepared list as processors and warping.

    Args:
        processors: what transformers prepared.
        greedy: the argmax is taken of what they all leave.
        scores: the caller wants transformers' own scores, which all of them make; nothing is taken off then.
    """
    if greedy:
        return tuple(processors), Warping(temperature=0.0)
    return (tuple(processors), Warping()) if scores else split_warpers(processors)


def split_warpers(processors: Sequence[Processor]) -> tuple[tuple[Processor, ...], Warping]:
    """Takes the standard warpers off the end of a prepared list: what hetspec computes itself, on sorted heads.

    Returns:
        (the processors before them, the warping). If others come after the warpers, all stay processors and the
        warping is neutral: the law is then the softmax of what they leave.
    """
    rest = list(processors)
    if rest and _is(rest[-1], "LogitNormalization"):  # changes no law
        rest.pop()
    found: dict[str, Any] = {}
    for name, attribute in (
        ("MinP", "min_p"),
        ("TopP", "top_p"),
        ("TopK", "top_k"),
        ("Temperature", "temperature"),
    ):
        last = rest[-1] if rest else None
        usual = (
            getattr(last, "min_tokens_to_keep", 1) == 1
            and getattr(last, "filter_value", -math.inf) == -math.inf
        )
        if last is not None and _is(last, f"{name}LogitsWarper") and usual:
            found[attribute] = getattr(rest.pop(), attribute)
    return tuple(rest), Warping(**found)


def _is(processor: Processor, name: str) -> bool:
    return type(processor).__name__ == name and type(processor).__module__.startswith("transformers.")
