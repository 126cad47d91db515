# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: help demo test check format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(INSTALLED)  ## the same answer from plain decoding and from the best method, side by side
	@$(BIN)/python examples/side_by_side.py

test: $(INSTALLED)  ## run all tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(INSTALLED)  ## lint and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(INSTALLED)  ## apply the house format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:  ## remove what set-up and tests made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
