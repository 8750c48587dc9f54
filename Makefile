# Every target does its own set-up: a machine with Python 3.11 or newer needs nothing else.
#
#   make test ARGS="-k resize"            arguments for pytest
#   make env PYTHON=python3.12            another interpreter   (after `make clean`)
#   make env TORCH="torch==2.11.0"        another torch         (after `make clean`)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Pinned and installed first: the snapshots were taken with this release, and the newest one may
# come as a larger build for an accelerator that the tests do not use.
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench env clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy functionalize passes

bench: $(STAMP)
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.side_by_side
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.passes
	$(BIN)/python -m benchmarks.memory_truth
	$(BIN)/python -m benchmarks.memory_overhead
	$(BIN)/python -m benchmarks.scratch
	$(BIN)/python -m benchmarks.plan

env: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "No Python found: install 3.11 or set PYTHON"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "functionalize needs Python 3.11 or newer: set PYTHON")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test,models,plots,cli]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
