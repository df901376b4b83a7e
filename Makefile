# Needs only Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS := benchmarks/results
MINUTES ?= 0
WORKERS ?= logical
ENVIRONMENT ?= usual
FAST := $(BIN)/python -m tests.environments $(ENVIRONMENT) -- $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
MAKEFLAGS += --jobs=2  # compile the emulated device while packages install and types are checked
unexport MAKEFLAGS PYTHONDONTWRITEBYTECODE  # which slows each process that a test starts
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip does it, on all cores

.PHONY: train test test-slow check lint wheel versions docs bench gpu format clean

train: $(VENV)/installed  ## train a small language model on this machine
	$(BIN)/fsdpctl train

test: $(VENV)/developed $(VENV)/emulated  ## run the fast tests
	$(FAST)

test-slow: $(VENV)/developed $(VENV)/emulated  ## all slow tests, some hours; MINUTES=15 runs those longest unseen
	$(BIN)/python -m pytest -q -m slow --minutes $(MINUTES)

versions: $(VENV)/installed  ## test with the lowest and the newest versions of libraries
	$(BIN)/python -m tests.versions lowest
	$(BIN)/python -m tests.versions newest

check: lint $(VENV)/emulated  ## format, lint, types and fast tests, as in CI and the pre-commit hook
	$(FAST)

lint: $(VENV)/developed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(VENV)/developed  ## build the package, and use it where nothing of this checkout is imported
	$(BIN)/python -m pytest -q -m slow tests/test_wheel.py

docs: $(VENV)/developed  ## regenerate the tables and the picture in docs/
	$(BIN)/python -m docs.generate

bench: $(VENV)/developed  ## compare with PyTorch's engines on CPU ranks, about two hours; then run `make docs`
	$(BIN)/python -m benchmarks.planning --out $(RESULTS)/planning.json
	$(BIN)/python -m benchmarks.estimates --out $(RESULTS)/estimates.json
	$(BIN)/python -m benchmarks.startup --out $(RESULTS)/startup.json
	$(BIN)/python -m benchmarks.host_time --out $(RESULTS)/host-time.json
	$(BIN)/python -m benchmarks.peak_memory --out $(RESULTS)/peak-memory-cpu.json
	$(BIN)/python -m benchmarks.growth --out $(RESULTS)/growth.json
	$(BIN)/python -m benchmarks.corpus --out $(RESULTS)/corpus.json
	$(BIN)/python -m benchmarks.little_memory --out $(RESULTS)/little-memory.json
	$(BIN)/python -m benchmarks.update_time --out $(RESULTS)/update-time.json
	$(BIN)/python -m benchmarks.waiting --out $(RESULTS)/waiting.json
	$(BIN)/python -m benchmarks.step_time --out $(RESULTS)/step-time-cpu.json

gpu:  ## test and measure on a GPU; HALF=1 or HALF=2: half of it, five minutes; WHEELS=DIR: install these wheels first
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps $(WHEELS)/*.whl)
	$(PYTHON) -m benchmarks.gpu_session $(if $(HALF),--half $(HALF)) --out $(RESULTS)

format: $(VENV)/developed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist

$(VENV)/torch: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/installed: $(VENV)/torch
	$(PIP) --editable .
	$(COMPILE)
	touch $@

$(VENV)/developed: $(VENV)/torch
	$(PIP) --editable '.[dev]'
	$(COMPILE)
	touch $(VENV)/installed $@

# The emulated CUDA device for tests: a minute, once per torch version. Without a compiler, these tests are skipped.
$(VENV)/emulated: $(VENV)/torch $(wildcard tests/emulated/*.cpp tests/emulated/*.h)
	$(BIN)/python -m tests.emulated
	touch $@
