# tilewise: `make demo` shows it on this machine, `make test` checks it. Only Python 3.10+, pip and make are needed:
# each command makes its own virtual environment in .venv and installs what it wants. CI runs both in fresh clones (.ci/run).
#
#   make demo                          environment, two trainings, a benchmark; leaves out/index.html
#   make test                          ruff, pyright, limits of the structure, pytest
#   make test SYSTEM=1 PYTHON=python3  with that interpreter's own packages (its PyTorch, its GPU), nothing installed
#   make bench ARGS="--suite paper"    a benchmark; results in benchmarks/results
#   make card MINUTES=9                everything that needs a GPU, resumed where it stopped; ARGS=--list shows what waits
#   make report                        the pages of docs/results and the README's numbers from those results, and every picture
#   make hub                           the repository that Hugging Face's `kernels` loads, in out/hub
#   make wheel-kernels                 the wheel tilewise-kernels: compiled kernels of common calls, in dist
#   make versions                      part of the tests under the oldest and the newest PyTorch that Pythons here can have
#   make site                          the documentation as a site, in out/site
#   make help                          all of it
#
# TORCH names another PyTorch requirement, for example one with another index, for the CPU build.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
TRITON_NEWEST ?= triton==3.9.0
# Other packages that tests run on tilewise, and that would bring another PyTorch, or, kernels, what checks signatures.
# timm gets a separate folder: its torchvision does not load with a CPU build, and transformers imports whichever it finds.
ALONE := xformers ring-flash-attn yunchang kernels
# Tests in parallel: one more than processors, for some wait for processes of their own.
WORKERS ?= $(shell expr $$(nproc) + 1)
OUT ?= out
ARGS ?=
MINUTES ?= 9
RESULTS ?= benchmarks/results
SYSTEM ?=

VENV := .venv
NEWEST := $(CURDIR)/$(VENV)/triton-newest
TIMM := $(CURDIR)/$(VENV)/timm
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# Python compiles and keeps what is imported; pip would compile everything.
INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPATH := $(CURDIR)/src:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

ifeq ($(SYSTEM),)
PY := $(VENV)/bin/python
FOR_DEMO := $(VENV)/.demo
FOR_TEST := $(VENV)/.test $(VENV)/.compiled $(VENV)/.timm $(VENV)/.triton-newest
FOR_SITE := $(VENV)/.site
else
PY := $(PYTHON)
FOR_DEMO :=
FOR_TEST :=
FOR_SITE :=
endif

.PHONY: help demo test lint format pytest bench card report hub versions site wheel wheel-kernels clean
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

demo: $(FOR_DEMO)
	$(PY) -m studies demo --out $(OUT) $(ARGS)

# Two things at a time, from the downloads on.
test:
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

lint: $(FOR_TEST)
	@if $(PY) -c 'import ruff, pyright' 2>/dev/null; then set -ex; \
		$(PY) -m ruff check .; \
		$(PY) -m ruff format --check .; \
		$(PY) tools/limits.py; \
		$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"; \
	else echo 'ruff or pyright is not installed for $(PY): style and types are not checked'; fi

format: $(FOR_TEST)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

pytest: $(FOR_TEST)
	TILEWISE_TRITON_NEWEST='$(wildcard $(NEWEST))' TILEWISE_TIMM='$(wildcard $(TIMM))' OMP_NUM_THREADS=1 \
		$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

bench: $(FOR_DEMO)
	$(PY) -m studies bench --results '$(RESULTS)' $(ARGS)

card: $(FOR_TEST)
	$(PY) tools/card.py --minutes $(MINUTES) --results '$(RESULTS)' $(ARGS)

report: $(FOR_DEMO)
	$(PY) tools/report.py
	$(PY) docs/pictures/draw.py

hub:
	$(PYTHON) hub/write.py $(OUT)/hub

# An environment for each pair, in a temporary folder: 5 to 7 GB each, and some minutes of downloads.
versions:
	$(PYTHON) tests/pairs.py $(ARGS)

# Material says at every build that it has a successor.
site: $(FOR_SITE)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir $(OUT)/site

wheel: $(VENV)/.made
	$(PIP) wheel --no-deps --wheel-dir dist .

# Minutes of compiling, which begin where an earlier run stopped; without a GPU.
wheel-kernels: $(FOR_TEST)
	TRITON_INTERPRET=0 $(PY) tools/kernels_wheel.py --out dist --triton '$(wildcard $(NEWEST))' $(ARGS)

clean:
	rm -rf $(VENV) $(OUT) dist

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "tilewise needs Python 3.10 or newer; name one with PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# PyTorch first and alone, so that TORCH may name another index.
$(VENV)/.torch: $(VENV)/.made
	$(INSTALL) $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[studies]'
	touch $@

# PyTorch for GPUs brings its own Triton; the CPU build does not, and the interpreter and the compiler need one.
$(VENV)/.test: $(VENV)/.torch pyproject.toml tests/constraints.txt
	$(INSTALL) --constraint tests/constraints.txt --editable '.[test]'
	$(PY) -c 'import triton' 2>/dev/null || $(INSTALL) '$(TRITON)'
	$(INSTALL) --constraint tests/constraints.txt --no-deps $(ALONE)
	touch $@

# While pip installs the rest: else each of pytest's workers would compile it at its first import.
$(VENV)/.compiled: $(VENV)/.torch
	$(PY) -m compileall -q -x _internal/py3 $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy
	touch $@

$(VENV)/.timm: $(VENV)/.made tests/constraints.txt
	$(INSTALL) --constraint tests/constraints.txt --no-deps --upgrade --target $(TIMM) timm torchvision
	touch $@

$(VENV)/.site: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable '.[site]'
	touch $@

# The newest Triton, in a separate folder, for tests that only compile.
$(VENV)/.triton-newest: $(VENV)/.made
	$(INSTALL) --no-deps --target $(NEWEST) '$(TRITON_NEWEST)'
	touch $@
