"""Pairs in MLflow: what a run holds, how it is found again, and that half a run is never found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetspec.artifact import PairArtifact
from hetspec.errors import ArtifactNotFound, HetspecError, InvalidArtifact, InvalidInput
from hetspec.tracking import (
    BENCH,
    METRICS,
    PAIRS,
    Store,
    default_uri,
    find_pair,
    load_pair,
    pair_metrics,
    ui_link,
)
from tests.builders import MAP_METRICS, small_pair

FIGURES = {
    "map": {
        "intersection_count": 4,
        "target_fraction": 0.5,
        "drafter_fraction": 0.25,
        "duplicates": 0,
        "controls_mapped": 1,
        "first_fraction": 1.0,
    },
    "corpus": {"name": "mine", "bytes": 10, "target_covered": 0.9, "drafter_covered": 0.8},
    "seconds": 1.5,
}


def named(target: str, drafter: str, **changes: Any) -> PairArtifact:
    pair = small_pair()
    return replace(
        pair,
        target=replace(pair.target, name=target),
        drafter=replace(pair.drafter, name=drafter),
        **{"figures": FIGURES, **changes},
    )


@pytest.fixture
def store(store_uri: str) -> Store:
    return Store(store_uri)


# --- what a run holds


def test_a_run_holds_identity_figures_and_the_artifact(store: Store) -> None:
    from matplotlib.figure import Figure

    pair = named("big", "small")
    stored = store.log_pair(
        pair,
        stage="build-map",
        params={"text": "mine"},
        figures={"plots/x.png": Figure(), "overview.png": Figure()},
        tables={"tables/t.json": [{"id": 1}]},
        note="- a note",
        parent_run="0" * 32,
    )
    run = store.client.get_run(stored.run_id)
    assert run.info.run_name == "big ← small"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "target": "big",
        "drafter": "small",
        "target_revision": "sha256:t",
        "drafter_revision": "sha256:d",
        "target_style": "byte-level BPE",
        "drafter_style": "byte-level BPE",
        "hetspec_version": pair.provenance.get("hetspec_version", "0.1.0"),
        "text": "mine",
    }
    tags = run.data.tags
    assert tags["hetspec.state"] == "complete"
    assert tags["hetspec.pair_key"] == pair.key
    assert tags["hetspec.stage"] == "build-map"
    assert tags["hetspec.parts"] == "map kernel-cosegment"
    assert tags["hetspec.parent_run"] == "0" * 32
    assert tags["hetspec.target_vocab_sha256"] == pair.target.vocab_sha256
    assert tags["hetspec.drafter_behaviour_sha256"] == pair.drafter.behaviour_sha256
    assert tags["mlflow.note.content"] == "- a note"
    assert tags["mlflow.source.name"] == "hetspec-prep build-map"
    assert {f.path for f in store.client.list_artifacts(stored.run_id)} == {
        "pair",
        "plots",
        "tables",
        "overview.png",
    }
    size = sum(f.stat().st_size for f in stored.artifact_dir.iterdir())
    assert run.data.metrics["cost/artifact_bytes"] == size
    assert PairArtifact.from_pretrained(stored.artifact_dir).key == pair.key


def test_metrics_are_a_closed_list_and_all_of_a_map_is_measured(store: Store) -> None:
    stored = store.log_pair(named("big", "small"), stage="build-map")
    assert set(stored.metrics) == MAP_METRICS
    assert set(METRICS) >= MAP_METRICS
    assert stored.metrics["map/intersection_count"] == 4
    assert stored.metrics["corpus/target_covered_frac"] == 0.9
    assert stored.metrics["cost/build_seconds"] == 1.5
    sections = ("vocab", "map", "corpus", "affinity", "prune", "accept", "predict", "speed", "cost")
    assert {name.split("/")[0] for name in METRICS} <= set(sections)
    assert all(description for description in METRICS.values())


def test_the_list_of_metrics_is_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert [name for name in METRICS if name not in readme] == []


def test_what_was_not_measured_is_left_out() -> None:
    assert set(pair_metrics(named("a", "b", figures={}))) == {n for n in METRICS if n.startswith("vocab/")}
    no_text = {**FIGURES, "corpus": {**FIGURES["corpus"], "bytes": 0}}
    assert not any(n.startswith("corpus/") for n in pair_metrics(named("a", "b", figures=no_text)))


def test_all_pairs_have_the_same_names_of_parameters_and_metrics(store: Store) -> None:
    pairs = [named("a", "b"), named("org/model-7B", "/some/path/tokenizer.json"), named("模型", "ü")]
    runs = [
        store.client.get_run(store.log_pair(p, stage="build-map", params={"text": "t"}).run_id) for p in pairs
    ]
    assert len({tuple(sorted(run.data.params)) for run in runs}) == 1
    assert len({tuple(sorted(run.data.metrics)) for run in runs}) == 1
    assert len({tuple(sorted(set(run.data.tags) - {"mlflow.user"})) for run in runs}) == 1
    for run, pair in zip(runs, pairs, strict=True):
        names = [*run.data.params, *run.data.metrics]
        assert not any(pair.target.name in name for name in names if len(pair.target.name) > 1)


def test_runs_of_one_pair_share_a_colour_and_others_differ(store: Store) -> None:
    def colour(n: int) -> str:
        pair = small_pair()
        pair = replace(pair, target=replace(pair.target, vocab_sha256=f"{n:016x}" * 4))
        return store.log_pair(pair, stage="build-map").tags["mlflow.runColor"]

    first = [colour(n) for n in range(8)]
    assert len(set(first)) == 8
    assert [colour(n) for n in (3, 0)] == [first[3], first[0]]


def test_experiments_are_set_up_for_the_ui(store: Store) -> None:
    for name, metric in ((PAIRS, "map/intersection_count"), (BENCH, "speed/ratio_to_plain")):
        experiment = store.client.get_experiment(store.experiment(name))
        assert experiment.tags["mlflow.experiment.primaryMetric.name"] == metric
        assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
        assert store.experiment(name) == experiment.experiment_id
    link = ui_link(store, 5005)
    assert (
        link
        == f"http://127.0.0.1:5005/#/experiments/{store.experiment(PAIRS)}/runs?workflowType=machine_learning"
    )


# --- how it is found


@pytest.mark.parametrize(
    "form", ["names", "two words", "tuple", "id", "uri", "uri without a part", "directory"]
)
def test_a_pair_is_found_by_every_name_it_has(store: Store, form: str) -> None:
    pair = named("big/target", "small/drafter")
    stored = store.log_pair(pair, stage="build-map")
    store.log_pair(named("big/target", "another"), stage="build-map")
    uri = store.uri
    if form == "names":
        found = find_pair("big/target", "small/drafter", uri=uri)
    elif form == "two words":
        found = find_pair("big/target small/drafter", uri=uri)
    elif form == "tuple":
        assert load_pair(("big/target", "small/drafter"), uri=uri).key == pair.key
        return
    elif form == "directory":
        assert find_pair(str(stored.artifact_dir), uri="sqlite:////nowhere/at/all.db") == stored.artifact_dir
        assert load_pair(stored.artifact_dir).drafter == pair.drafter
        return
    else:
        word = {"id": "{}", "uri": "runs:/{}/pair", "uri without a part": "runs:/{}"}[form]
        found = find_pair(word.format(stored.run_id), uri=uri)
        assert load_pair(word.format(stored.run_id), uri=uri).drafter == pair.drafter
    assert not isinstance(found, Path)
    assert found.run_id == stored.run_id
    assert found.artifact_dir == stored.artifact_dir


def test_names_lead_to_the_newest_run_that_has_the_part(store: Store) -> None:
    def log(pair: PairArtifact) -> str:
        time.sleep(0.005)  # start times are in milliseconds
        return store.log_pair(pair, stage="x").run_id

    with_kernel, without = named("a", "b"), named("a", "b", kernels={})
    log(with_kernel)
    second = log(with_kernel)
    third = log(without)
    assert find_pair("a", "b", uri=store.uri).run_id == third
    assert find_pair("a", "b", uri=store.uri, part="kernel-cosegment").run_id == second
    assert load_pair(("a", "b"), uri=store.uri, part="kernel-cosegment").kernels
    with pytest.raises(ArtifactNotFound, match="with kernel-mean"):
        find_pair("a", "b", uri=store.uri, part="kernel-mean")
    assert [p.run_id for p in store.pairs()][:2] == [third, second]


def test_names_are_matched_whole(store: Store) -> None:
    store.log_pair(named("abc", "xyz"), stage="build-map")
    for target, drafter in (("ab", "xyz"), ("abc", "xy"), ("xyz", "abc"), ("%", "%"), ("ABC", "xyz")):
        with pytest.raises(ArtifactNotFound, match="no complete pair") as caught:
            find_pair(target, drafter, uri=store.uri)
        assert f"build-map {target} {drafter}" in caught.value.hint


@pytest.mark.parametrize(
    "reference", ["one", "one two three", "0" * 32, "runs:/" + "a" * 32, "", "runs:/xyz/pair"]
)
def test_what_leads_nowhere_is_said_in_one_line(store: Store, reference: str) -> None:
    with pytest.raises(ArtifactNotFound) as caught:
        find_pair(reference, uri=store.uri)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["it's", "a`b"])
def test_names_with_quotes_do_not_reach_the_query(store: Store, name: str) -> None:
    with pytest.raises(InvalidInput, match="has a quote"):
        find_pair(name, "b", uri=store.uri)
    store.log_pair(named(name, "b"), stage="build-map")  # but can be stored, and found by id


def test_a_damaged_artifact_of_a_run_is_invalid(store: Store) -> None:
    stored = store.log_pair(named("a", "b"), stage="build-map")
    path = stored.artifact_dir / "map.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidArtifact):
        load_pair(("a", "b"), uri=store.uri)


def test_a_removed_artifact_is_not_found(store: Store) -> None:
    import shutil

    stored = store.log_pair(named("a", "b"), stage="build-map")
    shutil.rmtree(stored.artifact_dir)
    with pytest.raises(ArtifactNotFound, match="is not at") as caught:
        load_pair(("a", "b"), uri=store.uri)
    assert "\n" not in str(caught.value)


def test_folders_with_spaces_and_other_letters(
    empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    folder = tmp_path / "my dir é %20 #1 ?"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    (folder / "artifacts").mkdir()
    (folder / "mlflow.db").rename(folder / "artifacts" / "mlflow.db")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Store()
    stored = store.log_pair(named("a", "b"), stage="build-map")
    found = find_pair("a", "b", uri=store.uri)
    assert found.artifact_dir == stored.artifact_dir
    assert found.artifact_dir.is_relative_to(folder)  # itself, not a downloaded copy
    assert load_pair(("a", "b"), uri=store.uri).target.name == "a"


# --- incomplete runs


class Boom(Exception):
    pass


@pytest.mark.parametrize("step", ["log_batch", "log_artifacts", "log_dict", "set_tag"])
def test_a_run_that_fails_anywhere_is_failed_and_never_found(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise Boom

    with monkeypatch.context() as patch:
        patch.setattr(store.client, step, fail)
        with pytest.raises(Boom):
            store.log_pair(named("a", "b"), stage="build-map", tables={"tables/t.json": []})
    (run,) = store.client.search_runs([store.experiment(PAIRS)])
    assert run.info.status == "FAILED"
    assert store.pairs() == []
    with pytest.raises(ArtifactNotFound, match="no complete pair"):
        find_pair("a", "b", uri=store.uri)
    with pytest.raises(ArtifactNotFound, match="holds no complete pair"):
        find_pair(run.info.run_id, uri=store.uri)
    store.log_pair(named("a", "b"), stage="build-map")
    assert len(store.pairs()) == 1


def test_a_run_without_its_last_tag_is_never_found(store: Store) -> None:
    stored = store.log_pair(named("a", "b"), stage="build-map")
    store.client.delete_tag(stored.run_id, "hetspec.state")
    assert store.pairs() == []
    with pytest.raises(ArtifactNotFound):
        find_pair(stored.run_id, uri=store.uri)


def test_a_run_that_was_killed_before_its_end_is_not_listed(store: Store) -> None:
    stored = store.log_pair(named("a", "b"), stage="build-map")
    store.client.update_run(stored.run_id, status="RUNNING")
    assert store.pairs() == []


def test_a_deleted_run_is_not_listed(store: Store) -> None:
    stored = store.log_pair(named("a", "b"), stage="build-map")
    store.client.delete_run(stored.run_id)
    assert store.pairs() == []


def test_a_deleted_experiment_is_said_with_the_way_back(store: Store) -> None:
    experiment = store.experiment(PAIRS)
    store.client.delete_experiment(experiment)
    with pytest.raises(HetspecError, match="was deleted") as caught:
        store.log_pair(named("a", "b"), stage="build-map")
    assert f"mlflow experiments restore -x {experiment}" in caught.value.hint


def test_a_run_of_something_else_is_no_pair(store: Store) -> None:
    run = store.client.create_run(store.experiment(PAIRS))
    store.client.set_tag(run.info.run_id, "hetspec.state", "complete")
    with pytest.raises(ArtifactNotFound, match="holds no complete pair"):
        find_pair(run.info.run_id, uri=store.uri)


def test_a_metric_outside_the_list_is_a_mistake_of_ours(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    monkeypatch.setattr("hetspec.tracking.pair_metrics", lambda pair: {"map/new": 1.0})
    with pytest.raises(AssertionError, match="map/new"):
        store.log_pair(named("a", "b"), stage="build-map")


# --- stores


def test_the_default_store_is_the_environments_or_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert default_uri() == "http://server:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    assert default_uri() == f"sqlite:///{tmp_path}/artifacts/mlflow.db"


@pytest.mark.parametrize(
    "uri",
    ["sqlite:////proc/nowhere/mlflow.db", "sqlite:////dev/null/mlflow.db", "nonsense://x"],
)
def test_a_store_that_cannot_be_opened_is_one_line(uri: str) -> None:
    with pytest.raises(HetspecError, match="cannot be opened") as caught:
        Store(uri)
    assert "\n" not in str(caught.value)
    assert "--tracking-uri" in caught.value.hint


def test_a_directory_in_the_databases_place_is_one_line_at_once(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    started = time.perf_counter()
    with pytest.raises(HetspecError, match="cannot be opened"):
        Store(f"sqlite:///{tmp_path / 'inner'}")
    assert time.perf_counter() - started < 5  # MLflow itself tries again for two minutes


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database at all, but long enough to have a header" * 10)
    with pytest.raises(HetspecError, match="cannot be opened") as caught:
        Store(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert "\n" not in str(caught.value)


def test_six_processes_open_a_cold_store_at_once_and_in_silence(tmp_path: Path) -> None:
    """Without the lock five or six of them fail (their migrations collide)."""
    code = (
        "import sys; from hetspec.tracking import PAIRS, Store; print(Store(sys.argv[1]).experiment(PAIRS))"
    )
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        )
        for _ in range(6)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 6, results
    assert len({out for out, _ in results}) == 1  # one experiment, not six
    assert [error for _, error in results] == [""] * 6  # the tables are made without ten lines of INFO
