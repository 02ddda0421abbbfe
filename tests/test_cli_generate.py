"""From two model directories to text, through the installed commands: build-map, build-affinity, generate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hetspec.cli import app, prep_app
from tests.test_cli import one_object, run
from tests.test_runtime import CODE, PROSE
from tests.toys import tiny_model, trained_bpe

PROMPT = "def f(x):\n    return"


class Models:
    """A random target and drafter as transformers saves them, with a pair and its kernel in a store."""

    def __init__(self, folder: Path, database: Path) -> None:
        (folder / "mlflow.db").write_bytes(database.read_bytes())
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.folder = folder
        self.names = []
        for name, texts, size, rows, seed in (
            ("target", [CODE, PROSE], 420, 432, 1),
            ("drafter", [PROSE[:4000]], 330, 336, 2),
        ):
            home = folder / name
            model = tiny_model("llama", rows, seed)
            model.save_pretrained(home)
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained_bpe(texts, size), eos_token="<eos>")
            tokenizer.save_pretrained(home)
            self.names.append(str(home))
        (folder / "text.txt").write_text(CODE[:20000])
        text = str(folder / "text.txt")
        self.map = one_object(self.prep("build-map", *self.names, "--text", text, "--json"))
        self.affinity = one_object(self.prep("build-affinity", *self.names, "--text", text, "--json"))

    def prep(self, *arguments: str):
        return self._inside(prep_app, *arguments)

    def _inside(self, which, *arguments: str):
        """The command in this process: the imports of a new one take longer than the test."""
        done = CliRunner().invoke(
            which, list(arguments), env={"MLFLOW_TRACKING_URI": self.uri, "NO_COLOR": "1"}
        )
        return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    def generate(self, *arguments: str):
        pair = " ".join(self.names)
        return self._inside(app, "generate", "--pair", pair, "--dtype", "float64", *arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Models:
    # The installed commands settle this from the environment, before anything is imported.
    transformers.utils.logging.disable_progress_bar()
    return Models(tmp_path_factory.mktemp("models"), empty_database)


def test_build_affinity_extends_the_map_run(models):
    assert models.affinity["parent_run"] == models.map["run_id"]
    assert models.affinity["affinity"]["cosegment"]["target_tokens"] > 1000
    assert models.affinity["affinity"]["cosegment"]["nnz"] >= 330
    shown = one_object(models.prep("show", models.affinity["run_id"], "--json"))
    assert shown["parts"] == ["map", "kernel-cosegment"]
    assert shown["provenance"]["stages"] == ["build-map", "build-affinity"]
    assert one_object(models.prep("show", models.map["run_id"], "--json"))["parts"] == ["map"]  # immutable
    assert one_object(models.prep("verify", *models.names, "--json"))["valid"] is True


def test_every_algorithm_prints_the_targets_own_ids(models):
    expected = one_object(
        models.generate("--prompt", PROMPT, "--algorithm", "none", "--max-new-tokens", "24", "--json")
    )
    assert len(expected["ids"]) == 24 or expected["stats"]["stop_reason"] == "eos"
    for algorithm in ("slem", "slrs", "rdk", "auto", "tli --static", "slrs --static", "auto --static"):
        out = one_object(
            models.generate(
                "--prompt",
                PROMPT,
                "--algorithm",
                *algorithm.split(),
                "--num-draft-tokens",
                "3",
                "--max-new-tokens",
                "24",
                "--json",
            )
        )
        assert out["ids"] == expected["ids"]
        assert out["text"] == expected["text"]
        assert set(out["stats"]) >= {
            "steps",
            "proposed",
            "accepted",
            "acceptance_rate",
            "tokens_per_target_pass",
            "acceptance_by_position",
            "target_forwards",
            "drafter_forwards",
            "seconds",
            "tokens_per_second",
        }
        assert out["stats"]["proposed"] > 0


def test_text_comes_on_stdout_and_figures_on_stderr(models):
    done = models.generate(
        "--prompt",
        PROMPT,
        "--algorithm",
        "tli",
        "--temperature",
        "0.8",
        "--seed",
        "3",
        "--max-new-tokens",
        "12",
    )
    again = models.generate(
        "--prompt",
        PROMPT,
        "--algorithm",
        "tli",
        "--temperature",
        "0.8",
        "--seed",
        "3",
        "--max-new-tokens",
        "12",
        "-q",
    )
    assert done.returncode == again.returncode == 0
    assert done.stdout == again.stdout != "\n"
    assert "per target pass" in done.stderr
    assert again.stderr == ""


def test_options_of_the_generation_config(models, tmp_path):
    base = ["--prompt", PROMPT, "--max-new-tokens", "16", "--algorithm", "slem", "--json"]
    free = one_object(models.generate(*base))
    penalised = one_object(models.generate(*base, "--option", "repetition_penalty=1.5"))
    transformers.GenerationConfig(repetition_penalty=1.5).save_pretrained(tmp_path)
    same = one_object(models.generate(*base, "--generation-config", str(tmp_path)))
    assert free["ids"] != penalised["ids"] == same["ids"]
    text = free["text"]
    stop = next(text[i : i + 2] for i in range(2, len(text)) if "\ufffd" not in text[i : i + 2])
    stopped = one_object(models.generate(*base, "--stop", stop))
    assert free["ids"][: len(stopped["ids"])] == stopped["ids"]
    assert stopped["stats"]["stop_reason"] == "stop string"
    transformers.GenerationConfig(
        do_sample=True, temperature=0.7, max_new_tokens=5, eos_token_id=419
    ).save_pretrained(tmp_path / "sampled")
    own = ["--prompt", PROMPT, "--algorithm", "slem", "--seed", "1", "--json"]
    sampled = one_object(models.generate(*own, "--generation-config", str(tmp_path / "sampled")))
    assert len(sampled["ids"]) == 5
    assert sampled["ids"] != free["ids"][:5]
    short = one_object(models.generate(*own, "--option", "max_length=20"))
    assert len(short["ids"]) < 20
    guided = one_object(models.generate(*own, "--option", "guidance_scale=1.5", "--max-new-tokens", "4"))
    assert len(guided["ids"]) == 4
    told = one_object(models.generate(*base, "--draft-prompt", "something else"))
    assert told["ids"] == free["ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", "x", "--option", "repetition_penalty"], 2, "expected name=value"),
        (["--prompt", "x", "--option", "temperature=0.5"], 2, "flag of its own"),
        (["--prompt", "x", "--option", "stop_strings=x"], 2, "flag of its own"),
        (["--prompt", "x", "--option", "streamer=1"], 2, "only be given in Python"),
        (["--prompt", "x", "--option", "num_beams=4"], 2, "num_beams"),
        (["--prompt", "x", "--option", "nonsense=4"], 2, "nonsense"),
        (["--prompt", "x", "--generation-config", "/nowhere/at/all"], 2, "not a generation config"),
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--prompt", "x" * 4000], 2, "context holds 512"),
        (["--prompt", "x", "--algorithm", "magic"], 2, "unknown algorithm"),
        (["--prompt", "x", "--num-draft-tokens", "many"], 2, "--num-draft-tokens"),
        (["--prompt", "x", "--top-p", "2"], 2, "top_p"),
        (["--prompt", "x", "--device", "cuda:7"], 2, "not available"),
        (["--prompt", "x", "--algorithm", "slrs", "--slrs-form", "other"], 2, "unknown slrs_form"),
        (["--prompt", "x", "--chat"], 2, "chat template"),
        (["--prompt", "x", "--static", "--num-draft-tokens", "17", "--algorithm", "tli"], 2, "at most 16"),
        (["--prompt-file", "/nowhere/at/all"], 1, "No such file"),
        ([], 2, "either --prompt or --prompt-file"),
    ],
)
def test_what_cannot_be_done_is_one_line(models, arguments, code, message):
    done = models.generate(*arguments, "--json")
    assert done.returncode == code
    assert message in json.loads(done.stdout)["error"]["message"]


def test_the_installed_command_generates(models):
    done = run(
        "generate", "--pair", " ".join(models.names), "--dtype", "float64", "--prompt", PROMPT,
        "--algorithm", "slrs", "--max-new-tokens", "8", "--json",
        command="hetspec", uri=models.uri,
    )  # fmt: skip
    assert done.returncode == 0
    assert len(one_object(done)["ids"]) <= 8


def test_a_pair_of_other_tokenizers_is_refused_with_3(models, tmp_path):
    other = tmp_path / "other"
    tiny_model("llama", 432, 1).save_pretrained(other)
    PreTrainedTokenizerFast(tokenizer_object=trained_bpe([PROSE], 420), eos_token="<eos>").save_pretrained(
        other
    )
    done = models.generate("--prompt", "x", "--target", str(other))
    assert done.returncode == 3
    assert done.stderr.count("\n") <= 2  # what is being loaded, and the error
    assert "the pair was built for target" in done.stderr
    assert done.stdout == ""
