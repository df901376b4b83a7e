# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RESULTS := benchmarks/results
SAMPLE ?= 1
SEED ?= $(shell git rev-parse --short HEAD)
FAST := $(BIN)/python -m pytest -q --numprocesses logical --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-slow check docs bench gpu format clean

train: $(VENV)/installed  ## train a small language model, now, on this machine
	$(BIN)/fsdpctl train

test: $(VENV)/emulated  ## the fast tests
	$(FAST)

test-slow: $(VENV)/emulated  ## the whole matrices, half an hour; SAMPLE=0.7: so much of them
	$(BIN)/python -m pytest -q -m slow --sample $(SAMPLE) --seed "$(SEED)"

check: $(VENV)/emulated  ## what CI, the pre-commit hook and people run
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(FAST)

docs: $(VENV)/developed  ## the tables and the picture that come from the code
	$(BIN)/python -m docs.generate

bench: $(VENV)/developed  ## beside PyTorch's own engines on CPU ranks, about an hour; then `make docs`
	$(BIN)/python -m benchmarks.planning --out $(RESULTS)/planning.json
	$(BIN)/python -m benchmarks.estimates --out $(RESULTS)/estimates.json
	$(BIN)/python -m benchmarks.startup --out $(RESULTS)/startup.json
	$(BIN)/python -m benchmarks.host_time --out $(RESULTS)/host-time.json
	$(BIN)/python -m benchmarks.peak_memory --out $(RESULTS)/peak-memory-cpu.json
	$(BIN)/python -m benchmarks.consolidate --out $(RESULTS)/consolidate.json
	$(BIN)/python -m benchmarks.saving --out $(RESULTS)/saving.json
	$(BIN)/python -m benchmarks.watching --out $(RESULTS)/watching.json
	$(BIN)/python -m benchmarks.restarting --out $(RESULTS)/restarting.json
	$(BIN)/python -m benchmarks.step_time --out $(RESULTS)/step-time-cpu.json

gpu:  ## on a machine with a GPU, HALF=1 or HALF=2 in five minutes each, with what is installed, or WHEELS=folder of wheels
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps $(WHEELS)/*.whl)
	$(PYTHON) -m benchmarks.gpu_session $(if $(HALF),--half $(HALF)) --out $(RESULTS)

format: $(VENV)/developed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	touch $@

# A CUDA device in host memory, for tests: a minute, once per torch. Without a compiler they skip.
$(VENV)/emulated: $(VENV)/developed $(wildcard tests/emulated/*.cpp tests/emulated/*.h)
	$(BIN)/python -m tests.emulated
	touch $@
