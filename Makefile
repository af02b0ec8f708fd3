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
BUILD_REQUIRES = $$($(PY) -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')

C_FILES = $(wildcard native/*/*.[ch] tests/*/*.[ch] tests/*/clients/*.[ch] bench/*.c bench/*/*.c)
TOOLS = python3-venv python3-dev gcc libc6-dev binutils strace qemu-user-static
PY_FILES = $(wildcard isolator/*.py isolator/*/*.py native/*.py tests/*.py tests/*/*.py bench/*.py bench/*/*.py)

.PHONY: help setup tools build demo test test-cluster test-gpu cluster-tools bench bench-gpu sanitize fuzz image chart lint format clean

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

tools:
	@.ci/tools $(TOOLS)

$(SETUP): pyproject.toml
	@.ci/tools $(TOOLS)
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
	@echo "setting up .venv (two minutes at the first time)"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(PY) -m pip install -q $(BUILD_REQUIRES)
	@$(PY) -m pip install -q --no-build-isolation -e '.[dev]'
	@touch $@

setup: tools build ## make .venv, install the tools and build everything in place

build: $(SETUP) ## rebuild what changed: libvgpu.so, the simulated GPU, the extension
	@$(PY) -W ignore setup.py -q build_ext --inplace

demo: build ## two tenants on one simulated GPU, each held to its quota (ARGS="--gpu real")
	@$(VENV)/bin/isolator demo $(ARGS)

test: build ## unit, native and chart tests, then those on a real cluster (ARGS="-k name")
	@$(PY) -m pytest -q -n 2 tests/unit tests/native tests/chart $(ARGS)
	@$(MAKE) --no-print-directory test-cluster

test-cluster: build ## the tests on a real cluster alone (root; after make cluster-tools)
	@$(PY) -m pytest -q tests/cluster $(ARGS)

cluster-tools: ## build Kubernetes, etcd and Helm for those tests from Go modules (ten minutes and more)
	@tests/cluster/tools/build

# Needs only a built library, pytest and, for some tests, torch: no .venv, no network.
# The settings of pyproject.toml are left out because they ask for plugins that such a machine lacks.
test-gpu: ## tests on a real GPU with the system's python3 (LIBVGPU=path, else the library built here)
	@LIBVGPU="$${LIBVGPU:-$(CURDIR)/isolator/lib/$$(uname -m)/libvgpu.so}" PYTHONPATH="$(CURDIR)" \
		python3 -m pytest -c /dev/null --rootdir "$(CURDIR)" -p no:cacheprovider -ra tests/gpu $(ARGS)

# A missed target shows at its figure and at the end; the others run all the same. ARGS is for the first one.
BENCH ?= bench webhook monitor libsync
bench: build ## what calls, admissions, scrapes and idle nodes cost, with targets (BENCH=webhook ARGS="--rate 9" for one)
	@missed=; arguments='$(ARGS)'; for each in $(BENCH); do \
		echo "== bench/$$each.py $$arguments"; \
		$(PY) bench/$$each.py $$arguments || missed="$$missed $$each"; arguments=; done; \
		test -z "$$missed" || { echo "bench: targets missed (or not measured) in:$$missed" >&2; exit 1; }

# As test-gpu: the built library and the system's python3 are enough; torch and matplotlib where they are there.
bench-gpu: ## every figure on a real GPU, beside a bare program, into docs/ (LIBVGPU=path, ARGS="--only O4 --quick")
	@LIBVGPU="$${LIBVGPU:-$(CURDIR)/isolator/lib/$$(uname -m)/libvgpu.so}" python3 -m bench.gpu $(ARGS)

sanitize: build ## core, shim and simulated GPU under ASan, UBSan and TSan
	@.ci/tools clang
	@tests/sanitize/run $(ARGS)

fuzz: build ## libFuzzer on the region and the limit parser
	@.ci/tools clang
	@tests/fuzz/run $(ARGS)

image: ## build the container image (IMAGE=name:tag BASE=python-image CONTAINER_TOOL=docker|podman|buildah)
	@IMAGE="$(IMAGE)" BASE="$(BASE)" CONTAINER_TOOL="$(CONTAINER_TOOL)" .ci/image

chart: ## package the Helm chart into dist/
	@.ci/chart

lint: $(SETUP) ## ruff, mypy, import-linter, clang-format, include floors, file budgets
	@$(VENV)/bin/ruff check -q .
	@$(VENV)/bin/ruff format -q --check .
	@$(VENV)/bin/mypy --no-error-summary
	@$(VENV)/bin/lint-imports --no-logo >/dev/null || $(VENV)/bin/lint-imports --no-logo
	@test -z "$(C_FILES)" || $(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@! grep -n 'include.*\(gpu_abi\|hooks\|shim/\)' native/core/* || { echo "lint: core includes the shim" >&2; exit 1; }
	@! grep -rln --exclude-dir=build 'include.*gpu_abi\.h' --include='*.[chS]' . | grep -v '^./native/\(shim\|simgpu\)/' \
		|| { echo "lint: gpu_abi.h is for native/shim and native/simgpu alone" >&2; exit 1; }
	@wc -l $(C_FILES) | awk '$$2 != "total" && $$1 > 600 { print "lint: " $$2 " has " $$1 " lines, 600 allowed"; bad = 1 } \
		END { exit bad }' >&2
	@wc -l $(PY_FILES) | awk '$$2 != "total" && $$1 > 300 { print "lint: " $$2 " has " $$1 " lines, 300 allowed"; bad = 1 } \
		END { exit bad }' >&2

format: $(SETUP) ## put Python and C into the project's format
	@$(VENV)/bin/ruff check -q --fix-only . ; $(VENV)/bin/ruff format -q .
	@test -z "$(C_FILES)" || $(VENV)/bin/clang-format -i $(C_FILES)

clean: ## remove everything that was built, .venv included
	@rm -rf $(VENV) build dist isolator/lib isolator/sim isolator/_core*.so *.egg-info
