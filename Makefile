# The two commands a newcomer types are `make demo` and `make test`; each sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo atlas test check lint format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/sternway split
	$(BIN)/sternway demo

atlas: $(READY)
	$(BIN)/sternway atlas src --out build/atlas

test: $(READY)
	$(BIN)/python -m pytest

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: $(READY)
	$(BIN)/python benchmarks/split/main.py
	$(BIN)/python benchmarks/schedule/main.py
	$(BIN)/python benchmarks/pipeline/main.py
	$(BIN)/python benchmarks/graph/main.py
	$(BIN)/python benchmarks/atlas/main.py
	$(BIN)/python benchmarks/saved/main.py
	$(BIN)/python benchmarks/chaos/main.py
	$(BIN)/python benchmarks/scale/main.py

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis
