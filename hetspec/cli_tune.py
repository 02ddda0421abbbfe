"""`hetspec-prep calibrate`, `build-affinity` and `prune`: parts added to a stored pair.

Each writes a new artifact and a new run that extends the old one; the old ones stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetspec.cli_prep import show_pair
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
    from hetspec.artifact import PairArtifact

Output = Annotated[str, typer.Option(help="Also save the artifact to this new directory.")]
LAWS_FILE = "calibration/target_laws.safetensors"


@prep_app.command("calibrate")
@reporting
def calibrate(
    pair: PairName,
    prompts: Annotated[
        list[str] | None, typer.Option(help="humaneval, passages, stdlib or a file; may be repeated.")
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Run on what the target itself writes after the prompts.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=64, help="Target tokens in all.")] = 20_000,
    new_tokens: Annotated[int, typer.Option(min=1, help="With --generate: tokens after each prompt.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of both laws.")] = 1.0,
    window: Annotated[int, typer.Option(min=8, help="Tokens of a text read at once.")] = 512,
    fit_contexts: Annotated[int, typer.Option(min=1, help="Contexts kept to fit weights on.")] = 2000,
    held_out_contexts: Annotated[int, typer.Option(min=1, help="Contexts kept to test them.")] = 1000,
    no_drafter: Annotated[bool, typer.Option("--no-drafter", help="Run the target alone.")] = False,
    seed: Annotated[int, typer.Option(help="Of --generate.")] = 0,
    target: TargetModel = "",
    drafter: DrafterModel = "",
    dtype: Dtype = "bfloat16",
    output: Output = "",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run both models over text and store what they say; two of ten texts are held out for testing.

    Interrupted, it goes on from its last shard when it is called again with the same arguments.
    """
    silent = as_json or quiet
    say = Voice(silent)
    old, parent, store = _open(pair, tracking_uri, output)
    names = prompts or ["humaneval"]
    collections = [texts_of(name) for name in names]
    engine = load_engine(
        old,
        target=target,
        drafter=drafter,
        with_drafter=not no_drafter,
        dtype=dtype,
        full_head=True,
        target_weights="own",  # long reads, which no other layout is for
        say=say,
    )
    from hetspec.prep.build import recalibrated
    from hetspec.prep.calibrate import CalibrationSettings, discard, save_laws, work_key
    from hetspec.prep.calibrate import calibrate as run
    from hetspec.prep.documents import read_documents, sample_documents
    from hetspec.prep.report import calibration_plots
    from hetspec.prep.texts import for_calibration

    texts = [text for collection in collections for text in for_calibration(collection)]
    models = f"{_model_name(old.target, target)} ← {'' if no_drafter else _model_name(old.drafter, drafter)} {dtype}"
    settings = CalibrationSettings(temperature, fit=fit_contexts, held_out=held_out_contexts)
    if generate:
        count = max(5, min(len(texts), -(-tokens // new_tokens)))
        texts = [texts[i * len(texts) // count] for i in range(count)] if len(texts) > count else texts
        kept = (
            _work(store)
            / f"generated-{_generation_key(models, old, texts, new_tokens, temperature, seed)}.jsonl"
        )
        kept.parent.mkdir(parents=True, exist_ok=True)
        with progress_bar(len(texts), "the target writes", silent=silent) as progress:
            documents = sample_documents(
                texts,
                engine.target,
                max_new_tokens=new_tokens,
                temperature=temperature,
                seed=seed,
                store=kept,
                progress=progress,
            )
    else:
        documents = read_documents(texts, engine.target, window=window, limit=tokens)
    work = _work(store) / f"calibrate-{work_key(old, documents, settings, models)}"
    total = sum(len(d.ids) - d.start for d in documents)
    with progress_bar(total, "calibrating", silent=silent) as progress:
        result = run(
            old,
            engine.target,
            None if no_drafter else engine.drafter,
            documents,
            settings,
            work=work,
            progress=progress,
        )
    figures = {**result.figures, "text": " ".join(names)}
    new = recalibrated(
        old,
        result.calibration,
        figures=figures,
        settings={
            "texts": names,
            "source": "generated" if generate else "text",
            "temperature": temperature,
            "tokens": total,
            "seed": seed,
            "models": models,
        },
    )
    laws = save_laws(result.P, work / Path(LAWS_FILE).name)
    run_id, place = _store(
        new,
        store,
        "calibrate",
        {"texts": " ".join(names), "source": "generated" if generate else "text", "temperature": temperature},
        calibration_plots(new),
        parent,
        output,
        files={"calibration": laws},
    )
    discard(work)
    _tell(new, run_id, parent, place, {"calibration": figures}, as_json=as_json, quiet=quiet)
    say(
        f"{figures['tokens_per_second']:.0f} target tokens/s, "
        f"{figures['extra_memory_bytes'] / 1e6:,.0f} MB of memory on top of the models"
    )


@prep_app.command("build-affinity")
@reporting
def build_affinity(
    pair: PairName,
    prior: Annotated[
        str,
        typer.Option(
            help="cosegment, covariance, embedding, mean or mixture; stops, for drafters that write bytes."
        ),
    ] = "cosegment",
    text: Annotated[
        list[str] | None,
        typer.Option(help="For cosegment and stops: stdlib, humaneval, passages or a file; may be repeated."),
    ] = None,
    smoothing: Annotated[
        float, typer.Option(min=0.0, help="For cosegment: pseudo-counts of each token's image.")
    ] = 1.0,
    top: Annotated[int, typer.Option(min=1, help="Entries kept per row.")] = 64,
    fit_rows: Annotated[
        bool, typer.Option("--fit-rows", help="Fit the kernel's entries too (needs a calibration).")
    ] = False,
    target: TargetModel = "",
    output: Output = "",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add an affinity kernel to a pair; with a calibration its weights are fitted and tested on held-out texts."""
    from hetspec.parts import KERNEL_PRIORS
    from hetspec.prep.report import stops_plots

    if prior not in (*KERNEL_PRIORS, "stops"):
        raise InvalidInput(f"unknown prior {prior!r}.", f"Choose one of {', '.join(KERNEL_PRIORS)}, stops.")
    silent = as_json or quiet
    say = Voice(silent)
    names = text or ["stdlib"]
    counted = prior in ("cosegment", "stops")
    texts = _for_making(names) if counted else []
    # What is counted on text needs nothing; the other priors need a calibration.
    old, parent, store = _open(pair, tracking_uri, output, prefer="" if counted else "calibration")
    plots: dict[str, Any] = {}
    if prior == "stops":
        new = _stops(old, texts, names, say, silent=silent)
        params: dict[str, Any] = {"prior": prior, "texts": " ".join(names)}
        run_id, place = _store(new, store, "build-affinity", params, stops_plots(new), parent, output)
        extra = {"stops": new.figures["stops"], "seconds": new.figures["stops"]["seconds"]}
        _tell(new, run_id, parent, place, extra, as_json=as_json, quiet=quiet)
        return
    if prior == "cosegment":
        new, plots = _cosegment(old, texts, names, smoothing, top, say, silent=silent)
    else:
        new = _model_prior(old, prior, top, target, store, parent, say, silent=silent)
    from hetspec.prep.build import fitted
    from hetspec.prep.report import kernel_plots

    if fit_rows or (new.calibration is not None and len(new.calibration.held_out.q)):
        say("fitting the weights")
        new = fitted(new, prior, rows=fit_rows)
    plots |= kernel_plots(new, prior)
    figures = new.figures["affinity"][prior]
    params = {"prior": prior, "top": top}
    if prior == "cosegment":
        params |= {"texts": " ".join(names), "smoothing": smoothing}
    run_id, place = _store(new, store, "build-affinity", params, plots, parent, output)
    extra = {"affinity": {prior: figures}, "seconds": figures["seconds"]}
    _tell(new, run_id, parent, place, extra, as_json=as_json, quiet=quiet)
    if "gain" in figures and not silent:
        _tell_gain(figures)


def _tell_gain(figures: Mapping[str, Any]) -> None:
    interval = f"{figures['gain']:+.4f} ({figures['gain_low']:+.4f} to {figures['gain_high']:+.4f})"
    if figures["theta"] + figures["lam"] > 0:
        print(
            f"held-out gain over TLI {interval}; shipped θ = {figures['theta']:.3f}, λ = {figures['lam']:.3f}"
        )
    else:
        print(f"no gain over TLI on held-out text {interval}; shipping θ = λ = 0")


def _cosegment(
    old: PairArtifact,
    texts: list[str],
    names: list[str],
    smoothing: float,
    top: int,
    say: Voice,
    *,
    silent: bool,
) -> tuple[PairArtifact, dict[str, Any]]:
    from hetspec.prep.build import add_cosegment, prepare
    from hetspec.prep.report import cosegment_plots
    from hetspec.sources import hub_commit, load_tokenizer

    say(f"reading the tokenizers of {old.target.name} and {old.drafter.name}")
    target, drafter = (
        prepare(load_tokenizer(side.name, revision=hub_commit(side.revision)))
        for side in (old.target, old.drafter)
    )
    old.require(target.vocabulary, drafter.vocabulary)
    total = sum(len(part.encode()) for part in texts)
    with progress_bar(total, "counting co-segmentations", silent=silent) as progress:
        new, result = add_cosegment(
            old, target, drafter, texts, names, smoothing=smoothing, top=top, progress=progress
        )
    return new, cosegment_plots(new, result)


def _stops(
    old: PairArtifact, texts: list[str], names: list[str], say: Voice, *, silent: bool
) -> PairArtifact:
    from hetspec.prep.build import add_stops, prepare
    from hetspec.sources import hub_commit, load_tokenizer

    say(f"reading the tokenizer of {old.target.name}")
    target = prepare(load_tokenizer(old.target.name, revision=hub_commit(old.target.revision)))
    old.target.require(target.vocabulary, "target")
    total = sum(len(part.encode()) for part in texts)
    with progress_bar(total, "counting token ends", silent=silent) as progress:
        return add_stops(old, target, texts, names, progress=progress)


def _model_prior(
    old: PairArtifact, prior: str, top: int, target: str, store: Any, parent: str, say: Voice, *, silent: bool
) -> PairArtifact:
    """A pair with a kernel made from a calibration, or from the target's embeddings."""
    import time

    from hetspec.prep.build import add_kernel
    from hetspec.prep.priors import best_covariance, best_embedding, mean_kernel, mixture_kernel
    from hetspec.prep.weights import require_calibration

    started = time.perf_counter()
    knobs: dict[str, float] = {}
    rows = old.target.rows
    if prior == "mean":
        kernel = mean_kernel(old.map, require_calibration(old).mean)
    elif prior == "mixture":
        kernel, knobs = mixture_kernel(old)
    elif prior == "covariance":
        from hetspec.prep.calibrate import load_laws

        require_calibration(old)
        laws = store.inherited_file(parent, LAWS_FILE) if parent else None
        if laws is None:
            raise InvalidInput(
                "the target's laws that calibrate left in MLflow are not there (a pair given by directory has none).",
                "Name the pair by its run id or its two names.",
            )
        say("covariances of the target's probabilities")
        with progress_bar(rows, "covariance", silent=silent) as progress:
            kernel, knobs = best_covariance(old, load_laws(laws, rows), top=top, progress=progress)
    else:
        import torch

        from hetspec.prep.build import prepare
        from hetspec.sources import hub_commit, load_model, load_tokenizer

        name = target or old.target.name
        revision = None if target else hub_commit(old.target.revision)
        say(f"embeddings of {name}")
        old.target.require(prepare(load_tokenizer(name, revision=revision)).vocabulary, "target")
        model = load_model(name, dtype=torch.bfloat16, revision=revision)
        with progress_bar(rows, "embedding neighbours", silent=silent) as progress:
            kernel, knobs = best_embedding(
                old, model.get_input_embeddings().weight, top=top, progress=progress
            )
    return add_kernel(old, kernel, knobs, top=top, seconds=time.perf_counter() - started)


@prep_app.command("prune")
@reporting
def prune(
    pair: PairName,
    size: Annotated[str, typer.Option(help="Rows to keep, a share such as 12.5%, or auto.")] = "auto",
    score: Annotated[
        str, typer.Option(help="overlap, frequency, generated, mean, variance or random.")
    ] = "overlap",
    text: Annotated[
        list[str] | None, typer.Option(help="For frequency: stdlib, humaneval, passages or a file.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of the curve, with commas; default: halving.")] = "",
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Do not load the models.")] = False,
    seed: Annotated[int, typer.Option(help="Of the score random.")] = 0,
    target: TargetModel = "",
    drafter: DrafterModel = "",
    dtype: Dtype = "bfloat16",
    output: Output = "",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep the useful rows of the drafter's LM head; by default as many as predict the most tokens per second."""
    silent = as_json or quiet
    say = Voice(silent)
    old, parent, store = _open(pair, tracking_uri, output, prefer="calibration")
    from hetspec.prep.build import extend
    from hetspec.prep.prune import HeadChooser
    from hetspec.prep.report import prune_plots
    from hetspec.prep.weights import require_contexts

    require_contexts(old)
    texts = _for_making(text) if text else []
    if no_timing and size == "auto":
        raise InvalidInput("auto needs the models' step times.", "Give --size, or leave --no-timing out.")
    engine = None
    if not no_timing:
        engine = load_engine(old, target=target, drafter=drafter, dtype=dtype, full_head=True, say=say)
    chooser = HeadChooser.of(old, score=score, texts=texts, seed=seed, engine=engine)
    wanted = chooser.sizes(sizes, size)
    say(f"measuring {len(wanted)} heads")
    with progress_bar(len(wanted), "heads", silent=silent) as progress:
        curve = chooser.curve(wanted, progress)
    chosen = chooser.pick(wanted, size)
    new = chooser.pair_with(chosen)
    point = chooser.point(chosen)
    whole = curve[-1]
    fraction = None
    if point.step_seconds is not None and whole.step_seconds:
        fraction = point.step_seconds / whole.step_seconds
    figures = {
        **point.as_dict(),
        "rdk_rate": max(point.rdk.values(), default=None),
        "step_fraction": fraction,
        "score": score,
        "curve": [p.as_dict() for p in curve],
    }
    new = extend(
        new,
        stage="prune",
        figures={"prune": figures},
        settings={"size": size, "score": score, "texts": text or [], "seed": seed, "dtype": dtype},
    )
    run_id, place = _store(
        new,
        store,
        "prune",
        {"size": size, "score": score},
        prune_plots(new),
        parent,
        output,
        curves=_prune_curves(curve),
    )
    _tell(new, run_id, parent, place, {"prune": figures}, as_json=as_json, quiet=quiet)
    if not silent:
        _show_curve(curve, point)


def _prune_curves(curve: list[Any]) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for point in curve:
        values = {
            "prune/target_mass_frac": point.target_mass,
            "prune/tli_rate": point.tli,
            "prune/rdk_rate": max(point.rdk.values(), default=None),
            "prune/step_seconds": point.step_seconds,
            "prune/predicted_speedup_ratio": point.speedup,
        }
        for name, value in values.items():
            if value is not None:
                curves.setdefault(name, {})[point.size] = value
    return curves


def _show_curve(curve: list[Any], chosen: Any) -> None:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rows = [
        [
            f"{p.size:,}{' ←' if p.size == chosen.size else ''}",
            f"{100 * p.share:.1f} %",
            f"{100 * p.target_mass:.2f} %",
            f"{p.tli:.3f}",
            cell(max(p.rdk.values(), default=None), ".3f"),
            p.prior or "tli",
            cell(None if p.head_bytes is None else p.head_bytes / 1e6, ".1f"),
            cell(None if p.step_seconds is None else 1e3 * p.step_seconds, ".1f"),
            cell(p.speedup, ".2f"),
            cell(p.draft_length, "d"),
        ]
        for p in curve
    ]
    print_table(
        ["rows", "share", "p(I∩H)", "TLI", "RDK", "use", "MB", "ms/step", "predicted ×", "length"],
        rows,
        title="heads on held-out contexts",
    )


# -- shared ------------------------------------------------------------------------------------------------------


def _for_making(names: list[str]) -> list[str]:
    """Texts that a kernel or a head may be made from: none that it is tested on later."""
    from hetspec.prep.texts import for_making

    found = [part for name in names for part in for_making(texts_of(name))]
    if not found:
        raise InvalidInput(f"there is no text in {' '.join(names)}.", "Give more text.")
    return found


def _open(pair: list[str], uri: str, output: str, prefer: str = "") -> tuple[PairArtifact, str, Any]:
    """The old pair, its run id and the store; before any work, so that faults are told at once."""
    from hetspec.tracking import Store

    if output and Path(output).exists():
        raise InvalidInput(f"{output} exists already; artifacts are immutable.", "Choose a new directory.")
    store = Store(uri or None)
    old, _, parent = load(pair, uri, prefer=prefer)
    return old, parent, store


def _work(store: Any) -> Path:
    """Where unfinished work is kept: beside a local store, else in the working directory."""
    root = store.artifact_root()
    return (Path(root).parent if root else Path.cwd() / "artifacts") / "work"


def _model_name(identity: Any, given: str) -> str:
    """What was loaded for a side, and at which revision."""
    return given or f"{identity.name}@{identity.revision}"


def _generation_key(
    models: str, pair: PairArtifact, texts: list[str], new_tokens: int, temperature: float, seed: int
) -> str:
    import hashlib

    text = repr((models, pair.target.behaviour_sha256, texts, new_tokens, temperature, seed))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _store(
    new: PairArtifact,
    store: Any,
    stage: str,
    params: Mapping[str, Any],
    plots: Mapping[str, Any],
    parent: str,
    output: str,
    **more: Any,
) -> tuple[str, Path]:
    """Saves the artifact and the run; (run id, directory)."""
    from hetspec.prep.build import summary

    if output:
        new.save_pretrained(output)
    stored = store.log_pair(
        new, stage=stage, params=params, figures=plots, note=summary(new), parent_run=parent or None, **more
    )
    return stored.run_id, Path(output).absolute() if output else stored.artifact_dir


def _tell(
    new: PairArtifact,
    run_id: str,
    parent: str,
    folder: Path,
    record: Mapping[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    if as_json:
        print_json({"run_id": run_id, "parent_run": parent, "artifact_dir": str(folder), **record})
    elif quiet:
        print(run_id)
    else:
        show_pair(new, title=f"{new.target.name} ← {new.drafter.name}")
        print(f"MLflow run  {run_id} (extends {parent or folder})\nartifact    {folder}")
