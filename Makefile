# `make demo` and `make test` set up everything they need: Python 3.10 or newer with venv and pip, and a C++ compiler
# for the host kernels, are all that must be there. What they install stays in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One test process per core, at most 4: more only fight for memory bandwidth.
NUM_PROCESSES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -le 4 ] && echo "$$n" || echo 4)
DEMO := runs/tiny_llama_demo

# A change in any of these installs again; the Python sources are used where they are.
INSTALLED := $(VENV)/.installed
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/include/* native/src/*)

.PHONY: help setup demo test lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train a small Llama on the CPU, its optimizer state offloaded (about two minutes)"
	@echo "make test    everything CI does: format, lint, types, tests"
	@echo "make lint    format, lint and types only"
	@echo "make format  format the code"
	@echo "make setup   only install into $(VENV)"
	@echo "make clean   remove $(VENV), builds and caches; runs/ stays"

setup: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "forebay needs Python 3.10 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@# A venv that failed half-way must not look like a finished one.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(INSTALLED): $(BUILD_INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@# Says which host kernels are in use, and why if they are the slow ones.
	@$(BIN)/python -c 'from forebay.host import kernels; print("host kernels:", kernels.backend())'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/forebay train tiny_llama_demo
	@echo
	@echo "The run is in $(DEMO): metrics.jsonl has every step, train.log what was printed."

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Nothing is fetched in tests; a test that tries fails at once instead of hanging.
test: lint
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 $(BIN)/pytest -n $(NUM_PROCESSES)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache src/forebay/_native
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
