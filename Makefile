# `make` checks everything; `make serve` and `make test` first install what they need, into a virtual environment.
#   PYTHON=python3.12       the Python of the virtual environment (3.11 to 3.13)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                           where torch comes from; this is the CPU build, of about 0.2 GB
#   CONSTRAINTS=            install without the versions of constraints.txt
#   ARGS="--port 9000"      more options for `engine serve` or pytest
#   SCREENSHOTS=docs/img    folder for the pictures that `make browser-test` takes
#   RESULTS=FILE            what `make ray-serve-test` writes its figures to, as JSON
#   WORKERS=4               processes that run the tests; 0: all in one, as for --pdb

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 4
RESULTS ?= build/ray-serve.json

BIN := $(VENV)/bin
# Packages of the tests in a browser alone, next to the virtual environment.
BROWSER_PACKAGES := build/browser
# Modules are compiled when they are first imported; pip would compile all of them, which takes as long as the rest of the
# installation.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# The empty file that marks an extra of pyproject.toml as installed; make installs again when the requirements are newer.
# The extra dev contains the others.
installed = $(VENV)/.installed-$(1)

# The tests start hundreds of processes, which else would compile all modules again where the environment forbids to keep
# bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := check
.PHONY: check lint format types tests test browser-test prometheus-test ray-serve-test clients serve docs site linkcheck format-fix clean

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

browser-test: $(call installed,test) $(BROWSER_PACKAGES)/.installed ## the page at / in Chromium, which must be there
	BROWSER_PACKAGES=$(BROWSER_PACKAGES) SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest tests/server/browser $(ARGS)

ray-serve-test: $(call installed,test) $(call installed,ray-serve) ## the Ray Serve application on a cluster on this machine, a few minutes
	RAY_SERVE_RESULTS=$(RESULTS) $(BIN)/python -m pytest tests/server/ray_serve $(ARGS)

PROMETHEUS ?= build/prometheus/usr/bin/prometheus

prometheus-test: $(call installed,test) $(PROMETHEUS) ## a real Prometheus scrapes a server (Debian's package, unpacked; or PROMETHEUS=path)
	PROMETHEUS=$(abspath $(PROMETHEUS)) $(BIN)/python -m pytest tests/prometheus $(ARGS)

build/prometheus/usr/bin/prometheus:
	@mkdir -p build/prometheus
	cd build/prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# Each environment has what the others' versions exclude; Node.js has to be there, 20 or newer.
CLIENTS := build/clients
CLIENT_TESTS = ENGINE_PYTHON=$(abspath $(BIN)/python) CLIENTS_NODE=$(abspath $(CLIENTS)/node) \
	$(CLIENTS)/$(1)/bin/python -m pytest -c tests/clients/pytest.ini --outcomes=$(CLIENTS)/outcomes.json $(ARGS)

clients: $(call installed,server) $(foreach name,main instructor litellm node,$(CLIENTS)/$(name)/.installed) ## run other projects' clients, write docs/clients.md (needs the network to install)
	rm -f $(CLIENTS)/outcomes.json
	$(call CLIENT_TESTS,main) tests/clients $(foreach name,instructor litellm,--ignore tests/clients/test_$(name).py)
	$(call CLIENT_TESTS,instructor) tests/clients/test_instructor.py
	$(call CLIENT_TESTS,litellm) tests/clients/test_litellm.py
	CLIENTS_NODE=$(abspath $(CLIENTS)/node) $(CLIENTS)/main/bin/python tests/clients/outcomes.py $(CLIENTS)/outcomes.json

serve: $(call installed,server) ## answer on 127.0.0.1:8000 with the demo model
	$(BIN)/engine serve $(ARGS)

docs: $(call installed,server) ## write the generated parts of README.md and docs/
	$(BIN)/python scripts/generate_docs.py

site: $(call installed,docs) ## build docs/ into build/site; a link to a page or heading that is not there is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/site
	@echo "open build/site/index.html"

linkcheck: $(call installed,docs) ## ask the servers that docs/ links to (needs the network)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --builder linkcheck docs build/linkcheck

format-fix: $(call installed,dev) ## format, and apply what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is missing or older than 3.11; give another one as make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BROWSER_PACKAGES)/.installed: $(CONSTRAINTS) | $(call installed,test)
	$(PIP) --upgrade --target $(BROWSER_PACKAGES) playwright $(CONSTRAINTS:%=--constraint %)
	@touch $@

$(CLIENTS)/%/.installed: tests/clients/requirements-%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
ifneq ($(TORCH_INDEX),)
	$(if $(filter main,$*),$(CLIENTS)/$*/bin/python -m pip install torch --index-url $(TORCH_INDEX) --constraint $<)
endif
	$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/package.json tests/clients/package-lock.json
	@mkdir -p $(@D)
	cp $^ $(@D)
	npm ci --no-audit --no-fund --prefix $(@D)
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
ifeq ($(TORCH_INDEX),)
	@echo "Downloading the requirements of [$*] from your package index. torch is the largest: on PyPI for Linux the" \
		"CUDA build, several GB. For the CPU build, about 0.2 GB: make TORCH_INDEX=https://download.pytorch.org/whl/cpu"
else
	@echo "Downloading torch from $(TORCH_INDEX), then the other requirements of [$*] from your package index."
	$(PIP) torch --index-url $(TORCH_INDEX) $(CONSTRAINTS:%=--constraint %)
endif
	$(PIP) --editable '.[$*]' $(CONSTRAINTS:%=--constraint %)
	@touch $@ $(if $(filter dev,$*),$(foreach extra,docs test server,$(call installed,$(extra))))
