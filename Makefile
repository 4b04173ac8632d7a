# The two commands a newcomer types are `make demo` and `make test`; each sets itself up in .venv.
#   make test    every test that needs no GPU, by JOBS processes: 6 to 19 minutes on two cores
#   make quick   those that run in one process and take no compiler or browser: 2 minutes
#   make zoo     the tests of models of transformers, timm, diffusers and PEFT, in a .venv-zoo of their own
#   make other-torch TORCH=2.15.0   make test on another release of torch, in an environment of its own
#   make docs    the documentation site, in build/site, with its links checked and its pages opened in Chromium
#   make check   what CI runs: format, lint, types, room order, every test, coverage
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO := .venv-zoo
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)

JOBS ?= 2
OPTIONS = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(OPTIONS)

.PHONY: setup demo atlas test quick other-torch docs opsweep upstream zoo zoo-table check lint format bench clean

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

test check other-torch: JOBS = 3 # more than two cores: tests of several processes mostly wait

test: $(READY)
	$(PYTEST)

quick: $(READY)
	$(PYTEST) -m 'not (dist or browser or slow or gpu)'

other-torch: $(OTHER)/.ready
	$(OTHER)/bin/python -m pytest $(OPTIONS)

$(OTHER)/.ready: pyproject.toml
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH) --editable '.[dev]'
	touch $@

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	STERNWAY_SITE=build/site $(BIN)/python -m pytest tests/docs --numprocesses 0 --deselect tests/docs/test_docs_code.py

$(VENV)/.ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

opsweep: $(READY) # every sample of torch's own operator and module tests; what differs, by cause
	$(BIN)/python tests/upstream/opsweep.py --verbose

upstream: $(READY) # PyTorch's own tests on ours: make upstream TORCH_TESTS=<the folder test of a checkout>
	$(BIN)/python tests/upstream/judge.py $(TORCH_TESTS) --jobs $(JOBS)

zoo: $(ZOO)/.ready
	$(ZOO)/bin/python -m pytest tests/zoo tests/docs/test_docs_code.py --numprocesses $(JOBS) --dist worksteal

zoo-table: $(ZOO)/.ready # the table of docs/models.md
	PYTHONPATH=tests:benchmarks $(ZOO)/bin/python -m zoo.table

$(ZOO)/.ready: pyproject.toml constraints.txt
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[zoo]'
	touch $@

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(PYTEST) --cov --cov-report=term

bench: $(READY)
	$(BIN)/python benchmarks/split/main.py
	$(BIN)/python benchmarks/schedule/main.py
	$(BIN)/python benchmarks/pipeline/main.py
	$(BIN)/python benchmarks/plan/main.py
	$(BIN)/python benchmarks/graph/main.py
	$(BIN)/python benchmarks/atlas/main.py
	$(BIN)/python benchmarks/saved/main.py
	$(BIN)/python benchmarks/chaos/main.py
	$(BIN)/python benchmarks/scale/main.py

clean:
	rm -rf $(VENV) $(ZOO) .venv-torch-* build .mypy_cache .pytest_cache .ruff_cache .hypothesis
