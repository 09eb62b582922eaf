# Two commands do everything on a fresh Linux machine with Python 3.11 or newer: `make demo` and `make test`; `make
# install` only makes the environment.
# With a C++ compiler, `make demo-all` and `make test` build llama.cpp first (minutes, once).
# TARGET is cuda where nvidia-smi sees a GPU, else cpu; `make demo TARGET=cpu` overrides.

PYTHON ?= python3
TARGET ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
VENV ?= .venv-$(TARGET)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
UV := $(VENV)/lock/bin/uv
LLAMA := $(VENV)/.llama
LLAMA_FLAGS := -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_INCLUDE=$(CURDIR)/requirements/llama_cpp.cmake
ifeq ($(TARGET)$(if $(shell command -v nvcc),, without nvcc),cuda)
LLAMA_FLAGS += -DGGML_CUDA=ON
endif
# Container images often set PYTHONDONTWRITEBYTECODE.  Then each process compiles compare_q again: a second on two cores.
unexport PYTHONDONTWRITEBYTECODE
# `make test CPU=avx2` and `make demo CPU=avx2` run as on a CPU without AVX-512, `CPU=avx512core` as on one that has it
# and no arithmetic for bf16, `CPU=avx512` as on one without AMX.
CPU ?=
MASKED := MASKED_CPU=$(CPU) PYTHONPATH=$(CURDIR)/tests/support/masked_cpu
MASK_avx2 := $(MASKED) ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
  GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F
MASK_avx512core := $(MASKED) ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI
MASK_avx512 := $(MASKED) ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
# In the environment of SUSE's shells CPU is the kind of machine.
MASK := $(if $(filter-out $(shell uname -m),$(CPU)),$(or $(MASK_$(CPU)),$(error CPU=$(CPU): unknown; known: \
  $(patsubst MASK_%,%,$(filter MASK_%,$(.VARIABLES))))))

.PHONY: install llama demo demo-all test quick paths bench versions fuzz check format schema lock clean

install: $(READY)  ## the environment, and compare_q in it
	@echo "installed; now: source $(BIN)/activate"

llama: $(LLAMA)  ## llama.cpp beside it, compiled

demo: $(READY)  ## the main job on a built-in default: table, and report.html, results.json, plot.png in demo/results
	$(MASK) $(BIN)/python -m demo

demo-all: $(READY) $(LLAMA)  ## the demo with GGUF in llama.cpp
	$(MASK) $(BIN)/python -m demo --all

test: $(READY)  ## every test, with real engines: a process for each of two cores
	@$(MAKE) --no-print-directory $(LLAMA) || echo "llama.cpp could not be built (no C++ compiler?): its tests are skipped"
	@$(MASK) $(BIN)/python -c 'from compare_q.backends.common import machine as m; print("tests on:", m.cpu(), "(bf16 is emulated)" * m.emulates_bf16())'
	$(MASK) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

quick: check  ## lint, types and every fast test that starts no engine, in a minute
	$(BIN)/python -m pytest -n 2 -m "not engine and not slow and not paths" --durations=3

BENCH ?= bench-$(TARGET).json
bench: $(READY)  ## wall time of a table over its models' prefill, by part, and peers: an 8B shape on a GPU, else a toy
	$(BIN)/python -m benchmarks.table $(BENCH) --peers 16

versions: $(READY)  ## gate the oldest and the newest vLLM and Transformers beside the locked ones, on the demo's model
	test -d demo/models/smollm2-135m || $(MAKE) --no-print-directory demo
	$(BIN)/python -m benchmarks.versions results/cpu/versions.md demo/models/smollm2-135m

paths: $(READY)  ## every engine with commits, kills, resuming, a second run and interrupts, in every role (half an hour)
	@$(MAKE) --no-print-directory $(LLAMA) || echo "llama.cpp could not be built (no C++ compiler?): its tests are skipped"
	$(BIN)/python -m pytest -m "paths or not paths" tests/paths

FUZZ_EXAMPLES ?= 20000
fuzz: $(READY)  ## damaged files for every reader, other ones each time: FUZZ_EXAMPLES=100000 make fuzz
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/fuzz

check: $(READY) .types/compare_q  ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf .types/built && $(BIN)/python setup.py -q build_py --build-lib .types/built
	cd .types/built && $(abspath $(BIN))/lint-imports --no-cache $(CURDIR)/pyproject.toml

.types/compare_q:  # for mypy, which does not run the line of compare_q/__init__.py that finds eval and backends
	mkdir -p $@
	ln -sfn ../../compare_q/__init__.py ../../eval ../../backends $@

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(READY)  ## regenerate eval/spec/schema
	$(BIN)/python -m compare_q.eval.specs.spec_types
	$(BIN)/python -m compare_q.eval.results

# A CPU build of torch is not on PyPI. A mirror or wheel folder that pip knows of comes first, then torch's own index.
$(READY): requirements/$(TARGET).lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $$(grep -c == $<) packages for $(TARGET) into $(VENV); minutes the first time"
	@if [ $(TARGET) = cpu ]; then \
	  torch=$$(grep '^torch==' $<); \
	  $(PIP) install -qq --no-deps "$$torch" 2>/dev/null \
	    || $(PIP) install -q --no-deps --index-url $(TORCH_INDEX) "$$torch"; fi
	$(PIP) install -qq --no-deps -r $<
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

# pip takes what is installed, or a wheel of its cache, for the same build: it does not look at CMAKE_ARGS.
$(LLAMA): requirements/llama_cpp.txt requirements/llama_cpp.cmake | $(READY)
	@echo "building llama.cpp into $(VENV); three to six minutes on two cores"
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(PIP) install -qq --no-deps --no-cache-dir --force-reinstall \
	  -r requirements/llama_cpp.txt
	touch $@

lock:  ## resolve requirements/*.in again
	test -x $(UV) || ($(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/pip install -q uv)
	for target in cpu cuda; do \
	  $(UV) pip compile -q --universal --no-annotate --no-header --python-version 3.11 --no-emit-package compare-q \
	    $$([ $$target = cpu ] && echo --extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match) \
	    --override requirements/$$target.overrides requirements/$$target.in -o requirements/$$target.lock || exit 1; \
	  sed -i "/sys_platform == 'never'/d; /sys_platform == 'win32'/d; /^-/d" requirements/$$target.lock; done

clean:
	rm -rf .types .venv-cpu .venv-cuda demo/models demo/results
