# SPDX-License-Identifier: Apache-2.0
# The steps of a day's work, each a thin line over CMakePresets.json. Every target that builds first makes sure that
# the machine has what it needs (tools/setup.sh, under a second when nothing is missing).
#
# Variables: JOBS=n   CUDA=ON|OFF   MPI=OFF   TORCH=OFF   TORCH_PYTHON=python that has torch   PREFIX=/usr/local
# FUZZ_SECONDS=n   PYTHONS="python3.11 ..."   WHEELS="cpu cuda"
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-demo build demo demo-server test test-frameworks test-long bench fuzz dev tsan install wheels \
        test-wheels format clean

JOBS ?= $(shell nproc)
CUDA ?= AUTO
MPI ?= ON
TORCH ?= ON
TORCH_PYTHON ?=
export TORCH TORCH_PYTHON
# Names of generated files are relative to the folder that they are compiled in, so that the trees below build/ share
# them where they are alike: the wheel that is tested has most objects of the main tree.
export CCACHE_BASEDIR ?= $(CURDIR)/build
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 600
PYTHONS ?=
WHEELS ?=

launcher = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
release := -DGRADWIRE_CUDA=$(CUDA) -DGRADWIRE_MPI=$(MPI) -DGRADWIRE_TORCH=$(TORCH) -DGRADWIRE_TORCH_PYTHON=$(TORCH_PYTHON)
# `make demo` installs less than the tests need. In a folder that is new it therefore leaves them out; the other targets
# take them in again.
whole := -DGRADWIRE_TESTS=ON -DGRADWIRE_BENCH=ON
demo_part = $(if $(wildcard build/CMakeCache.txt),,-DGRADWIRE_TESTS=OFF -DGRADWIRE_BENCH=OFF)

# $(call compile,preset,more arguments of cmake,more arguments of the build)
compile = cmake --preset $(1) $(launcher) $(2) && cmake --build --preset $(1) -j $(JOBS) $(3)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
	@echo "Variables: JOBS=$(JOBS) CUDA=$(CUDA) MPI=$(MPI) TORCH=$(TORCH) TORCH_PYTHON=$(TORCH_PYTHON) PREFIX=$(PREFIX) FUZZ_SECONDS=$(FUZZ_SECONDS) PYTHONS=$(PYTHONS) WHEELS=$(WHEELS)"

setup:  ## install what is missing (Debian packages; build/venv for the Python tests)
	@tools/setup.sh

build: setup  ## the library, the program build/bin/gradwire, the tests and the benchmarks
	@$(call compile,release,$(release) $(whole))

setup-demo:
	@tools/setup.sh demo

demo: setup-demo  ## train a small network with five codecs, 4 workers each; build/demo/report.html shows how they compare
	@$(call compile,release,$(release) $(demo_part),--target bin/gradwire $(if $(filter OFF,$(TORCH)),,bin/gradwire-train))
ifeq ($(TORCH),OFF)
	build/bin/gradwire demo
else
	build/bin/gradwire compare --task fashion-mnist --model cnn --workers 4 --limit 16000 --epochs 3 \
	  --evaluate-every 31 --out build/demo \
	  --codec fp32 --codec qsgd:bits=4 --codec optquant:bits=3 --codec casq:bits=2 --codec dqsgd:budget=4.5
endif

demo-server: setup  ## a parameter server and three workers: one is killed, one joins; ends with the loss curve
	@$(call compile,release,$(release) $(whole),--target bin/gradwire bin/gradwire-server bin/gradwire-train)
	build/venv/bin/python3 tools/demo_server.py build/bin/gradwire

# The three trees are built before anything runs; then all three run, whatever the first ones say, the main one last.
test: build  ## the tests; ThreadSanitizer on the engine; half a minute of libFuzzer on all that is parsed
	@$(call compile,tsan)
	@$(call compile,fuzz)
	@failed=; for preset in tsan fuzz release; do \
	  echo "== ctest --preset $$preset"; ctest --preset $$preset -j $(JOBS) || failed+=" $$preset"; \
	done; test -z "$$failed" || { echo "make test: failed in:$$failed"; exit 1; }

test-frameworks: setup  ## resume tests in Lightning, transformers and accelerate, which it installs in build/frameworks
	@tests/install/frameworks_test.sh

test-long: build dev fuzz  ## tests labelled long, `make dev`, `make fuzz`, gRPC under ThreadSanitizer
	@$(call compile,tsan,,--target server_rpc_test)
	ctest --preset grpc -j $(JOBS)
	ctest --preset long -j $(JOBS)

bench: setup  ## the measurements of docs/measuring.md on this machine, appended to bench/results.csv
	@$(call compile,release,$(release) $(whole),--target bin/gradwire)
	build/venv/bin/python3 bench/record.py

fuzz: setup  ## FUZZ_SECONDS of libFuzzer on the decoders, as much on all other parsers, branch coverage
	FUZZ_SECONDS=$(FUZZ_SECONDS) JOBS=$(JOBS) tools/coverage.sh

dev: setup  ## build and test in build/dev with AddressSanitizer and UndefinedBehaviorSanitizer
	@$(call compile,dev,-DGRADWIRE_MPI=$(MPI))
	ctest --preset dev -j $(JOBS)

tsan: setup  ## build and run the tests of threads in build/tsan with ThreadSanitizer
	@$(call compile,tsan)
	ctest --preset tsan -j $(JOBS)

install: build  ## library, headers, CMake package and program to PREFIX
	cmake --install build --prefix $(PREFIX)

wheels:  ## wheels of the Python package in dist/, for the Pythons on the PATH
	@PYTHONS="$(PYTHONS)" WHEELS="$(WHEELS)" JOBS=$(JOBS) tools/wheels.sh

test-wheels:  ## install the wheels of dist/ into new environments and a clean Debian, and run them there
	@PYTHONS="$(PYTHONS)" tools/test_wheels.sh

format:  ## clang-format over the sources
	@command -v clang-format >/dev/null || { echo "make format: clang-format is missing (a Debian package)"; exit 1; }
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

clean:  ## remove build/ and all in it
	rm -rf build
