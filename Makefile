PYTHON ?= python3
BIN := .venv/bin
# Engines that run at once; starting one keeps one core busy for half a minute.
E2E_WORKERS ?= 2
KILLS ?= 120
MINUTES ?= 60
RESTARTS ?= 50
SEED ?= 1
# Tests and benchmarks start hundreds of programs of kvtier's, each of which would compile it again.
unexport PYTHONDONTWRITEBYTECODE
# vLLM alone ends in the one that is left out: Triton's interpreter cannot run its grammar kernel.
TRITON_TESTS ?= tests/unit/connector/workers/cuda/test_small_pages.py $(addprefix tests/e2e/test_,pinned_prompts.py \
	crowded_pool.py gpu_pins.py faults_while_serving.py request_kinds.py hybrid.py lora.py chunks_of_blocks.py) \
	--deselect tests/e2e/test_request_kinds.py::test_structured_output

# short fits 15 minutes; disk measures the disk alone; long is for numbers to quote; smoke shows that everything runs.
PROFILE ?= short
# Of another version of vLLM: what touches it, and all end-to-end tests.
VLLM ?= 0.33.0
TESTS ?= tests/unit/connector tests/simulation tests/property/test_gpu_pins.py tests/contract/test_workers.py \
	tests/contract/test_model_runners.py tests/e2e

.PHONY: help venv peers-venv demo bench test check test-fast test-e2e test-models test-litellm test-lmcache \
	test-triton test-vllm test-nixl test-mooncake test-browser test-fleet test-restarts chaos fuzz mutants clean

help:
	@echo "make demo       pin a system prompt, flood, restart and kill things, and see what is restored; then the"
	@echo "                same with a prompt that kvtier finds by itself (MODEL=org/name for a real model)"
	@echo "make bench      kvtier beside vLLM alone, LMCache and vLLM's fs tier, to bench-results/"
	@echo "                (PROFILE=smoke|short|disk|long, ARGS=--resume)"
	@echo "make test       everything: check, test-fast, test-e2e"
	@echo "make check      ruff, mypy, import-linter, generated code and docs, words, promises of the protocol"
	@echo "make test-fast  tests without vLLM"
	@echo "make test-e2e   tests with a real vllm serve, daemon and CLI"
	@echo "make test-models the rarer models and setups of vLLM that docs/compatibility.md lists"
	@echo "make test-lmcache the adapter for LMCache in its server, which it installs into .venv-peers"
	@echo "make test-litellm the cache markers through LiteLLM, which it installs into .litellm"
	@echo "make test-triton vLLM's Model Runner V2 and its copy kernel, with Triton's interpreter, which it installs into"
	@echo "                .triton"
	@echo "make test-vllm  kvtier with another version of vLLM, which it installs into .vllm (VLLM=$(VLLM); three quarters"
	@echo "                of an hour; TESTS=tests/e2e/test_lora.py for some)"
	@echo "make test-nixl  kvtier beside NIXL, which it installs into .nixl, in a pair of engines"
	@echo "make test-mooncake a pool of Mooncake Store in front of a fleet's store, which it installs into .mooncake"
	@echo "make test-browser the console in Debian's chromium, which has to be installed; its driver goes into .browser"
	@echo "                (SHOTS=folder: pictures of every view)"
	@echo "make test-restarts a vLLM that is stopped and killed RESTARTS=$(RESTARTS) times beside one daemon"
	@echo "                (half a minute each, a minute on a busy machine)"
	@echo "make test-fleet the store that hosts share on Ceph's gateway for S3, which has to be installed (Debian:"
	@echo "                radosgw ceph-mon ceph-osd ceph-common)"
	@echo "make chaos      the long attack: KILLS=$(KILLS) ends of the daemon in each mode, every failing call,"
	@echo "                damaged files, every bit of a WAL, the whole service, floods of requests"
	@echo "make fuzz       HTTP, every RPC and every file that is read, with inputs made to break them, for"
	@echo "                MINUTES=$(MINUTES); counts and findings to fuzz-results/, then 10,000 idle connections"
	@echo "make mutants    which of a hundred small changes to the code the fast tests notice (SEED=$(SEED)); an hour"
	@echo "make venv       only set up .venv (PYTHON=python3.12 to choose one)"
	@echo "make peers-venv set up .venv-peers: LMCache, for make bench and python -m benchmarks.peers"
	@echo "make clean      remove .venv, models, caches and bench-results"

venv:
	@PYTHON="$(PYTHON)" scripts/make_venv.sh

peers-venv: venv
	@scripts/make_peer_venv.sh

demo: venv
	@exec $(BIN)/python -m benchmarks.demo $(if $(MODEL),--model "$(MODEL)")

bench: peers-venv
	@exec $(BIN)/python -m benchmarks.suite --profile $(PROFILE) $(ARGS)

test: check test-fast test-e2e

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHON="$(PYTHON)" scripts/gen_proto.sh --check
	$(BIN)/python scripts/gen_docs.py --check
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/check_proto_compat.py

# Properties are tried with the same examples every time: a change is judged by what it changes. Plain pytest tries
# others. Those for a GPU are skipped where there is none, so they run over host memory too: half a minute.
test-fast: venv
	$(BIN)/pytest -q -m "not e2e and not fleet" -n $(E2E_WORKERS) --hypothesis-profile=ci
	KVTIER_GPU_TESTS=fake $(BIN)/pytest -q tests/gpu

chaos: venv
	KVTIER_CHAOS_KILLS=$(KILLS) KVTIER_CHAOS_FAULTS=1000 KVTIER_CHAOS_DAMAGES=20 KVTIER_CHAOS_EXAMPLES=1000 \
		$(BIN)/pytest -q -s tests/property/test_whole_service.py \
		tests/fault/test_daemon_kill.py tests/fault/test_service_failing_calls.py tests/fault/test_damaged_directory.py
	KVTIER_CHAOS_KILLS=$(KILLS) $(BIN)/pytest -q -rP -n $(E2E_WORKERS) tests/fault/test_ledger_loss.py
	KVTIER_CHAOS_FLOOD=20 $(BIN)/pytest -q tests/fault/test_hostile_requests.py

test-e2e: venv
	$(BIN)/pytest -q -m timed tests/e2e
	$(BIN)/pytest -q -m "e2e and not timed and not models and not restarts" -n $(E2E_WORKERS) --dist loadfile \
		--durations=10 tests/e2e

test-models: venv
	$(BIN)/pytest -q -m models -n $(E2E_WORKERS) --durations=10 tests/e2e

test-litellm: venv
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --upgrade --target .litellm \
		-r requirements/litellm.txt
	PYTHONPATH=.litellm LITELLM_LOCAL_MODEL_COST_MAP=True $(BIN)/pytest -q -k litellm tests/e2e/test_gateway_clients.py

test-lmcache: peers-venv
	$(BIN)/pytest -q tests/lmcache

.triton/installed: requirements/triton.txt $(wildcard tests/fakes/triton_cpu/*.py) | venv
	rm -rf .triton
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --target .triton -r requirements/triton.txt
	cp -r tests/fakes/triton_cpu .triton/triton/backends/cpu
	touch $@

test-triton: .triton/installed
	PYTHONPATH="$$PWD/.triton" TRITON_BACKENDS_IN_TREE=1 TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 \
		$(BIN)/pytest -q -n $(E2E_WORKERS) --dist loadfile $(TRITON_TESTS)

test-vllm: venv
	scripts/make_vllm.sh $(VLLM)
	PYTHONPATH="$$PWD/.vllm/$(VLLM)" $(BIN)/pytest -q -m "not timed and not models and not restarts and not fleet" \
		-n $(E2E_WORKERS) --dist loadfile --hypothesis-profile=ci $(TESTS)

test-nixl: venv
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --upgrade --target .nixl \
		-r requirements/nixl.txt
	PYTHONPATH="$$PWD/.nixl" $(BIN)/pytest -q tests/e2e/pairs/test_nixl.py

.mooncake/installed: requirements/mooncake.txt | venv
	rm -rf .mooncake
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --target .mooncake -r requirements/mooncake.txt
	touch $@

test-mooncake: .mooncake/installed
	PYTHONPATH="$$PWD/.mooncake" $(BIN)/pytest -q tests/contract/test_remote_pools.py tests/fault/test_pool_faults.py \
		tests/e2e/test_pool.py

.browser/installed: requirements/browser.txt | venv
	rm -rf .browser
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --target .browser -r requirements/browser.txt
	touch $@

test-browser: .browser/installed
	PYTHONPATH="$$PWD/.browser" KVTIER_SHOTS="$(SHOTS)" $(BIN)/pytest -q -m browser tests/e2e/console

test-restarts: venv
	KVTIER_RESTARTS=$(RESTARTS) $(BIN)/pytest -q -s -m restarts tests/e2e/test_many_restarts.py

# Not in parallel: each module has a cluster of its own.
test-fleet: venv
	$(BIN)/pytest -q -m fleet --durations=10 tests/contract tests/fault

# One after the other, so that each target has the memory and the cores; then the connections, as many as are allowed.
fuzz: venv
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --out fuzz-results
	KVTIER_FUZZ_CONNECTIONS=10000 $(BIN)/pytest -q -rP tests/fuzz/test_connections.py

mutants: venv
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --upgrade --target .mutants/libraries \
		-r requirements/mutation.txt
	PYTHONPATH=scripts $(BIN)/python -m mutation --libraries "$$PWD/.mutants/libraries" --seed $(SEED) \
		$(if $(PARTS),--parts "$(PARTS)")

clean:
	rm -rf .venv .venv-proto .venv-peers .litellm .nixl .triton .vllm .mooncake .browser .mutants .models .demo \
		bench-results fuzz-results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
