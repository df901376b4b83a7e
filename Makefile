# Everything a fresh machine needs is Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-slow check docs bench format clean

train: $(VENV)/installed  ## train a small language model, now, on this machine
	$(BIN)/fsdpctl train

test: $(VENV)/developed  ## the fast tests
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/developed  ## the whole matrices, a quarter of an hour
	$(BIN)/python -m pytest -q -m slow

check: $(VENV)/developed  ## what CI, the pre-commit hook and people run
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

docs: $(VENV)/developed  ## the tables and the picture that come from the code
	$(BIN)/python docs/generate.py

bench: $(VENV)/developed  ## a step beside PyTorch's own engines, on two CPU ranks
	$(BIN)/python -m benchmarks.step_time --out benchmarks/results/step-time-cpu.json

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
