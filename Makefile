# The targets make what they need: a fresh clone can start with `make demo` or `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint bench schema clean

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --editable ".[models,dev]"
	touch $@

# ResNet-50 in a third of the memory that eager takes: predicted beside measured beside eager; writes the plan and its trace.
demo: $(VENV)/.installed
	mkdir -p out
	$(BIN)/schedopt run examples/resnet50.py:workload --memory 33% --steps 5 --compare eager -o out/plan.json
	$(BIN)/schedopt check out/plan.json
	$(BIN)/schedopt export out/plan.json --to perfetto -o out/trace.json

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# Formatting, lint, types and layers.
lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

# Side by side with the rivals; minutes to hours, alone on the machine.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/memory.py

# The published JSON schema of plan files, after a change of the types.
schema: $(VENV)/.installed
	$(BIN)/python -c "from schedopt.plan_file import SCHEMA_PATH, schema_text; SCHEMA_PATH.write_text(schema_text())"

clean:
	rm -rf $(VENV) out build .mypy_cache .ruff_cache .pytest_cache
