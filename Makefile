# Every target does its own set-up: a machine with Python 3.11 or newer needs nothing else.
#
#   make test ARGS="-k resize"            arguments for pytest
#   make test ARGS=tests                  all tests: without a path, the slow ones (marked `long`) are left out
#   make test WORKERS=0                   in one process, without pytest-xdist
#   make test TORCH=2.15.0                another torch, in an environment of its own: .venv-2.15.0
#   make trl                              the tests of TRL and PEFT, which are skipped where these are not installed
#   make newest PYTHON=python3.13         what CI runs on the newest torch and a newer Python
#   make fuzz                             5,000 changed files, 2,000 random programs at random sizes
#   make package                          both archives into dist/, checked; the wheel is imported where it alone is
#   make site                             docs/ and the reference as HTML, in build/site; a broken link is an error
#   make test PYTHON=python3.13           another interpreter, in an environment of its own: .venv-python3.13

DEFAULT := $(shell command -v python3.11 || command -v python3)
PYTHON ?= $(DEFAULT)
# Pinned and installed first: the snapshots were taken with this release, and the newest one may
# come as a larger build for an accelerator that the tests do not use.
PINNED := 2.13.0
NEWEST := 2.15.0
TORCH ?= $(PINNED)
OTHER := $(filter-out $(notdir $(DEFAULT)),$(notdir $(PYTHON)))
VENV ?= .venv$(if $(OTHER),-$(OTHER))$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
ARGS ?=
# Processes that run tests, a file at a time; 0: this one. Tests on ranks start processes of their own beside them.
WORKERS ?= 2

PARALLEL := $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)
# Where another torch or another Python may be seen: they are tested as a whole where both are pinned.
FOLDERS := fsdp laws discharge recorder scalars calls state walk step audit

# Each of the processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A Python of a distribution may come without pip: then another one installs into its environment.
pip_of = if $(1)/bin/python -c 'import pip' 2>/dev/null; then pip="$(1)/bin/python -m pip"; \
	else pip="python3 -m pip --python $(1)/bin/python"; fi; $$pip
PIP := $(call pip_of,$(VENV))
# An environment that holds nothing yet.
new_venv = $(PYTHON) -m venv --clear $(1) >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip $(1)

.PHONY: demo test newest trl trl-env fuzz lint bench package site env clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

newest:
	$(MAKE) demo TORCH=$(NEWEST)
	$(MAKE) test TORCH=$(NEWEST) ARGS="-m 'not long' $(addprefix tests/,$(FOLDERS))"

# TRL and PEFT bring packages of their own, none of which moves torch: beside the others, where they are asked for.
trl-env: $(STAMP)
	@$(PIP) install --quiet torch==$(TORCH) --editable '.[trl,peft]'

trl: trl-env
	$(BIN)/python -m pytest $(PARALLEL) tests/integrations/test_trl.py

fuzz: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m fuzz tests/program tests/templates
	$(BIN)/python -m pytest tests/laws/test_sized_programs.py --fuzz-long

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy functionalize

bench: $(STAMP)
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.around
	$(BIN)/python -m benchmarks.journey
	$(BIN)/python -m benchmarks.side_by_side
	$(BIN)/python -m benchmarks.step_time
	$(BIN)/python -m benchmarks.exposed
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.dynamic
	$(BIN)/python -m benchmarks.bound
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.passes
	$(BIN)/python -m benchmarks.memory_truth
	$(BIN)/python -m benchmarks.memory_overhead
	$(BIN)/python -m benchmarks.audit
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.trace_backward

# `build` makes the wheel from the source archive: a module that the wheel has, `passes` behind its link too, is in both.
package: $(STAMP)
	@$(PIP) install --quiet --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	@$(call new_venv,.venv-wheel)
	@$(call pip_of,.venv-wheel) install --quiet torch==$(TORCH) dist/*.whl
	.venv-wheel/bin/python -I -c 'import functionalize as fz, functionalize.passes; print(fz.__file__, *fz.passes.PIPELINES)'

# The variable silences a note on the future of mkdocs, which is no warning of the build.
site: $(STAMP)
	@$(PIP) install --quiet --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

env: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "No Python found: install 3.11 or set PYTHON"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "functionalize needs Python 3.11 or newer: set PYTHON")'
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@$(PIP) install --quiet torch==$(TORCH)
	@$(PIP) install --quiet --editable '.[test,models,plots,page,cli,accelerate,lightning]'
	@touch $@

clean:
	rm -rf .venv .venv-* .pythons build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
