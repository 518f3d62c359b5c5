SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Several hundred processes start in the tests, and each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up down eval loadtest audit test test-full lint packages

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(INSTALLED) ## Start SGLang and the service (options: ARGS='--port 8000')
	$(BIN)/winnow up $(ARGS)

down: $(INSTALLED) ## Stop what `make up` started
	$(BIN)/winnow down $(ARGS)

eval: $(INSTALLED) ## Measure a served model's accuracy (options: ARGS='--lengths 4096')
	$(BIN)/winnow eval $(ARGS)

loadtest: $(INSTALLED) ## Put a service under load, one of its own by default (options: ARGS='--url http://...')
	$(BIN)/python -m loadtest $(ARGS)

audit: $(INSTALLED) ## Check versions, licences and known vulnerabilities of the dependencies
	$(BIN)/python scripts/audit_dependencies.py $(ARGS)

test: lint packages ## Check style, types and import contracts, and run the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not full' -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -m 'not full' -n 2 --dist worksteal tests/sglang_ext/device tests/kernels/gpu

test-full: $(INSTALLED) packages ## Run the long tests and record the result in docs/records
	TRITON_INTERPRET=1 $(BIN)/pytest -m full tests/sglang_ext/device
	$(BIN)/pytest -m full --record=docs/records $(ARGS)

lint: $(INSTALLED) ## Check style, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

packages:
	scripts/debian-packages redis-server prometheus openssl haproxy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[runtime,dev]'
	touch $@
