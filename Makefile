SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
# The environment of another release of SGLang lies beside the default one: `make up SGLANG=0.5.23`.
DEFAULT_SGLANG := $(shell sed -n 's/^sglang==//p' constraints.txt)
NEWEST_SGLANG := 0.5.23
SGLANG ?= $(DEFAULT_SGLANG)
SUFFIX := $(patsubst %,-%,$(filter-out $(DEFAULT_SGLANG),$(SGLANG)))
ENVIRONMENT := .venv$(SUFFIX)
# Releases between the two take what they ask for.
CONSTRAINTS := $(wildcard constraints$(SUFFIX).txt)
BIN := $(ENVIRONMENT)/bin
INSTALLED := $(ENVIRONMENT)/.installed
SGLANG_TESTS := tests/end_to_end tests/sglang_ext
INTERPRETED_TESTS := tests/sglang_ext/device tests/kernels/gpu
# Of these, what `make test` runs with the newest SGLang, too: where the plugin meets what releases change.
NEWEST_TESTS := tests/end_to_end/test_answers.py $(patsubst %,tests/sglang_ext/test_%.py, \
	admission admission_start allocator attention_arguments check_sampling cpu_server each_policy plans platform \
	policy_server radix radix_hooks refusals released_prompts reporting responses_and_messages rounds_in_steps \
	rows_with_tokens served_options server_options sglang_versions \
	verification_worker)
# Several hundred processes start in the tests, and each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up down eval loadtest audit test test-newest test-sglang test-release test-releases test-full lint packages

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -m 'not full' -n 2 --dist worksteal $(INTERPRETED_TESTS)
	$(MAKE) test-newest SGLANG=$(NEWEST_SGLANG)

test-newest: $(INSTALLED) packages
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not full' -n 2 --dist loadfile --no-loadscope-reorder $(NEWEST_TESTS)

# RECORD=1 writes what passed to service/winnow_service/tested_releases.json.
test-sglang: $(INSTALLED) packages ## Run the tests that SGLang decides on, with another release of it: SGLANG=0.5.23
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not full' -n 2 --dist loadfile --no-loadscope-reorder \
		$(if $(RECORD),--tested=cpu) $(SGLANG_TESTS) $(ARGS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -m 'not full' -n 2 --dist worksteal \
		$(if $(RECORD),--tested=interpreted) $(INTERPRETED_TESTS)

test-release: $(INSTALLED) ## Start a server and ask it for each policy, with another release of SGLang: SGLANG=0.5.20
	OMP_NUM_THREADS=1 $(BIN)/pytest --tested=start tests/sglang_ext/test_each_policy.py

test-releases: ## Do that with every release from the oldest to the newest, one environment after another
	for release in 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23; do \
		$(MAKE) test-release SGLANG=$$release; \
		case $$release in $(DEFAULT_SGLANG) | $(NEWEST_SGLANG)) ;; *) rm -rf .venv-$$release ;; esac; \
	done

test-full: $(INSTALLED) packages ## Run the long tests and record the result in docs/records
	TRITON_INTERPRET=1 $(BIN)/pytest -m full tests/sglang_ext/device
	$(BIN)/pytest -m full --record=docs/records $(ARGS)

lint: $(INSTALLED) ## Check style, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

packages:
	scripts/debian-packages redis-server prometheus openssl haproxy g++ chromium

$(INSTALLED): pyproject.toml constraints.txt $(CONSTRAINTS) overrides.txt
	$(PYTHON) -m venv $(ENVIRONMENT)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python $(addprefix --constraint ,$(CONSTRAINTS)) \
		--override overrides.txt 'sglang==$(SGLANG)' --editable '.[runtime,dev]'
	touch $@
