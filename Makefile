# Two commands: `make train` and `make test`. Both set up .venv from the pinned list when it is missing.
PYTHON ?= python3.11
BIN := .venv/bin
# Two processes, a file in one of them: most of a test's time is an engine or a cluster that starts.
SPREAD ?= -n 2 --dist loadfile
export HF_HUB_OFFLINE ?= 1
.DEFAULT_GOAL := help
.PHONY: help setup train test check bench gpu-check wheel-check clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: .venv/ready  ## create .venv from requirements/cpu.txt

.venv/ready: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

train: setup  ## train the tiny model on this machine (minutes); ARGS="seed=1 …" to change it
	$(BIN)/toolrl train quickstart-cpu $(ARGS)

test: setup  ## every test that this machine can run
	$(BIN)/python -m pytest tests $(SPREAD) $(ARGS)

check: setup  ## ruff, mypy, import contracts and the fast unit tests (< 90 s)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit -q $(SPREAD)

bench: setup  ## speed as ratios, printed and written as JSON to bench-results/
	$(BIN)/toolrl bench all

gpu-check:  ## one short script for a machine with a GPU (needs torch, triton, transformers)
	python3 benchmarks/gpu_check.py

wheel-check: setup  ## install the wheel into a clean environment and run toolrl --help
	sh tests/wheel_check.sh

clean:  ## remove what set-up and tests made (runs/ stays)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info bench-results
