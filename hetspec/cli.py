"""The command `hetspec` (generate with a prepared pair), and the entry points of both commands.

Data goes to stdout, everything else to stderr; a known error is one line with a hint. Heavy imports stand
inside each command, so that ``--help`` is instant.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

import hetspec.cli_predict
import hetspec.cli_prep
import hetspec.cli_tune  # noqa: F401 - each registers its commands with prep_app
from hetspec.cli_bench import bench
from hetspec.console import (
    DrafterModel,
    DraftWeights,
    Dtype,
    Json,
    Quiet,
    Static,
    TargetModel,
    TargetWeights,
    Uri,
    Voice,
    live_table,
    load,
    load_engine,
    prep_app,
    print_json,
    print_table,
    progress_bar,
    quiet_libraries,
    reporting,
    sampling,
    texts_of,
)
from hetspec.errors import InvalidInput

__all__ = ["app", "main", "main_prep", "prep_app"]

# Options that have a flag, and what it is called where that is not their name.
FLAGS = {
    **dict.fromkeys(
        ("algorithm", "slrs_form", "prior", "verify", "num_draft_tokens", "max_new_tokens", "seed")
    ),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "generation_config")),
    **dict.fromkeys(("draft_temperature", "draft_top_k", "draft_top_p", "draft_window")),
    "do_sample": "temperature",
    "stop_strings": "stop",
    "drafter_inputs": "draft-prompt",
}
# Arguments of `Engine.decoder` that a command line cannot give.
PYTHON_ONLY = frozenset(
    (
        *("generator", "rng", "streamer", "joint", "inputs", "logits_processor", "stopping_criteria"),
        "prefix_allowed_tokens_fn",
    )
)

app = typer.Typer(
    name="hetspec",
    help="Generate losslessly with a prepared pair.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of `hetspec`."""
    quiet_libraries()
    app()


def main_prep() -> None:
    """Entry point of `hetspec-prep`."""
    quiet_libraries()
    prep_app()


@app.command("generate")
@reporting
def generate(
    pair: Annotated[list[str], typer.Option(help="Directory, run id, runs:/… or 'TARGET DRAFTER'.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into each model's chat template.")
    ] = False,
    algorithm: Annotated[str, typer.Option(help="auto, slem, slrs, tli, rdk or none.")] = "auto",
    slrs_form: Annotated[
        str,
        typer.Option(
            help="lookahead (4d), first (4b), bytes (4c, for drafters that write bytes), enumerated (4a, tiny "
            "vocabularies only); auto: bytes where it can be had, else lookahead."
        ),
    ] = "auto",
    prior: Annotated[str, typer.Option(help="Which kernel rdk uses; auto: the best held out.")] = "auto",
    verify: Annotated[
        str, typer.Option(help="block or token verification; default: block, where every option allows it.")
    ] = "",
    full_head: Annotated[
        bool, typer.Option("--full-head", help="Do not use the pair's pruned head.")
    ] = False,
    draft_weights: DraftWeights = "auto",
    target_weights: TargetWeights = "auto",
    static: Static = False,
    num_draft_tokens: Annotated[str, typer.Option(help="Draft length, or auto.")] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(help="0 decodes greedily. Default: 0, or what --generation-config says."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: 128, or what --generation-config says.")
    ] = None,
    draft_temperature: Annotated[
        float | None, typer.Option(help="The drafter's; default: the target's.")
    ] = None,
    draft_top_k: Annotated[int, typer.Option(min=0)] = 0,
    draft_top_p: Annotated[float, typer.Option()] = 1.0,
    draft_window: Annotated[int, typer.Option(min=512, help="Tokens the drafter sees at most.")] = 2048,
    generation_config: Annotated[
        Path | None, typer.Option(help="A generation_config.json or its directory; default: the target's.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other generation option as name=JSON, e.g. repetition_penalty=1.2; repeatable."
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the generation; repeatable.")
    ] = None,
    draft_prompt: Annotated[str | None, typer.Option(help="Another prompt for the drafter.")] = None,
    target: TargetModel = "",
    drafter: DrafterModel = "",
    device: Annotated[
        str, typer.Option(help="The target's device: cpu, cuda:N, or auto (over all GPUs).")
    ] = "cpu",
    draft_device: Annotated[str, typer.Option(help="The drafter's; default: the target's.")] = "",
    dtype: Dtype = "bfloat16",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text from the target, losslessly; new text on stdout as it comes."""
    text = _prompt(prompt, prompt_file)
    draft_length = _draft_length(num_draft_tokens)
    say = Voice(as_json or quiet)
    artifact, _, _ = load(pair, tracking_uri, prefer="kernel-")
    engine = load_engine(
        artifact,
        target=target,
        drafter=drafter,
        with_drafter=algorithm != "none",
        device=device,
        draft_device=draft_device,
        dtype=dtype,
        full_head=full_head,
        draft_weights=draft_weights,
        target_weights=target_weights,
        static=static,
        say=say,
    )
    inputs: Any = [{"role": "user", "content": text}] if chat else text
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "slrs_form": slrs_form,
        "prior": prior,
        "verify": verify,
        "num_draft_tokens": draft_length,
        "seed": seed,
        "draft_temperature": draft_temperature,
        "draft_top_k": draft_top_k,
        "draft_top_p": draft_top_p,
        "draft_window": draft_window,
        **_named_options(option or []),
    }
    told = generation_config is not None  # then what no flag says is left to it
    if told:
        options["generation_config"] = generation_config
    if max_new_tokens is not None or not (told or "max_length" in options):
        options["max_new_tokens"] = max_new_tokens or 128
    if temperature is not None or not told:
        options |= sampling(temperature or 0.0, top_k or 0, 1.0 if top_p is None else top_p, min_p or 0.0)
    else:
        given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        options |= {name: value for name, value in given.items() if value is not None}
    if stop:
        options["stop_strings"] = stop
    if draft_prompt is not None:
        options["drafter_inputs"] = [{"role": "user", "content": draft_prompt}] if chat else draft_prompt
    if as_json:
        out = engine.generate(inputs, **options)
        print_json(
            {"ids": out.new_ids, "text": out.text, "algorithm": out.algorithm, "stats": out.stats.as_dict()}
        )
        return
    stats = None
    for chunk in engine.stream(inputs, **options):
        print(chunk.text, end="", flush=True)
        stats = chunk.stats
    print()
    if stats is not None:
        say(
            f"{stats.new_tokens} tokens, {stats.tokens_per_target_pass:.2f} per target pass, "
            f"{100 * stats.acceptance_rate:.0f} % of the judged candidates accepted, "
            f"{stats.tokens_per_second:.1f} tokens/s"
        )
        if stats.choice:
            say(f"auto picked {stats.choice}")


app.command("bench")(bench)


@app.command("audit")
@reporting
def audit(
    pair: Annotated[
        list[str], typer.Argument(metavar="PAIR", help="Directory, run id, runs:/… or TARGET DRAFTER.")
    ],
    prompts: Annotated[str, typer.Option(help="humaneval, passages or a file.")] = "humaneval",
    texts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of every text.")] = 32,
    samples: Annotated[int, typer.Option(min=0, help="First steps drawn from each of two prompts.")] = 2000,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampled parts.")] = 1.0,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft length.")] = 5,
    algorithms: Annotated[str, typer.Option(help="With commas.")] = "slem,tli,slrs",
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    target: TargetModel = "",
    drafter: DrafterModel = "",
    dtype: Dtype = "float32",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check on your own pair that the output has the target's law. Exit code 1 if something speaks against it."""
    silent = as_json or quiet
    say = Voice(silent)
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    collection = texts_of(prompts)
    artifact, _, _ = load(pair, tracking_uri, prefer="kernel-")
    engine = load_engine(artifact, target=target, drafter=drafter, dtype=dtype, say=say)
    from hetspec.runtime import audit as audits

    texts = min(texts, len(collection))
    chosen = [collection[i * len(collection) // texts][-2000:] for i in range(texts)]
    with progress_bar(len(chosen) * len(names), "greedy texts", silent=silent) as progress:
        greedy = audits.audit_greedy(
            engine,
            chosen,
            names,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            progress=progress,
        )
    first, scored = [], []
    open_ended = audits.least_certain(engine, chosen, 2, temperature) if samples else []
    for name in names:
        for number in open_ended:
            prompt = chosen[number]
            say(f"first tokens of {name}, prompt {number + 1}")
            first.append(
                audits.audit_first_token(
                    engine,
                    prompt,
                    number,
                    name,
                    samples=samples,
                    temperature=temperature,
                    num_draft_tokens=min(2, num_draft_tokens),
                    seed=seed,
                )
            )
        with progress_bar(len(chosen), f"texts of {name}", silent=silent) as progress:
            scored.append(
                audits.audit_text(
                    engine,
                    chosen,
                    name,
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    num_draft_tokens=num_draft_tokens,
                    seed=seed,
                    progress=progress,
                )
            )
    verdict = audits.verdict(greedy, first, scored)
    if as_json:
        law = {"first_token": [dataclasses.asdict(f) for f in first], "texts": scored}
        print_json(
            {
                "verdict": verdict,
                "target": artifact.target.name,
                "drafter": artifact.drafter.name,
                "dtype": dtype,
                "temperature": temperature,
                "greedy": greedy,
                "law": law,
            }
        )
    elif quiet:
        print(verdict)
    else:
        _show_audit(verdict, greedy, first, scored)
    if verdict != "lossless":
        raise typer.Exit(1)


@app.command("demo")
@reporting
def demo(
    target: Annotated[str, typer.Option(help="The target's model.")] = "",
    drafter: Annotated[str, typer.Option(help="The drafter's model.")] = "",
    big: Annotated[
        bool, typer.Option("--big", help="Qwen2.5-Coder-0.5B ← SmolLM2-135M (570 MB to fetch).")
    ] = False,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft length.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 40,
    tracking_uri: Uri = "",
    as_json: Json = False,
) -> None:
    """Build a real pair, store it, and generate the same text with and without the drafter."""
    from hetspec.demo import HEADERS, run_demo

    usual = ("qwen2.5-coder-0.5b", "smollm2-135m") if big else ("smollm2-135m", "tiny-bpe")
    with live_table(HEADERS, silent=as_json) as show:
        record = run_demo(
            target or usual[0],
            drafter or usual[1],
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            uri=tracking_uri or None,
            say=Voice(as_json),
            out=(lambda _: None) if as_json else print,
            show=show,
        )
    if as_json:
        print_json(record)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise InvalidInput("give either --prompt or --prompt-file.")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{prompt_file} is not UTF-8 text.", "Convert it first.") from None
    assert prompt is not None
    if not prompt:
        raise InvalidInput("the prompt is empty.", "Give at least one character.")
    return prompt


def _named_options(pairs: list[str]) -> dict[str, Any]:
    """`name=JSON` as fields of a GenerationConfig; what is not JSON is text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found or not name.isidentifier():
            raise InvalidInput(f"--option is {pair!r}, expected name=value.")
        if name in FLAGS:
            flag = (FLAGS[name] or name).replace("_", "-")
            raise InvalidInput(f"--option {name} has a flag of its own.", f"Use --{flag}.")
        if name in PYTHON_ONLY:
            raise InvalidInput(f"--option {name} can only be given in Python.", "Use hetspec.generate.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _draft_length(value: str) -> int | str:
    if value == "auto":
        return value
    if value.isdecimal():
        return int(value)
    raise InvalidInput(f"--num-draft-tokens is {value!r}, expected auto or a whole number.")


def _show_audit(verdict: str, greedy: dict[str, Any], first: list[Any], scored: list[dict[str, Any]]) -> None:
    rows = [
        [
            "greedy texts equal to transformers'",
            f"{greedy['identical']} of {greedy['texts']}",
            f"{greedy['near_ties']} differ at a near-tie, {greedy['different']} otherwise",
        ]
    ]
    rows += [
        [
            f"first token, {f.algorithm}, prompt {f.prompt + 1}",
            f"χ² {f.statistic:.1f} / {f.degrees}",
            f"p = {f.p_value:.3f}",
        ]
        for f in first
    ]
    rows += [
        [
            f"text, {t['algorithm']} ({t['tokens']} tokens)",
            f"surprise {t['mean_nll']:.3f}, entropy {t['mean_entropy']:.3f}: z = {t['z']:+.2f}",
            f"ranks p = {t['rank_p_value']:.3f}",
        ]
        for t in scored
    ]
    print_table(["check", "", ""], rows)
    for m in greedy["mismatches"][:5]:
        kind = "near-tie" if m["near_tie"] else "DIFFERENT"
        gap = "where one text ends" if m["gap"] is None else f"gap {m['gap']:.4g}"
        print(f"{kind}: prompt {m['prompt'] + 1}, {m['algorithm']}, token {m['position']}, {gap}")
    print(f"verdict: {verdict}")
