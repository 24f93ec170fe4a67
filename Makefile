# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes the virtual environment it needs.
PYTHON ?= python3
# Torch comes first and by itself: another package's requirement would draw a build with CUDA, which a CPU does not need.
# On a machine with NVIDIA GPUs: make TORCH=torch demo
TORCH ?= torch==2.13.0
# Test files that run at once; each real run of two ranks is half idle while it starts.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin

# Files run whole, the longest first, so that none is left running alone at the end.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-long durations lint docs clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[all,dev]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/trainwright demo

# `make test ROOM=plan` runs the tests of one room.
test: $(VENV)/installed
	$(PYTEST) --durations 15 -m "not long" $(addprefix tests/,$(ROOM))

# Further cases of what the others show, and whole lives of runs on a cluster: half an hour and more.
test-long: $(VENV)/installed
	$(PYTEST) --durations 15 -m long

# `make test`, and then where its time went, by room and by file.
durations: $(VENV)/installed
	$(PYTEST) -p tests.durations -m "not long" $(addprefix tests/,$(ROOM))

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) dist build
