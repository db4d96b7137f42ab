# Everything starts from python3, make and a package index. Each target prepares what it needs; all are safe to repeat.
#
# torch takes its CUDA build from PyPI, some gigabytes. On a machine without a GPU, the CPU build is smaller:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
VENV ?= .venv
# make demo VIDEOS=folder trains on your own clips instead of the bundled ones.
VIDEOS ?=
# make demo CONFIG=demo_ltx trains another family, see examples/configs.
CONFIG ?= demo
# make test-upstream DIFFUSERS=folder
DIFFUSERS ?=
# make test-gpu FILES=tests/gpu/kernels/test_gelu_on_gpus.py runs a part; COMMIT=sha says what is tested where there is no git.
FILES ?= tests/gpu
COMMIT ?= HEAD
# make support FAMILY=wan tries the cells of one family.
FAMILY ?=
# How many test files run at a time; each may start up to four processes, which mostly wait for each other. On two cores
# three files take about a quarter of an hour.
WORKERS ?= 3
# The slowest tests are listed after the results, so that one that has become slow is seen.
SLOWEST := --durations=25 --durations-min=3

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SEVERAL := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(SLOWEST)
# The files with tests that are timed, by the word: to import all others takes seconds, with nothing beside it.
TIMED := `grep -rlw --include='test_*.py' timed tests`

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-full test-upstream test-gpu support lint format build clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create the virtual environment with the pinned versions

# First what builds the package, and DeepSpeed, which comes as source (in seconds: its kernels are not compiled).
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed and $(PYTHON) is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## Train a small Wan on real clips in three ways, compare them, and sample a clip (VIDEOS=folder for yours)
	$(BIN)/python examples/prepare_videos.py --output demo_data/shards --start 60 $(if $(VIDEOS),--videos "$(VIDEOS)")
	$(BIN)/python examples/demo.py --config examples/configs/$(CONFIG).yaml

# The distributed tests start up to four processes: one thread each keeps them from fighting over the cores.
test test-full test-upstream test-gpu support: export OMP_NUM_THREADS ?= 1

# Some fifty processes import the package, each of which would compile it where bytecode is not kept.
test test-full: export PYTHONDONTWRITEBYTECODE :=

test: $(INSTALLED) ## Run the test suite
	$(SEVERAL) -m "not full and not timed"
	$(BIN)/python -m pytest $(TIMED) -m "timed and not full"

test-full: $(INSTALLED) ## Run the suite with the exhaustive matrices, long kill tests and downloads
	$(SEVERAL) -m "not timed"
	$(BIN)/python -m pytest $(TIMED) -m timed

test-upstream: $(INSTALLED) ## Run diffusers' own tests with every model split (DIFFUSERS=checkout, see tests/upstream)
	$(if $(DIFFUSERS),,$(error Name a checkout of diffusers: make test-upstream DIFFUSERS=folder))
	$(BIN)/python -m pytest tests/upstream --diffusers="$(DIFFUSERS)" -m ""

test-gpu: $(INSTALLED) ## Run the tests that need GPUs, and record the result in tests/gpu/last_result.json
	$(BIN)/python -m pytest $(FILES) --record $(COMMIT)

support: $(INSTALLED) ## Try and record what works with which model, and write docs/support.md (FAMILY=wan for one family)
	-$(BIN)/python -m pytest tests/support/test_cells.py -m full --record-support $(COMMIT) $(if $(FAMILY),-k "$(FAMILY)-")
	$(BIN)/python -m tests.support

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(INSTALLED) ## Build the documentation as a site into build/site; a broken link is an error
	$(BIN)/mkdocs build --strict

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Apply the format and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(INSTALLED) ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation --outdir dist .

clean: ## Remove what the other targets made, except the virtual environment
	rm -rf dist demo_data demo_runs lightning_logs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
