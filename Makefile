# Every target sets up what it needs in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
FILES := pyproject.toml constraints.txt
QUICK := tests/feeds tests/planning tests/store tests/frameworks/test_functional.py \
	$(filter-out %/test_process_group.py,$(wildcard tests/frameworks/torch/test_*.py)) \
	$(addprefix tests/test_,$(addsuffix .py,bad_input callbacks composition each fleet golden history layers \
	members saving shared_loader streams trees trouble))

.PHONY: help setup demo test test-gpu quick fuzz chaos killing lint bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(VENV)/.setup  ## everything: all frameworks, the tests' and the linters' packages

demo: $(VENV)/.demo  ## 64 variants of a network on one device, in under a minute
	$(BIN)/modelfleet demo

# With bytecode kept, whatever the environment says: a hundred processes are started.
test: lint  ## lint, types and all tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --durations=40

test-gpu: setup  ## on a machine with an NVIDIA GPU: the promises kept there, and a table of timings
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m benchmarks.accelerators

quick: setup  ## what to run after each edit: the tests that take neither processes nor compilers, a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' $(QUICK)

MINUTES ?= 10
TARGET ?= all

fuzz: setup  ## random programs, in a fleet and alone: MINUTES=60 TARGET=torch|jax|keras-tensorflow|keras-jax|all
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) --target $(TARGET)

chaos: setup  ## replicas while their workers are killed, frozen and short of memory: MINUTES=10
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.replicas.chaos --minutes $(MINUTES)

killing: setup  ## programs and ranks killed at random moments leave nothing behind
	MODELFLEET_TEST_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_left_behind.py tests/graph/test_lost_ranks.py

lint: setup  ## ruff and pyrefly
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --summary=none

bench: setup  ## fused fleets against their peers, as ratios in one run
	$(BIN)/python -m benchmarks

clean:  ## remove the environment and every cache
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis benchmarks/results

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first, alone: so that no later requirement brings another build of it. triton, which only one test needs
# and not every system has, is kept apart: a process that imports it after TensorFlow ends with a segmentation fault.
$(VENV)/.demo: $(FILES) | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.setup: $(FILES) | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[all,demo,dev]'
	-$(PIP) --no-deps --upgrade --target $(VENV)/triton triton
	@touch $@ $(VENV)/.demo
