"""What both commands share: options, errors as one line, tables, progress, and loading what the user named."""

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

from hetspec.errors import HetspecError, InvalidInput

if TYPE_CHECKING:
    from hetspec.runtime.engine import Engine
    from hetspec.tracking import StoredPair

prep_app = typer.Typer(
    name="hetspec-prep",
    help="Prepare (target, drafter) pairs.",
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

TargetModel = Annotated[str, typer.Option("--target", help="The target's model, if not the recorded one.")]
DrafterModel = Annotated[str, typer.Option("--drafter", help="The drafter's model, if not the recorded one.")]
DraftWeights = Annotated[
    str,
    typer.Option(
        help="How a bfloat16 drafter on the CPU reads its weights: auto, own, packed, int8 or int4."
    ),
]
TargetWeights = Annotated[
    str,
    typer.Option(
        help="own, packed (a second copy in a layout that a bfloat16 CPU reads faster), or auto: packed where it fits."
    ),
]
Static = Annotated[
    bool,
    typer.Option("--static", help="Fixed shapes and recorded steps: for a GPU."),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]

Command = TypeVar("Command", bound=Callable[..., None])


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


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def progress_bar(total: int, label: str, *, silent: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr when it is a terminal."""
    if silent or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def live_table(headers: list[str], *, silent: bool) -> Iterator[Callable[[list[list[str]]], None]]:
    """A table that can be drawn again and again on stderr when it is a terminal."""
    if silent or not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True) as live:
        yield lambda rows: live.update(_table(headers, rows))


DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_engine(
    artifact: Any,
    *,
    target: str = "",
    drafter: str = "",
    with_drafter: bool = True,
    device: str = "cpu",
    draft_device: str = "",
    dtype: str = "bfloat16",
    full_head: bool = False,
    draft_weights: str = "auto",
    target_weights: str = "auto",
    static: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Loads the models of a pair and makes them ready to generate."""
    if dtype not in DTYPES:
        raise InvalidInput(f"unknown dtype {dtype!r}.", f"Choose one of {', '.join(DTYPES)}.")
    import torch

    from hetspec.runtime.engine import Engine
    from hetspec.runtime.weights import lacks_room
    from hetspec.sources import hub_commit, load_model, load_tokenizer

    if not draft_device:  # small models lose time on several devices
        draft_device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    for name in (device, draft_device):
        if name not in ("cpu", "auto") and not (name.startswith("cuda") and torch.cuda.is_available()):
            raise InvalidInput(f"device {name!r} is not available.", "Use --device cpu.")
    # A model named here is taken as it is; a recorded one at the recorded revision. Its tokenizer is checked anyway.
    target_at = None if target else hub_commit(artifact.target.revision)
    drafter_at = None if drafter else hub_commit(artifact.drafter.revision)
    target, drafter = target or artifact.target.name, drafter or artifact.drafter.name
    say(f"loading {target}" + (f" and {drafter}" if with_drafter else ""))
    if with_drafter and artifact.head is not None and not full_head:
        say(f"the drafter's LM head is pruned to {len(artifact.head.kept):,} rows (--full-head: all)")
    kind = getattr(torch, dtype)
    target_model = load_model(target, dtype=kind, device=device, revision=target_at)
    if target_weights == "auto" and lacks_room(target_model):
        say("there is no memory for a faster copy of the target's weights; it reads its own")
    return Engine(
        target_model,
        load_model(drafter, dtype=kind, device=draft_device, revision=drafter_at) if with_drafter else None,
        artifact,
        target_tokenizer=load_tokenizer(target, revision=target_at),
        drafter_tokenizer=load_tokenizer(drafter, revision=drafter_at) if with_drafter else None,
        full_head=full_head,
        draft_weights=draft_weights,
        target_weights=target_weights,
        static=static,
    )


def sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """Sampling options as `Engine.decoder` takes them; checked here, so that greedy runs are checked too."""
    from hetspec.runtime.laws import Warping

    warping = Warping(temperature, top_k, top_p, min_p)
    if warping.greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}


def texts_of(name: str) -> list[str]:
    """Texts by name, one file, or a JSON-lines file with a text (or an object's "text" or "prompt") on each line."""
    from hetspec.sources import named_texts

    path = Path(name)
    if not path.is_file():
        return named_texts(name)
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        return [text] if text else []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        value = (record.get("text") or record.get("prompt")) if isinstance(record, dict) else record
        if not isinstance(value, str) or not value:
            raise InvalidInput(
                f"line {number} of {name} is no text.", 'Each line must be a string or {"text": "…"}.'
            )
        found.append(value)
    return found


def load(reference: list[str], uri: str, prefer: str = "") -> tuple[Any, Path, str]:
    """A pair by what the user typed: (artifact, directory, run id or "")."""
    from hetspec.artifact import PairArtifact

    if len(reference) == 1 and reference[0] and Path(reference[0]).is_dir():  # needs no MLflow
        folder = Path(reference[0])
        return PairArtifact.from_pretrained(folder), folder.absolute(), ""
    if len(reference) == 1:  # an option's value holds both names
        reference = reference[0].split()
    if not 1 <= len(reference) <= 2:
        raise InvalidInput(
            f"{len(reference)} words for a pair.", "Give a directory, a run id, or TARGET DRAFTER."
        )
    from hetspec.tracking import find_pair

    found: Path | StoredPair = find_pair(*reference, uri=uri or None, prefer=prefer)
    if isinstance(found, Path):
        return PairArtifact.from_pretrained(found), found.absolute(), ""
    return PairArtifact.from_pretrained(found.artifact_dir), found.artifact_dir, found.run_id


def print_table(headers: list[str], rows: list[list[str]], title: str = "", empty: str = "") -> None:
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

    Console().print(_table(headers, rows, title))


def _table(headers: list[str], rows: list[list[str]], title: str = "") -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
