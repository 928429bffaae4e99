# Everything happens in .venv, which is built once and again when its inputs change.
PYTHON ?= python3
BIN := .venv/bin

# Every package is compared with its hash in locks/ before it is installed; `make lock` writes them.
# Python compiles what is imported, a tenth of what is installed: --no-compile saves 20 s.
LOCKED = $(BIN)/python -m pip install --quiet --no-compile --no-deps --require-hashes --only-binary :all:

# Only serve-demo downloads a model, from the package index; this makes any other attempt an error.
export HF_HUB_OFFLINE := 1

# Hundreds of processes in the tests import the same modules: their bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help venv demo serve-demo quick test check docs compatibility gpu lock release clean

help:
	@echo "make demo    fine-tune and generate on an untrusted provider, and prove the claims"
	@echo "make serve-demo    chat with SmolLM2 in a browser, on providers on this machine; fetches the model once (93 MB)"
	@echo "make quick   in a minute: tests of arithmetic, wire, federation file, trust core, sessions and provider.toml"
	@echo "make test    ruff, mypy and the tests"
	@echo "make check   ruff and mypy only"
	@echo "make docs    the pages and the API reference as a site, in build/site"
	@echo "make venv    build .venv only"
	@echo "make compatibility    try every family of models, and architectures with PEFT methods; writes docs/compatibility/"
	@echo "make gpu     on a machine with a GPU: kernels, tests, products, steps and tokens, in 8 minutes; writes gpu.json"
	@echo "make lock    write the versions and hashes that make venv installs, after pyproject.toml or constraints.txt changed"
	@echo "make release    build sdist and wheel, try both in empty environments, print checksums; uploads nothing"
	@echo "make clean   remove .venv and caches"

venv: .venv/.stamp

.venv/.stamp: pyproject.toml $(wildcard locks/*.txt) hatch_build.py $(wildcard symbiosis_priv/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "symbiosis-priv needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make venv PYTHON=python3.11")'
	@echo "==> building .venv (once)"
	@$(PYTHON) -m venv .venv
	@while sleep 4; do echo "    still installing"; done & trap "kill $$!" EXIT; \
		if ! $(BIN)/python -m pip show --quiet torch 2>/dev/null; then \
			$(BIN)/python -m pip download --quiet --no-deps --dest .venv/torch "$$(grep -o '^torch==[^ ]*' locks/torch.txt)" && \
			$(LOCKED) --no-index --find-links .venv/torch --requirement locks/torch.txt && rm -r .venv/torch; fi && \
		$(LOCKED) --requirement locks/venv.txt && \
		{ $(BIN)/python -c "import torch" 2>/dev/null || $(LOCKED) --requirement locks/cuda.txt; } && \
		$(BIN)/python -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	@touch $@

demo: venv
	@echo "==> demo"
	@$(BIN)/symbiosis-priv demo

serve-demo: venv
	@$(BIN)/symbiosis-priv serve-demo

# tests/test_mutations.py checks that each promise of these corners that it knows is noticed here.
QUICK := tests/symbiosis_priv/arithmetic tests/symbiosis_priv/network tests/symbiosis_priv/federation tests/tenant/core \
	tests/tenant/session tests/tenant/masking/test_registry.py tests/provider/config

quick: venv
	@HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder $(QUICK) \
		--ignore tests/tenant/session/test_failover.py

test: check
	@$(BIN)/python -m tests.sizes
	@echo "==> pytest"
	@$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

check: venv
	@echo "==> ruff"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet
	@echo "==> mypy"
	@$(BIN)/mypy

docs: venv
	@$(BIN)/mkdocs build --strict

compatibility: venv
	@$(BIN)/python -m pytest --numprocesses 2 tests/compatibility --compatibility write

# With a Python that has torch, nothing is installed: such a machine may have no network. `make gpu OPTIONS=--cpu` tries it.
gpu:
	@if $(PYTHON) -c "import torch" 2>/dev/null; then $(PYTHON) -m tests.gpu $(OPTIONS); \
		else $(MAKE) --no-print-directory venv && $(BIN)/python -m tests.gpu $(OPTIONS); fi

lock:
	@.ci/lock

release:
	@.ci/release

clean:
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
