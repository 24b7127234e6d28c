# Weightplane's habits, one command each. `make` alone lists them.
# Everything runs in .venv, which `make setup` makes; the other targets call it, and it does nothing twice.

PYTHON ?= python3.11
# Tests that share nothing run two at a time, and those of real processes, engines and trainers by themselves. What the
# first part came to (which reasons of errors some test produced) is handed on to the second, which judges the whole.
REASONS := .pytest_cache/reasons.json
TEST_PURE = $(BIN)/python -m pytest -n 2 --dist worksteal --reasons $(REASONS) -m "pure and not slow" \
  tests/unit tests/contract tests/sim tests/cases
TEST_REST = $(BIN)/python -m pytest --reasons $(REASONS) -m "not pure and not slow and not deploy" tests
# What is installed. On a GPU machine: make setup EXTRAS=engine,trainer,demo,dev
EXTRAS ?= engine-cpu,trainer,demo,dev
# Further words for the demo: make demo DEMO="--model tiny --steps 5"
DEMO ?= --verify

VENV := .venv
BIN := $(VENV)/bin
SETUP_LOG := $(VENV)/setup.log
# The set-up is done when a stamp of this pyproject.toml and these extras exists.
STAMP := $(VENV)/.set-up-$(shell (cat pyproject.toml; echo "$(EXTRAS)") | cksum | cut -d' ' -f1)
# PyPI's builds of these are for CUDA, and with them vLLM cannot be imported beside a CPU build of torch.
CUDA_ONLY := torchvision torchaudio torchcodec

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-real test-deploy test-gpu sim mutants fuzz coverage kill-matrix sweep bench bench-quick check check-style check-types check-protos check-imports format protos clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
	  while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## make .venv and install everything into it (about 2 minutes, 4 GB; nothing if it is done)

demo: setup ## train a small model here: a coordinator, two vLLM engines, a Megatron trainer
	$(BIN)/weightplane demo $(DEMO)

test: setup ## the tests, real engines and trainers included; without the slow ones (TESTS=path: some of them)
ifdef TESTS
	$(BIN)/python -m pytest -m "not slow and not deploy" $(TESTS)
else
	@rm -f $(REASONS)
	$(TEST_PURE); pure=$$?; $(TEST_REST); rest=$$?; test $$pure = 0 && test $$rest = 0
endif

test-real: setup ## the tests that start real vLLM or real Megatron, the slow ones too
	$(BIN)/python -m pytest -m "real or slow" $(TESTS)

test-deploy: setup ## the units under a booted systemd, the images built and run (root; says what it needs)
	$(BIN)/python -m pytest -m deploy -s tests/deploy

test-gpu: ## what needs an NVIDIA GPU, in a .venv with CUDA builds (under 8 minutes on one; says what it skips)
	$(BIN)/python -m pytest -rs --durations=0 tests/gpu

# Only the core must be whole: most of the rest is reached by tests of real processes, which are not measured.
coverage: setup ## branches that the pure tests reach: all of controlplane/core, or it fails
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "pure and not slow" --cov --cov-report= tests/unit tests/contract tests/sim
	@echo "the rest: $$($(BIN)/coverage report --omit='controlplane/core/*' --format=total) %"
	$(BIN)/coverage report --include='controlplane/core/*' --fail-under=100

sim: setup ## simulate the fleet with faults: 200 seeds, or one again (make sim SEED=7)
	$(BIN)/weightplane sim $(if $(SEED),--seed $(SEED))

mutants: setup ## remove each invariant's check in turn: some test must catch it
	$(BIN)/python -m tests.mutants.run

fuzz: setup ## send 20,000 malformed frames to every service of real servers (FRAMES=n SEED=n; about 3 minutes), and fuzz what reads them (extra fuzz; RUNS=n)
	$(BIN)/python -m tests.fuzz.run $(if $(FRAMES),--frames $(FRAMES)) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz.guided $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED))

kill-matrix: setup ## kill each process at each phase of an update; writes docs/failures.md (up to 25 minutes)
	$(BIN)/python -m tests.kill_matrix.run --write docs/failures.md

sweep: setup ## split models in every way over real Megatron ranks (4, or RANKS=8): engines must get their checkpoint
	$(BIN)/python -m tests.sweep.run --ranks $(or $(RANKS),4)

# The benchmark needs the parts that it compares with: a set-up of its own extras, beside those of $(EXTRAS).
bench: ## measure everything against what one would pick instead; writes docs/benchmarks.md (up to 40 minutes)
	@$(MAKE) --no-print-directory setup EXTRAS=$(EXTRAS),bench
	$(BIN)/python -m bench.run $(foreach name,$(ONLY),--only $(name))

bench-quick: ## the same, small, printed only (up to 3 minutes)
	@$(MAKE) --no-print-directory setup EXTRAS=$(EXTRAS),bench
	$(BIN)/python -m bench.run --quick $(foreach name,$(ONLY),--only $(name))

check: setup ## style, types, protos, generated code and import rules, in a minute
	@$(MAKE) --no-print-directory -j2 -k --output-sync=target check-types check-style check-protos check-imports
	@echo "check: all is well"

check-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check

check-types:
	$(BIN)/mypy

check-protos:
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code
	$(BIN)/python protos/generate.py --check
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || exit 0; \
	  echo "$(BIN)/buf breaking --against $$tag"; $(BIN)/buf breaking --against ".git#tag=$$tag"

check-imports:
	$(BIN)/lint-imports

format: setup ## rewrite code and protos in the house style
	$(BIN)/ruff check --fix-only --exit-zero --quiet
	$(BIN)/ruff format
	$(BIN)/buf format -w

protos: setup ## generate the Python of the protos
	$(BIN)/buf lint
	$(BIN)/python protos/generate.py

clean: ## remove caches and what was built
	rm -rf build dist .ruff_cache .mypy_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environment too
	rm -rf $(VENV)

# ---- set-up --------------------------------------------------------------------------------------

define NO_PYTHON
Set-up needs Python 3.11, and there is no usable $(PYTHON) here.
Install it (Debian: apt install python3.11 python3.11-venv), or name yours: make setup PYTHON=/path/to/python3.11
endef
define NO_VENV
$(PYTHON) could not make a virtual environment in $(VENV); the lines above say why.
Debian keeps that part in a package of its own: apt install python3.11-venv
endef
define NO_PACKAGES
Set-up stopped while it installed packages; the lines above are the end of $(SETUP_LOG).
If they speak of connections or names, check the network and which package index pip uses (pip config list).
If they speak of torch, README.md says where its CPU builds are. `make setup` may be repeated: it goes on from here.
endef
export NO_PYTHON NO_VENV NO_PACKAGES

define REMOVE_CUDA_ONLY
echo "set-up 3/3: removing $(CUDA_ONLY), whose CUDA builds break vLLM on a CPU"; \
  $(PIP) uninstall -y $(CUDA_ONLY) >>$(SETUP_LOG) 2>&1 || \
  { tail -n 15 $(SETUP_LOG) >&2; echo "removing $(CUDA_ONLY) failed; see $(SETUP_LOG)" >&2; exit 1; }
endef
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/python -m pip

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "$$NO_PYTHON" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "set-up 1/3: making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$$NO_VENV" >&2; exit 1; }; }
	@echo "set-up 2/3: installing weightplane[$(EXTRAS)]: about 2 minutes and 4 GB the first time; log: $(SETUP_LOG)"
	@$(PIP) install --progress-bar off -e ".[$(EXTRAS)]" >$(SETUP_LOG) 2>&1 || \
	  { tail -n 15 $(SETUP_LOG) >&2; echo >&2; echo "$$NO_PACKAGES" >&2; exit 1; }
	@$(if $(findstring engine-cpu,$(EXTRAS)),$(REMOVE_CUDA_ONLY),true)
	@rm -f $(VENV)/.set-up-*
	@touch $@
	@echo "set-up is done: make demo, make test"
