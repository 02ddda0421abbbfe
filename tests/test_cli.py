"""The commands as a user runs them: what goes to stdout, exit codes, and errors in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetspec.artifact import PairArtifact
from hetspec.cli import app, prep_app
from tests.builders import MAP_METRICS, full_byte_bpe, sentencepiece_bpe, small_pair

BIN = Path(sys.executable).parent
TEXT = "the cat and the dog, the cat\n" * 20


def run(
    *arguments: str, command: str = "hetspec-prep", uri: str = "", cwd: Path | None = None, **environment: str
):
    """The installed console script, as a user starts it."""
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": uri,
        "NO_COLOR": "1",
        **environment,
    }
    return subprocess.run(
        [BIN / command, *arguments],
        capture_output=True,
        text=True,
        env=settings,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def one_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stdout, with nothing around it and nothing on stderr."""
    assert done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith("{")
    assert done.stderr == ""
    return json.loads(done.stdout)


class Workplace:
    """Two tokenizer files, a text and a store with one built pair."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        shutil.copyfile(database, folder / "mlflow.db")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.target, self.drafter, self.other = (
            str(folder / f"{n}.json") for n in ("target", "drafter", "other")
        )
        full_byte_bpe(("the", " the", "cat"), ("<|endoftext|>",)).save(self.target)
        sentencepiece_bpe(("▁the", "the", "▁dog")).save(self.drafter)
        full_byte_bpe(("the", " the", "dog"), ("<|endoftext|>",)).save(self.other)
        (folder / "text.txt").write_text(TEXT)
        self.pair = str(folder / "pair")
        done = self.prep(
            "build-map",
            self.target,
            self.drafter,
            "--text",
            str(folder / "text.txt"),
            "--output",
            self.pair,
            "--json",
        )
        self.built = one_object(done)

    def prep(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, uri=self.uri, cwd=self.folder, **environment)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("workplace"), empty_database)


# --- build-map, list, show


def test_build_map_says_everything_in_one_object(place: Workplace) -> None:
    built = place.built
    assert set(built) == {
        "run_id", "artifact_dir", "target", "drafter", "vocab", "map", "corpus", "seconds",
    }  # fmt: skip
    assert built["artifact_dir"] == place.pair
    assert built["target"]["name"] == place.target
    assert built["target"]["rows"] == built["target"]["text_tokens"] + 1
    assert built["drafter"]["style"] == "SentencePiece BPE"
    assert set(built["map"]) == {
        "intersection_count", "target_fraction", "drafter_fraction", "duplicates", "controls_mapped", "first_fraction",
    }  # fmt: skip
    # All 256 bytes, " t", " th", " the", "th" and "the"; "</s>" is "<|endoftext|>".
    assert built["map"]["intersection_count"] == 256 + 5
    assert built["map"]["controls_mapped"] == 1
    assert built["corpus"]["name"].endswith("text.txt")
    assert 0 < built["corpus"]["target_covered"] < 1
    assert PairArtifact.from_pretrained(place.pair).figures["map"] == built["map"]


def test_build_map_for_people(place: Workplace) -> None:
    done = place.prep("build-map", place.target, place.drafter, "--text", "text.txt")
    assert done.returncode == 0
    assert "shared byte for byte\t261" in done.stdout
    assert "MLflow run  " in done.stdout
    assert done.stderr.splitlines() == [
        f"reading the tokenizers of {place.target} and {place.drafter}",
        "intersecting the vocabularies",
        "measuring coverage on text.txt",
        "storing the pair",
    ]


def test_list_and_show_agree_with_what_was_built(place: Workplace) -> None:
    listed = one_object(place.prep("list", "--json"))
    (pair,) = (p for p in listed["pairs"] if p["run_id"] == place.built["run_id"])
    assert (pair["target"], pair["drafter"]) == (place.target, place.drafter)
    assert (pair["stage"], pair["parts"]) == ("build-map", "map")
    assert set(pair["metrics"]) == MAP_METRICS
    assert pair["metrics"]["map/intersection_count"] == 261
    shown = one_object(place.prep("show", place.built["run_id"], "--json"))
    assert set(shown) == {
        "run_id", "artifact_dir", "target", "drafter", "figures", "provenance", "parts",
    }  # fmt: skip
    assert shown["run_id"] == place.built["run_id"]
    assert shown["parts"] == ["map"]
    assert shown["figures"]["map"] == place.built["map"]
    assert PairArtifact.from_pretrained(shown["artifact_dir"]).target.name == place.target


def test_quiet_prints_the_run_id_and_nothing_else(place: Workplace) -> None:
    done = place.prep("list", "-q")
    assert done.stderr == ""
    assert place.built["run_id"] in done.stdout.split()
    assert all(len(word) == 32 for word in done.stdout.split())


def test_a_fresh_store_is_made_in_silence(tmp_path: Path) -> None:
    done = run("list", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no pairs yet\n", "")
    assert (tmp_path / "artifacts" / "mlflow.db").is_file()


# --- verify


def test_verify_accepts_what_was_built(place: Workplace) -> None:
    record = one_object(place.prep("verify", place.target, place.drafter, "--json"))
    assert record["valid"] is True
    assert (record["target"], record["drafter"]) == (place.target, place.drafter)


def test_verify_needs_no_store_for_a_directory(place: Workplace) -> None:
    done = run("verify", place.pair, uri="sqlite:////nowhere/at/all.db")
    assert done.returncode == 0
    assert done.stdout.startswith("valid: ")


def test_verify_refuses_a_swapped_tokenizer_with_3(place: Workplace) -> None:
    done = place.prep("verify", place.pair, "--target", place.other)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: the pair was built for target vocabulary ")
    assert done.stderr.count("\n") == 1
    assert "build-map" in done.stderr


@pytest.fixture
def broken(place: Workplace, tmp_path: Path) -> Path:
    """A copy of the built artifact, to be broken."""
    shutil.copytree(place.pair, tmp_path / "broken")
    return tmp_path / "broken"


def test_verify_refuses_a_truncated_artifact_with_3(place: Workplace, broken: Path) -> None:
    path = broken / "map.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = place.prep("verify", str(broken), "--json")
    assert done.returncode == 3
    error = one_object(done)["error"]
    assert set(error) == {"type", "message", "hint"}
    assert error["type"] == "InvalidArtifact"
    assert "sha256" in error["message"]


# The rest runs in this process: the same code, without a second for every start.


def invoke(*arguments: str, which=prep_app):
    return CliRunner().invoke(which, list(arguments))


def test_verify_refuses_a_map_that_is_sound_but_another(place: Workplace, broken: Path) -> None:
    """Everything agrees with itself and with both fingerprints; only rebuilding the map shows it."""
    import numpy as np

    from tests.attacks.test_hostile_artifacts import put_tensors, tensor

    first = tensor(broken, "map.safetensors", "first")
    first[:5] = np.int32(0)
    put_tensors(broken, "map.safetensors", first=first)
    PairArtifact.from_pretrained(broken)
    done = invoke("verify", str(broken))
    assert done.exit_code == 3
    assert "the map's first differs" in done.stderr


def test_show_of_an_artifact_with_other_figures(place: Workplace, tmp_path: Path) -> None:
    from dataclasses import replace

    bare = small_pair().save_pretrained(tmp_path / "bare")
    done = invoke("show", str(bare))
    assert done.exit_code == 0
    assert "text tokens\t6\t5" in done.stdout
    for n, figures in enumerate([{"map": 3}, {"map": {}}, {"corpus": []}, {"corpus": {"bytes": 1}}]):
        odd = replace(small_pair(), figures=figures).save_pretrained(tmp_path / f"odd{n}")
        done = invoke("show", str(odd))
        assert done.exit_code == 3, figures
        assert "are not those of a built map" in done.stderr


# --- errors


def test_unknown_names_are_one_line_and_1(place: Workplace) -> None:
    done = place.prep("build-map", "smolm2-135m", place.drafter)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Did you mean smollm2-135m" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["build-map", "nothing", "nothing"], 1),
        (["build-map", "nothing", "nothing", "--text", "no such text"], 1),
        (["show", "/no/such/pair"], 1),
        (["show", "a", "b", "c"], 2),
        (["verify", "0" * 32], 1),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_every_known_error_is_one_line_or_one_object(
    store_uri: str, arguments: list[str], code: int, as_json: bool
) -> None:
    done = invoke(*arguments, "--tracking-uri", store_uri, *(["--json"] if as_json else []))
    assert done.exit_code == code
    if as_json:
        error = json.loads(done.stdout)["error"]
        assert set(error) == {"type", "message", "hint"}
        assert error["message"]
        assert done.stderr == ""
    else:
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ")
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["build-map"],
        ["build-map", "one"],
        ["list", "--nonsense"],
        ["ui", "--port", "0"],
        ["show"],
    ],
)
def test_usage_errors_are_2(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Usage:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--prompt-file", "y"], "either --prompt or --prompt-file"),
        ([], "either --prompt or --prompt-file"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--num-draft-tokens", "many"], "expected auto or a whole number"),
        (["--prompt", "x", "--dtype", "int3"], "unknown dtype"),
        (["--prompt", "x", "--device", "cuda:77"], "is not available"),
    ],
)
def test_options_of_generate_are_checked_before_any_model_is_read(
    place: Workplace, arguments: list[str], message: str
) -> None:
    done = invoke("generate", "--pair", place.pair, *arguments, which=app)
    assert done.exit_code == 2
    assert message in done.stderr


def test_an_existing_output_is_refused_before_the_work(place: Workplace) -> None:
    done = invoke("build-map", place.target, place.drafter, "--output", place.pair)
    assert done.exit_code == 2
    assert "exists already" in done.stderr


def test_an_unwritable_store_is_one_line(place: Workplace) -> None:
    arguments = ["build-map", place.target, place.drafter, "--text", str(place.folder / "text.txt")]
    done = invoke(*arguments, "--tracking-uri", "sqlite:////proc/nowhere/mlflow.db", "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert "cannot be opened" in error["message"]
    assert "--tracking-uri" in error["hint"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/x"), 1, "error: No space left on device (/x)."),
        (MemoryError(), 1, "error: MemoryError"),
    ],
)
def test_what_the_system_does_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("hetspec.tracking.Store", fail)
    done = invoke("list")
    assert done.exit_code == code
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_tracebacks_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in invoke("show", "/no/such/pair").stderr
    monkeypatch.setenv("HETSPEC_DEBUG", "1")
    assert "Traceback" in invoke("show", "/no/such/pair").stderr


@pytest.mark.parametrize("which", [app, prep_app], ids=["hetspec", "hetspec-prep"])
def test_help_lists_every_command_with_a_line(which) -> None:
    done = invoke("--help", which=which)
    assert done.exit_code == 0
    for command in which.registered_commands:
        name = command.name or command.callback.__name__
        assert name in done.stdout
        assert invoke(name, "--help", which=which).exit_code == 0
        assert command.callback.__doc__


def test_names_that_are_no_text_are_refused_in_one_line(place: Workplace) -> None:
    odd = place.folder / os.fsdecode(b"bad\xff.json")
    shutil.copyfile(place.target, odd)
    done = place.prep("build-map", str(odd), place.drafter, "--text", "text.txt", "--json")
    assert done.returncode != 0
    assert "control characters" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr
