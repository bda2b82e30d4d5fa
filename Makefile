# `make run` shows the main job; `make test` does the same and runs the suite. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
SCENARIO ?= azure-conversation
PYTEST_ARGS ?= -n auto
PORT ?= 8000
INSTALL = $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: run test load clean

run: $(VENV)/core
	$(VENV)/bin/twinserve run $(SCENARIO)

test: $(VENV)/everything run
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# A load generator from PyPI measures the simulator in real time (docs/serving.md).
load: $(VENV)/core
	$(INSTALL) '.[serve,load]'
	mkdir -p build; set -e; $(VENV)/bin/twinserve serve quickstart --port $(PORT) & server=$$!; trap "kill $$server" EXIT; \
	url=http://127.0.0.1:$(PORT); until curl -sf $$url/health; do kill -0 $$server; sleep 0.3; done; \
	$(VENV)/bin/servebench run --url $$url/v1 --model llama-3.1-8b --concurrency 1,8,32 --input-len 256 --output-len 64 --out build/load.json

# What a capacity planner needs; no torch.
$(VENV)/core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twinserve needs Python 3.11 or later: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

# What the suite needs besides: the engine's torch and Triton, the HTTP server, the studies.
$(VENV)/everything: $(VENV)/core
	$(INSTALL) '.[test,engine,serve,study]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
