# Every target prepares .venv first; nothing outside this checkout is changed.
PYTHON ?= python3
SEED ?= 0
KILLS ?= 50
PY := .venv/bin/python
SHELL := /bin/sh

# The tests and the quickstart need no hub: whatever asks for one should fail at once, not wait for a network.
export HF_HUB_OFFLINE := 1

.PHONY: help setup test lint types unit soak quickstart size clean

help:
	@echo "make quickstart [SEED=0]  train SmolLM2-135M to use a calculator, on the CPU"
	@echo "make test                 ruff, mypy --strict and the whole test suite"
	@echo "make setup                only prepare .venv (the targets above do it themselves)"
	@echo "make lint | types | unit  one part of make test; unit takes ARGS for pytest, such as ARGS='-k store'"
	@echo "make soak [KILLS=50]      kill one run that often at random moments; it must end as if nothing had happened"
	@echo "make size                 code lines per package: no blanks, comments or docstrings"
	@echo "make clean                remove .venv, .cache and tool caches; keeps runs/"

setup:
	@command -v $(PYTHON) >/dev/null || { \
		echo "setup: no '$(PYTHON)' on PATH; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python" >&2; \
		exit 1; }
	@$(PYTHON) scripts/make_venv.py

test: lint types unit

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy --strict -p molt_sdk -p trainer_backend

unit: setup
	$(PY) -m pytest --durations=15 $(ARGS)

soak: setup
	MOLT_KILLS=$(KILLS) $(PY) -m pytest -s tests/molt_sdk/test_resume.py -k killed_again

quickstart: setup
	$(PY) examples/quickstart.py --seed $(SEED) $(ARGS)

size: setup
	$(PY) scripts/size.py

clean:
	rm -rf .venv .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
