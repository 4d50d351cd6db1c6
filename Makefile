# `make up` and `make test` are all that a user needs; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(shell find kernels/native -name '*.cpp' -o -name '*.hpp') CMakeLists.txt

.PHONY: setup up test check format lint types architecture bench bench-peers bench-gpu chaos soak soak-integrity probes clean

setup: $(VENV)/.native

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "Sluicegate needs Python 3.11 or newer ($(PYTHON) was not found)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Sluicegate needs Python 3.11 or newer; name one with: make PYTHON=..."; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || { echo "Sluicegate needs a C++ compiler (on Debian: apt-get install g++)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Everything is pinned, and checked by hash but for torch: which of its builds suits depends on the machine. It comes first, so that what
# depends on it finds it; its own needs are in the lock.
$(VENV)/.packages: $(VENV)/.python requirements/lock.txt requirements/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/lock.txt
	@touch $@

$(VENV)/.native: $(VENV)/.packages pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

up: setup
	$(BIN)/sluicegate up

test: setup
	$(BIN)/python -m pytest

check: setup format lint types architecture

format:
	$(BIN)/ruff format --check .

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

architecture:
	$(BIN)/python -m pytest tests/architecture

# Kills at random points of requests' lives, at length; the short versions are part of the tests.
chaos: setup
	CHAOS_KILLS=100 CHAOS_REAL_KILLS=100 $(BIN)/python -m pytest tests/chaos/test_kills.py

REQUESTS ?= 200000
soak: setup
	SOAK_REQUESTS=$(REQUESTS) $(BIN)/python -m pytest tests/chaos/test_soak.py

# Mixed traffic over a short pool in `full` mode: every alarm would be a false one.
MINUTES ?= 15
soak-integrity: setup
	SOAK_INTEGRITY_MINUTES=$(MINUTES) $(BIN)/python -m pytest -s -n 0 tests/worker/engine/test_integrity_soak.py

# Whether a tenant can tell what another asked, with the default model; the tests use a small one.
PROBES ?= 200
probes: setup
	ISOLATION_MODEL=smollm2-135m-instruct ISOLATION_PROBES=$(PROBES) $(BIN)/python -m pytest -s -n 0 tests/worker/engine/test_isolation.py

bench: setup
	$(BIN)/sluicegate bench kernels
	$(BIN)/sluicegate bench engine

# Installs the peers first: some 5 GB, and llama.cpp compiles for 5 to 15 minutes. The run itself takes 10 to 20.
bench-peers: setup
	$(BIN)/sluicegate bench peers
	$(BIN)/sluicegate bench engine --peers

bench-gpu: setup
	$(BIN)/python -m bench.gpu

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
