"""Speed, side by side in one process: hetspec's algorithms and transformers' own decoding on the same prompts.

The machine's speed drifts, so contestants alternate on every prompt, in an order that turns from prompt to prompt, and
only ratios to plain decoding *of the same prompt* are compared. Greedy texts are compared while they are timed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hetspec.errors import InvalidInput
from hetspec.runtime.algorithms import ALGORITHMS
from hetspec.runtime.engine import Engine
from hetspec.runtime.options import plain_law
from hetspec.runtime.verify import METHODS
from hetspec.runtime.views import shallow_view

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PLAIN = "hf-plain"  # the reference of every ratio
ASSISTED = ("hf-slem", "hf-tli")
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8  # at most, tokens
HF_LENGTHS = ("3", "5", "8", "default")


@dataclass(frozen=True)
class Entrant:
    """One way of decoding, from a name such as ``slem``, ``tli:3``, ``slrs:auto:token`` or ``hf-slem:default``.

    Attributes:
        name: as given.
        kind: an algorithm of hetspec, "auto", "hf-plain", "hf-slem" (transformers' string-level assisted generation) or
            "hf-tli" (its token-level sampling with its order defect repaired: as it ships it is not lossless).
        length: draft length, "auto", or "default" for transformers' own settings.
        verify: "block" or "token", for hetspec's; "" for the usual one.
    """

    name: str
    kind: str
    length: str
    verify: str = ""

    @classmethod
    def parse(cls, name: str, length: str) -> Entrant:
        """Reads a name; `length` is used where it gives none, but for auto, which then chooses that, too.

        Raises:
            InvalidInput: not a contestant.
        """
        kind, *rest = name.split(":")
        known = (*ALGORITHMS, "auto", PLAIN, *ASSISTED)
        if kind not in known:
            raise InvalidInput(f"unknown contestant {name!r}.", f"Choose among {', '.join(known)}.")
        verify = rest.pop() if rest and rest[-1] in METHODS else ""
        given = (
            rest.pop(0) if rest else ("default" if kind in ASSISTED else "auto" if kind == "auto" else length)
        )
        words = ("auto",) if kind not in ASSISTED else ("default",)
        if rest or not (given.isdecimal() or given in words) or (kind.startswith("hf-") and verify):
            raise InvalidInput(
                f"contestant {name!r} cannot be read.",
                "Write KIND[:LENGTH][:block|token], as in slem:5 or hf-slem:5.",
            )
        return cls(name, kind, given, verify)


@dataclass(frozen=True)
class Result:
    """One contestant's run of one prompt.

    Attributes:
        contestant, collection, prompt: which.
        ids: the new ids.
        seconds: of the whole call, by the race's clock.
        stats: hetspec's own; empty for transformers'.
    """

    contestant: str
    collection: str
    prompt: int
    ids: list[int]
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return len(self.ids) / self.seconds


@dataclass(frozen=True)
class Race:
    """What is run.

    Attributes:
        collections: prompts by name of their kind.
        contestants: `PLAIN` is added if it is missing.
        temperature: 0 for greedy.
        max_new_tokens: of every text; end-of-text does not end one, so that all are equally long.
        seed: of the first prompt; one more for each next.
        clock: "wall", or "cpu": processor time, which other programs on the machine disturb less.
        setting: what else the figures depend on (models, dtype, layout of the weights); finished runs of another
            setting do not count.
    """

    collections: dict[str, list[Any]]
    contestants: tuple[Entrant, ...]
    temperature: float = 0.0
    max_new_tokens: int = 64
    seed: int = 0
    clock: str = "wall"
    setting: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Runs contestants on one engine."""

    def __init__(self, engine: Engine, race: Race) -> None:
        assert engine.target.model is not None
        self.engine, self.race = engine, race
        self.model = shallow_view(engine.target.model.model)
        self.model.generation_config = type(engine.target.model.model.generation_config)()
        self.law = {**plain_law(race.temperature), "eos_token_id": []}
        self._token_level: dict[str, Any] = {}

    def run(
        self, contestant: Entrant, prompt: Any, number: int, *, tokens: int = 0
    ) -> tuple[list[int], float, Any]:
        """The new ids, the seconds they took, and hetspec's stats or None."""
        tokens = tokens or self.race.max_new_tokens
        seed = self.race.seed + number
        ids = self.ids_of(prompt)
        now = CLOCKS[self.race.clock]
        if contestant.kind.startswith("hf-"):
            started = now()
            new = self._transformers(contestant, ids, tokens, seed)
            return new, now() - started, None
        length: int | str = "auto" if contestant.length == "auto" else int(contestant.length)
        started = now()
        out = self.engine.generate(
            prompt,
            algorithm=contestant.kind,
            num_draft_tokens=length,
            verify=contestant.verify,
            max_new_tokens=tokens,
            # A seed would make automatic choices follow declared costs; what they are worth shows by the clock.
            seed=None if "auto" in (contestant.kind, contestant.length) else seed,
            **self.law,
        )
        return out.new_ids, now() - started, out.stats

    def ids_of(self, prompt: Any) -> list[int]:
        """The target's ids of a prompt."""
        return self.engine.decoder(prompt, algorithm="none", max_new_tokens=1).ids

    def _transformers(self, contestant: Entrant, ids: list[int], tokens: int, seed: int) -> list[int]:
        """transformers' own decoding, without its warnings' worth of defaults: no EOS, no top-k."""
        options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        if self.race.temperature:
            options |= {"do_sample": True, "temperature": self.race.temperature, "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        if contestant.kind == "hf-slem":
            if self.race.temperature:
                raise InvalidInput(
                    "transformers' string-level assisted generation is greedy only (sampled, it uses its token-level "
                    "form, which is not lossless).",
                    "Use --temperature 0 with hf-slem.",
                )
            options |= self._assistant(contestant.length)
        if contestant.kind == "hf-tli":
            if not self.race.temperature:
                raise InvalidInput(
                    "transformers' token-level assisted generation samples only.",
                    "Use --temperature with hf-tli.",
                )
            options |= self._token_level_assistant(contestant.length)
        with torch.random.fork_rng(devices=[]), torch.inference_mode(), ordered_translation():
            torch.manual_seed(seed)
            tokens_in = torch.tensor([ids], device=self.model.device)
            out = self.model.generate(tokens_in, attention_mask=torch.ones_like(tokens_in), **options)
        return [int(i) for i in out[0, len(ids) :]]

    def _token_level_assistant(self, length: str) -> dict[str, Any]:
        """Copies: transformers prunes the assistant's head in place, and remembers that by the tokenizers."""
        if not self._token_level:
            self._token_level = copy.deepcopy(self._assistant("default"))
        self._set_length(self._token_level["assistant_model"], length)
        return self._token_level

    def _assistant(self, length: str) -> dict[str, Any]:
        assert self.engine.drafter is not None
        assert self.engine.drafter.model is not None
        drafter = shallow_view(self.engine.drafter.model.model)
        self._set_length(drafter, length)
        return {
            "assistant_model": drafter,
            "tokenizer": self.engine.target.transformers_tokenizer,
            "assistant_tokenizer": self.engine.drafter.transformers_tokenizer,
        }

    def _set_length(self, drafter: Any, length: str) -> None:
        assert self.engine.drafter is not None
        assert self.engine.drafter.model is not None
        drafter.generation_config = copy.deepcopy(self.engine.drafter.model.model.generation_config)
        if length != "default":  # given to generate() these have no effect; on the assistant they do
            drafter.generation_config.num_assistant_tokens = int(length)
            drafter.generation_config.num_assistant_tokens_schedule = "constant"
            drafter.generation_config.assistant_confidence_threshold = 0.0


@contextlib.contextmanager
def ordered_translation() -> Iterator[None]:
    """Lets transformers' token-level translation list the shared ids in one order everywhere.

    It prunes the assistant's head in the order of a dictionary and scatters the logits in the order of ids (5.24).
    """
    from transformers.generation.candidate_generator import AssistantToTargetTranslator as Translator

    original = Translator._get_assistant_to_target_input_ids

    def ordered(self: Any) -> tuple[torch.Tensor, dict[int, int]]:
        forward, back = original(self)
        return forward, dict(sorted(back.items(), key=lambda pair: pair[1]))

    Translator._get_assistant_to_target_input_ids = ordered
    try:
        yield
    finally:
        Translator._get_assistant_to_target_input_ids = original


def run_race(
    engine: Engine,
    race: Race,
    *,
    screen: float = 0.0,
    resume: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Runs all contestants on all prompts, alternating.

    Args:
        engine: models and pair.
        race: what is run.
        screen: contestants slower than this share of the fastest on the first prompt of a collection are left out of
            its others, transformers' own by the fastest of theirs; 0 keeps all. Plain decoding always stays.
        resume: a file of finished runs, read first and added to.
        progress: is told the runs done.
        say: is told every run.

    Returns:
        In the order they were run.
    """
    runner = Runner(engine, race)
    done = _read(resume, race)
    results: list[Result] = []
    first = runner.ids_of(next(iter(race.collections.values()))[0])[:WARM_UP_PROMPT]
    for contestant in race.contestants:  # first calls compile, allocate and page in
        runner.run(contestant, first, 0, tokens=min(WARM_UP_TOKENS, race.max_new_tokens))
    for collection, prompts in race.collections.items():
        running = list(race.contestants)
        for number, prompt in enumerate(prompts):
            turn = number % len(running)
            for contestant in running[turn:] + running[:turn]:
                result = done.get((contestant.name, collection, number))
                if result is None:
                    ids, seconds, stats = runner.run(contestant, prompt, number)
                    result = Result(
                        contestant.name,
                        collection,
                        number,
                        ids,
                        seconds,
                        {} if stats is None else stats.as_dict(),
                    )
                    _append(resume, race, result)
                results.append(result)
                progress(len(results))
                where = f"{collection} {number + 1}/{len(prompts)}"
                say(f"{where} {contestant.name}: {result.tokens_per_second:.2f} tokens/s")
            if number == 0 and screen:
                speed = {r.contestant: r.tokens_per_second for r in results if r.collection == collection}
                fastest = {
                    theirs: max(
                        (v for name, v in speed.items() if is_theirs(name) == theirs and name != PLAIN),
                        default=0.0,
                    )
                    for theirs in (True, False)
                }
                running = [
                    c
                    for c in running
                    if c.name == PLAIN or speed[c.name] >= screen * fastest[is_theirs(c.name)]
                ]
    return results


def is_theirs(name: str) -> bool:
    """Whether a contestant is transformers' own decoding."""
    return name.startswith("hf-")


def summary(race: Race, results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per collection and contestant: medians over prompts, ratios to plain decoding with their quartiles.

    Returns:
        [{"collection", "name", "settings", "prompts", "tokens_per_second", "ratio_to_plain" {"median", "low", "high"},
        "identical" (greedy texts equal to plain; None when sampling), "tokens_per_target_pass", "acceptance_rate",
        "efficiency" (share of the time spent in the two models), "shares" {part: of the time}}]; transformers' own have
        None for what they do not tell.
    """
    rows = []
    for collection in race.collections:
        mine = [r for r in results if r.collection == collection]
        plain = {r.prompt: r for r in mine if r.contestant == PLAIN}
        for contestant in race.contestants:
            runs = [r for r in mine if r.contestant == contestant.name]
            if runs:
                rows.append(_row(contestant, collection, runs, plain, greedy=race.temperature == 0))
    return rows


def _row(
    contestant: Entrant, collection: str, runs: list[Result], plain: dict[int, Result], *, greedy: bool
) -> dict[str, Any]:
    ratios = sorted(r.tokens_per_second / plain[r.prompt].tokens_per_second for r in runs)
    own = [r.stats for r in runs if r.stats]
    total = sum(s["seconds"]["total"] for s in own)
    parts = ("target", "drafter", "verify", "align", "other")
    shares = {part: sum(s["seconds"][part] for s in own) / total for part in parts} if total else None
    drafted = [s for s in own if s["proposed"]]
    return {
        "collection": collection,
        "name": contestant.name,
        "settings": asdict(contestant),
        "prompts": len(runs),
        "tokens_per_second": statistics.median(r.tokens_per_second for r in runs),
        "ratio_to_plain": {
            "median": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[-1 - len(ratios) // 4],
        },
        "identical": sum(r.ids == plain[r.prompt].ids for r in runs) if greedy else None,
        "tokens_per_target_pass": sum(len(r.ids) for r in runs) / sum(s["steps"] for s in own)
        if own
        else None,
        "acceptance_rate": statistics.mean(s["acceptance_rate"] for s in drafted) if drafted else None,
        "efficiency": shares["target"] + shares["drafter"] if shares else None,
        "shares": shares,
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import transformers

    return {
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _key(race: Race) -> dict[str, Any]:
    """What must be the same for a finished run to count."""
    own = ("temperature", "max_new_tokens", "seed", "clock")
    return {**race.setting, **{name: getattr(race, name) for name in own}, **machine()}


def _read(resume: Path | None, race: Race) -> dict[tuple[str, str, int], Result]:
    if resume is None or not resume.exists():
        return {}
    done = {}
    for line in resume.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            result = Result(**record["result"])
        except (ValueError, KeyError, TypeError):
            continue  # the last line of an interrupted run
        if record["key"] == _key(race):
            done[result.contestant, result.collection, result.prompt] = result
    return done


def _append(resume: Path | None, race: Race, result: Result) -> None:
    if resume is not None:
        with resume.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": _key(race), "result": asdict(result)}) + "\n")
