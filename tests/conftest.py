"""Settings for every test: one thread, no telemetry, hypothesis profiles, and an MLflow store made once."""

from __future__ import annotations

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # read when Triton is first imported, by whatever test comes first

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HETSPEC_HYPOTHESIS", "ci"))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and nothing else; making one takes seconds, copying it none."""
    from hetspec.tracking import Store

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    Store(f"sqlite:///{path}")
    return path


@pytest.fixture
def store_uri(empty_database: Path, tmp_path: Path) -> str:
    """A tracking URI of the test's own, on a store that exists and is empty."""
    folder = tmp_path / "tracking"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"
