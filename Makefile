# The README's commands: `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo schemes test test-vllm lint check-python
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python demo.py

# Five steps of the demo under every reward scheme that its questions have rubrics for, each in a run folder of its own.
schemes: $(VENV)/.installed
	set -e; for scheme in $$($(BIN)/python -c 'import schemes; print(*schemes.SCHEMES)' | sed 's/ exact_match//'); do \
	  echo "== $$scheme"; $(BIN)/python demo.py --steps 5 --set REWARD_SCHEME=$$scheme; done

test: lint $(VENV)/.installed-tests
	$(BIN)/python -m pytest -q tests

# A real vLLM server on the CPU, in an environment of its own (3 GB): minutes to install, minutes to run.
test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest -q tests/vllm

lint: $(VENV)/.installed-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }

$(VENV)/bin/python: | check-python
	$(PYTHON) -m venv $(VENV)

# The stamps are written last, so that an interrupted install is taken up again.
$(VENV)/.installed: requirements-cpu.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-cpu.txt
	touch $@

$(VENV)/.installed-tests: tests/requirements.txt $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -r tests/requirements.txt
	touch $@

$(VENV)-vllm/.installed: tests/vllm/requirements.txt tests/vllm/install.sh | check-python
	bash tests/vllm/install.sh $(VENV)-vllm $(PYTHON)
	touch $@
