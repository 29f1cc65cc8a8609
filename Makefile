# Installing, running and testing Manta; every target may be repeated. `make help` lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# The first Python that is new enough and really runs (version managers leave commands that do not).
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)
VENV := .venv
PY := $(VENV)/bin/python
MODEL ?= smollm2-135m
ARGS ?=
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

.PHONY: help install model serve test check format cluster-test soak gpu-test gpu-bench aot clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/installed model  ## .venv with the project, its development tools, and the demo model

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Manta needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no virtual environment: on Debian, apt install python3-venv" >&2; exit 1; }

# torch first: a CPU build where there is no NVIDIA driver and pip can find one, else what the index gives.
# A CUDA build of torch demands the Triton that it was made with, so ours is pinned for CPU builds only.
$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@if $(PY) -c 'import torch' >/dev/null 2>&1; then :; \
	elif command -v nvidia-smi >/dev/null 2>&1; then \
		echo "installing torch $(TORCH) for the GPU"; \
		$(PY) -m pip install -qq 'torch==$(TORCH),!=$(TORCH)+cpu' || $(PY) -m pip install -qq 'torch==$(TORCH)'; \
	else \
		echo "installing torch $(TORCH), a CPU build if pip finds one"; \
		$(PY) -m pip install -qq 'torch==$(TORCH)+cpu' 2>/dev/null || $(PY) -m pip install -qq 'torch==$(TORCH)'; \
	fi
	@echo "installing Manta and its development tools"
	@if $(PY) -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
		sed '/^triton==/d' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	@$(PY) -m pip install -qq -e '.[dev]' -c $(VENV)/constraints.txt
	@touch $@

model: $(VENV)/installed
	@$(PY) -m manta fetch smollm2-135m

serve: $(VENV)/installed model  ## serve the demo model at http://127.0.0.1:8000 (MODEL=..., ARGS='--set a.b=c')
	@exec $(VENV)/bin/manta serve $(MODEL) $(ARGS)

test: $(VENV)/installed model  ## everything that CI runs
	@tools/run_tests.sh all

check: $(VENV)/installed  ## formatting, ruff, pyright and the fast tests
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .
	@tools/run_tests.sh fast

cluster-test: $(VENV)/installed model  ## the tests on several Ray nodes in network namespaces (root; a quarter of an hour)
	@tools/run_tests.sh cluster

soak: $(VENV)/installed model  ## break a served model for ten minutes under load, then kill it at every token (ARGS='--minutes 60')
	@$(VENV)/bin/manta chaos --minutes 10 --json soak.json $(ARGS)
	@MANTA_KILLS=all $(PY) -m pytest -q tests/replicas/test_survival.py

gpu-test: $(VENV)/installed model  ## the tests that need a CUDA GPU
	@tools/run_tests.sh gpu

gpu-bench: $(VENV)/installed model  ## measure everything on a GPU: kernels, engine, traces, serving
	@tools/measure_gpu.sh

aot: $(VENV)/installed  ## compile every kernel ahead of time for every architecture (no GPU needed)
	@tools/run_tests.sh aot

clean:  ## remove what was built or installed here (models in ~/.cache/manta stay)
	rm -rf $(VENV) build dist *.egg-info .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
