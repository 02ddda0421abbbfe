"""Pairs in MLflow: where runs are stored, what is logged, and how a pair is found again.

The only module that imports mlflow. Runs that are not wholly written never carry the tag
``hetspec.state = complete``, and only complete runs are found.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from hetspec import __version__
from hetspec.artifact import PairArtifact
from hetspec.errors import ArtifactNotFound, HetspecError, InvalidInput
from hetspec.metrics import BENCH_METRICS, METRICS, pair_metrics, renamed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAIRS, BENCH = "hetspec-pairs", "hetspec-bench"
ARTIFACT_PATH = "pair"
PREFERRED = "kernel-"  # names lead to the newest run with a kernel, if there is one

TAG_STATE, TAG_KEY, TAG_STAGE, TAG_PARENT = (
    "hetspec.state",
    "hetspec.pair_key",
    "hetspec.stage",
    "hetspec.parent_run",
)
TAG_TARGET, TAG_DRAFTER, TAG_PARTS = "hetspec.target", "hetspec.drafter", "hetspec.parts"
TAG_COLOUR = "mlflow.runColor"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#5b5b5b", "#b3a000")


def default_uri() -> str:
    """``MLFLOW_TRACKING_URI``, else an SQLite store under ``artifacts/`` of the working directory."""
    here = str(Path.cwd() / "artifacts" / "mlflow.db").replace("%", "%25").replace("?", "%3F")
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{here}"


@dataclass(frozen=True)
class StoredPair:
    """A pair run: ids and where its artifact lies on this machine."""

    run_id: str
    run_name: str
    artifact_dir: Path
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    start_time: int


@dataclass(frozen=True)
class Child:
    """One nested run: its name, params, metrics, and metrics with a value for each step."""

    name: str
    params: Mapping[str, Any]
    metrics: Mapping[str, Any]
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


class Store:
    """One MLflow tracking store, opened safely.

    Args:
        uri: a tracking URI; by default `default_uri()`.

    Raises:
        HetspecError: the store cannot be opened or created.
    """

    def __init__(self, uri: str | None = None) -> None:
        self.uri = uri or default_uri()
        self.client = _open(self.uri)

    def artifact_root(self) -> str | None:
        """Where experiments of a local SQLite store keep their artifacts (absolute); None: the server decides."""
        database = _sqlite_path(self.uri)
        return None if database is None else str(database.parent / "mlruns")

    def experiment(self, name: str) -> str:
        """Id of an experiment, created if needed."""
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            root = self.artifact_root()
            try:
                created = self.client.create_experiment(
                    name, artifact_location=None if root is None else f"{Path(root).as_uri()}/{name}"
                )
            except MlflowException:  # another process was first
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
            else:
                primary = "map/intersection_count" if name == PAIRS else "speed/ratio_to_plain"
                self.client.set_experiment_tag(created, "mlflow.experiment.primaryMetric.name", primary)
                # Otherwise the UI takes the experiment for one of prompts and traces and hides metrics.
                self.client.set_experiment_tag(created, "mlflow.experimentKind", "custom_model_development")
                return str(created)
        if found.lifecycle_stage != "active":
            raise HetspecError(
                f"the MLflow experiment {name} was deleted.",
                f"Restore it: mlflow experiments restore -x {found.experiment_id}.",
            )
        return str(found.experiment_id)

    def log_pair(
        self,
        pair: PairArtifact,
        *,
        stage: str,
        params: Mapping[str, Any] | None = None,
        figures: Mapping[str, Figure] | None = None,
        tables: Mapping[str, Any] | None = None,
        curves: Mapping[str, Mapping[int, float]] | None = None,
        files: Mapping[str, Path] | None = None,
        note: str = "",
        parent_run: str | None = None,
    ) -> StoredPair:
        """Stores a pair as a new run; complete or not found at all.

        Args:
            pair: the artifact.
            stage: the command that made it.
            params: knobs besides the identities.
            figures: plots by artifact path.
            tables: JSON by artifact path.
            curves: metrics with a value for each step.
            files: heavy parts by the artifact folder they go to.
            note: markdown shown as the run's description.
            parent_run: the run whose artifact this one extends.
        """
        with tempfile.TemporaryDirectory(prefix="hetspec-") as scratch:
            folder = pair.save_pretrained(Path(scratch) / ARTIFACT_PATH)
            size = sum(f.stat().st_size for f in folder.iterdir())
            run_name = f"{pair.target.name} ← {pair.drafter.name}"
            with self._run(PAIRS, run_name, note, source=f"hetspec-prep {stage}") as run_id:
                self.client.log_batch(
                    run_id,
                    metrics=_metrics(pair_metrics(pair) | {"cost/artifact_bytes": float(size)}),
                    params=_params(_identity_params(pair) | dict(params or {})),
                    tags=_tags(
                        {
                            TAG_KEY: pair.key,
                            TAG_COLOUR: self._colour(pair.key),
                            TAG_STAGE: stage,
                            TAG_TARGET: pair.target.name,
                            TAG_DRAFTER: pair.drafter.name,
                            TAG_PARTS: " ".join(pair.parts),
                            "hetspec.target_vocab_sha256": pair.target.vocab_sha256,
                            "hetspec.target_behaviour_sha256": pair.target.behaviour_sha256,
                            "hetspec.drafter_vocab_sha256": pair.drafter.vocab_sha256,
                            "hetspec.drafter_behaviour_sha256": pair.drafter.behaviour_sha256,
                            **({TAG_PARENT: parent_run} if parent_run else {}),
                        }
                    ),
                )
                self.client.log_artifacts(run_id, str(folder), ARTIFACT_PATH)
                self._log_curves(run_id, curves or {})
                for path, file in (files or {}).items():
                    self.client.log_artifact(run_id, str(file), path)
                for path, figure in (figures or {}).items():
                    self.client.log_figure(run_id, figure, path)
                for path, table in (tables or {}).items():
                    self.client.log_dict(run_id, table, path)
        return self._stored(self.client.get_run(run_id))

    def _log_curves(self, run_id: str, curves: Mapping[str, Mapping[int, float]]) -> None:
        points = [
            metric
            for name, curve in curves.items()
            for step, value in sorted(curve.items())
            for metric in _metrics({name: float(value)}, step)
        ]
        for at in range(0, len(points), 1000):  # the most a batch may hold
            self.client.log_batch(run_id, metrics=points[at : at + 1000])

    def inherited_file(self, run_id: str, path: str) -> Path | None:
        """A file that a run, or one of those it extends, holds as an artifact; None if there is none.

        Args:
            run_id: of a pair run; "" finds nothing.
            path: inside the run's artifacts.
        """
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        while run_id:
            try:
                run = self.client.get_run(run_id)
            except MlflowException:  # deleted since
                return None
            names = [
                item.path for item in self.client.list_artifacts(run_id, path.rpartition("/")[0] or None)
            ]
            if path in names:
                try:
                    found = download_artifacts(run_id=run_id, artifact_path=path, tracking_uri=self.uri)
                except (MlflowException, OSError):
                    return None
                return Path(found)
            run_id = run.data.tags.get(TAG_PARENT, "")
        return None

    def _colour(self, key: str) -> str:
        """A pair's own colour in the UI's charts, which by default give many runs the same one."""
        known = {p.tags[TAG_KEY]: p.tags.get(TAG_COLOUR, "") for p in self.pairs()}
        return known.get(key) or COLOURS[len(known) % len(COLOURS)]

    @contextmanager
    def _run(self, experiment: str, name: str, note: str, source: str) -> Iterator[str]:
        """A run that is FAILED unless the block ends, and marked complete last of all."""
        tags = {"mlflow.source.name": source, "mlflow.source.type": "LOCAL"}
        if note:
            tags["mlflow.note.content"] = note
        with suppress(OSError, KeyError):  # a user id without a name
            tags["mlflow.user"] = getpass.getuser()
        run = self.client.create_run(self.experiment(experiment), run_name=name, tags=tags)
        run_id = str(run.info.run_id)
        try:
            yield run_id
            self.client.set_tag(run_id, TAG_STATE, "complete")
            self.client.set_terminated(run_id, "FINISHED")
        except BaseException:
            self.client.set_terminated(run_id, "FAILED")
            raise

    def log_comparison(
        self,
        setting: Mapping[str, Any],
        rows: list[dict[str, Any]],
        figures: Mapping[str, Figure] | None = None,
    ) -> str:
        """Stores one comparison in the bench experiment: a parent run and a nested run per contestant.

        Args:
            setting: what all contestants share (params of every run).
            rows: figures by contestant, `name` among them; what is None is left out.
            figures: plots by artifact path.

        Returns:
            The parent's run id.
        """
        title = (
            f"{setting['target']} ← {setting['drafter']}, {setting['prompts']}, "
            f"temperature {setting['temperature']}"
        )
        children = [
            Child(
                row["name"],
                {"contestant": row["name"]},
                renamed(BENCH_METRICS, row),
            )
            for row in rows
        ]
        return self.log_nested(
            title,
            setting,
            children,
            kind="comparison",
            tables={"tables/contestants.json": {"contestants": rows}},
            figures=figures,
        )

    def log_nested(
        self,
        title: str,
        setting: Mapping[str, Any],
        children: Sequence[Child],
        *,
        kind: str,
        tables: Mapping[str, Any] | None = None,
        figures: Mapping[str, Figure] | None = None,
    ) -> str:
        """Stores a parent run in the bench experiment with nested runs that share its setting.

        Args:
            title: the parent's name.
            setting: params of every run.
            children: one run each.
            kind: tag of the parent ("comparison", "prediction", "recommendation").
            tables: JSON by artifact path, at the parent.
            figures: plots by artifact path, at the parent.

        Returns:
            The parent's run id.
        """
        with self._run(BENCH, title, "", source=f"hetspec {kind}") as parent:
            self.client.log_batch(parent, params=_params(setting), tags=_tags({"hetspec.kind": kind}))
            for path, table in (tables or {}).items():
                self.client.log_dict(parent, table, path)
            for path, figure in (figures or {}).items():
                self.client.log_figure(parent, figure, path)
            for child in children:
                with self._run(BENCH, child.name, "", source=f"hetspec {kind}") as run_id:
                    self.client.log_batch(
                        run_id,
                        metrics=_metrics({name: float(value) for name, value in child.metrics.items()}),
                        params=_params({**setting, **child.params}),
                        tags=_tags({"hetspec.kind": "contestant", "mlflow.parentRunId": parent}),
                    )
                    self._log_curves(run_id, child.curves)
        return parent

    def pairs(
        self, target: str = "", drafter: str = "", part: str = "", limit: int = 1000
    ) -> list[StoredPair]:
        """Complete pair runs, newest first."""
        experiment = self.client.get_experiment_by_name(PAIRS)
        if experiment is None:
            return []
        clauses = [f"tags.`{TAG_STATE}` = 'complete'", "attributes.status = 'FINISHED'"]
        for tag, value in ((TAG_TARGET, target), (TAG_DRAFTER, drafter)):
            if value:
                clauses.append(f"tags.`{tag}` = '{value}'")
        if part:
            clauses.append(f"tags.`{TAG_PARTS}` LIKE '%{part}%'")
        runs = self.client.search_runs(
            [experiment.experiment_id],
            filter_string=" and ".join(clauses),
            order_by=["attributes.start_time DESC"],
            max_results=limit,
        )
        return [self._stored(run, fetch=False) for run in runs]

    def pair_run(self, run_id: str) -> StoredPair:
        """A pair by its run id.

        Raises:
            ArtifactNotFound: no such run, or not a complete pair run.
        """
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.get_run(run_id)
        except MlflowException:
            raise ArtifactNotFound(
                f"no MLflow run {run_id} in {self.uri}.", "See what is there: hetspec-prep list."
            ) from None
        if run.data.tags.get(TAG_STATE) != "complete" or TAG_KEY not in run.data.tags:
            raise ArtifactNotFound(
                f"MLflow run {run_id} holds no complete pair.", "See what is there: hetspec-prep list."
            )
        return self._stored(run)

    def _stored(self, run: Run, fetch: bool = True) -> StoredPair:
        """A run with the local directory of its artifact (downloaded if the store is remote)."""
        location = f"{run.info.artifact_uri}/{ARTIFACT_PATH}"
        local = Path(unquote(urlsplit(location).path) if location.startswith("file:") else location)
        if fetch and not local.is_dir():
            from mlflow.artifacts import download_artifacts
            from mlflow.exceptions import MlflowException

            try:
                local = Path(
                    download_artifacts(
                        run_id=run.info.run_id, artifact_path=ARTIFACT_PATH, tracking_uri=self.uri
                    )
                )
            except (MlflowException, OSError) as error:
                raise ArtifactNotFound(
                    f"the artifact of run {run.info.run_id} is not at {location} ({str(error).splitlines()[0]}).",
                    "If the store was moved, give the pair's directory instead.",
                ) from None
        return StoredPair(
            run_id=run.info.run_id,
            run_name=run.info.run_name,
            artifact_dir=local,
            tags=run.data.tags,
            metrics=run.data.metrics,
            start_time=run.info.start_time,
        )


def find_pair(
    reference: str, drafter: str | None = None, *, uri: str | None = None, part: str = "", prefer: str = ""
) -> StoredPair | Path:
    """What a user calls a pair, resolved: a directory, a run id, ``runs:/<id>/pair``, or two names.

    Args:
        reference: directory, run id, runs URI, "TARGET DRAFTER", or the target's name.
        drafter: the drafter's name, where `reference` is the target's.
        uri: the tracking store.
        part: a part the pair must have ("kernel-cosegment", …); the newest such run is taken.
        prefer: a part it should have, if any run of the two names has it.

    Raises:
        ArtifactNotFound: nothing under that name.
    """
    if drafter is None and reference and Path(reference).is_dir():
        return Path(reference)
    if drafter is None and (match := re.fullmatch(r"(?:runs:/)?([0-9a-f]{32})(?:/pair)?/?", reference)):
        return Store(uri).pair_run(match.group(1))
    if drafter is None:
        names = reference.split()
        if len(names) != 2:
            raise ArtifactNotFound(
                f"no pair {reference!r}: not a directory, a run id or two names.",
                "See what is there: hetspec-prep list.",
            )
        reference, drafter = names
    for name in (reference, drafter):
        if "'" in name or "`" in name:
            raise InvalidInput(
                f"the name {name!r} has a quote in it.", "Give the pair's directory or run id."
            )
    store = Store(uri)
    found = store.pairs(reference, drafter, prefer, limit=1) if prefer and not part else []
    found = found or store.pairs(reference, drafter, part, limit=1)
    if not found:
        what = f"with {part} " if part else ""
        raise ArtifactNotFound(
            f"no complete pair {reference} ← {drafter} {what}in {store.uri}.",
            f"Build it: hetspec-prep build-map {reference} {drafter}.",
        )
    return store.pair_run(found[0].run_id)


def load_pair(
    reference: str | Path | tuple[str, str], *, uri: str | None = None, part: str = ""
) -> PairArtifact:
    """Loads a pair artifact after checking all of it.

    Args:
        reference: a directory, a run id, ``"runs:/<id>/pair"``, or ``(target, drafter)`` names.
        uri: the MLflow tracking store; by default the usual one.
        part: a part it must have; without one, names lead to the newest run with a kernel, if there is one.

    Raises:
        ArtifactNotFound, InvalidArtifact: see the messages.
    """
    if isinstance(reference, tuple):
        found = find_pair(reference[0], reference[1], uri=uri, part=part, prefer=PREFERRED)
    else:
        found = find_pair(str(reference), uri=uri, part=part, prefer=PREFERRED)
    return PairArtifact.from_pretrained(found if isinstance(found, Path) else found.artifact_dir)


# -- MLflow details ------------------------------------------------------------------------------------------


def _open(uri: str) -> MlflowClient:
    """A client whose store exists; its first opening is serialised (a cold SQLite store breaks under races)."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from filelock import FileLock
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    database = _sqlite_path(uri)
    try:
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{database}.lock") if database else nullcontext(), _hushed("mlflow", "alembic"):
            if database is not None:  # MLflow would try again for two minutes
                with closing(sqlite3.connect(database)) as probe:
                    probe.execute("PRAGMA schema_version")
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
        return client
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise HetspecError(
            f"the MLflow store {uri} cannot be opened: {str(error).splitlines()[0]}.",
            "Check --tracking-uri or MLFLOW_TRACKING_URI, and that the folder is writable.",
        ) from error


@contextmanager
def _hushed(*names: str) -> Iterator[None]:
    """Keeps these loggers to warnings for a while (creating a store is told in ten lines of INFO).

    Only after ``import mlflow``, which sets its logger's level itself.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _sqlite_path(uri: str) -> Path | None:
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0])).absolute()


def _identity_params(pair: PairArtifact) -> dict[str, Any]:
    return {
        "target": pair.target.name,
        "target_revision": pair.target.revision,
        "target_style": pair.target.style,
        "drafter": pair.drafter.name,
        "drafter_revision": pair.drafter.revision,
        "drafter_style": pair.drafter.style,
        "hetspec_version": __version__,
    }


def _metrics(values: Mapping[str, float], step: int = 0) -> list[Any]:
    from mlflow.entities import Metric
    from mlflow.utils.time import get_current_time_millis

    unknown = set(values) - set(METRICS)
    assert not unknown, f"metrics outside the closed list: {unknown}"
    now = get_current_time_millis()
    return [Metric(name, value, now, step) for name, value in values.items()]


def _params(values: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import Param

    return [Param(name, str(value)) for name, value in values.items() if str(value)]


def _tags(values: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in values.items()]


def ui_link(store: Store, port: int) -> str:
    """Where the UI shows the pairs: the list of runs, in the mode that shows metrics."""
    return (
        f"http://127.0.0.1:{port}/#/experiments/{store.experiment(PAIRS)}/runs?workflowType=machine_learning"
    )


def ui_command(uri: str, port: int) -> list[str]:
    """The command line that serves the MLflow UI on a store."""
    return [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port)]
