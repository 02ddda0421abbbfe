"""`hetspec bench`: speed on the user's own machine, side by side with transformers' own decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hetspec.console import (
    DrafterModel,
    DraftWeights,
    Dtype,
    Json,
    Quiet,
    TargetModel,
    TargetWeights,
    Uri,
    Voice,
    load,
    load_engine,
    print_json,
    print_table,
    progress_bar,
    reporting,
    texts_of,
)
from hetspec.errors import InvalidInput

DEFAULT = "none,slem:3,slem:5,tli:3,slrs:3,slrs:5,auto,hf-slem:3,hf-slem:5,hf-slem:8,hf-slem:default"
DEFAULT_SAMPLED = "none,slem:3,tli:3,tli:5,slrs:3,slrs:5,auto,hf-tli:3,hf-tli:5"


@reporting
def bench(
    pair: Annotated[list[str], typer.Option(help="Directory, run id, runs:/… or 'TARGET DRAFTER'.")],
    prompts: Annotated[
        str,
        typer.Option(help="With commas: code, prose, chat, long, longest (2,000, 8,000 tokens), files."),
    ] = "code,prose,chat",
    algorithms: Annotated[
        str,
        typer.Option(
            help="Contestants with commas: KIND[:LENGTH][:block|token], KIND one of none, slem, tli, rdk, slrs, auto, "
            "hf-plain, hf-slem (transformers' assisted generation, greedy; LENGTH may be default), hf-tli (its "
            "token-level sampling, repaired: as shipped it is not lossless). Default: a broad field."
        ),
    ] = "",
    texts: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of every text.")] = 64,
    num_draft_tokens: Annotated[str, typer.Option(help="Where a contestant names none; or auto.")] = "5",
    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0,
    screen: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Leave out what is slower than this share of the fastest on the first prompt."
        ),
    ] = 0.0,
    resume: Annotated[
        Path | None, typer.Option(help="A file of finished runs, read first and added to.")
    ] = None,
    full_head: Annotated[
        bool, typer.Option("--full-head", help="Do not use the pair's pruned head.")
    ] = False,
    draft_weights: DraftWeights = "auto",
    target_weights: TargetWeights = "auto",
    seed: Annotated[int, typer.Option(help="Of the first prompt.")] = 0,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: processor time, for a machine that runs other programs, too.")
    ] = "wall",
    target: TargetModel = "",
    drafter: DrafterModel = "",
    dtype: Dtype = "bfloat16",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the speed of algorithms, transformers' own among them, alternating in one process."""
    from hetspec.prompts import KINDS, prompts_of
    from hetspec.runtime.race import CLOCKS, PLAIN, Entrant, Race, machine, run_race, summary

    if clock not in CLOCKS:
        raise InvalidInput(f"unknown clock {clock!r}.", f"Choose {' or '.join(CLOCKS)}.")
    silent = as_json or quiet
    say = Voice(silent)
    names = [
        name.strip() for name in (algorithms or (DEFAULT_SAMPLED if temperature else DEFAULT)).split(",")
    ]
    contestants = [Entrant.parse(name, num_draft_tokens) for name in names if name]
    if PLAIN not in names:
        contestants.insert(0, Entrant.parse(PLAIN, "0"))
    if len({c.name for c in contestants}) < len(contestants):
        raise InvalidInput("a contestant is named twice.", "Name each once.")
    collections: dict[str, list[Any]] = {}
    for kind in (word.strip() for word in prompts.split(",")):
        found = prompts_of(kind, texts) if kind in KINDS else texts_of(kind)[:texts]
        if not found:
            raise InvalidInput(f"there are no texts in {kind!r}.", f"Give {', '.join(KINDS)} or a file.")
        collections[kind] = found
    artifact, _, _ = load(pair, tracking_uri, prefer="kernel-")
    engine = load_engine(
        artifact,
        target=target,
        drafter=drafter,
        dtype=dtype,
        full_head=full_head,
        draft_weights=draft_weights,
        target_weights=target_weights,
        say=say,
    )
    setting = {
        "target": artifact.target.name,
        "drafter": artifact.drafter.name,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "clock": clock,
        "dtype": dtype,
        "draft_weights": draft_weights,
        "target_weights": target_weights,
        "head": "whole" if full_head or artifact.head is None else f"{len(artifact.head.kept)} rows",
    }
    race = Race(collections, tuple(contestants), temperature, max_new_tokens, seed, clock, setting)
    total = len(contestants) * sum(map(len, collections.values()))
    with progress_bar(total, "runs", silent=silent) as progress:
        results = run_race(engine, race, screen=screen, resume=resume, progress=progress)
    rows = summary(race, results)
    runs = _log(tracking_uri, artifact, {**setting, **machine()}, rows)
    if as_json:
        identical = None if temperature else all(r["identical"] == r["prompts"] for r in rows)
        print_json(
            {
                "contestants": rows,
                "machine": machine(),
                "identical_greedy": identical,
                "run_ids": runs,
                **setting,
            }
        )
        return
    for collection in collections:
        print(f"{collection}, temperature {temperature:g}")
        print_table(
            ["contestant", "tokens/s", "over plain", "quartiles", "per pass", "same text", "in the models"],
            [_cells(r) for r in rows if r["collection"] == collection],
        )
    for run in runs:
        say(f"MLflow run  {run}")


def _cells(row: dict[str, Any]) -> list[str]:
    ratio, per_pass, share = row["ratio_to_plain"], row["tokens_per_target_pass"], row["efficiency"]
    return [
        row["name"],
        f"{row['tokens_per_second']:.2f}",
        f"{ratio['median']:.2f}",
        f"{ratio['low']:.2f}-{ratio['high']:.2f}",
        "" if per_pass is None else f"{per_pass:.2f}",
        "" if row["identical"] is None else f"{row['identical']} of {row['prompts']}",
        "" if share is None else f"{100 * share:.0f} %",
    ]


def _log(uri: str, pair: Any, setting: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """One comparison for each kind of prompts, with its plots; the run ids."""
    from hetspec.prep.report import speed_plots
    from hetspec.tracking import Store

    store = Store(uri or None)
    runs = []
    for collection in dict.fromkeys(r["collection"] for r in rows):
        flat = [
            {
                **r,
                "ratio_to_plain": r["ratio_to_plain"]["median"],
                "acceptance_measured": r["acceptance_rate"],
            }
            for r in rows
            if r["collection"] == collection
        ]
        title = f"{collection}, temperature {setting['temperature']:g}"
        plots = speed_plots(pair, title, [r for r in rows if r["collection"] == collection])
        runs.append(store.log_comparison({**setting, "prompts": collection}, flat, plots))
    return runs
