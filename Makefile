# Two commands: `make train` and `make test`. Both set up .venv from the pinned list when it is missing.
PYTHON ?= python3.11
BIN := .venv/bin
# Two processes, a file in one of them: most of a test's time is an engine or a cluster that starts.
SPREAD ?= -n 2 --dist loadfile
export HF_HUB_OFFLINE ?= 1
.DEFAULT_GOAL := help
.PHONY: help setup tools train test check bench gpu-check wheel-check compose-check slurm-check ray-up-check clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: .venv/ready  ## create .venv from requirements/cpu.txt

.venv/ready: requirements/cpu.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

tools: .tools/ready  ## create .tools: programs that check the files of deploy/

.tools/ready: requirements/tools.txt
	$(PYTHON) -m venv .tools
	.tools/bin/pip install -q --no-deps -r requirements/tools.txt
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

compose-check: setup  ## build the CPU image and train on a Compose cluster of it (needs a Docker engine, 12 GB, minutes)
	$(BIN)/python -m tests.compose_check

slurm-check: setup  ## a run that a real Slurm puts back, preempts and ends (root, Docker, slurm-wlm; twenty minutes)
	$(BIN)/python -m pytest tests/slurm_check.py -o faulthandler_timeout=0 $(ARGS)

ray-up-check: setup  ## `ray up` on four machines of this one, a run there, `ray down` (root, openssh-server, rsync; minutes)
	$(BIN)/python -m pytest tests/ray_up_check.py -o faulthandler_timeout=0 $(ARGS)

clean:  ## remove what set-up and tests made (runs/ stays)
	rm -rf .venv .tools .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info bench-results
