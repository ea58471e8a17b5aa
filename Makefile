# Two commands matter: `make demo` and `make test`. Both create their environment in .venv first, with this checkout
# installed as editable: a change of Python files, also a new or moved file, needs no installation.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test test-quick test-gpu test-device fuzz fuzz-gguf soak test-amx test-sanitize test-threads check check-native format lock clean help

PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)

# The C++ test program needs a compiler and cmake only; cmake comes with the environment where the system has none.
CMAKE ?= $(or $(shell command -v cmake),$(BIN)/cmake)
CMAKE_INSTALLED := $(if $(shell command -v cmake),,$(VENV)/installed)
KERNEL_TESTS = $(CMAKE) -S . -B build/$@ -DKT_BUILD_PYTHON=OFF -DKT_BUILD_TESTS=ON
KERNEL_BUILD = MAKEFLAGS= $(CMAKE) --build build/$@ --parallel $(PROCESSORS) --target kt_kernel_tests

help:
	@echo "make demo    install, then train an adapter inside a running server and see the answer change (about four minutes)"
	@echo "make test    install, then run every test, in its usual cases (docs/testing.md)"
	@echo "make test-quick     install, then run the tests that start no server: the folders left out are printed"
	@echo "make test-gpu       install, then run tests/gpu on this machine's NVIDIA GPU; without one it ends with status 2"
	@echo "make test-device    install, then run whole servers on the emulated accelerator, for DEVICE_SEEDS=20 orders of its work"
	@echo "make fuzz    attack a real server for an hour, or for FUZZ_SECONDS (docs/testing.md)"
	@echo "make fuzz-gguf   attack the readers of GGUF files with new inputs for an hour, or for FUZZ_SECONDS"
	@echo "make soak    send a real server SOAK_REQUESTS=100000 requests: its memory, files and threads stay"
	@echo "make test-amx       run the AMX kernels' tests on AMX instructions: here, else through the command in AMX_RUNNER"
	@echo "make test-sanitize  run the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, in SANITIZE_PART=1 all sizes"
	@echo "make test-threads   run the thread pool's and the native step's tests under ThreadSanitizer"
	@echo "make check   linters, formatting, types of sources and tests, and the import-direction test"
	@echo "make check-native   test-threads and test-sanitize, which also runs AMX's kernels on a model of its tiles"
	@echo "make format  apply ruff's and clang-format's formatting"
	@echo "make lock    write the versions of this environment's packages into constraints.txt"
	@echo "make clean   remove the build tree and the environment"

# What the installation needs, each with one line that says how to get it. CMake takes $CXX, or else c++ and its names.
COMPILER = $(firstword $(shell command -v "$${CXX:-c++}" || command -v g++ || command -v clang++))
PYTHON_HEADER = import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))

$(VENV)/created:
	@command -v '$(PYTHON)' >/dev/null || \
	  { echo "kt-runtime needs Python 3.11 or 3.12, and there is no '$(PYTHON)': install python3 with your system's packages, or say make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "kt-runtime needs Python 3.11 or 3.12; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "kt-runtime is installed into a virtual environment, and '$(PYTHON)' can't make one: install its venv package (Debian, Ubuntu: apt install python3-venv)"; exit 2; }
	@$(PYTHON) -c '$(PYTHON_HEADER)' || \
	  { echo "kt-runtime's extension is compiled against Python.h, which '$(PYTHON)' lacks: install its development package (Debian, Ubuntu: apt install python3-dev)"; exit 2; }
	@test -n '$(COMPILER)' && echo '#include <span>' | '$(COMPILER)' -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || \
	  { echo "kt-runtime's expert kernels need a C++20 compiler, and there is none (GCC 11 or clang 14 at least): install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set CXX"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

# Every package at the version that the tests ran with: pip finds these at once, where it would otherwise try hundreds of
# releases of boto3 and botocore, and take old ones. `make lock` writes the file, from an environment that passed.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# Without pip's build isolation the compiler's results in build/ stay valid, and only what changed is compiled again.
# setuptools: jieba is published as sources only, and without isolation pip builds it with what the environment has.
$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt $(NATIVE)
	$(INSTALL) 'cmake>=3.24' ninja 'setuptools>=70.1' \
	  $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	$(INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

# Only the tools: the package itself is installed, and need not be built again.
$(VENV)/check-installed: $(VENV)/installed
	$(INSTALL) \
	  $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["check"])')
	@touch $@

# To move a version: install it into .venv, run the tests, then this.
lock: $(VENV)/check-installed
	@{ echo '# Versions that the tests ran with, on Python 3.11 and Linux: pip --constraint. Written by make lock.'; \
	  $(BIN)/python -m pip freeze --exclude-editable; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

demo: $(VENV)/installed
	$(BIN)/kt-runtime demo --json demo.json

# Processes, each with whole files of tests; WORKERS=0: all in this process. In the order of their names, tests/system
# before tests/unit: the files at the end are short, and no process waits long.
# Tests that start no server compute all the time: a process for each of two processors. A test with a server waits
# about as often as it computes, so another process computes meanwhile, where memory has room for it and its servers.
test-quick: WORKERS ?= 2
test: WORKERS ?= $(shell awk '/^MemAvailable/ { print ($$2 >= 14 * 1048576) ? 3 : 2 }' /proc/meminfo)
# Without compiled modules on disk, each process of these tests compiles them again: that is a tenth of the time.
unexport PYTHONDONTWRITEBYTECODE
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/installed
	$(BIN)/pytest $(IN_PARALLEL) $(PYTEST_ARGS)

# One process: the servers of two would share the GPU's memory (docs/gpu.md).
test-gpu: $(VENV)/installed
	$(BIN)/pytest --gpu=require tests/gpu $(PYTEST_ARGS)

# Whole servers on the emulated accelerator, one for each seed of an order of its work (docs/testing.md).
DEVICE_SEEDS ?= 20
test-device: $(VENV)/installed
	LATE_SEEDS=$(DEVICE_SEEDS) $(BIN)/pytest -s tests/device/test_serving.py tests/device/test_serving_in_bf16.py $(PYTEST_ARGS)

# An attack on a real server, for an hour unless told otherwise (docs/testing.md). No seed: one is drawn and printed.
FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/installed
	FUZZ_STRICT=1 FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SEED=$(FUZZ_SEED) FUZZ_REPLAY="$(FUZZ_REPLAY)" \
	  $(BIN)/pytest -s tests/system/fuzz $(if $(FUZZ_REPLAY),-k replayed) $(PYTEST_ARGS)

# The readers of GGUF files, models' and adapters', against new inputs in each round.
GGUF_READERS := tests/unit/test_gguf_file.py tests/unit/serve/models/test_gguf_fuzz.py tests/unit/adapters/test_gguf_lora.py
fuzz-gguf: $(VENV)/installed
	end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); while [ $$(date +%s) -lt $$end ]; do \
	  TEST_CASES=all $(BIN)/pytest -q $(GGUF_READERS) -k 'fuzz or damaged' $(PYTEST_ARGS) || exit 1; done

# Many requests to a real server, whose memory, files and threads must stay (docs/testing.md).
SOAK_REQUESTS ?= 100000
soak: $(VENV)/installed
	SOAK_REQUESTS=$(SOAK_REQUESTS) $(BIN)/pytest -s tests/system/faults/test_soak.py $(PYTEST_ARGS)

# AMX_RUNNER: a command that runs the (static) program given to it on an emulated processor with AMX, as `sde64 -spr --`.
test-amx: $(CMAKE_INSTALLED)
	$(KERNEL_TESTS) -DKT_STATIC_TESTS=ON
	$(KERNEL_BUILD)
	@program=build/$@/tests/unit/csrc/kt_kernel_tests; log=build/$@/amx.log; \
	if $$program --list | grep -qx amx; then runner=; options='--isa amx'; \
	elif [ -n "$$AMX_RUNNER" ]; then runner=$$AMX_RUNNER; options='--isa amx --quick'; \
	else echo "This processor or its kernel offers no AMX, and AMX_RUNNER names no command that emulates it (as AMX_RUNNER='sde64 -spr --')"; exit 2; fi; \
	echo "$$runner $$program $$options"; \
	$$runner $$program $$options >$$log; status=$$?; cat $$log; \
	[ $$status = 0 ] || exit $$status; \
	grep -q '^isa amx: [1-9][0-9]* checks, 0 failures' $$log || { echo "FAIL another instruction set than amx ran"; exit 1; }

# -g1: lines, for a report's stack. The program is one thread for most of the time: as many instruction sets at once as
# there are processors, the output of each when it has ended. Numbers are compared in all sizes by `make test`; of these
# sizes one in SANITIZE_PART runs here, drawn (Report::takes in tests/unit/csrc/checks.h).
SANITIZE_PART ?= 3
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -O1 -g1
test-sanitize: $(CMAKE_INSTALLED)
	$(KERNEL_TESTS) -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="$(SANITIZERS)"
	$(KERNEL_BUILD)
	@program=build/$@/tests/unit/csrc/kt_kernel_tests; isas=$$($$program --list) && [ -n "$$isas" ] || exit 1; \
	echo "$$program --part $(SANITIZE_PART) --isa" $$isas; \
	printf '%s\n' $$isas | sort | xargs -P $(PROCESSORS) -I ISA sh -c \
	  "$$program --isa ISA --part $(SANITIZE_PART) >build/$@/ISA.log 2>&1; status=\$$?; cat build/$@/ISA.log; exit \$$status"

test-threads: $(CMAKE_INSTALLED)
	$(KERNEL_TESTS) -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="-fsanitize=thread -O1 -g1"
	MAKEFLAGS= $(CMAKE) --build build/$@ --parallel $(PROCESSORS) --target kt_pool_tests
	TSAN_OPTIONS="halt_on_error=1 die_after_fork=0" build/$@/tests/unit/csrc/kt_pool_tests

check-native: test-threads test-sanitize

# Whole folders, so that no test is forgotten: those that start servers, compile, or run for minutes. Of cases that show
# the same, few (docs/testing.md).
SLOW := unit/csrc system device gpu
# The files that tests write, over 1 GiB, lie in memory where there is room for them: thousands of fsync wait for no disk.
FILES_KIB := 4194304
test-quick: $(VENV)/installed
	@echo "left out: $(SLOW:%=tests/%) (make test runs them)"
	@free=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }'); \
	if [ -w /dev/shm ] && [ "$${free:-0}" -ge $(FILES_KIB) ]; then in=/dev/shm; else in=$${TMPDIR:-/tmp}; fi; \
	files=$$(mktemp -d "$$in/kt-runtime-tests-XXXXXX") || exit 2; \
	trap 'rm -rf "$$files"' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	echo "files of the tests: in $$in"; \
	TEST_CASES=$${TEST_CASES:-few} $(BIN)/pytest $(IN_PARALLEL) --basetemp="$$files/tests" $(SLOW:%=--ignore=tests/%) $(PYTEST_ARGS)

check: $(VENV)/check-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.h' '*.hpp' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layout.py

format: $(VENV)/check-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.h' '*.hpp' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build $(VENV) kt_runtime/_experts*.so
