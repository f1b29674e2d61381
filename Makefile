# `make` checks everything; `make serve` and `make test` set up what they need by themselves.
#   PYTHON=python3.12       which Python makes the virtual environment (3.11 to 3.13)
#   CONSTRAINTS=            install without constraints.txt, for example to get torch with CUDA
#   ARGS="--port 9000"      more options for `engine serve` or pytest
#   WORKERS=2               processes that run the tests; 0: all in one, as for --pdb

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
# The empty file that notes an extra of pyproject.toml as installed; it is older than a changed list of requirements.
installed = $(VENV)/.installed-$(1)

.DEFAULT_GOAL := check
.PHONY: check lint format types tests test serve docs site linkcheck format-fix clean

check: lint format types tests ## lint, format, types and tests

lint: $(call installed,dev) ## ruff check
	$(BIN)/ruff check .

format: $(call installed,dev) ## is everything formatted?
	$(BIN)/ruff format --check .

types: $(call installed,dev) ## mypy --strict
	scripts/typecheck $(BIN)/mypy

tests: $(call installed,dev)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test: $(call installed,test) ## the tests, with only what they need
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

serve: $(call installed,server) ## answer on 127.0.0.1:8000 with the demo model
	$(BIN)/engine serve $(ARGS)

docs: $(call installed,server) ## write the generated parts of README.md and docs/
	$(BIN)/python scripts/generate_docs.py

site: $(call installed,docs) ## build docs/ into build/site; a link to a page or heading that is not there is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/site
	@echo "open build/site/index.html"

linkcheck: $(call installed,docs) ## ask the servers that docs/ links to (needs the network)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --builder linkcheck docs build/linkcheck

format-fix: $(call installed,dev) ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is missing or older than 3.11; give another one as make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]' $(CONSTRAINTS:%=--constraint %)
	@touch $@
