# `make demo` and `make test` do all their own set-up: they need Python 3.11 to 3.13 (with venv) and
# pip's registry.
#   PYTHON=...   makes the environment           BACKEND=cpu|cuda12|cuda13   MLX on Linux
#   VENV=...     the environment (.venv)         PYTEST_ARGS="-x -k cache"   more for pytest
#   JOBS=2       tests at a time, each with one thread for matrix products
#   DEMO_ARGS="--output other --pretrain-seconds 600"            more for openelm demo

SHELL := /bin/sh
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3 python)
ifeq ($(shell uname -s),Darwin)
BACKEND ?= metal
EXTRAS := data,eval,plot,dev
else
BACKEND ?= cpu
EXTRAS := $(BACKEND),data,eval,plot,dev
endif
READY := $(VENV)/.ready-$(BACKEND)

# What an interpreter must pass: the version, venv with pip, and arm64 on Apple silicon.
SUITABLE := import sys, venv, ensurepip, platform; \
  ok = (3, 11) <= sys.version_info[:2] <= (3, 13); \
  sys.exit(not ok or (sys.platform == "darwin" and platform.machine() != "arm64"))
# What a finished environment must pass.
WORKS := import openelm_mlx, mlx.core, mlx_lm, numpy, sentencepiece, tokenizers, pytest, ruff, mypy

# On a CPU mx.compile calls the C++ compiler for each kernel, 1 to 30 s: not in the tests.
ifeq ($(BACKEND),cpu)
TEST_ENV := MLX_DISABLE_COMPILE=$${MLX_DISABLE_COMPILE-1}
endif

.PHONY: help venv demo test notebooks lint clean

help:
	@echo "make demo       set up $(VENV), then text, model, tuning, Core ML, report in 3 minutes"
	@echo "make test       set up $(VENV) and run every test that needs no network"
	@echo "make notebooks  run the notebooks with small settings (make test does, too)"
	@echo "make lint       ruff and mypy"
	@echo "make venv       set up $(VENV) alone"
	@echo "make clean      remove $(VENV), builds and caches"

venv: $(READY)

demo: $(READY)
	@$(BIN)/openelm demo $(DEMO_ARGS)

test: $(READY)
	$(TEST_ENV) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	  -m "not network and not benchmark" $(PYTEST_ARGS)

notebooks: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m "not network" tests/test_notebooks.py $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# An environment that a failed or interrupted run left (.started without an end), one for another
# backend (backends overwrite each other's files) and one whose Python is gone are made anew.
$(READY): pyproject.toml
	@set -e; failed=; \
	if [ -e $(VENV)/.started ] || ! $(BIN)/python -c '$(SUITABLE)' 2>/dev/null \
	   || { ls $(VENV)/.ready-* >/dev/null 2>&1 && [ ! -e $@ ]; }; then \
	  python=; \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c '$(SUITABLE)' 2>/dev/null; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "error: no Python 3.11 to 3.13 with venv among: $(CANDIDATES); install one (on Debian" \
	      "with its -venv package, on Apple silicon for arm64) or name one: make PYTHON=/path" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$("$$python" --version)"; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV); \
	fi; \
	touch $(VENV)/.started; \
	echo "installing openelm-mlx[$(EXTRAS)] into $(VENV): one to two minutes"; \
	$(BIN)/python -m pip install -qq --editable '.[$(EXTRAS)]' || failed=1; \
	$(BIN)/python -c '$(WORKS)'; \
	rm $(VENV)/.started; \
	if [ -n "$$failed" ]; then echo "error: pip failed; $(VENV) is as it was" >&2; exit 1; fi; \
	touch $@
