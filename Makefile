# The door: `make help`. Each target sets itself up in .venv and needs nothing installed by hand.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

VENV := .venv
PY := $(VENV)/bin/python
SETUP := $(VENV)/.setup

# Any Python from 3.11 on that starts; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help setup build demo test lint bench test-gpu sanitize fuzz clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

$(SETUP): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q $$($(PY) -c 'import tomllib; print(*(f"\"{r}\"" for r in \
		tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))' | xargs -n1 | tr '\n' ' ')
	@$(PY) -m pip install -q --no-build-isolation -e '.[dev]'
	@touch $@

setup: $(SETUP) build ## make .venv, install the tools and build everything in place

build: $(SETUP) ## rebuild what changed: libvgpu.so, the simulated GPU, the extension
	@$(PY) -W ignore setup.py -q build_ext --inplace

demo: build ## two tenants on one simulated GPU, each held to its quota
	@$(VENV)/bin/isolator demo $(ARGS)

test: build ## unit and native tests, on the simulated GPU
	@$(PY) -m pytest -q -n 2 tests/unit tests/native $(ARGS)

clean: ## remove everything that was built, .venv included
	@rm -rf $(VENV) build dist isolator/lib isolator/sim isolator/_core*.so *.egg-info
