"""calibrate, build-affinity with every prior, prune, predict and recommend, through the real commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import transformers

from hetspec.artifact import PairArtifact
from tests.test_cli import one_object
from tests.test_cli_generate import PROMPT, Models
from tests.test_runtime import CODE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Models:
    transformers.utils.logging.disable_progress_bar()
    made = Models(tmp_path_factory.mktemp("models"), empty_database)
    lines = [json.dumps({"text": CODE[i : i + 300]}) for i in range(0, 9000, 300)]
    (made.folder / "texts.jsonl").write_text("\n".join(lines))
    made.texts = str(made.folder / "texts.jsonl")
    made.calibration = one_object(
        made.prep(
            "calibrate",
            *made.names,
            "--prompts",
            made.texts,
            "--tokens",
            "1500",
            "--dtype",
            "float32",
            "--json",
        )
    )
    return made


def test_calibrate_extends_the_pair_and_leaves_no_shards(models):
    found = models.calibration
    assert found["parent_run"] == models.affinity["run_id"]
    assert 1490 <= found["calibration"]["target_tokens"] <= 1500
    assert found["calibration"]["fit_contexts"] > 50
    assert found["calibration"]["held_out_contexts"] > 50
    assert 0 < found["calibration"]["target_mass_in_intersection"] <= 1
    shown = one_object(models.prep("show", found["run_id"], "--json"))
    assert shown["parts"] == ["map", "kernel-cosegment", "calibration"]
    assert not list((models.folder / "work").glob("calibrate-*"))
    table = models.prep("show", found["run_id"])
    assert "calibrated on" in table.stdout


@pytest.mark.parametrize("prior", ["mean", "covariance", "embedding", "cosegment"])
def test_every_prior_is_built_fitted_and_used(models, prior):
    arguments = ["--text", str(models.folder / "text.txt")] if prior == "cosegment" else []
    built = one_object(
        models.prep(
            "build-affinity",
            models.calibration["run_id"],
            "--prior",
            prior,
            "--top",
            "8",
            *arguments,
            "--json",
        )
    )
    figures = built["affinity"][prior]
    assert figures["fit_bound"] - figures["fit_value"] <= 1e-5
    assert figures["gain_low"] <= figures["gain"] <= figures["gain_high"]
    assert (figures["theta"] + figures["lam"] > 0) == (figures["gain_low"] > 0)
    plain = one_object(
        models.generate("--prompt", PROMPT, "--algorithm", "none", "--max-new-tokens", "12", "--json")
    )
    out = models._inside(
        __import__("hetspec.cli", fromlist=["app"]).app,
        *("generate", "--pair", built["run_id"], "--dtype", "float64", "--prompt", PROMPT),
        *("--algorithm", "rdk", "--prior", prior, "--max-new-tokens", "12", "--json"),
    )
    assert one_object(out)["ids"] == plain["ids"]


def test_a_mixture_and_fitted_rows(models):
    built = one_object(
        models.prep(
            "build-affinity", models.calibration["run_id"], "--prior", "covariance", "--top", "8", "--json"
        )
    )
    mixed = one_object(models.prep("build-affinity", built["run_id"], "--prior", "mixture", "--json"))
    figures = mixed["affinity"]["mixture"]
    assert figures["weight_cosegment"] + figures["weight_covariance"] == pytest.approx(1)
    text = str(models.folder / "text.txt")
    rows = one_object(
        models.prep("build-affinity", models.calibration["run_id"], "--text", text, "--fit-rows", "--json")
    )
    assert len(rows["affinity"]["cosegment"]["row_fit_curve"]) > 10
    before, after = (
        PairArtifact.from_pretrained(run["artifact_dir"]).kernels["cosegment"]
        for run in (models.calibration, rows)
    )
    assert after.indices.tolist() == before.indices.tolist()
    assert not np.array_equal(after.weights, before.weights)
    assert after.counts.tolist() == before.counts.tolist()


def test_prune_writes_a_head_that_generates_the_same_text(models):
    pruned = one_object(
        models.prep(
            "prune", models.calibration["run_id"], "--sizes", "260,290", "--dtype", "float32", "--json"
        )
    )
    figures = pruned["prune"]
    assert [p["size"] for p in figures["curve"]] == [260, 290, 336]
    assert figures["size"] in (260, 290, 336)
    assert all(p["step_seconds"] > 0 for p in figures["curve"])
    assert all(
        p["target_mass"] <= q["target_mass"]
        for p, q in zip(figures["curve"], figures["curve"][1:], strict=False)
    )
    fixed = one_object(
        models.prep(
            "prune",
            models.calibration["run_id"],
            "--size",
            "80%",
            "--no-timing",
            "--score",
            "frequency",
            "--json",
        )
    )
    assert fixed["prune"]["size"] == 269
    shown = one_object(models.prep("show", fixed["run_id"], "--json"))
    assert shown["parts"][-2:] == ["calibration", "head"]
    assert "LM head kept" in models.prep("show", fixed["run_id"]).stdout
    plain = one_object(
        models.generate("--prompt", PROMPT, "--algorithm", "none", "--max-new-tokens", "12", "--json")
    )
    app = __import__("hetspec.cli", fromlist=["app"]).app
    for extra in ((), ("--full-head",)):
        out = models._inside(
            app,
            *("generate", "--pair", fixed["run_id"], "--dtype", "float64", "--prompt", PROMPT, "--json"),
            *("--algorithm", "tli", "--num-draft-tokens", "3", "--max-new-tokens", "12", *extra),
        )
        assert one_object(out)["ids"] == plain["ids"]


def test_predict_gives_every_draft_length_with_intervals(models):
    found = one_object(
        models.prep(
            "predict",
            models.calibration["run_id"],
            *("--prompts", models.texts, "--texts", "3", "--new-tokens", "12", "--dtype", "float32"),
            *("--algorithms", "slem,tli,slrs,rdk,rdk:cosegment", "--json"),
        )
    )
    assert [p["name"] for p in found["predictions"]] == ["slem", "tli", "slrs", "rdk", "rdk:cosegment"]
    for p in found["predictions"]:
        assert sorted(map(int, p["tokens_per_pass"])) == list(range(1, 9))
        for i in p["tokens_per_pass"].values():
            assert 1 <= i["low"] <= i["mean"] <= i["high"]
        assert 0 <= p["best_length"] <= 8
    assert found["drafter_cost_ratio"] > 0
    table = models.prep(
        "predict",
        models.calibration["run_id"],
        *("--prompts", models.texts, "--texts", "2", "--new-tokens", "8", "--dtype", "float32"),
        *("--algorithms", "tli", "--check", "2", "--check-length", "3"),
    )
    assert "draft length 3, other prompts" in table.stdout


def test_recommend_ranks_drafters_and_no_drafter(models):
    target, drafter = models.names
    found = one_object(
        models.prep(
            "recommend",
            *(target, drafter, target),
            *("--prompts", models.texts, "--texts", "2", "--new-tokens", "8", "--dtype", "float32"),
            *("--algorithms", "tli,slrs", "--json"),
        )
    )
    assert [row["speedup"] for row in found["ranking"]] == sorted(
        (row["speedup"] for row in found["ranking"]), reverse=True
    )
    assert {row["drafter"] for row in found["ranking"]} == {"", drafter, target}
    assert found["best"] == found["ranking"][0]
    itself = [row for row in found["ranking"] if row["drafter"] == target and row["algorithm"] == "tli"]
    assert itself[0]["tokens_per_target_pass"] > 1.5  # the target as its own drafter: all is accepted


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("build-affinity", "MAP", "--prior", "mean"), 2, "no calibration"),
        (("build-affinity", "MAP", "--prior", "astrology"), 2, "unknown prior"),
        (("build-affinity", "CAL", "--prior", "mixture"), 2, "needs two kernels"),
        (("prune", "MAP"), 2, "no calibration"),
        (("prune", "CAL", "--size", "many", "--no-timing"), 2, "no head size"),
        (("prune", "CAL", "--size", "0", "--no-timing"), 2, "expected 1 to"),
        (("prune", "CAL", "--no-timing"), 2, "step times"),
        (("prune", "CAL", "--size", "280", "--no-timing", "--score", "luck"), 2, "unknown score"),
        (("predict", "CAL", "--algorithms", ","), 2, "no algorithm"),
        (("predict", "CAL", "--algorithms", "tli,none"), 2, "no algorithm 'none'"),
        (("predict", "CAL", "--prompts", "nothing-of-the-kind"), 1, "No texts are called"),
        (("calibrate", "MAP", "--prompts", "BAD"), 2, "line 2"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(models, arguments, code, message):
    bad = models.folder / "bad.jsonl"
    bad.write_text('"fine"\n{"no": "text"}\n')
    names = {"MAP": models.map["run_id"], "CAL": models.calibration["run_id"], "BAD": str(bad)}
    before = one_object(models.prep("list", "--json"))
    done = models.prep(*(names.get(a, a) for a in arguments))
    assert done.returncode == code
    assert re.fullmatch(r"(loading [^\n]*\n)?error: [^\n]*\n", done.stderr), done.stderr
    assert message in done.stderr
    assert one_object(models.prep("list", "--json")) == before


def test_audit_gives_a_verdict(models):
    app = __import__("hetspec.cli", fromlist=["app"]).app
    arguments = (
        "audit",
        models.calibration["run_id"],
        "--prompts",
        models.texts,
        "--texts",
        "2",
        "--dtype",
        "float64",
    )
    arguments += ("--max-new-tokens", "8", "--samples", "200", "--num-draft-tokens", "2")
    found = one_object(models._inside(app, *arguments, "--json"))
    assert found["verdict"] == "lossless"
    assert found["greedy"]["identical"] == found["greedy"]["texts"] == 6
    assert len(found["law"]["first_token"]) == 6
    assert [t["algorithm"] for t in found["law"]["texts"]] == ["slem", "tli", "slrs"]
    table = models._inside(app, *arguments)
    assert table.returncode == 0
    assert "verdict: lossless" in table.stdout
