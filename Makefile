# `make run` serves the built-in ladder, `make test` and `make test-all` prove it; all set up what they need.
HOST ?= 127.0.0.1
PORT ?= 8000
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Small models on few cores: idle OpenMP workers must sleep, not spin.
export OMP_WAIT_POLICY ?= passive
# Hundreds of processes are started by the tests; each would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-all test-failed agents test-gpu lint format bench lock services clean

run: $(VENV)/.run
	$(BIN)/suffice up --host $(HOST) --port $(PORT)

# A file's tests stay in one process, which then builds their models once. Many wait for a server: so four, on two cores too.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# Frameworks under test: of those that want one version of the openai package and of those that want the next.
FRAMEWORKS := $(VENV)/clients-openai2/.installed $(VENV)/clients-openai3/.installed

# What a change is tried with; `test-all` is what must pass.
test: $(VENV)/.test tests/clients/node_modules/.installed
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.test tests/clients/node_modules/.installed $(FRAMEWORKS)
	$(PYTEST)

# What failed last, one after another.
test-failed: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --verbose

# Coding agents from npm against the server: 2 GB, some minutes.
agents: $(VENV)/.test tests/clients/agents/node_modules/.installed
	SUFFICE_REQUIRE_AGENTS=1 $(BIN)/python -m pytest -rs tests/clients/test_agents.py

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	$(BIN)/python -m engine.bench
	$(BIN)/suffice bench overhead
	$(BIN)/suffice bench ladder --tasks 400 --seed 1

# The hashes by which the image installs; after a change of constraints.txt.
lock: $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip compile pyproject.toml --constraints constraints.txt --universal --python-version 3.11 \
		--generate-hashes --only-binary :all: --no-annotate --custom-compile-command "make lock" --quiet \
		--output-file deploy/requirements.lock

# PostgreSQL and Redis for the tests, on a bare Debian.
services:
	deploy/services.sh

clean:
	rm -rf $(VENV) tests/clients/node_modules tests/clients/agents/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV) || { echo 'No venv module: on Debian, apt-get install python3-venv.' >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.run: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test,bench]'
	touch $@

$(FRAMEWORKS): $(VENV)/clients-%/.installed: tests/clients/python/%.txt $(BIN)/python
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	touch $@

# The npm packages are clients under test; without node their tests are named as skipped (and fail in CI).
tests/clients/node_modules/.installed: tests/clients/package.json
	@if command -v npm >/dev/null; then \
		cd tests/clients && npm install --no-audit --no-fund --no-package-lock --silent && touch node_modules/.installed; \
	else echo 'npm is missing: the tests of npm packages will be skipped.' >&2; fi

tests/clients/agents/node_modules/.installed: tests/clients/agents/package.json
	cd $(<D) && npm install --no-audit --no-fund --no-package-lock --silent && touch node_modules/.installed
