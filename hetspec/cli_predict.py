"""`hetspec-prep predict` and `recommend`: what a pair gains, and which drafter gains most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetspec.console import (
    DrafterModel,
    Dtype,
    Json,
    PairName,
    Quiet,
    TargetModel,
    Uri,
    Voice,
    load,
    load_engine,
    prep_app,
    print_json,
    print_table,
    progress_bar,
    reporting,
    texts_of,
)
from hetspec.errors import InvalidInput

if TYPE_CHECKING:
    from hetspec.prep.predict import Costs, Prediction, ScoredTexts
    from hetspec.runtime.bench import Contestant
    from hetspec.runtime.engine import Engine

Prompts = Annotated[
    str,
    typer.Option(
        help="humaneval, passages or a file: the tenth that no other command reads (under 100 texts: all)."
    ),
]
Texts = Annotated[int, typer.Option(min=1, help="Texts the target writes.")]
NewTokens = Annotated[int, typer.Option(min=8, help="Tokens of each.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy.")]
Algorithms = Annotated[
    str, typer.Option(help="With commas: slem, tli, slrs, rdk, rdk:PRIOR; default: all there are.")
]


@prep_app.command("predict")
@reporting
def predict(
    pair: PairName,
    prompts: Prompts = "humaneval",
    texts: Texts = 8,
    new_tokens: NewTokens = 64,
    temperature: Temperature = 1.0,
    algorithms: Algorithms = "",
    check: Annotated[
        int, typer.Option(min=0, help="Also generate after this many other prompts and compare; 0: do not.")
    ] = 0,
    check_length: Annotated[int, typer.Option(min=1, max=8, help="Draft length of that check.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    target: TargetModel = "",
    drafter: DrafterModel = "",
    dtype: Dtype = "bfloat16",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict tokens per target pass and speed-up of each algorithm, at every draft length."""
    silent = as_json or quiet
    say = Voice(silent)
    from hetspec.tracking import Store

    names, collection = _algorithm_names(algorithms), texts_of(prompts)
    if check:
        _held_out_prompts(collection, texts, others=check)  # fails at once if there are too few
    store = Store(tracking_uri or None)
    artifact, _, _ = load(pair, tracking_uri, prefer="kernel-")
    engine = load_engine(artifact, target=target, drafter=drafter, dtype=dtype, say=say)
    scored = _held_out_texts(engine, collection, texts, new_tokens, temperature, seed, silent=silent)
    costs, found = _predict(engine, scored, names, silent=silent)
    record = _record(engine, costs, found)
    measured = {}
    if check:
        others = _held_out_prompts(collection, texts, others=check)
        measured = _measured(engine, found, others, check_length, temperature, new_tokens, silent=silent)
        record["measured"] = {
            "draft_length": check_length,
            "tokens_per_pass": {name: asdict(i) for name, i in measured.items()},
        }
    setting = _setting(artifact.target.name, prompts, temperature, texts, new_tokens, dtype) | {
        "drafter": artifact.drafter.name
    }
    from hetspec.prep.report import measured_plot, prediction_plot

    run_id = store.log_nested(
        f"prediction: {artifact.target.name} ← {artifact.drafter.name}, {prompts}, temperature {temperature}",
        setting,
        _children(found, costs, artifact.drafter.name),
        kind="prediction",
        tables={"tables/prediction.json": record},
        figures={
            "plots/prediction.png": prediction_plot(artifact, found),
            **(
                {"plots/predicted_measured.png": measured_plot(artifact, found, measured, check_length)}
                if measured
                else {}
            ),
        },
    )
    if as_json:
        print_json({"run_id": run_id, **setting, **record})
    elif quiet:
        print(run_id)
    else:
        _show(found, costs)
        if measured:
            _show_measured(found, measured, check_length)
        print(f"MLflow run  {run_id}")


@prep_app.command("recommend")
@reporting
def recommend(
    target: Annotated[str, typer.Argument(help="The target's model.")],
    drafters: Annotated[list[str], typer.Argument(metavar="DRAFTER…", help="Drafters to be ranked.")],
    prompts: Prompts = "humaneval",
    texts: Texts = 4,
    new_tokens: NewTokens = 48,
    temperature: Temperature = 1.0,
    algorithms: Algorithms = "",
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    dtype: Dtype = "bfloat16",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rank drafters for a target by predicted speed-up; plain decoding is among the ranks.

    Pairs that are not stored yet are built, with a co-segmentation kernel; a stored pair with a pruned head is
    tried with and without it.
    """
    silent = as_json or quiet
    say = Voice(silent)
    from hetspec.tracking import Child, Store

    names, collection = _algorithm_names(algorithms), texts_of(prompts)
    store = Store(tracking_uri or None)
    rows: list[dict[str, Any]] = [
        {
            "drafter": "",
            "head": "",
            "algorithm": "none",
            "draft_length": 0,
            "speedup": 1.0,
            "low": 1.0,
            "high": 1.0,
        }
    ]
    children: list[Child] = []
    scored: ScoredTexts | None = None
    costs_by: dict[str, Any] = {}
    for drafter in dict.fromkeys(drafters):
        artifact = _pair_of(target, drafter, store, say)
        for full in (True, False) if artifact.head is not None else (True,):
            engine = load_engine(
                artifact, target=target, drafter=drafter, dtype=dtype, full_head=full, say=say
            )
            if scored is None:  # the target's texts are the same for all drafters
                scored = _held_out_texts(
                    engine, collection, texts, new_tokens, temperature, seed, silent=silent
                )
            costs, found = _predict(engine, scored, names, silent=silent)
            del engine  # before the next one is loaded
            head = "" if full or artifact.head is None else f"{len(artifact.head.kept)} rows"
            name = f"{drafter} ({head})" if head else drafter
            costs_by[name] = costs.c
            children += _children(found, costs, name, prefix=f"{name}: ")
            rows += [_rank_row(drafter, head, prediction) for prediction in found]
    rows.sort(key=lambda row: -row["speedup"])
    best = rows[0]
    setting = _setting(target, prompts, temperature, texts, new_tokens, dtype)
    record = {"ranking": rows, "drafter_cost_ratio": costs_by}
    run_id = store.log_nested(
        f"recommendation for {target}, {prompts}, temperature {temperature}",
        setting,
        children,
        kind="recommendation",
        tables={"tables/ranking.json": record},
    )
    if as_json:
        print_json({"run_id": run_id, **setting, "best": best, **record})
        return
    if quiet:
        print(best["drafter"] or "none")
        return
    print_table(
        ["drafter", "head", "algorithm", "length", "tokens/pass", "predicted ×", "95 %"],
        [
            [
                row["drafter"] or "(no drafter)",
                row["head"],
                row["algorithm"],
                str(row["draft_length"]),
                f"{row.get('tokens_per_target_pass', 1.0):.2f}",
                f"{row['speedup']:.2f}",
                f"{row['low']:.2f}-{row['high']:.2f}",
            ]
            for row in rows
        ],
        title=f"drafters for {target}, {prompts}, temperature {temperature}",
    )
    print(f"MLflow run  {run_id}")


# -- parts -------------------------------------------------------------------------------------------------------


def _algorithm_names(listed: str) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    known = ("slem", "tli", "slrs", "rdk")
    for name in names:
        if name.partition(":")[0] not in known:
            raise InvalidInput(
                f"no algorithm {name!r} to predict.", f"Choose of {', '.join(known)}, rdk:PRIOR."
            )
    if listed and not names:
        raise InvalidInput("no algorithm given.", "For instance --algorithms slem,tli,slrs.")
    return names


def _contestant(name: str) -> Contestant:
    """An algorithm by its name, "rdk:PRIOR" with a kernel of its own."""
    from hetspec.runtime.bench import Contestant

    algorithm, _, prior = name.partition(":")
    return Contestant(name, {"algorithm": algorithm, **({"prior": prior} if prior else {})})


def _held_out_texts(
    engine: Engine,
    collection: Sequence[str],
    count: int,
    new_tokens: int,
    temperature: float,
    seed: int,
    *,
    silent: bool,
) -> ScoredTexts:
    """Texts the target writes after prompts that calibrate never sees."""
    from hetspec.prep.documents import sample_documents
    from hetspec.prep.predict import score

    picked = _held_out_prompts(collection, count)
    with progress_bar(len(picked), "the target writes", silent=silent) as progress:
        documents = sample_documents(
            picked,
            engine.target,
            max_new_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            progress=progress,
        )
    if not documents:
        raise InvalidInput("the target ends every text at once.", "Give other prompts.")
    return score(engine, documents, temperature)


def _held_out_prompts(collection: Sequence[str], count: int, *, others: int = 0) -> list[str]:
    """An even choice of the prompts that calibrate never sees; with `others` that many different ones."""
    from hetspec.prep.texts import for_prediction

    held = [text[-2000:] for text in for_prediction(collection)]
    count = min(count, len(held))
    picked = [i * len(held) // count for i in range(count)]
    if not others:
        return [held[i] for i in picked]
    rest = [i for i in range(len(held)) if i not in picked]
    if not rest:
        raise InvalidInput(
            f"all {len(held)} prompts are used for predicting.", "Lower --texts or give more prompts."
        )
    others = min(others, len(rest))
    return [held[rest[i * len(rest) // others]] for i in range(others)]


def _measured(
    engine: Engine,
    found: Sequence[Prediction],
    prompts: Sequence[str],
    draft_length: int,
    temperature: float,
    new_tokens: int,
    *,
    silent: bool,
) -> dict[str, Any]:
    """Tokens per pass by algorithm, measured."""
    from hetspec.prep.predict import measure

    measured = {}
    for p in found:
        with progress_bar(len(prompts), f"generating with {p.name}", silent=silent) as progress:
            measured[p.name] = measure(
                engine,
                _contestant(p.name),
                prompts,
                draft_length=draft_length,
                temperature=temperature,
                max_new_tokens=new_tokens,
                seed=1000,
                progress=progress,
            )
    return measured


def _predict(
    engine: Engine, scored: ScoredTexts, names: Sequence[str], *, silent: bool
) -> tuple[Costs, list[Prediction]]:
    from hetspec.prep.predict import measure_costs, probe
    from hetspec.prep.predict import predict as predicted

    assert engine.pair is not None
    names = names or ["slem", "tli", "slrs", *(["rdk"] if engine.pair.kernels else [])]
    costs = measure_costs(engine)
    found = []
    for name in names:
        total = sum(len(d.ids) - d.start for d in scored.documents)
        with progress_bar(total, f"walking with {name}", silent=silent) as progress:
            seen = probe(engine, _contestant(name), scored, progress=progress)
        found.append(predicted(name, seen, costs))
    return costs, found


def _setting(
    target: str, prompts: str, temperature: float, texts: int, new_tokens: int, dtype: str
) -> dict[str, Any]:
    return {
        "target": target,
        "prompts": prompts,
        "temperature": temperature,
        "texts": texts,
        "new_tokens": new_tokens,
        "dtype": dtype,
    }


def _record(engine: Engine, costs: Costs, found: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "drafter_cost_ratio": costs.c,
        "target_seconds": list(costs.target_seconds),
        "drafter_seconds": costs.drafter_seconds,
        "predictions": [prediction.as_dict() for prediction in found],
    }


def _children(found: Sequence[Prediction], costs: Costs, drafter: str, prefix: str = "") -> list[Any]:
    from hetspec.tracking import Child

    return [
        Child(
            f"{prefix}{p.name}",
            {"contestant": p.name, "drafter": drafter},
            {
                "predict/best_speedup_ratio": p.best_speedup,
                "predict/best_draft_length": p.best_length,
                "predict/drafter_cost_ratio": costs.c,
                "predict/drafter_forwards_per_candidate": p.forwards_per_candidate,
            },
            {
                "predict/tokens_per_target_pass": {n: i.mean for n, i in p.tokens_per_pass.items()},
                "predict/speedup_ratio": {n: i.mean for n, i in p.speedup.items()},
            },
        )
        for p in found
    ]


def _rank_row(drafter: str, head: str, p: Prediction) -> dict[str, Any]:
    n = p.best_length or 1
    at = p.speedup[n]
    return {
        "drafter": drafter,
        "head": head,
        "algorithm": p.name,
        "draft_length": n,
        "tokens_per_target_pass": p.tokens_per_pass[n].mean,
        "speedup": at.mean,
        "low": at.low,
        "high": at.high,
    }


def _pair_of(target: str, drafter: str, store: Any, say: Voice) -> Any:
    """The newest stored pair of two names with a kernel; built if there is none."""
    from hetspec.artifact import PairArtifact
    from hetspec.errors import ArtifactNotFound
    from hetspec.prep.build import add_cosegment, build_pair, corpus, prepare, summary
    from hetspec.prep.texts import for_making
    from hetspec.sources import load_tokenizer, named_texts
    from hetspec.tracking import find_pair

    try:
        found = find_pair(target, drafter, uri=store.uri, part="kernel-")
        return PairArtifact.from_pretrained(found if isinstance(found, Path) else found.artifact_dir)
    except ArtifactNotFound:
        pass
    say(f"building {target} ← {drafter}")
    sides = [prepare(load_tokenizer(name)) for name in (target, drafter)]
    texts = for_making(named_texts("stdlib"))
    artifact = build_pair(sides[0], sides[1], corpus(texts), "stdlib", say)
    artifact, _ = add_cosegment(artifact, sides[0], sides[1], corpus(texts, 8_000_000), ["stdlib"])
    store.log_pair(artifact, stage="build-affinity", params={"texts": "stdlib"}, note=summary(artifact))
    return artifact


def _show(found: Sequence[Prediction], costs: Costs) -> None:
    print_table(
        [
            "algorithm",
            "length",
            "tokens/pass",
            "95 %",
            "predicted ×",
            "95 %",
            "forwards",
            "acceptance by place",
        ],
        [
            [
                p.name,
                str(p.best_length),
                f"{p.tokens_per_pass[p.best_length or 1].mean:.2f}",
                f"{p.tokens_per_pass[p.best_length or 1].low:.2f}-{p.tokens_per_pass[p.best_length or 1].high:.2f}",
                f"{p.best_speedup:.2f}",
                f"{p.speedup[p.best_length or 1].low:.2f}-{p.speedup[p.best_length or 1].high:.2f}",
                f"{p.forwards_per_candidate:.2f}",
                " ".join(f"{a:.2f}" for a in p.acceptance_by_position),
            ]
            for p in found
        ],
        title=f"at the best draft length (a drafter forward is {costs.c:.2f} target forwards)",
    )


def _show_measured(found: Sequence[Prediction], measured: Mapping[str, Any], length: int) -> None:
    rows = []
    for p in found:
        expected, seen = p.tokens_per_pass[length], measured[p.name]
        rows.append(
            [
                p.name,
                f"{expected.mean:.2f} ({expected.low:.2f}-{expected.high:.2f})",
                f"{seen.mean:.2f} ({seen.low:.2f}-{seen.high:.2f})",
                f"{100 * (expected.mean / seen.mean - 1):+.0f} %",
            ]
        )
    print_table(
        ["algorithm", "predicted", "measured", "difference"],
        rows,
        title=f"tokens per target pass at draft length {length}, other prompts",
    )
