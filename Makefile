# `make demo` and `make test` need Python 3.11 or newer, pip and make; they set up the rest.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
CONSTRAINTS ?= constraints.txt
VENV := .venv
BENCH := .venv-bench
ZOO := .venv-zoo
BENCHMARKS := $(sort $(wildcard benchmarks/*.py))
RUN := $(VENV)/bin
PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS)

# $(call usable,FOLDER): a shell test. False for an environment that was moved or whose Python is gone.
usable = grep -qsF "$(CURDIR)/$(1)" $(1)/bin/activate && \
	$(1)/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
# $(call if_unusable,FOLDER): FORCE where the environment in FOLDER has to be created again.
if_unusable = $(shell { $(call usable,$(1)); } || echo FORCE)

# $(call environment,FOLDER,REQUIREMENT): create the environment and install. Constraints are always given and the build is not
# isolated, so that pip never downloads another torch.
define environment
@$(PYTHON) -c 'import sys; sys.exit("dubito needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
@{ $(call usable,$(1)); } || { echo "Creating $(1)"; $(PYTHON) -m venv --clear $(1); }
@echo "Installing $(2) into $(1)"
@$(1)/bin/python $(PIP_INSTALL) hatchling
@$(1)/bin/python $(PIP_INSTALL) --no-build-isolation --editable '$(2)'
endef

.PHONY: setup demo test quick lint style types tests mutants test-slow test-gpu zoo bench format clean FORCE

setup: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml $(CONSTRAINTS) $(call if_unusable,$(VENV))
	$(call environment,$(VENV),.[dev])
	@touch $@

# The libraries that the benchmarks compare with, in an environment of their own: see benchmarks/requirements.txt.
$(BENCH)/.stamp: pyproject.toml $(CONSTRAINTS) benchmarks/requirements.txt $(call if_unusable,$(BENCH))
	$(call environment,$(BENCH),.)
	@echo "Installing benchmarks/requirements.txt into $(BENCH)"
	@$(BENCH)/bin/python $(PIP_INSTALL) --no-deps --requirement benchmarks/requirements.txt
	@touch $@

demo: setup
	$(RUN)/dubito demo $(ARGS)

test: lint tests

# For the inner loop, under two minutes on two cores: one case of each fast test (tests/conftest.py), without the type checker.
quick: style
	$(RUN)/python -m pytest -n $(WORKERS) --quick -q $(ARGS)

lint: style types

style: setup
	$(RUN)/python -m ruff format --check .
	$(RUN)/python -m ruff check .
	$(RUN)/lint-imports

types: setup
	$(RUN)/python -m pyright

tests: setup
	$(RUN)/python -m pytest -n $(WORKERS) $(ARGS)

# Breaks one thing at a time in methods, likelihoods, priors and predictions: the contract must notice each.
mutants: setup
	$(RUN)/python tests/mutants/run.py --workers $(WORKERS) $(ARGS)

test-slow: setup
	$(RUN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-gpu: setup
	$(RUN)/python -m pytest -m gpu $(ARGS)

# Networks of other libraries, by every method and every way to predict; writes docs/zoo.md.
zoo: $(ZOO)/.stamp
	$(ZOO)/bin/python -m pytest -n $(WORKERS) -q -m zoo tests/zoo $(ARGS)

$(ZOO)/.stamp: pyproject.toml $(CONSTRAINTS) $(wildcard tests/zoo/requirements*.txt) $(call if_unusable,$(ZOO))
	$(call environment,$(ZOO),.[dev])
	@echo "Installing the libraries of tests/zoo into $(ZOO)"
	@$(ZOO)/bin/python $(PIP_INSTALL) --requirement tests/zoo/requirements.txt
	@$(ZOO)/bin/python $(PIP_INSTALL) --no-deps --requirement tests/zoo/requirements-without-dependencies.txt
	@touch $@

# One at a time, because they measure time.
bench: $(BENCH)/.stamp
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BENCH)/bin/python $$file $(ARGS) || exit 1; done

format: setup
	$(RUN)/python -m ruff format .
	$(RUN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV) $(BENCH) $(ZOO) build dist reports .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
