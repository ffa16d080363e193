# Every target sets up what it needs in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
FILES := pyproject.toml constraints.txt

.PHONY: help setup demo test lint bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(VENV)/.setup  ## everything: all frameworks, the tests' and the linters' packages

demo: $(VENV)/.demo  ## 64 variants of a network on one device, in under a minute
	$(BIN)/modelfleet demo

# With bytecode kept, whatever the environment says: a hundred processes are started.
test: lint  ## lint, types and all tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

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

# torch comes first, alone: so that no later requirement brings another build of it.
$(VENV)/.demo: $(FILES) | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.setup: $(FILES) | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[all,demo,dev]'
	@touch $@ $(VENV)/.demo
