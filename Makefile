# Everything runs from .venv, which is made here from the hash-locked requirements files.
# `make` alone lists the targets. ARGS is passed on: make serve ARGS="--port 5000".

DATABASE_URL ?= sqlite:///lightning.db
ARGS ?=
MINUTES ?= 10
# Two processes at least keep a second core busy while a test waits; four PostgreSQL clusters are enough.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal
# A Python 3.11 or newer to make .venv with; found on PATH when not given.
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
AUDIT := .venv-audit
# Agent Lightning whole, with everything that it depends on.
WHOLE := .venv-agentlightning
# The first of these holds everything that the runtime's and the build's do.
AUDITED := requirements-dev.txt requirements-upstream.txt requirements-audit.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
COMPILE := $(BIN)/uv pip compile --quiet --no-header --no-emit-index-url --generate-hashes --universal --python-version 3.11

# An environment whose interpreter is gone, or that came along with a moved or copied checkout, is made anew:
# its scripts and its editable install name the old place.
$(shell [ ! -e $(VENV) ] || { [ -x $(BIN)/python ] && grep -qF "$(CURDIR)/$(VENV)" $(BIN)/activate; } || rm -rf $(VENV))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help: ## list the targets
	@echo "make TARGET [ARGS=\"...\"]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/  \1: \2/p' Makefile | awk -F': ' '{printf "%-17s %s\n", $$1, $$2}'

.PHONY: serve
serve: $(VENV)/.runtime ## run the store on an SQLite file at http://127.0.0.1:4747
	@exec $(BIN)/lightning-sql serve --database-url "$(DATABASE_URL)" $(ARGS)

.PHONY: demo
demo: $(VENV)/.runtime ## watch simulated runners work through a queue of rollouts
	@exec $(BIN)/lightning-sql demo $(ARGS)

.PHONY: migrate
migrate: $(VENV)/.runtime ## bring DATABASE_URL's schema up to date (ARGS="current", "check", "down")
	@LIGHTNING_SQL_DATABASE_URL="$(DATABASE_URL)" $(BIN)/lightning-sql migrate $(or $(ARGS),up)

.PHONY: test
test: $(VENV)/.dev ## run the whole test suite, on real PostgreSQL and SQLite
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

.PHONY: test-fast
test-fast: $(VENV)/.dev ## run the tests that are not marked slow (under a minute)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow" $(ARGS)

PROPERTIES = tests/properties tests/api/test_lean.py tests/store/test_documents.py tests/store/test_differential.py \
	tests/store/test_batching_random.py

.PHONY: properties
properties: $(VENV)/.dev ## try the properties with other examples, each of what comes in with 5,000 (hours)
	$(BIN)/python -m pytest $(PYTEST_ARGS) --hypothesis-profile long -o timeout=0 $(PROPERTIES) $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## break everything that can break, over and over, and check that nothing is lost (MINUTES=10)
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

.PHONY: restart
restart: $(VENV)/.dev ## stop PostgreSQL for 30 seconds under load, and count the calls that fail (ARGS="--seconds 60")
	$(BIN)/python -m tests.faults.restart $(ARGS)

.PHONY: bench
bench: $(VENV)/.dev ## measure against the upstream server and write docs/performance.md (ARGS="--quick" looks only)
	$(BIN)/python -m bench.compare $(ARGS)

.PHONY: bench-quick
bench-quick: $(VENV)/.dev ## run every benchmark in short, and say whether all of it succeeded (ARGS="--only 'store.*'")
	$(BIN)/python -m bench.quick $(ARGS)

# How much, and where to: of the targets below.
PRESET ?= minimal
BENCHMARK ?= insert
BACKEND ?= sqlite
CONTENTION ?= medium
SCALE ?= 1
SUMMARY ?= bench-summary.jsonl
# Claims and writes that are made at once.
CONTENTION_low := 4
CONTENTION_medium := 128
CONTENTION_high := 2048

.PHONY: bench-preset
bench-preset: $(VENV)/.dev ## one preset of bench.store on one backend (PRESET=minimal BACKEND=sqlite SCALE=1 SUMMARY=...)
	$(BIN)/python -m bench.served --backend $(BACKEND) bench.store --preset $(PRESET) --scale $(SCALE) \
		--summary-file $(SUMMARY) $(ARGS)

.PHONY: bench-micro
bench-micro: $(VENV)/.dev ## one benchmark of bench.micro on one backend (BENCHMARK=worker BACKEND=sqlite SUMMARY=...)
	$(BIN)/python -m bench.served --backend $(BACKEND) bench.micro $(BENCHMARK) --summary-file $(SUMMARY) $(ARGS)

.PHONY: bench-collections
bench-collections: $(VENV)/.dev ## insert, dequeue or inc on one backend (BENCHMARK=insert CONTENTION=low|medium|high)
	$(BIN)/python -m bench.collections $(BENCHMARK) --backend $(BACKEND) --concurrency $(CONTENTION_$(CONTENTION)) \
		--summary-file $(SUMMARY) $(ARGS)

.PHONY: bench-summary
bench-summary: $(VENV)/.dev ## the results in SUMMARY as a table in Markdown
	@$(BIN)/python -m bench.summaries $(SUMMARY)

.PHONY: test-monitoring
test-monitoring: $(VENV)/.dev ## try the dashboard and the alerts on the real Prometheus and exporters, under load
	$(BIN)/python -m tests.monitoring.live $(ARGS)

.PHONY: test-agentlightning
test-agentlightning: $(WHOLE)/.installed ## run Agent Lightning's own training loop on our store (its packages take a gigabyte)
	$(WHOLE)/bin/python -m pytest -c tests/agentlightning/pytest.ini tests/agentlightning $(ARGS)

.PHONY: lint
lint: $(VENV)/.dev ## ruff, pyright, the import rules, no values in texts of SQL, and what is deployed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tools.sql_texts
	$(BIN)/python -m tools.deployment

# A dependency that PyPI says nothing of has not been looked at, so it fails (--strict).
.PHONY: audit
audit: $(AUDIT)/.installed ## ask PyPI for known vulnerabilities of everything in the requirements files
	@failed=; for file in $(AUDITED); do echo "$$file:"; $(AUDIT)/bin/python -m pip_audit --strict \
		--vulnerability-service pypi --disable-pip --require-hashes --progress-spinner off $(ARGS) -r "$$file" \
		|| failed=yes; done; [ -z "$$failed" ]

.PHONY: format
format: $(VENV)/.dev ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: $(VENV)/.dev ## write the requirements files anew (ARGS="--upgrade" for newer versions)
	$(COMPILE) $(ARGS) pyproject.toml -o requirements.txt
	$(COMPILE) $(ARGS) --group build -c requirements.txt -o requirements-build.txt
	$(COMPILE) $(ARGS) pyproject.toml --group dev -c requirements.txt -c requirements-build.txt -o requirements-dev.txt
	$(COMPILE) $(ARGS) --no-deps requirements-upstream.in -o requirements-upstream.txt
	$(COMPILE) $(ARGS) --group audit -o requirements-audit.txt
	$(COMPILE) $(ARGS) -c requirements-dev.txt bench/requirements.in -o bench/requirements.txt
	$(COMPILE) $(ARGS) --no-strip-extras pyproject.toml tests/agentlightning/requirements.in \
		-o tests/agentlightning/requirements.txt

.PHONY: clean
clean: ## remove .venv and what the tools leave behind (databases stay)
	rm -rf $(VENV) $(AUDIT) $(WHOLE) dist build .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that is Python 3.11 or newer and can make environments; each must be run to know,
# since a version manager's shim may stand on PATH for a version that is not installed.
$(VENV)/bin/python:
	@for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14 python); do \
		if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			echo "Making $(VENV) with $$("$$candidate" --version)"; \
			rm -rf $(VENV); \
			exec "$$candidate" -m venv $(VENV); \
		fi; \
	done; \
	echo "lightning-sql needs Python 3.11 or newer with its venv module (on Debian: python3-venv)." >&2; \
	echo "None was found; name one with: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(VENV)/.runtime-lock: requirements.txt requirements-build.txt | $(VENV)/bin/python
	@echo "Installing the locked dependencies into $(VENV)"
	@$(PIP) install --require-hashes -r requirements.txt -r requirements-build.txt
	@touch $@

$(VENV)/.runtime: pyproject.toml $(VENV)/.runtime-lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev-lock: requirements-dev.txt requirements-upstream.txt $(VENV)/.runtime-lock
	@echo "Installing the locked development tools into $(VENV)"
	@$(PIP) install --require-hashes -r requirements-dev.txt
	@$(PIP) install --require-hashes --no-deps -r requirements-upstream.txt
	@touch $@

$(WHOLE)/.installed: tests/agentlightning/requirements.txt | $(VENV)/bin/python
	@echo "Installing Agent Lightning and all that it needs into $(WHOLE)"
	@$(BIN)/python -m venv --clear $(WHOLE)
	@$(PIP:$(BIN)/%=$(WHOLE)/bin/%) install --require-hashes -r $<
	@touch $@

# An environment of its own: what audits the dependencies is not one of them.
$(AUDIT)/.installed: requirements-audit.txt | $(VENV)/bin/python
	@$(BIN)/python -m venv --clear $(AUDIT)
	@$(PIP:$(BIN)/%=$(AUDIT)/bin/%) install --require-hashes -r requirements-audit.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.dev-lock $(VENV)/.runtime
	@touch $@
