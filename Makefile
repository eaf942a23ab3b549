# Sets the project up in .venv and runs its main job and its checks.
#
# Whatever is installed leaves a stamp in .venv, so that a second run installs
# nothing.  PYTHON= picks the interpreter, MPIEXEC= an MPI of one's own.

VENV := .venv
BIN := $(VENV)/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Of what is installed a part is ever imported: that compiles it.
export PIP_NO_COMPILE := 1

# Every rank is one process on one core: BLAS must not start more threads.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1

# Without PYTHON=, an existing .venv is kept as it is; else python3 is taken,
# or, where that one does not do, the newest that does.
ifeq ($(strip $(PYTHON)),)
PYTHON := $(wildcard $(BIN)/python)
endif
ifeq ($(strip $(PYTHON)),)
PYTHON := $(or $(shell \
    for python in python3 python3.14 python3.13 python3.12 python3.11 \
        python3.10; do \
        $$python tools/check_python.py 2> /dev/null \
            && echo $$python && break; \
    done),python3)
endif

# What .venv must have been made from.  A copied tree's .venv has the wrong
# directory in its scripts and in its editable install.
REAL := $(shell "$(PYTHON)" -c \
    'import os, sys; print(os.path.realpath(sys.executable))' 2> /dev/null)
ORIGIN := $(REAL) for $(CURDIR)
ifneq ($(ORIGIN),$(shell cat $(VENV)/.origin 2> /dev/null))
.PHONY: $(VENV)/.origin
endif

# mpi4py looks for an MPI library in .venv first, so the mpich wheel must not
# be there when another MPI's launcher starts the ranks.
ifeq ($(strip $(MPIEXEC)),)
MPI := mpich
LAUNCHER := $(BIN)/mpiexec
else
MPI := own
LAUNCHER := $(MPIEXEC)
endif
extras = $(if $(filter mpich,$(MPI)),mpich,mpi)$(addprefix $(comma),$(1))
comma := ,

INSTALLED_FROM := $(VENV)/.origin setup.cfg setup.py pyproject.toml \
    chainer_fp8pipe/compat/install_chainer.py $(wildcard $(addprefix \
    chainer_fp8pipe/,compat/_edits.py compat/_today.py */*.c */*.h \
    */*/*.c */*/*.h))
DEMO := $(VENV)/.demo-$(MPI)
TEST := $(VENV)/.test-$(MPI)

# $(call quietly,COMMAND): the output is shown only where the command fails.
LOG := $(VENV)/install.log
quietly = $(1) > $(LOG) 2>&1 || { cat $(LOG) >&2; \
    echo 'Cannot set up: the step above failed, its output is above' >&2; \
    exit 1; }

# $(call install,EXTRAS): Chainer and this package, editable, on the chosen
# MPI.  Chainer's wheel is built beside the rest.  A quarter of a C compiler's
# time goes into what only debuggers read.  Ranks that start together would
# each compile what they import.
CHAINER := $(VENV)/chainer
TEST_EXTRAS := examples,plot,test,docs
define install
@rm -f $(VENV)/.*-$(if $(filter own,$(MPI)),mpich,own)
@$(if $(filter own,$(MPI)),$(call quietly,\
    $(BIN)/python -m pip uninstall --yes mpich))
@rm -rf $(CHAINER) && mkdir $(CHAINER)
@$(call quietly,{ $(if $(CI),PIP_NO_CACHE_DIR=1) $(BIN)/python -c \
    'from chainer_fp8pipe.compat.install_chainer import build_wheel; \
    build_wheel("$(CHAINER)")' & \
    CFLAGS="-g0 $$CFLAGS" \
        $(BIN)/python -m pip install --editable '.[$(call extras,$(1))]' && \
    wait $$! && $(BIN)/python -m pip install $(CHAINER)/*.whl && \
    $(BIN)/python -c 'import chainer'; })
@$(if $(filter own,$(MPI)),$(check_own_mpi))
endef

define check_own_mpi
echo 'Trying two ranks of your own MPI: $(LAUNCHER) -n 2'; \
$(LAUNCHER) -n 2 $(BIN)/python -c \
    'from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2' || { \
    echo 'Cannot set up: $(LAUNCHER) and the MPI library that mpi4py loads' \
        'do not start 2 ranks together: see docs/installation.rst' >&2; \
    exit 1; }
endef

.PHONY: help demo test test-all checks lint docs pytest explore sanitize bench \
    test-gpu wheels gpu matrix package clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:  ## show this list
	@echo 'make TARGET [PYTHON=python3.12] [MPIEXEC=mpirun]'
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 12

demo: $(DEMO)  ## train over 4 virtual hosts, and a model that no rank holds
	@MPIEXEC='$(LAUNCHER)' $(BIN)/python examples/demo.py

test: checks pytest  ## run every check; pytest comes last

# mypy and Sphinx have a core each.
checks: $(TEST)
	@$(MAKE) --no-print-directory docs & \
	    $(MAKE) --no-print-directory lint; lint=$$?; \
	    wait $$! && exit $$lint

lint: $(TEST)  ## ruff, mypy and the layers of the design
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(TEST)  ## build docs/_build/html, warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html \
	    -d docs/_build/doctrees docs docs/_build/html

# Tests of a file share ranks and runs of examples, so a file is one job; in
# the order of names the short files come last.
JOBS ?= 3
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder

pytest: $(TEST)  ## the tests alone, JOBS=3 files at a time
	$(BIN)/python -m pytest -m 'not slow' $(SIDE_BY_SIDE)

test-all: checks  ## every check, and the tests that take long
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

ROUNDS ?= 10
explore: $(TEST)  ## property-based tests on new random examples; ROUNDS=10
	@for round in $$(seq $(ROUNDS)); do echo "Round $$round of $(ROUNDS)"; \
	    $(BIN)/python -m pytest -q -m hypothesis --timeout 1200 \
	        --hypothesis-profile explore $(SIDE_BY_SIDE) || exit 1; done

# LD_PRELOAD: the interpreter is not built with sanitizers.  Tests and their
# ranks take the package that is beside them.
SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
    -fno-omit-frame-pointer
sanitize: $(TEST)  ## tests of compiled code, with address and undefined sanitizers
	@CFLAGS='-g $(SANITIZERS)' LDFLAGS='$(SANITIZERS)' \
	    $(BIN)/python setup.py -q build --build-base $(SANITIZED) \
	        --build-lib $(SANITIZED)/lib
	@cp -r tests benchmarks pyproject.toml $(SANITIZED)/lib
	@cd $(SANITIZED)/lib && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) \
	    $$($(CC) -print-file-name=libubsan.so)" PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    $(abspath $(BIN))/python -m pytest -q --timeout 4000 tests/formats \
	        tests/codecs tests/allreduce tests/exchange

bench: $(TEST)  ## all-reduce and training on virtual hosts
	@for network in star aggregator torus; do \
	    $(BIN)/python benchmarks/allreduce.py $$network \
	        --sizes 1e6,8e6 || exit 1; echo; done
	@for what in steps accelerator; do \
	    $(BIN)/python benchmarks/training.py $$what || exit 1; echo; done

test-gpu: $(VENV)/.gpu-$(MPI)  ## the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m gpu

wheels: $(DEMO)  ## fill wheels/ for make gpu on a machine without a network
	@$(BIN)/python tools/gpu.py wheels

gpu:  ## all that waits for a GPU into result/gpu.txt; PYTHON= has CuPy
	@"$(PYTHON)" tools/gpu.py run '$(PYTHON)'

matrix: $(VENV)/.package-$(MPI)  ## quick tests on every supported Python found
	$(BIN)/python -m nox -f tools/noxfile.py -s matrix

package: $(VENV)/.package-$(MPI)  ## dist/, tried on every supported Python
	$(BIN)/python -m nox -f tools/noxfile.py -s package

clean:  ## remove .venv and everything built
	rm -rf $(VENV) .nox .venv-gpu .venv-ecosystem wheels build dist docs/_build
	rm -rf *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache result
	find chainer_fp8pipe -name '*.so' -exec rm {} +

# A .venv without .made-by-make is somebody's own and is not touched.
$(VENV)/.origin:
	@"$(PYTHON)" -c '' 2> /dev/null || { echo 'Cannot set up:' \
	    '"$(PYTHON)" does not run; name a Python of 3.10 to 3.14,' \
	    'as in  PYTHON=python3.12 make demo' >&2; exit 1; }
	@"$(PYTHON)" tools/check_python.py
	@test ! -e $(VENV) || test -e $(VENV)/.made-by-make || { \
	    echo 'Cannot set up: $(VENV) is there but not made by make;' \
	        'move it away' >&2; exit 1; }
	@test ! -e $(VENV) || echo 'Replacing $(VENV): it was made with' \
	    'another Python, or in another directory'
	@echo 'Making $(VENV) with $(REAL) (some seconds)'
	@rm -rf $(VENV) && mkdir $(VENV) && touch $(VENV)/.made-by-make
	@$(call quietly,"$(REAL)" -m venv $(VENV))
	@echo '$(ORIGIN)' > $@

$(DEMO): $(INSTALLED_FROM)
	@echo 'Installing what the demo needs: Chainer, NumPy, MPI, this' \
	    'package (half a minute or more the first time)'
	$(call install)
	@touch $@

$(TEST): $(INSTALLED_FROM)
	@echo 'Installing what the tests need: the main job, pytest, mypy,' \
	    'Sphinx, NVRTC (1 to 5 minutes the first time)'
	$(call install,$(TEST_EXTRAS))
	@touch $(DEMO) $@

$(VENV)/.package-$(MPI): $(DEMO)
	@echo 'Installing what builds packages (some seconds)'
	@$(call quietly,$(BIN)/python -m pip install --editable '.[package]')
	@touch $@

# CUDA= names the major version; else the driver is asked.
ifneq ($(filter test-gpu,$(MAKECMDGOALS)),)
CUDA ?= $(shell nvidia-smi 2> /dev/null \
    | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
endif
$(VENV)/.gpu-$(MPI): $(TEST)
	@case '$(CUDA)' in 12 | 13) ;; *) echo 'Cannot set up: nvidia-smi' \
	    'shows no CUDA 12 or 13; name it with CUDA=12' >&2; exit 1 ;; esac
	@echo 'Installing CuPy for CUDA $(CUDA) (1 to 5 minutes)'
	@$(call quietly,$(BIN)/python -m pip install \
	    --editable '.[cuda$(CUDA)]')
	@touch $@
