# Needs only Python 3.11 or newer, with venv and pip: every environment is created here, on demand.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
export NO_MKDOCS_2_WARNING = 1
# JAX 0.10.1 prints two long lines of CPU features for every program it takes from the compilation cache.
export TF_CPP_MIN_LOG_LEVEL = 3

.DEFAULT_GOAL := help
.PHONY: help demo browser test test-slow test-oldest test-newest lint format docs bench lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: .venv/.stamp  ## natural gradients and first-order methods on one problem, with a report
	$(BIN)/natgrad compare --out out/demo

browser:  ## a browser for the tests of the report, where this machine can install one
	tests/install_browser

test: .venv/.stamp  ## tests, and every code block of the README and the docs
	$(BIN)/pytest -n $(WORKERS) --dist loadfile README.md docs  # the blocks of a page share a namespace
	$(BIN)/pytest -n $(WORKERS) --dist loadfile tests  # the tests of a file share compiled functions

# Optimised code costs three times the time, so only the laws that depend on the compiler's choice of kernels get it.
test-slow: .venv/.stamp  ## the tests left out of `make test`, with types checked at run time; float32 laws optimised
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m slow --jaxtyping-packages=natgrad,beartype.beartype tests
	XLA_FLAGS= $(BIN)/pytest -n $(WORKERS) -m "" tests/test_single_precision.py

test-oldest: .venv-oldest/.stamp  ## the compatibility tests on the oldest supported versions
	XLA_FLAGS= .venv-oldest/bin/pytest -n $(WORKERS) --dist loadfile -m compat tests

test-newest:  ## the same on the newest Python and JAX to be found
	@python=$$($(newest_python)); \
	if [ -z "$$python" ]; then \
		echo "test-newest: skipped, no Python 3.12 or newer on PATH or in ~/.pyenv/versions"; \
	else \
		$(MAKE) --no-print-directory .venv-newest/.stamp NEWEST="$$python" && \
		XLA_FLAGS= .venv-newest/bin/pytest -n $(WORKERS) --dist loadfile -m compat tests; \
	fi

lint: .venv/.stamp  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright

format: .venv/.stamp  ## put the sources into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.stamp  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: .venv/.stamp .venv-peers/.stamp .venv-kfac-jax/.stamp  ## measure the costs promised by the documentation, and those of the peers
	$(BIN)/python benchmarks/run.py

lock: .venv/.stamp  ## move requirements/dev.txt to the newest versions
	$(BIN)/pip install --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(BIN)/pip freeze --exclude-editable > requirements/dev.txt

clean:  ## remove environments, caches and products
	rm -rf .venv .venv-* .cache out site

.venv/.stamp: pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

.venv-oldest/.stamp: pyproject.toml requirements/oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --requirement requirements/oldest.txt
	.venv-oldest/bin/pip install --quiet --no-deps --editable .
	@touch $@

.venv-newest/.stamp: pyproject.toml
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --upgrade --editable '.[test]'
	@touch $@

.venv-kfac-jax/.stamp: requirements/kfac-jax.txt
	$(PYTHON) -m venv .venv-kfac-jax
	.venv-kfac-jax/bin/pip install --quiet --requirement requirements/kfac-jax.txt
	@touch $@

.venv-peers/.stamp: requirements/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --requirement requirements/peers.txt
	@touch $@

# A name on PATH may be a shim without a Python behind it, so each candidate has to run.
newest_python = \
	for minor in 15 14 13 12; do \
		for python in python3.$$minor ~/.pyenv/versions/3.$$minor.*/bin/python; do \
			if "$$python" -c 'import ensurepip' >/dev/null 2>&1; then echo "$$python"; exit; fi; \
		done; \
	done
