"""The two commands, `hetspec` (generate) and `hetspec-prep` (prepare pairs).

Data goes to stdout, everything else to stderr; a known error is one line with a hint. Heavy imports stand
inside each command, so that ``--help`` is instant.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hetspec.errors import HetspecError, InvalidArtifact, InvalidInput

if TYPE_CHECKING:
    from hetspec.runtime.generate import Engine
    from hetspec.tracking import StoredPair

prep_app = typer.Typer(
    name="hetspec-prep",
    help="Prepare (target, drafter) pairs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app = typer.Typer(
    name="hetspec",
    help="Generate losslessly with a prepared pair.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
Uri = Annotated[
    str, typer.Option("--tracking-uri", help="MLflow store; default: MLFLOW_TRACKING_URI or ./artifacts.")
]
PairName = Annotated[
    list[str], typer.Argument(metavar="PAIR", help="Directory, run id, runs:/… or TARGET DRAFTER.")
]

Command = TypeVar("Command", bound=Callable[..., None])


def main() -> None:
    """Entry point of `hetspec`."""
    quiet_libraries()
    app()


def main_prep() -> None:
    """Entry point of `hetspec-prep`."""
    quiet_libraries()
    prep_app()


def quiet_libraries() -> None:
    """Settles what libraries print and how OpenMP waits, unless the environment says otherwise."""
    # Spinning OpenMP threads lose a factor of 30 as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "" if sys.stderr.isatty() else "1")


def reporting(command: Command) -> Command:
    """Turns known errors into one line (or a JSON object) and the documented exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except (HetspecError, OSError, MemoryError) as error:
            if os.environ.get("HETSPEC_DEBUG"):
                traceback.print_exc()
            known = error if isinstance(error, HetspecError) else _system_error(error)
            if kwargs.get("as_json"):
                record = {"type": type(known).__name__, "message": known.message, "hint": known.hint}
                print(json.dumps({"error": record}))
            else:
                print(f"error: {known}", file=sys.stderr)
            raise typer.Exit(known.exit_code) from None

    return run  # type: ignore[return-value]


def _system_error(error: BaseException) -> HetspecError:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return HetspecError(
            f"{error.strerror}{where}.", "Check the path, its permissions and the free space."
        )
    return HetspecError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}.")


class Voice:
    """What a command says while it works: to stderr, and nothing with --json or -q."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def __call__(self, line: str) -> None:
        if not self.silent:
            print(line, file=sys.stderr, flush=True)


def _print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, allow_nan=False))


# -- hetspec-prep --------------------------------------------------------------------------------------------


@prep_app.command("build-map")
@reporting
def build_map(
    target: Annotated[str, typer.Argument(help="Hub id, directory, tokenizer file, .gguf or packaged name.")],
    drafter: Annotated[str, typer.Argument(help="The same, for the drafter.")],
    text: Annotated[
        str, typer.Option(help="Running text for coverages: stdlib, humaneval or a file.")
    ] = "stdlib",
    output: Annotated[str, typer.Option(help="Also save the artifact to this new directory.")] = "",
    revision_target: Annotated[str, typer.Option(help="Hub revision of the target.")] = "",
    revision_drafter: Annotated[str, typer.Option(help="Hub revision of the drafter.")] = "",
    local_files_only: Annotated[bool, typer.Option(help="Do not ask the hub.")] = False,
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the byte-exact intersection map of two tokenizers and store the pair in MLflow."""
    from hetspec.prep.build import build_pair, corpus, most_frequent_unmapped, prepare, summary
    from hetspec.prep.report import map_plots
    from hetspec.sources import load_tokenizer
    from hetspec.tracking import Store

    say = Voice(as_json or quiet)
    if output and Path(output).exists():
        raise InvalidInput(f"{output} exists already; artifacts are immutable.", "Choose a new directory.")
    texts = corpus(_texts(text))
    say(f"reading the tokenizers of {target} and {drafter}")
    sides = [
        prepare(load_tokenizer(name, revision=revision or None, local_files_only=local_files_only))
        for name, revision in ((target, revision_target), (drafter, revision_drafter))
    ]
    store = Store(tracking_uri or None)  # before the work, so that an unusable store is said at once
    pair = build_pair(sides[0], sides[1], texts, text, say)
    if output:
        pair.save_pretrained(output)
    say("storing the pair")
    stored = store.log_pair(
        pair,
        stage="build-map",
        params={"text": text},
        figures=map_plots(pair, sides[0].vocabulary, sides[1].vocabulary),
        tables={"tables/top_unmapped.json": most_frequent_unmapped(pair, sides[0], texts)},
        note=summary(pair),
    )
    folder = Path(output).absolute() if output else stored.artifact_dir
    if as_json:
        _print_json(_map_record(pair, stored, folder))
    elif quiet:
        print(stored.run_id)
    else:
        _show_pair(pair, title=f"{target} ← {drafter}")
        print(f"MLflow run  {stored.run_id}\nartifact    {folder}")


@prep_app.command("build-affinity")
@reporting
def build_affinity(
    pair: PairName,
    prior: Annotated[str, typer.Option(help="cosegment.")] = "cosegment",
    text: Annotated[
        list[str] | None, typer.Option(help="stdlib, humaneval, passages or a file; may be repeated.")
    ] = None,
    smoothing: Annotated[float, typer.Option(min=0.0, help="Pseudo-counts of each token's image.")] = 1.0,
    top: Annotated[int, typer.Option(min=1, help="Entries kept per row.")] = 64,
    output: Annotated[str, typer.Option(help="Also save the artifact to this new directory.")] = "",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add an affinity kernel to a pair: a new artifact and a new run; the old ones stay."""
    from hetspec.prep.build import add_cosegment, prepare, summary
    from hetspec.prep.report import kernel_plots
    from hetspec.sources import hub_commit, load_tokenizer
    from hetspec.tracking import Store

    if prior != "cosegment":
        raise InvalidInput(f"unknown prior {prior!r}.", "Choose cosegment.")
    if output and Path(output).exists():
        raise InvalidInput(f"{output} exists already; artifacts are immutable.", "Choose a new directory.")
    say = Voice(as_json or quiet)
    names = text or ["stdlib"]
    texts = [part for name in names for part in _texts(name)]
    store = Store(tracking_uri or None)
    old, _, parent = _load(pair, tracking_uri)
    say(f"reading the tokenizers of {old.target.name} and {old.drafter.name}")
    target, drafter = (
        prepare(load_tokenizer(side.name, revision=hub_commit(side.revision)))
        for side in (old.target, old.drafter)
    )
    old.require(target.vocabulary, drafter.vocabulary)
    total = sum(len(part.encode()) for part in texts)
    with _progress(total, "counting co-segmentations", silent=as_json or quiet) as progress:
        new, result = add_cosegment(
            old, target, drafter, texts, names, smoothing=smoothing, top=top, progress=progress
        )
    figures = new.figures["affinity"][prior]
    if output:
        new.save_pretrained(output)
    stored = store.log_pair(
        new,
        stage="build-affinity",
        params={"prior": prior, "texts": " ".join(names), "smoothing": smoothing, "top": top},
        figures=kernel_plots(new, result),
        note=summary(new),
        parent_run=parent or None,
    )
    folder = Path(output).absolute() if output else stored.artifact_dir
    if as_json:
        _print_json(
            {
                "run_id": stored.run_id,
                "parent_run": parent,
                "artifact_dir": str(folder),
                "affinity": {prior: figures},
                "seconds": figures["seconds"],
            }
        )
    elif quiet:
        print(stored.run_id)
    else:
        _show_pair(new, title=f"{new.target.name} ← {new.drafter.name}")
        print(f"MLflow run  {stored.run_id} (extends {parent or folder})\nartifact    {folder}")


@contextlib.contextmanager
def _progress(total: int, label: str, *, silent: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr when it is a terminal."""
    if silent or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


@prep_app.command("list")
@reporting
def list_pairs(tracking_uri: Uri = "", as_json: Json = False, quiet: Quiet = False) -> None:
    """List the stored pairs, newest first."""
    import datetime

    from hetspec.tracking import TAG_DRAFTER, TAG_PARTS, TAG_STAGE, TAG_TARGET, Store

    pairs = Store(tracking_uri or None).pairs()
    if as_json:
        keys = {"target": TAG_TARGET, "drafter": TAG_DRAFTER, "stage": TAG_STAGE, "parts": TAG_PARTS}
        _print_json(
            {
                "pairs": [
                    {
                        "run_id": p.run_id,
                        **{name: p.tags.get(tag, "") for name, tag in keys.items()},
                        "created_ms": p.start_time,
                        "metrics": dict(sorted(p.metrics.items())),
                    }
                    for p in pairs
                ]
            }
        )
        return
    if quiet:
        for p in pairs:
            print(p.run_id)
        return
    rows = []
    for p in pairs:
        created = datetime.datetime.fromtimestamp(p.start_time / 1000).astimezone().strftime("%Y-%m-%d %H:%M")
        shared = p.metrics.get("map/intersection_count")
        rows.append(
            [
                p.run_name,
                "" if shared is None else f"{shared:,.0f}",
                p.tags.get(TAG_PARTS, ""),
                created,
                p.run_id,
            ]
        )
    _table(["pair", "shared tokens", "parts", "created", "run id"], rows, empty="no pairs yet")


@prep_app.command("show")
@reporting
def show(pair: PairName, tracking_uri: Uri = "", as_json: Json = False) -> None:
    """Show what is known about a pair."""
    from dataclasses import asdict

    artifact, folder, run_id = _load(pair, tracking_uri)
    if as_json:
        _print_json(
            {
                "run_id": run_id,
                "artifact_dir": str(folder),
                "target": asdict(artifact.target),
                "drafter": asdict(artifact.drafter),
                "figures": artifact.figures,
                "provenance": artifact.provenance,
                "parts": artifact.parts,
            }
        )
        return
    _show_pair(artifact, title=f"{artifact.target.name} ← {artifact.drafter.name}")
    if run_id:
        print(f"MLflow run  {run_id}")
    print(f"artifact    {folder}")


@prep_app.command("verify")
@reporting
def verify(
    pair: PairName,
    target: Annotated[
        str, typer.Option(help="Check against this tokenizer instead of the recorded one.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="The same, for the drafter.")] = "",
    tracking_uri: Uri = "",
    as_json: Json = False,
) -> None:
    """Check a stored pair: files, invariants, and both tokenizers by fingerprint. Exit code 3 if unsound."""
    from hetspec.prep.build import prepare
    from hetspec.sources import hub_commit, load_tokenizer

    artifact, folder, _ = _load(pair, tracking_uri)
    names = (target or artifact.target.name, drafter or artifact.drafter.name)
    revisions = (
        None if target else hub_commit(artifact.target.revision),
        None if drafter else hub_commit(artifact.drafter.revision),
    )
    sides = [prepare(load_tokenizer(n, revision=r)) for n, r in zip(names, revisions, strict=True)]
    artifact.require(sides[0].vocabulary, sides[1].vocabulary)
    _verify_map(artifact, sides)
    if as_json:
        _print_json({"valid": True, "artifact_dir": str(folder), "target": names[0], "drafter": names[1]})
    else:
        print(f"valid: {names[0]} ← {names[1]} ({folder})")


def _verify_map(artifact: Any, sides: list[Any]) -> None:
    """Rebuilds the map from the tokenizers and compares."""
    import numpy as np

    from hetspec.errors import StaleArtifact
    from hetspec.prep.intersect import build_map

    fresh = build_map(sides[0].vocabulary, sides[1].vocabulary, sides[0].segmenter)
    for name in ("d2t", "t2d", "first"):
        stored, rebuilt = getattr(artifact.map, name), getattr(fresh, name)
        size = min(len(stored), len(rebuilt))
        if not np.array_equal(stored[:size], rebuilt[:size]) or (stored[size:] >= 0).any():
            raise StaleArtifact(
                f"the map's {name} differs from the one these tokenizers give.",
                "Rebuild it: hetspec-prep build-map TARGET DRAFTER.",
            )


@prep_app.command("ui")
@reporting
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    tracking_uri: Uri = "",
) -> None:
    """Start the MLflow UI on the store that hetspec uses."""
    from hetspec.tracking import Store, ui_command, ui_link

    store = Store(tracking_uri or None)
    print(f"MLflow UI on {store.uri} (Ctrl-C ends it)\n{ui_link(store, port)}", file=sys.stderr, flush=True)
    # The UI's server for prompts and judges: eight processes more.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    command = ui_command(store.uri, port)
    os.execv(command[0], command)  # noqa: S606 - our own interpreter, fixed arguments


# -- hetspec -------------------------------------------------------------------------------------------------


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
        str, typer.Option(help="lookahead (4d), first (4b) or enumerated (4a, tiny vocabularies only).")
    ] = "lookahead",
    num_draft_tokens: Annotated[str, typer.Option(help="Draft length, or auto.")] = "auto",
    temperature: Annotated[float, typer.Option(help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    draft_temperature: Annotated[
        float | None, typer.Option(help="The drafter's; default: the target's.")
    ] = None,
    draft_top_k: Annotated[int, typer.Option(min=0)] = 0,
    draft_top_p: Annotated[float, typer.Option()] = 1.0,
    target: Annotated[str, typer.Option(help="The target's model, if not the recorded one.")] = "",
    drafter: Annotated[str, typer.Option(help="The drafter's model, if not the recorded one.")] = "",
    device: Annotated[str, typer.Option(help="The target's device.")] = "cpu",
    draft_device: Annotated[str, typer.Option(help="The drafter's; default: the target's.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "bfloat16",
    tracking_uri: Uri = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text from the target, losslessly; new text on stdout as it comes."""
    text = _prompt(prompt, prompt_file)
    draft_length = _draft_length(num_draft_tokens)
    say = Voice(as_json or quiet)
    names = (
        [word for value in pair for word in value.split()]
        if len(pair) == 1 and not Path(pair[0]).is_dir()
        else pair
    )
    artifact, _, _ = _load(names, tracking_uri, prefer="kernel-cosegment")
    engine = load_engine(
        artifact,
        target=target,
        drafter=drafter,
        with_drafter=algorithm != "none",
        device=device,
        draft_device=draft_device or device,
        dtype=dtype,
        say=say,
    )
    inputs: Any = [{"role": "user", "content": text}] if chat else text
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "slrs_form": slrs_form,
        "num_draft_tokens": draft_length,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "draft_temperature": draft_temperature,
        "draft_top_k": draft_top_k,
        "draft_top_p": draft_top_p,
        **sampling(temperature, top_k, top_p, min_p),
    }
    if as_json:
        out = engine.generate(inputs, **options)
        _print_json(
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


@app.command("demo")
@reporting
def demo(
    target: Annotated[str, typer.Option(help="The target's model.")] = "qwen2.5-coder-0.5b",
    drafter: Annotated[str, typer.Option(help="The drafter's model.")] = "smollm2-135m",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft length.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    tracking_uri: Uri = "",
    as_json: Json = False,
) -> None:
    """Build a real pair, store it, and generate the same text with and without the drafter."""
    from hetspec.demo import run_demo

    record = run_demo(
        target,
        drafter,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        uri=tracking_uri or None,
        say=Voice(as_json),
        out=(lambda _: None) if as_json else print,
    )
    if as_json:
        _print_json(record)


# -- shared --------------------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_engine(
    artifact: Any,
    *,
    target: str = "",
    drafter: str = "",
    with_drafter: bool = True,
    device: str = "cpu",
    draft_device: str = "cpu",
    dtype: str = "bfloat16",
    say: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Loads the models of a pair and makes them ready to generate."""
    if dtype not in DTYPES:
        raise InvalidInput(f"unknown dtype {dtype!r}.", f"Choose one of {', '.join(DTYPES)}.")
    import torch

    from hetspec.runtime.generate import Engine
    from hetspec.sources import hub_commit, load_model, load_tokenizer

    for name in (device, draft_device):
        if name != "cpu" and not (name.startswith("cuda") and torch.cuda.is_available()):
            raise InvalidInput(f"device {name!r} is not available.", "Use --device cpu.")
    # A model named here is taken as it is; a recorded one at the recorded revision. Its tokenizer is checked anyway.
    target_at = None if target else hub_commit(artifact.target.revision)
    drafter_at = None if drafter else hub_commit(artifact.drafter.revision)
    target, drafter = target or artifact.target.name, drafter or artifact.drafter.name
    say(f"loading {target}" + (f" and {drafter}" if with_drafter else ""))
    kind = getattr(torch, dtype)
    return Engine(
        load_model(target, dtype=kind, device=device, revision=target_at),
        load_model(drafter, dtype=kind, device=draft_device, revision=drafter_at) if with_drafter else None,
        artifact,
        target_tokenizer=load_tokenizer(target, revision=target_at),
        drafter_tokenizer=load_tokenizer(drafter, revision=drafter_at) if with_drafter else None,
    )


def sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """Sampling options as `Engine.decoder` takes them; checked here, so that greedy runs are checked too."""
    from hetspec.runtime.laws import Warping

    warping = Warping(temperature, top_k, top_p, min_p)
    if warping.greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


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


def _draft_length(value: str) -> int | str:
    if value == "auto":
        return value
    if value.isdecimal():
        return int(value)
    raise InvalidInput(f"--num-draft-tokens is {value!r}, expected auto or a whole number.")


def _texts(name: str) -> list[str]:
    """Texts by name, or one file."""
    from hetspec.sources import named_texts

    path = Path(name)
    if path.is_file():
        return [path.read_text(encoding="utf-8", errors="replace")]
    return named_texts(name)


def _load(reference: list[str], uri: str, prefer: str = "") -> tuple[Any, Path, str]:
    """A pair by what the user typed: (artifact, directory, run id or "")."""
    from hetspec.artifact import PairArtifact

    if len(reference) == 1 and reference[0] and Path(reference[0]).is_dir():  # needs no MLflow
        folder = Path(reference[0])
        return PairArtifact.from_pretrained(folder), folder.absolute(), ""
    if len(reference) > 2:
        raise InvalidInput(
            f"{len(reference)} words for a pair.", "Give a directory, a run id, or TARGET DRAFTER."
        )
    from hetspec.tracking import find_pair

    found: Path | StoredPair = find_pair(*reference, uri=uri or None, prefer=prefer)
    if isinstance(found, Path):
        return PairArtifact.from_pretrained(found), found.absolute(), ""
    return PairArtifact.from_pretrained(found.artifact_dir), found.artifact_dir, found.run_id


def _map_record(pair: Any, stored: StoredPair, folder: Path) -> dict[str, Any]:
    def side(identity: Any) -> dict[str, Any]:
        return {
            "name": identity.name,
            "revision": identity.revision,
            "rows": identity.rows,
            "text_tokens": identity.text_tokens,
            "style": identity.style,
        }

    return {
        "run_id": stored.run_id,
        "artifact_dir": str(folder),
        "target": side(pair.target),
        "drafter": side(pair.drafter),
        "vocab": {"target": pair.target.text_tokens, "drafter": pair.drafter.text_tokens},
        "map": pair.figures["map"],
        "corpus": pair.figures["corpus"],
        "seconds": pair.figures["seconds"],
    }


def _show_pair(pair: Any, title: str) -> None:
    rows = [
        ["tokenizer", pair.target.style, pair.drafter.style],
        ["model rows", f"{pair.target.rows:,}", f"{pair.drafter.rows:,}"],
        ["text tokens", f"{pair.target.text_tokens:,}", f"{pair.drafter.text_tokens:,}"],
    ]
    try:
        rows += _figure_rows(pair.figures)
    except (KeyError, TypeError, ValueError, AttributeError):  # checked by sha256 only, so of any shape
        raise InvalidArtifact(
            f"the figures of {title} are not those of a built map.", "Rebuild it: hetspec-prep build-map."
        ) from None
    for prior, kernel in pair.kernels.items():
        known = figures_of(pair, prior)
        rows.append([f"kernel {prior}", f"{len(kernel.indices):,} entries", ""])
        if known:
            rows.append(["… from", str(known["texts"]), f"{known['target_tokens']:,} target tokens"])
            rows.append(["… rows seen in the text", "", f"{100 * known['rows_seen_fraction']:.1f} %"])
            rows.append(["… of its tokens uncertain", "", f"{100 * known['uncertain_mass']:.1f} %"])
    _table(["", "target", "drafter"], rows, title=title)


def _figure_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Rows of the table for what was counted; none for a pair made without `build_pair`."""
    rows = []
    if "map" in figures:
        counted = figures["map"]
        rows += [
            ["shared byte for byte", f"{counted['intersection_count']:,}", ""],
            [
                "… as a share",
                f"{100 * counted['target_fraction']:.1f} %",
                f"{100 * counted['drafter_fraction']:.1f} %",
            ],
            ["control tokens by role", f"{counted['controls_mapped']}", ""],
        ]
    corpus = figures.get("corpus", {})
    if corpus.get("bytes"):
        rows.append(
            [
                f"running text covered ({corpus['name']})",
                f"{100 * corpus['target_covered']:.1f} %",
                f"{100 * corpus['drafter_covered']:.1f} %",
            ]
        )
    return rows


def figures_of(pair: Any, prior: str) -> dict[str, Any]:
    """The recorded figures of a kernel, {} if there are none."""
    found: dict[str, Any] = pair.figures.get("affinity", {}).get(prior, {})
    return found


def _table(headers: list[str], rows: list[list[str]], title: str = "", empty: str = "") -> None:
    """A table on stdout; plain tab-separated lines when stdout is no terminal."""
    if not rows:
        print(empty)
        return
    if not sys.stdout.isatty():
        if title:
            print(title)
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
