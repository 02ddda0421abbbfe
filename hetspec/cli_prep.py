"""The command `hetspec-prep`: prepare, inspect and store pairs.

Heavy imports stand inside each command, so that ``--help`` is instant.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetspec.console import (
    Json,
    PairName,
    Quiet,
    Uri,
    Voice,
    load,
    prep_app,
    print_json,
    print_table,
    reporting,
    texts_of,
)
from hetspec.errors import InvalidArtifact, InvalidInput

if TYPE_CHECKING:
    from hetspec.tracking import StoredPair


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
    texts = corpus(texts_of(text))
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
        print_json(_map_record(pair, stored, folder))
    elif quiet:
        print(stored.run_id)
    else:
        show_pair(pair, title=f"{target} ← {drafter}")
        print(f"MLflow run  {stored.run_id}\nartifact    {folder}")


@prep_app.command("list")
@reporting
def list_pairs(tracking_uri: Uri = "", as_json: Json = False, quiet: Quiet = False) -> None:
    """List the stored pairs, newest first."""
    import datetime

    from hetspec.tracking import TAG_DRAFTER, TAG_PARTS, TAG_STAGE, TAG_TARGET, Store

    pairs = Store(tracking_uri or None).pairs()
    if as_json:
        keys = {"target": TAG_TARGET, "drafter": TAG_DRAFTER, "stage": TAG_STAGE, "parts": TAG_PARTS}
        print_json(
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
    print_table(["pair", "shared tokens", "parts", "created", "run id"], rows, empty="no pairs yet")


@prep_app.command("show")
@reporting
def show(pair: PairName, tracking_uri: Uri = "", as_json: Json = False) -> None:
    """Show what is known about a pair."""
    from dataclasses import asdict

    artifact, folder, run_id = load(pair, tracking_uri)
    if as_json:
        print_json(
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
    show_pair(artifact, title=f"{artifact.target.name} ← {artifact.drafter.name}")
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

    artifact, folder, _ = load(pair, tracking_uri)
    names = (target or artifact.target.name, drafter or artifact.drafter.name)
    revisions = (
        None if target else hub_commit(artifact.target.revision),
        None if drafter else hub_commit(artifact.drafter.revision),
    )
    sides = [prepare(load_tokenizer(n, revision=r)) for n, r in zip(names, revisions, strict=True)]
    artifact.require(sides[0].vocabulary, sides[1].vocabulary)
    _verify_map(artifact, sides)
    if as_json:
        print_json({"valid": True, "artifact_dir": str(folder), "target": names[0], "drafter": names[1]})
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


# -- what the commands print ---------------------------------------------------------------------------------


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


def show_pair(pair: Any, title: str) -> None:
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
    try:
        rows += [row for prior, kernel in pair.kernels.items() for row in _kernel_rows(pair, prior, kernel)]
        rows += _tuning_rows(pair.figures)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidArtifact(
            f"the figures of {title} are not those of its parts.", "Rebuild it: hetspec-prep build-map."
        ) from None
    print_table(["", "target", "drafter"], rows, title=title)


def _kernel_rows(pair: Any, prior: str, kernel: Any) -> list[list[str]]:
    known = figures_of(pair, prior)
    rows = [[f"kernel {prior}", f"{len(kernel.indices):,} entries", ""]]
    if "texts" in known:
        rows.append(["… from", str(known["texts"]), f"{known['target_tokens']:,} target tokens"])
        rows.append(["… rows seen in the text", "", f"{100 * known['rows_seen_fraction']:.1f} %"])
        rows.append(["… of its tokens uncertain", "", f"{100 * known['uncertain_mass']:.1f} %"])
    if "gain" in known:
        weights = f"θ {known['theta']:.3f}  λ {known['lam']:.3f}"
        interval = f"{known['gain']:+.4f} ({known['gain_low']:+.4f} to {known['gain_high']:+.4f})"
        rows.append(["… held-out gain over TLI", interval, weights])
    return rows


def _tuning_rows(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    if calibrated := figures.get("calibration"):
        rows.append(
            [
                f"calibrated on ({calibrated['text']})",
                f"{calibrated['target_tokens']:,} tokens",
                f"{calibrated['fit_contexts']:,} + {calibrated['held_out_contexts']:,} contexts",
            ]
        )
        rows.append(["… target mass in I", f"{100 * calibrated['target_mass_in_intersection']:.1f} %", ""])
    if stops := figures.get("stops"):
        rows.append(["stop table", f"{stops['nodes']:,} nodes", f"{stops['target_tokens']:,} target tokens"])
        rows.append(["… bytes it is sure about", f"{100 * stops['decided']:.1f} %", ""])
    if pruned := figures.get("prune"):
        rows.append(["LM head kept", "", f"{pruned['size']:,} rows ({100 * pruned['share']:.1f} %)"])
    return rows


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
