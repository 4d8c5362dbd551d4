# Everything runs from the root of the repository in an environment of its own. Needs python3 (3.11 or newer) and make.

PYTHON = python3
VENV = .venv
CONSTRAINTS = constraints.txt
JOBS = 2
PYTEST_ARGS =

BIN = $(VENV)/bin
# Named after the constraints, so that other constraints install anew.
STAMP = $(VENV)/.installed-$(notdir $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help env lint types test demo serve bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP)  ## make .venv and install kvloom in it, with all that development needs

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "==> installing into $(VENV): torch is large, the first time takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[transformers,server,dev]' -c $(CONSTRAINTS)
	@touch $@

lint: env  ## ruff (rules and format) and import-linter (who may import whom)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: env  ## mypy, strict
	$(BIN)/mypy

test: lint types  ## lint, types, then pytest (tests marked gpu skip themselves where there is no device)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

demo: env  ## watch the scheduler at work in a terminal
	$(BIN)/python -m examples.demo

serve: env  ## serve a model over an OpenAI-compatible API
	$(BIN)/python -m examples.openai_server

bench: env  ## measure what the host pays for a step
	$(BIN)/python -m benchmarks.host_overhead

clean:  ## back to a fresh clone: remove .venv, caches and builds
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
