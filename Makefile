# Two commands are enough on a fresh machine: `make demo` and `make test`. Both set everything up first.

SHELL := /bin/bash
UV := $(shell command -v uv || echo .uv/bin/uv)
# A machine whose CUDA device answers gets the CUDA build of vLLM, any other the CPU build.
GROUPS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo "--no-group cpu --group gpu")
RUN := $(UV) run --quiet $(GROUPS)
FAST := packages
PYTEST := $(RUN) pytest -q
# Many container images set it. Without byte code on disk every engine compiles all that it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup harnesses demo conformance simulation check test test-fast test-integration soak mutants format

setup:
	@scripts/bootstrap
	@$(UV) sync --quiet $(GROUPS)

harnesses: setup
	@scripts/harnesses

conformance: harnesses
	@$(RUN) molt-train conformance --python .harness/bin/python

simulation: setup
	@$(RUN) python -m integration_tests.simulation

demo: setup
	@$(RUN) molt-train demo

check: setup
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) basedpyright
	$(RUN) lint-imports

test-fast: setup
	$(PYTEST) -n 2 --dist loadfile $(FAST)  # a file's tests stay in one process, for they share servers and models

test-integration: harnesses
	$(PYTEST) -m "not soak" integration_tests

soak: harnesses
	$(PYTEST) -m soak integration_tests  # engines that die for minutes, and refits that fail at every step

test: test-fast test-integration

mutants: setup
	@$(RUN) python scripts/mutants.py

format: setup
	$(RUN) ruff format .
	$(RUN) ruff check --fix .
