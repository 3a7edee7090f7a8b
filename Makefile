# Everything runs in a virtual environment of its own (.venv) with outlast installed from a wheel, as a user has it.
#
#   make demo    train, break things, end with the right result (no GPU, no Slurm, no root)
#   make test    formatting, types and all tests, real Slurm included (installs Debian's packages when run as root)
#   make check   the fast part of it
#
# Without a GPU, torch's CPU build is enough. pip takes what its configuration offers; to name another source:
#   make demo PIP_TORCH="--index-url <where CPU builds are>"

VENV ?= .venv
PYTHON ?= python3.11
BASE_PYTHON := $(shell command -v $(PYTHON) 2>/dev/null || command -v python3)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
PIP_TORCH ?=
SOURCES := $(shell git ls-files 'outlast/*' 'reliability/*' 'monitors/*' 'slurm/*' 'launchers/*' 'checkpoint/*') setup.cfg pyproject.toml
PYTEST := $(VENV)/bin/pytest -q -p no:cacheprovider

.PHONY: mutants demo test test-slurm test-slow test-long check bench bench-checkpoint test-megatron-lm system wheel clean

demo: wheel
	$(VENV)/bin/outlast demo

check: wheel
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PYTEST) -n 2 -m "not slow and not slurm and not megatron and not long and not megatron_lm"

# two at once: on a real Slurm most of the time is waiting, and the rest leaves it a core
test: system check
	@$(MAKE) --no-print-directory -j 2 test-slurm test-slow

test-slurm:
	$(PYTEST) -m "slurm and not long"

test-slow:
	$(PYTEST) -m "(slow or megatron) and not slurm and not long and not megatron_lm"

test-long: system wheel
	$(PYTEST) -m "long"
	OUTLAST_HYPOTHESIS=search $(PYTEST) -n 2 -m "not slow and not slurm and not megatron and not long and not megatron_lm"

# judging and deciding broken on purpose, in copies of the tree: each time a test must turn red
mutants: wheel
	$(VENV)/bin/python tests/mutants/run.py

# needs OUTLAST_MEGATRON_LM: a work tree of Megatron-LM core_v0.16.1
test-megatron-lm: wheel
	$(PYTEST) -m "megatron_lm"

bench: wheel
	$(VENV)/bin/python -m tests.bench

# saves and loads beside every peer; BENCH_CHECKPOINT_MB=512 for a smaller state
bench-checkpoint: wheel
	$(VENV)/bin/python -m tests.bench checkpoint

wheel: $(VENV)/.wheel

$(VENV)/.packages: setup.cfg
	@echo "preparing $(VENV) with $(BASE_PYTHON) ..."
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip setuptools wheel 2>/dev/null
	$(PIP) install $(PIP_TORCH) "torch==2.13.0" 2>/dev/null
	$(PIP) install $$($(VENV)/bin/python tests/requirements.py) 2>/dev/null
	@$(VENV)/bin/python -c "import torch, importlib.metadata as m; print('torch', torch.__version__, '- megatron-core', m.version('megatron-core'))"
	@touch $@

$(VENV)/.wheel: $(VENV)/.packages $(SOURCES) README.md
	@rm -rf build/wheel && mkdir -p build/wheel
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheel . 2>/dev/null
	$(PIP) install --force-reinstall --no-deps build/wheel/outlast-*.whl 2>/dev/null
	@touch $@

# Debian's packages for the tests on real Slurm; a machine without apt or root says what it lacks
system:
	@sh tests/system.sh

clean:
	rm -rf build .venv runs
