"""Two models and their pair, ready to generate.

Reads prompts (text, ids, chats), checks that the pair belongs to these very tokenizers, and hands one row
to the decoding loop.
"""

from __future__ import annotations

import codecs
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hetspec.artifact import PairArtifact
from hetspec.errors import InvalidInput
from hetspec.runtime.algorithms import (
    ALGORITHMS,
    Algorithm,
    Plain,
)
from hetspec.runtime.auto import AutoChoice, Record
from hetspec.runtime.batch import JointRow, run_together
from hetspec.runtime.context import DRAFT_WINDOW, DrafterContext
from hetspec.runtime.decode import Decoder, DecodeStats
from hetspec.runtime.laws import Warping
from hetspec.runtime.models import Row
from hetspec.runtime.options import Options, from_generation_config
from hetspec.runtime.plan import LONGEST, AutoLength, ConfidentLength, DraftLength, FixedLength
from hetspec.runtime.processors import (
    CountPenalty,
    Criterion,
    Processing,
    Processor,
    apart,
    ends_of,
    of_one_row,
    prepare,
    stop_criteria,
)
from hetspec.runtime.request import Drafting, Task, calls_of, check_draws, config_of, method_of
from hetspec.runtime.rng import Rng, TorchRng
from hetspec.runtime.sides import first_bytes, is_chat, make_side, read_batch, read_prompt
from hetspec.runtime.tools import SLRS_FORMS, PairTools
from hetspec.runtime.weights import TARGET_WEIGHTS

if TYPE_CHECKING:
    from hetspec.runtime.static_decode import StaticPool


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
        sequences: int64[1, S], prompt and new ids, as transformers returns them.
        new_ids: the new ids.
        text: the new ids as text, control tokens left out.
        algorithm: what was run; what "auto" ended with (`stats.choice` says why).
        stats: what it took.
        scores: with `output_scores`, per new token the target's processed scores [1, V], as transformers has them:
            whatever was drafted, they are those of the law the token was drawn from.
        logits: with `output_logits`, per new token the target's raw logits [1, V], float32.
    """

    sequences: Tensor
    new_ids: list[int]
    text: str
    algorithm: str
    stats: DecodeStats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Chunk:
    """One step of `stream`: the committed ids, the text they complete, and the stats so far."""

    ids: list[int]
    text: str
    stats: DecodeStats


class Engine:
    """Two models and their pair, ready to generate.

    Args:
        target: the model whose law is kept, a transformers causal language model.
        drafter: the model that proposes; None allows only the algorithm "none".
        pair: the artifact of the two tokenizers; None allows only "none".
        target_tokenizer, drafter_tokenizer: by default those recorded in the pair.
        full_head: compute the drafter's whole LM head even if the pair has a pruned one.
        draft_weights: how a bfloat16 drafter on the CPU reads its weights: "own", "packed", "int8", "int4"; "auto" is
            "packed" where the processor allows it (`hetspec.runtime.weights`).
        target_weights: "own", "packed", or "auto": packed where the processor allows it and the memory has room.
        static: read in fixed shapes, as a GPU can replay them (`hetspec.runtime.static_decode`).

    Raises:
        StaleArtifact: the pair was built for other tokenizers.
        UnsupportedModel: a model cannot be used, or its head not pruned.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        pair: PairArtifact | None = None,
        *,
        target_tokenizer: Any = None,
        drafter_tokenizer: Any = None,
        full_head: bool = False,
        draft_weights: str = "auto",
        target_weights: str = "own",
        static: bool = False,
    ) -> None:
        if pair is None and target_tokenizer is None:
            raise InvalidInput("no pair and no target_tokenizer given.", "Pass pair=hetspec.load_pair(…).")
        if drafter is not None and pair is None:
            raise InvalidInput(
                "a drafter needs the pair artifact that maps its vocabulary.",
                "Build one: hetspec-prep build-map TARGET DRAFTER.",
            )
        self.pair = pair
        if target_weights not in TARGET_WEIGHTS:
            raise InvalidInput(
                f"target_weights is {target_weights!r}, which could change the target's law.",
                f"Choose one of {', '.join(TARGET_WEIGHTS)}.",
            )
        identity = pair.target if pair else None
        self.target = make_side(
            target, target_tokenizer, identity, "target", weights=target_weights, static=static
        )
        self._statics = _pool() if static else None
        # What automatic choices have seen, by the settings they saw it with.
        self._records: dict[Any, dict[str, Record]] = {}
        self._lengths: dict[Any, AutoLength | ConfidentLength] = {}
        self.drafter = None
        if drafter is not None:
            assert pair is not None
            head = None if full_head or pair.head is None else pair.head.kept
            self.drafter = make_side(
                drafter,
                drafter_tokenizer,
                pair.drafter,
                "drafter",
                kept=head,
                weights=draft_weights,
                static=static,
            )
        self.check()

    def check(self) -> None:
        """Compares both tokenizers with the pair's fingerprints; runs before every generation."""
        changed = self.target.refresh()
        if self.pair is not None:
            self.pair.target.require(self.target.vocabulary, "target")
        if self.drafter is not None:
            assert self.pair is not None
            changed |= self.drafter.refresh()
            self.pair.drafter.require(self.drafter.vocabulary, "drafter")
        if changed:
            self.__dict__.pop("_tools", None)

    # -- generating --------------------------------------------------------------------------------------

    def generate(self, inputs: Any, **options: Any) -> GenerateOutput:
        """Generates to the end; see `decoder` for the arguments.

        A `streamer` (transformers' protocol) gets the prompt and then every committed token.
        """
        streamer = options.pop("streamer", None)
        decoder = self.decoder(inputs, **options)
        if streamer is not None:
            streamer.put(torch.tensor([decoder.ids]))
        run(decoder, streamer)
        return self.output(decoder)

    def generate_batch(
        self,
        inputs: Any,
        *,
        seed: int | None = None,
        drafter_inputs: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[GenerateOutput]:
        """Generates from several prompts side by side, each exactly as it would alone.

        One padded pass of the target serves all rows, and so do the drafter's passes as far as rows are at the same
        point. Beside the passes it costs one copy of the rows' KV caches per pass. Draft lengths and "auto" follow
        declared costs, not the clock. With a padded pass logits differ by rounding from those of a single run.

        Args:
            inputs: a list of prompts in any form `decoder` takes, or padded ids [B, S] with their attention mask.
            seed: row r draws as a single run with seed + r does.
            drafter_inputs: a prompt of the drafter's own for every row.
            options: see `decoder`; the same for all. Each row has its own copy of a criterion of the user's, called
                with that row's ids [1, S].

        Raises:
            InvalidInput: as `decoder`; or a processor that may keep a state, which several rows cannot share.
        """
        prompts = read_batch(inputs)
        criteria = calls_of("stopping_criteria", options.pop("stopping_criteria", None))
        own = drafter_inputs if drafter_inputs is not None else [None] * len(prompts)
        if len(own) != len(prompts):
            raise InvalidInput(f"{len(own)} drafter_inputs for {len(prompts)} prompts.", "Give one for each.")
        decoders = [
            self.decoder(
                prompt,
                seed=None if seed is None else seed + row,
                drafter_inputs=own[row],
                joint=len(prompts) > 1,
                stopping_criteria=[of_one_row(c) for c in criteria],
                **options,
            )
            for row, prompt in enumerate(prompts)
        ]
        run_rows(decoders)
        return [self.output(decoder) for decoder in decoders]

    def output(self, decoder: Decoder) -> GenerateOutput:
        """What a finished decoding returns."""
        return GenerateOutput(
            sequences=torch.tensor([decoder.ids]),
            new_ids=decoder.new_ids,
            text=self.decode_text(decoder.new_ids),
            algorithm=getattr(decoder.algorithm, "current", decoder.algorithm.name),
            stats=decoder.stats,
            scores=None if decoder.scores is None else tuple(s[None] for s in decoder.scores),
            logits=None if decoder.logits is None else tuple(s[None] for s in decoder.logits),
        )

    def stream(self, inputs: Any, **options: Any) -> Iterator[Chunk]:
        """Yields a `Chunk` per step; text is held back while a character is unfinished."""
        decoder = self.decoder(inputs, **options)
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        while not decoder.done:
            committed = decoder.step()
            text = characters.decode(self.target.vocabulary.spell(committed), final=decoder.done)
            yield Chunk(committed, text, decoder.stats)

    def decoder(
        self,
        inputs: Any,
        *,
        algorithm: str = "auto",
        num_draft_tokens: int | str = "auto",
        generation_config: Any = None,
        slrs_form: str = "auto",
        prior: str = "auto",
        verify: str = "",
        seed: int | None = None,
        generator: torch.Generator | None = None,
        rng: Rng | None = None,
        draft_temperature: float | None = None,
        draft_top_k: int = 0,
        draft_top_p: float = 1.0,
        draft_window: int = DRAFT_WINDOW,
        drafter_inputs: Any = None,
        logits_processor: Sequence[Processor] = (),
        stopping_criteria: Sequence[Criterion] = (),
        prefix_allowed_tokens_fn: Any = None,
        joint: bool = False,
        **overrides: Any,
    ) -> Decoder:
        """Prepares the decoding of one prompt.

        Args:
            inputs: text, target ids (list, [S] or [1, S] tensor, a tokenizer's output), or a chat
                (list of {"role", "content"}).
            algorithm: "none", "slem", "tli", "slrs", "rdk" or "auto".
            num_draft_tokens: candidates per step (drafter tokens for "slem"), or "auto".
            generation_config: a transformers GenerationConfig, or a file or directory with one; by default the
                target model's own.
            slrs_form: "lookahead" (4d, with healing), "first" (4b), "bytes" (4c, for drafters that write bytes) or
                "enumerated" (4a) for "slrs"; "auto" is "bytes" where it can be had, else "lookahead".
            prior: which kernel "rdk" uses; "auto" takes the one with the best held-out acceptance.
            verify: "block" verification, which never accepts fewer in expectation, or "token"; by default "block",
                and "token" with processors that may keep a state.
            seed: makes the generation repeatable.
            generator: a CPU generator to draw from instead.
            rng: replaces the source of every draw.
            draft_temperature, draft_top_k, draft_top_p: the drafter's; by default the target's temperature.
            draft_window: tokens the drafter sees at most; when they are full, half as many stay. A longer past
                costs more time than it gains candidates (the target always sees everything). In fixed shapes the
                drafter's own limit holds.
            drafter_inputs: a prompt of the drafter's own (text, ids or a chat).
            logits_processor, stopping_criteria: the user's own, called with (ids [1, S], scores [1, V]) on the CPU for
                every committed token, the drafted ones before it among the ids.
            prefix_allowed_tokens_fn: as in transformers.
            joint: prepares one of several rows that are decoded together (`generate_batch`).
            overrides: fields of the generation config, `presence_penalty` and `frequency_penalty`.

        Raises:
            InvalidInput, StaleArtifact, UnsupportedModel: see the messages.
        """
        self.check()
        assert self.target.model is not None
        own = self.target.model.model.generation_config
        options = from_generation_config(config_of(generation_config, own), overrides, own)
        prompt = read_prompt(inputs, self.target)
        self._check_prompt(prompt)
        limit = options.new_tokens(len(prompt))
        if limit < 1:
            raise InvalidInput(
                f"max_length {options.max_length} leaves no room after a prompt of {len(prompt)} tokens.",
                "Pass max_new_tokens.",
            )
        processors = calls_of("logits_processor", logits_processor)
        criteria = calls_of("stopping_criteria", stopping_criteria)
        eos_ids, limit = ends_of(criteria, options.eos_ids, limit, len(prompt))
        warping, processing = self._processing(
            options, prompt, limit, processors, criteria, prefix_allowed_tokens_fn
        )
        check_draws(seed, generator, rng)
        return self.prepared_decoder(
            prompt,
            Task(
                warping,
                processing,
                eos_ids,
                limit,
                keep_scores=options.scores,
                keep_logits=options.logits,
            ),
            Drafting(
                algorithm,
                num_draft_tokens,
                slrs_form,
                prior,
                verify,
                draft_temperature,
                draft_top_k,
                draft_top_p,
                draft_window,
            ),
            rng=rng if rng is not None else TorchRng(seed, generator),
            seeded=seed is not None or generator is not None or rng is not None,
            chat=inputs if is_chat(inputs) else None,
            drafter_inputs=drafter_inputs,
            joint=joint,
        )

    def prepared_decoder(
        self,
        prompt: list[int],
        task: Task,
        drafting: Drafting,
        *,
        rng: Rng,
        seeded: bool,
        chat: Any = None,
        drafter_inputs: Any = None,
        joint: bool = False,
    ) -> Decoder:
        """The decoding of prompt ids with everything about the target's law already prepared; see `decoder`.

        Args:
            prompt: target ids.
            task: the target's law, and where the text ends.
            drafting: how candidates are made and judged.
            rng: the source of every draw.
            seeded: whether the same draws must give the same tokens, so that nothing may follow the clock.
            chat: the prompt as messages, which the drafter then gets through its own template.
            joint: whether the rows' forwards are to be read together with those of other decodings.
        """
        assert self.target.model is not None
        self._check_prompt(prompt)
        boundary = self.target.model.rope_boundary
        if boundary and len(prompt) <= boundary < len(prompt) + task.max_new_tokens:
            raise InvalidInput(
                f"{self.target.model.name} reads texts of more than {boundary:,} tokens with other rotary factors "
                f"(longrope), which this text of {len(prompt) + task.max_new_tokens:,} would cross.",
                f"Ask for at most {boundary - len(prompt):,} new tokens.",
            )
        if joint and not task.processing.stateless:
            raise InvalidInput(
                f"{task.processing.names} may keep a state and cannot serve several prompts at once.",
                "Generate from one prompt at a time.",
            )
        for eos in task.eos_ids:
            if eos >= self.target.model.rows:
                raise InvalidInput(
                    f"eos_token_id {eos} is outside the target's {self.target.model.rows:,} rows."
                )
        draft_warping = drafting.warping(task.warping)
        form, length = drafting.slrs_form, drafting.num_draft_tokens
        # The clock of one row says nothing while others run, and cannot tell the parts of a recorded step apart.
        seeded = seeded or joint or self._statics is not None
        plan: DraftLength
        chosen: Algorithm
        name = drafting.algorithm
        if name == "auto" and (self.drafter is None or self._statics is not None):
            name = self._recorded_choice
        if name == "auto":
            plan = chosen = self._auto(form, task, draft_warping, length, seeded=seeded)
        else:
            plan = self._plan(length, name, form, task, draft_warping, seeded=seeded)
            chosen = self._algorithm(name, form, task, draft_warping, plan, drafting.prior, drafting.verify)
        drafter = None if chosen.name == "none" or self.drafter is None else self.drafter.model
        target, static = self.target.model, None
        draft_row: Row | None = None
        row: Row = JointRow(target) if joint else target.new_row()
        if drafter is not None:
            draft_row = JointRow(drafter, first=True) if joint else drafter.new_row()
        if self._statics is not None and not joint:
            static = self._statics.take(self.target, self.drafter, prompt, task.max_new_tokens)
            row, draft_row = static.rows(drafting=drafter is not None)
        options: dict[str, Any] = {
            "target": row,
            "vocabulary": self.target.vocabulary,
            "prompt": prompt,
            "context": None
            if draft_row is None
            else self._context(
                draft_row,
                chat,
                drafter_inputs,
                prompt,
                window=drafting.draft_window if static is None else None,
            ),
            "algorithm": chosen,
            "warping": task.warping,
            "plan": plan,
            "rng": rng,
            "eos_ids": task.eos_ids,
            "max_new_tokens": task.max_new_tokens,
            "method": method_of(drafting.verify, task.processing),
            "processing": task.processing,
            "prompt_alone": target.prompt_alone,
            "keep_scores": task.keep_scores,
            "keep_logits": task.keep_logits,
        }
        if static is None:
            return Decoder(**options)
        return static.decoder(options, draft_warping, self._tools if draft_row is not None else None)

    @property
    def _recorded_choice(self) -> str:
        """What "auto" is where nothing is tried: no drafter, or recorded steps."""
        if self.drafter is None or self.pair is None:
            return "none"
        if not (self._tools.map.d2t >= 0).any():
            return "slem"
        return "rdk" if self.pair.kernels else "tli"

    def _processing(
        self,
        options: Options,
        prompt: list[int],
        limit: int,
        processors: Sequence[Processor],
        criteria: Sequence[Criterion],
        allowed: Any,
    ) -> tuple[Warping, Processing]:
        """The target's warping, and what is done to its logits before it and asked of its text after it."""
        assert self.target.model is not None
        warping, prepared = options.warping, tuple(processors)
        warpers_too = options.scores and not warping.greedy  # transformers' scores are what they leave
        if options.processed or allowed is not None or prepared or warpers_too:
            fields = options.for_transformers(len(prompt) + limit)
            own = prepare(self.target.model.model, prompt, fields, prepared, prefix_allowed_tokens_fn=allowed)
            prepared, warping = apart(own, greedy=warping.greedy, scores=options.scores)
        if any(options.penalties):
            prepared = (CountPenalty(len(prompt), *options.penalties), *prepared)
        ends = stop_criteria(options, self.target, criteria)
        return warping, Processing(prepared, (*ends, *criteria))

    def decode_text(self, ids: Sequence[int]) -> str:
        """Target ids as text: exactly the bytes they spell, a leading space included; control tokens are left out."""
        return self.target.vocabulary.spell(ids).decode("utf-8", errors="replace")

    # -- parts -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _tools(self) -> PairTools:
        assert self.drafter is not None
        assert self.pair is not None
        return PairTools(self.pair, self.target, self.drafter)

    def _algorithm(
        self,
        name: str,
        form: str,
        task: Task,
        draft_warping: Warping,
        plan: DraftLength,
        prior: str = "auto",
        verify: str = "",
    ) -> Algorithm:
        if form not in SLRS_FORMS:
            raise InvalidInput(f"unknown slrs_form {form!r}.", f"Choose one of {', '.join(SLRS_FORMS)}.")
        if name not in ALGORITHMS:
            raise InvalidInput(
                f"unknown algorithm {name!r}.", f"Choose one of auto, {', '.join(ALGORITHMS)}."
            )
        if name == "none":
            return Plain()
        if self.drafter is None or self.pair is None:
            raise InvalidInput(
                f"algorithm {name!r} needs a drafter and a pair.", "Pass drafter=… and pair=…."
            )
        if name == "slrs" and verify == "block" and self._tools.form(form) == "bytes":
            raise InvalidInput(
                "the form bytes knows its law token by token, which block verification cannot use.",
                "Use verify='token', or leave it out.",
            )
        return self._tools.algorithm(
            name,
            form,
            prior,
            warping=task.warping,
            draft_warping=draft_warping,
            eos_ids=task.eos_ids,
            stopping=plan if isinstance(plan, ConfidentLength) else None,
        )

    def _auto(
        self,
        form: str,
        task: Task,
        draft_warping: Warping,
        num_draft_tokens: int | str,
        *,
        seeded: bool,
    ) -> AutoChoice:
        """All algorithms the pair allows, to be tried while generating; unseeded runs remember across prompts."""
        assert self.pair is not None
        names = ["slem", "slrs"] if task.warping.greedy else ["slrs", "slem", "tli"]
        if not (self._tools.map.d2t >= 0).any():
            names = ["slem"]
        key = (task.warping, draft_warping, form, num_draft_tokens)
        records: dict[str, Record] = {} if seeded else self._records.setdefault(key, {})
        plans = [
            self._plan(num_draft_tokens, name, form, task, draft_warping, seeded=seeded) for name in names
        ]
        return AutoChoice(
            [
                self._algorithm(name, form, task, draft_warping, plan)
                for name, plan in zip(names, plans, strict=True)
            ],
            plans,
            cost=self._declared_cost,
            measure=not seeded,
            records=records,
        )

    @property
    def _declared_cost(self) -> float:
        """A drafter step in target steps, as the weights read tell."""
        assert self.drafter is not None
        assert self.drafter.model is not None
        assert self.target.model is not None
        return self.drafter.model.weight_bytes / self.target.model.weight_bytes

    def _plan(
        self,
        num_draft_tokens: int | str,
        name: str,
        form: str,
        task: Task,
        draft_warping: Warping,
        *,
        seeded: bool,
    ) -> DraftLength:
        """The draft length of an algorithm; unseeded automatic ones remember across prompts."""
        if isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool):
            if num_draft_tokens < 0:
                raise InvalidInput(f"num_draft_tokens is {num_draft_tokens}, expected 0 or more, or 'auto'.")
            return FixedLength(num_draft_tokens)
        if num_draft_tokens != "auto":
            raise InvalidInput(f"num_draft_tokens is {num_draft_tokens!r}, expected a number or 'auto'.")
        if name == "none" or self.drafter is None or self.pair is None:
            return FixedLength(0)
        if (
            self._statics is not None and name != "slem"
        ):  # a recorded step has one length, whatever comes out in it
            return AutoLength(self._declared_cost, measure=False, longest=LONGEST)
        kind = ConfidentLength if self._tools.tells(name, form) else AutoLength
        if seeded:
            return kind(self._declared_cost, measure=False)
        key = (name, form, task.warping, draft_warping)
        known = self._lengths.get(key)
        plan = kind(self._declared_cost, measure=True) if known is None else known.next_text()
        self._lengths[key] = plan
        return plan

    def _check_prompt(self, ids: list[int]) -> None:
        """Whether the target can read these ids and go on."""
        assert self.target.model is not None
        if not ids:
            raise InvalidInput(
                "the prompt is empty and the target has no beginning-of-text token.",
                "Give at least one token.",
            )
        rows, longest = self.target.model.rows, self.target.model.max_length
        for t in ids:
            if not 0 <= t < rows:
                raise InvalidInput(
                    f"prompt id {t} is outside the target's {rows:,} rows.",
                    "Encode with the target's tokenizer.",
                )
        if len(ids) >= longest:
            raise InvalidInput(
                f"the prompt has {len(ids):,} tokens but the target's context holds {longest:,}.",
                "Shorten the prompt.",
            )

    def _context(
        self, row: Row, chat: Any, drafter_inputs: Any, prompt: list[int], window: int | None
    ) -> DrafterContext:
        """The drafter's row, holding the prompt in the drafter's own tokens."""
        assert self.pair is not None
        assert self.drafter is not None
        side = self.drafter
        t2d = self._tools.map.t2d
        controls = {
            t: int(t2d[t])
            for t in (*self.target.vocabulary.eos_ids, *self.target.vocabulary.turn_end_ids)
            if t2d[t] >= 0
        }
        own = read_prompt(drafter_inputs, side) if drafter_inputs is not None else None
        if own is None and chat is not None:
            try:
                own = side.chat_ids(chat)
            except InvalidInput as error:  # the target took the chat, so the drafter gets it as text
                logging.getLogger("hetspec").warning(
                    "%s The drafter reads the target's prompt instead.", error.message
                )
        begins = side.begins_with
        if own is not None:
            return DrafterContext(
                row,
                side.segmenter,
                own,
                sticky=len(begins) if own[: len(begins)] == begins else 0,
                controls=controls,
                window=window,
            )
        context = DrafterContext(row, side.segmenter, begins, controls=controls, window=window)
        text = self.target.vocabulary
        start = next((i for i, t in enumerate(prompt) if text.bytes_of(t)), len(prompt))
        if text.adds_prefix_space != side.vocabulary.adds_prefix_space and start < len(prompt):
            # Each side's dummy prefix is its own: take the target's away, or put the drafter's in front.
            head = first_bytes(
                text.bytes_of(prompt[start]), text.adds_prefix_space, side.vocabulary.adds_prefix_space
            )
            context.commit_ids(prompt[:start], text)
            context.commit(head)
            prompt = prompt[start + 1 :]
        context.commit_ids(prompt, text)
        return context


def _pool() -> StaticPool:
    from hetspec.runtime.static_decode import StaticPool  # imports transformers

    return StaticPool()


def run(decoder: Decoder, streamer: Any = None) -> None:
    """Steps a decoding to its end; a streamer gets the committed tokens one by one."""
    while not decoder.done:
        for t in decoder.step():
            if streamer is not None:
                streamer.put(torch.tensor([t]))
    if streamer is not None:
        streamer.end()


def run_rows(decoders: Sequence[Decoder]) -> None:
    """Steps several decodings to their ends, side by side; a row that has ended gives its cache back."""

    def work(decoder: Decoder) -> None:
        run(decoder)
        for row in (decoder.target, decoder.context.row if decoder.context is not None else None):
            if isinstance(row, JointRow):
                row.forget()

    run_together([functools.partial(work, decoder) for decoder in decoders])
