"""The entry point for transformers users: `target.generate(**inputs, custom_generate=hetspec.hf_generate, …)`.

transformers prepares inputs, processors and criteria as for its own decoding and hands them over; here each
prompt becomes a row of hetspec's, and the rows become the outputs downstream code expects.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hetspec.artifact import PairArtifact
from hetspec.errors import InvalidInput
from hetspec.runtime.context import DRAFT_WINDOW
from hetspec.runtime.decode import Decoder
from hetspec.runtime.engine import run, run_rows
from hetspec.runtime.generate import engine_of
from hetspec.runtime.options import from_generation_config
from hetspec.runtime.processors import Processing, apart, ends_of, of_one_row
from hetspec.runtime.request import Drafting, Task, check_draws
from hetspec.runtime.rng import TorchRng
from hetspec.runtime.sides import unpadded

# Inputs of the forward that say nothing a single unpadded prompt does not say by itself.
IMPLIED = frozenset(
    ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values")
)


def hf_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    pair: PairArtifact | None = None,
    drafter: Any = None,
    target_tokenizer: Any = None,
    drafter_tokenizer: Any = None,
    full_head: bool = False,
    draft_weights: str = "auto",
    target_weights: str = "own",
    static: bool = False,
    algorithm: str = "auto",
    num_draft_tokens: int | str = "auto",
    slrs_form: str = "auto",
    prior: str = "auto",
    verify: str = "",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    draft_temperature: float | None = None,
    draft_top_k: int = 0,
    draft_top_p: float = 1.0,
    draft_window: int = DRAFT_WINDOW,
    drafter_inputs: Any = None,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes losslessly inside transformers' `generate`; pass it as `custom_generate`.

    `target.generate(**inputs, custom_generate=hetspec.hf_generate, pair=pair, drafter=drafter, …)`. Every option that
    transformers turns into processors or criteria is honoured; what it would need another decoding loop for is
    refused by name. The draws do not come from torch's global generator: pass `seed` (row r of a batch draws with
    seed + r) or `generator`. transformers hands no tokenizer on, so stop strings come as a criterion:
    `stopping_criteria=[StopStringCriteria(tokenizer, ["…"])]`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: what
            transformers hands over.
        pair: the pair artifact; required with a drafter.
        drafter: the model that proposes.
        target_tokenizer, drafter_tokenizer: by default those recorded in the pair.
        full_head, draft_weights, target_weights, static, algorithm, num_draft_tokens, slrs_form, prior, verify, seed,
            generator, draft_temperature, draft_top_k, draft_top_p, draft_window, drafter_inputs: see `hetspec.Engine`.
        token_streamer: gets the prompt and every committed token. (`streamer` works too.)
        model_kwargs: what else transformers would pass to the forward.

    Returns:
        int64[B, S], or with `return_dict_in_generate` a `GenerateDecoderOnlyOutput` with `scores` and `logits` where
        asked for, and the rows' `stats` as an attribute.

    Raises:
        HetspecError: one of its kinds, saying what was found and what to do.
    """
    given = sorted(k for k, v in model_kwargs.items() if v is not None and k not in IMPLIED)
    if given or synced_gpus:
        raise InvalidInput(
            f"{', '.join(given) or 'synced_gpus'} is not supported and is not ignored either.",
            "Give input_ids and attention_mask only.",
        )
    check_draws(seed, generator)
    for cache in (model_kwargs.get(name) for name in ("cache", "past_key_values")):
        if cache is not None and (cache.get_seq_length() or getattr(cache, "_is_user_defined", False)):
            raise InvalidInput("a cache was given.", "Leave it out, and pass the whole text as input_ids.")
    caller = _callers_arguments(model)
    if caller.get("assistant_model") is not None:
        raise InvalidInput("an assistant_model was given.", "Pass it as drafter, with its pair.")
    # What transformers has done already is not refused; every other field is honoured or refused by name.
    options = from_generation_config(
        generation_config, dict.fromkeys(("num_return_sequences", "token_healing"))
    )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = unpadded(input_ids, mask)
    if not all(prompts):
        raise InvalidInput("a prompt is empty (its attention mask is all zeros).", "Give at least one token.")
    if not bool(mask[:, -1].all()):
        raise InvalidInput("prompts are padded on the right.", "Use a tokenizer with padding_side='left'.")
    positions = model_kwargs.get("position_ids")
    usual = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not bool(((positions == usual) | (mask == 0)).all()):
        raise InvalidInput("position_ids of your own are not supported.", "Leave them out.")
    given_streamers = [s for s in (token_streamer, streamer, caller.get("streamer")) if s is not None]
    if len(given_streamers) > 1 or (given_streamers and len(prompts) > 1):
        raise InvalidInput(
            f"{len(given_streamers)} streamers and {len(prompts)} texts.", "Give one streamer, for one text."
        )
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    engine_options = {
        "target_tokenizer": target_tokenizer,
        "drafter_tokenizer": drafter_tokenizer,
        "full_head": full_head,
        "draft_weights": draft_weights,
        "target_weights": target_weights,
        "static": static,
    }
    engine = engine_of(model, drafter, pair, engine_options)
    wanted = bool(generation_config.return_dict_in_generate)
    processors, warping = apart(
        list(logits_processor), greedy=not generation_config.do_sample, scores=wanted and options.scores
    )
    eos_ids, limit = ends_of(
        stopping_criteria,
        options.eos_ids,
        generation_config.max_length - input_ids.shape[1],
        input_ids.shape[1],
    )
    assert engine.target.model is not None
    longest = max(map(len, prompts)) + limit
    if longest > engine.target.model.max_length:
        raise InvalidInput(
            f"max_length allows {longest:,} tokens but the target's context holds {engine.target.model.max_length:,}.",
            "Ask for fewer new tokens.",
        )
    drafting = Drafting(
        algorithm,
        num_draft_tokens,
        slrs_form,
        prior,
        verify,
        draft_temperature,
        draft_top_k,
        draft_top_p,
        draft_window,
    )
    decoders = []
    for row, prompt in enumerate(prompts):
        before = input_ids[row : row + 1, : input_ids.shape[1] - len(prompt)]

        def of_row(call: Any, row: int = row, before: Tensor = before) -> Any:
            return (
                call if before.shape[1] == 0 and len(prompts) == 1 else OfRow(call, row, len(prompts), before)
            )

        task = Task(
            warping,
            Processing(
                tuple(map(of_row, processors)), tuple(map(of_row, stopping_criteria)), input_ids.device
            ),
            eos_ids,
            limit,
            keep_scores=wanted and options.scores,
            keep_logits=wanted and options.logits,
        )
        decoders.append(
            engine.prepared_decoder(
                prompt,
                task,
                drafting,
                rng=TorchRng(None if seed is None else seed + row, generator),
                seeded=seed is not None or generator is not None,
                drafter_inputs=drafter_inputs,
                joint=len(prompts) > 1,
            )
        )
    if len(decoders) == 1:
        run(decoders[0], given_streamers[0] if given_streamers else None)
    else:
        run_rows(decoders)
    return _outputs(decoders, input_ids, generation_config)


def _outputs(decoders: list[Decoder], input_ids: Tensor, config: Any) -> Any:
    """The rows as transformers returns them: padded on the right to the longest."""
    longest = max(len(decoder.new_ids) for decoder in decoders)
    pad = config._pad_token_tensor
    pad = int(pad) if pad is not None else next(iter(sorted(decoders[0].eos_ids)), 0)
    new = [decoder.new_ids + [pad] * (longest - len(decoder.new_ids)) for decoder in decoders]
    sequences = torch.cat(
        [input_ids, torch.tensor(new, device=input_ids.device, dtype=input_ids.dtype)], dim=1
    )
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    output = GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_per_step([decoder.scores for decoder in decoders], longest, input_ids.device),
        logits=_per_step([decoder.logits for decoder in decoders], longest, input_ids.device),
    )
    output.stats = [decoder.stats for decoder in decoders]
    return output


def _per_step(rows: list[Any], longest: int, device: Any) -> tuple[Tensor, ...] | None:
    """Per new position the rows' scores [B, V]; zeros where a row has ended."""
    if rows[0] is None:
        return None
    return tuple(
        torch.stack([row[i] if i < len(row) else torch.zeros_like(row[0]) for row in rows]).to(device)
        for i in range(longest)
    )


class OfRow:
    """A processor or criterion made for a padded batch, called for one of its rows.

    Args:
        call: expects ids [B, S] and scores [B, V].
        row, rows: which of how many.
        before: int64[1, P], the padding in front of the prompt.
    """

    def __init__(self, call: Any, row: int, rows: int, before: Tensor) -> None:
        self.call = of_one_row(call)
        self.row, self.rows, self.before = row, rows, before

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        """Calls it with this row in the place of every row."""
        whole = torch.cat([self.before.to(ids.device), ids], dim=1).expand(self.rows, -1)
        if isinstance(scores, Tensor):
            scores = scores.repeat(self.rows, 1)
        answer = self.call(whole, scores)
        return answer[self.row : self.row + 1] if isinstance(answer, Tensor) and answer.ndim else answer


def _callers_arguments(model: Any) -> dict[str, Any]:
    """The arguments of the `generate` that called: transformers hands neither streamer nor assistant on to a callable.

    It has put the prompt into the streamer by then, and a TextIteratorStreamer that never ends would hang its reader;
    so they are looked up where they are, in the frame of the caller, whatever wrappers lie between.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            return dict(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return {}
