# make demo | test | slow | fuzz | bench | docs | lint | native | native-arm64: each makes .venv and installs Strata into it first, once.
# Needs Python 3.11, pip and make. `make PYTHON=/path/to/python3.11 test` to name another interpreter.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.strata-installed
UV_VERSION := 0.12.24
EXECUTORCH_VERSION := 1.5.1
EXPORT_STAMP := .venv/.executorch-$(EXECUTORCH_VERSION)

# Four test processes, one thread each: on a small machine torch's own threads only get in each other's way, and some
# tests mostly wait for processes of their own.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Tests start hundreds of processes: none of them should compile Strata again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo executorch test slow lint pytest fuzz bench docs clean native native-arm64
.DEFAULT_GOAL := test

# uv installs these 130 packages in a quarter of a minute, where pip takes a minute and a half. It is told what pip is
# configured with, and finds what pip would find; where it cannot be had or fails, pip does the work.
PIP := $(BIN)/python -m pip --disable-pip-version-check
pip_has = $$($(PIP) config get global.$(1) 2>/dev/null)

install = $(PIP) install --quiet --no-compile uv==$(UV_VERSION) && \
	UV_FIND_LINKS="$(call pip_has,find-links)" UV_INDEX_STRATEGY=unsafe-best-match \
	UV_DEFAULT_INDEX="$(call pip_has,index-url)" UV_EXTRA_INDEX_URL="$(call pip_has,extra-index-url)" \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP) install -qq --no-compile $(1)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call install,-e ".[dev]")
	touch $@

demo: $(STAMP)
	$(BIN)/strata compare --methods slt,small,fd --data digits --constraint 0.125 --rounds 30 --devices 10 --per-round 5 \
		--batch 16 --eval-every 3 --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests of exported steps need it; where it cannot be had they are skipped and say so.
executorch: $(STAMP)
	@$(MAKE) --no-print-directory $(EXPORT_STAMP) || echo "ExecuTorch cannot be installed here"

# lint keeps one core busy for half a minute: beside the tests, not before them
test: executorch
	@$(MAKE) --no-print-directory -j 2 lint pytest

pytest: $(STAMP)
	$(BIN)/pytest --processes 4 -q -m "not slow"

# What takes minutes: every network as an exported program, a fleet with poisoners, the rest of large matrices.
slow: $(EXPORT_STAMP)
	$(BIN)/pytest --processes 2 -q -m slow

# Ten minutes of damaged and hand-made files and messages; the suite itself takes a few seconds of them.
FUZZ_SECONDS ?= 600
fuzz: $(STAMP)
	STRATA_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest -q tests/fuzz

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run_all

# not --quiet: it hides warnings from --strict too
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

# The native device (docs/pocket.md): cmake, a C++17 compiler, and ExecuTorch's wheel for its headers and libraries,
# without the dependencies that nothing here imports.
$(EXPORT_STAMP): $(STAMP)
	$(call install,--no-deps executorch==$(EXECUTORCH_VERSION) flatbuffers tabulate ruamel.yaml)
	touch $@

native: $(EXPORT_STAMP)
	cmake -S native -B native/build \
		-DEXECUTORCH="$$($(BIN)/python -c 'import executorch; print(list(executorch.__path__)[0])')"
	cmake --build native/build --parallel 2

# Debian: g++-aarch64-linux-gnu. The wheel for aarch64 is only unpacked.
native-arm64: $(STAMP)
	mkdir -p native/build-arm64/wheel
	$(PIP) download --quiet --no-deps --only-binary :all: \
		--platform manylinux_2_28_aarch64 --dest native/build-arm64 executorch==$(EXECUTORCH_VERSION)
	$(BIN)/python -m zipfile -e native/build-arm64/executorch-*aarch64.whl native/build-arm64/wheel
	cmake -S native -B native/build-arm64 -DCMAKE_TOOLCHAIN_FILE=arm64.cmake \
		-DEXECUTORCH="$(CURDIR)/native/build-arm64/wheel/executorch"
	cmake --build native/build-arm64 --parallel 2

clean:
	rm -rf native/build native/build-arm64 .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
