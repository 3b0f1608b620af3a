# `make` alone lists the commands. Everything is set up in $(VENV); nothing else is touched.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# The second torch of `make abi`: the binary built against TORCH must work there unchanged.
OTHER_TORCH ?= torch==2.14.1

BIN     := $(VENV)/bin
SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name 'sources.txt')
SANITIZED_TESTS := tests/conformance

.PHONY: help train test lint native sanitize abi check-all clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train DLRM on 2 local ranks, dense beside DCT; one table (about 3 minutes)"
	@echo "make test       the test suite: Python and native"
	@echo "make lint       ruff and clang-format"
	@echo "make abi        the binary built on $(TORCH), tested on $(OTHER_TORCH)"
	@echo "make sanitize   native tests under ASan, UBSan and TSan; op tests under ASan and UBSan"
	@echo "make check-all  all of these, and the tests that need much memory or time"

$(VENV)/installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH) "setuptools>=77" wheel ninja cmake
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[test,lint]'
	touch $@

$(VENV)/built: $(VENV)/installed $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m dct_kernels
	touch $@

train: $(VENV)/built
	$(BIN)/dct-train --modes dense,dct --out runs/train

test: $(VENV)/built native
	$(BIN)/python -m pytest

native: $(VENV)/installed
	$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_BUILD_TYPE=Release --log-level=WARNING
	$(BIN)/cmake --build build/native
	$(BIN)/ctest --test-dir build/native --output-on-failure

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h' \
	  | xargs $(BIN)/clang-format --dry-run --Werror

clean:
	rm -rf build dist *.egg-info dct_kernels/*.so $(VENV)
