# Two commands matter: `make demo` and `make test`. Both create their environment in .venv first.
# The checkout holds kt_runtime without its compiled part: never let it shadow the installed package.
export PYTHONSAFEPATH := 1
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc kt_runtime sglang_patch serve train configs -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test check format clean help

help:
	@echo "make demo    install, then train an adapter inside a running server and see the answer change (about four minutes)"
	@echo "make test    install, then run every test"
	@echo "make check   linters, types, and the import-direction test"
	@echo "make format  apply ruff's and clang-format's formatting"
	@echo "make clean   remove the build tree and the environment"

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "kt-runtime needs Python 3.11 or 3.12; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml CMakeLists.txt $(SOURCES)
	$(BIN)/python -m pip install --quiet '.[test]'
	@touch $@

$(VENV)/check-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet '.[test,check]'
	@touch $@

demo: $(VENV)/installed
	$(BIN)/kt-runtime demo --json demo.json

test: $(VENV)/installed
	$(BIN)/pytest $(PYTEST_ARGS)

check: $(VENV)/check-installed
	$(BIN)/ruff check .
	cd $(VENV) && bin/mypy --config-file ../pyproject.toml -p kt_runtime
	git ls-files '*.cpp' '*.h' '*.hpp' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/pytest -q tests/test_layout.py

format: $(VENV)/check-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.h' '*.hpp' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build $(VENV)
