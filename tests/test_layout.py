"""The shape of the package: imports go one way, and heavy ones wait until they are needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hetspec"
MODULES = sorted(str(p.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for p in PACKAGE.rglob("*.py"))

# What each part may import of the others, at any depth of indentation ("a" stands for "a" and "a.…").
FOUNDATION = {"errors", "__version__"}
MAY_IMPORT = {
    "errors": set(),
    "vocab": FOUNDATION,
    "segment": FOUNDATION | {"vocab"},
    "parts": FOUNDATION | {"vocab"},
    "artifact": FOUNDATION | {"vocab", "parts"},
    "tokenizer_files": FOUNDATION,
    "packaged": FOUNDATION | {"tokenizer_files"},
    "sources": FOUNDATION | {"vocab", "artifact", "packaged", "tokenizer_files"},
    "metrics": {"artifact"},
    "tracking": FOUNDATION | {"vocab", "artifact", "metrics"},
    "runtime": FOUNDATION | {"vocab", "segment", "parts", "artifact", "sources", "runtime"},
    "prep": FOUNDATION | {"vocab", "segment", "parts", "artifact", "sources", "runtime", "prep"},
    "demo": FOUNDATION
    | {"vocab", "segment", "artifact", "sources", "runtime", "prep", "tracking", "console"},
    "console": FOUNDATION | {"artifact", "sources", "runtime", "tracking"},
    "cli_prep": FOUNDATION | {"console", "artifact", "sources", "packaged", "runtime", "prep", "tracking"},
    "cli_tune": FOUNDATION | {"console", "cli_prep", "parts", "artifact", "sources", "prep", "tracking"},
    "cli_predict": FOUNDATION | {"console", "artifact", "sources", "runtime", "prep", "tracking"},
    "prompts": {"sources"},
    "cli_bench": FOUNDATION | {"prep", "console", "prompts", "runtime", "tracking"},
    "cli": FOUNDATION | {"console", "cli_bench", "cli_prep", "cli_tune", "cli_predict", "runtime", "demo"},
}
# Inside the runtime: the mathematics knows nothing of the loop, the loop nothing of the user's API.
RUNTIME_MAY_NOT_IMPORT = {
    "laws": {"algorithms", "decode", "engine", "generate", "models", "context"},
    "rng": {"algorithms", "decode", "engine", "generate", "models", "context"},
    "algorithms": {"decode", "engine", "generate", "models"},
    "models": {"algorithms", "decode", "engine", "generate"},
    "context": {"algorithms", "decode", "engine", "generate"},
    "processors": {"algorithms", "decode", "engine", "generate", "hf"},
    "batch": {"algorithms", "decode", "engine", "generate", "hf"},
    "decode": {"request", "engine", "generate", "hf"},
    "request": {"decode", "models", "engine", "generate", "hf"},
    "engine": {"generate", "hf"},
    "generate": {"hf"},
}


def imported(module: str, source: str) -> set[str]:
    """Modules of the package that a module's source imports, types-only imports left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} uses a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("hetspec.") for name in found if name.startswith("hetspec.")}


def illegal(module: str, names: set[str]) -> set[str]:
    allowed = MAY_IMPORT[module.split(".")[0]]
    wrong = {name for name in names if name.split(".")[0] not in allowed}
    if module.startswith("runtime."):
        forbidden = RUNTIME_MAY_NOT_IMPORT.get(module.split(".")[1], set())
        wrong |= {
            name for name in names if name.split(".")[0] == "runtime" and name.split(".")[1] in forbidden
        }
    return wrong


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_go_one_way(module: str) -> None:
    path = PACKAGE / (module.replace(".", "/") + ".py")
    assert illegal(module, imported(module, path.read_text())) == set()


def test_a_wrong_import_would_be_seen() -> None:
    wrong = "def f():\n    from hetspec.prep.build import prepare\n    import hetspec.tracking\n"
    assert illegal("runtime.decode", imported("runtime.decode", wrong)) == {"prep.build.prepare", "tracking"}
    assert illegal("runtime.laws", {"runtime.decode.Decoder"}) == {"runtime.decode.Decoder"}
    types_only = "if TYPE_CHECKING:\n    from hetspec.tracking import Store\n"
    assert imported("vocab", types_only) == set()


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("mlflow", {"tracking"}),
        ("typer", {"cli", "cli_bench", "cli_prep", "cli_tune", "cli_predict", "console"}),
        ("matplotlib", {"prep.report"}),
    ],
)
def test_each_heavy_library_has_one_home(library: str, home: set[str]) -> None:
    users: set[str] = set()
    for module in MODULES:
        tree = ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == library for name in names):
                users.add(module)
    assert users <= home | {"tracking"}
    assert home <= users


def modules_after(code: str) -> set[str]:
    """Names of everything imported once the code has run, in a fresh process."""
    tail = "\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


HELP = """
import sys
sys.argv = ["hetspec-prep", "--help"]
from hetspec.cli import {main}
try:
    {main}()
except SystemExit as end:
    assert end.code == 0, end.code
"""


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (HELP.format(main="main_prep"), {"torch", "mlflow", "transformers", "numpy", "matplotlib"}),
        (HELP.format(main="main"), {"torch", "mlflow", "transformers", "numpy", "matplotlib"}),
        ("import hetspec", {"torch", "mlflow", "transformers", "numpy", "typer"}),
        ("import hetspec.tracking, hetspec.artifact", {"torch", "mlflow", "transformers", "matplotlib"}),
        ("import hetspec.runtime.generate", {"mlflow", "matplotlib", "typer", "hetspec.tracking"}),
        ("import hetspec; hetspec.generate; hetspec.PairArtifact", {"mlflow", "matplotlib"}),
        ("import hetspec.prep.build, hetspec.prep.report", {"torch", "mlflow", "matplotlib"}),
    ],
    ids=["prep help", "help", "hetspec", "tracking", "runtime", "public names", "prep"],
)
def test_imports_wait_until_they_are_needed(code: str, unwanted: set[str]) -> None:
    assert modules_after(code) & unwanted == set()


def test_every_public_name_exists() -> None:
    import hetspec

    assert all(getattr(hetspec, name) is not None for name in hetspec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hetspec.nothing  # noqa: B018
