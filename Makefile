# Needs Python 3.11 or later with pip, and nothing else. PYTHON=python3.12 chooses another interpreter.
# On Linux the default torch wheel brings CUDA. PIP_EXTRA_INDEX_URL in the environment can name PyTorch's index of
# the far smaller CPU builds.

PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/package
READY := .venv/ready
# pip from outside the environment: where Debian splits Python up, "-m venv" cannot install pip by itself.
PIP := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check
ALONE = $(PYTHON) -m pip --python build/alone/bin/python install --quiet --no-compile --constraint constraints.txt
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

OLDEST := build/oldest/bin
OLDEST_TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints-oldest.txt)

.PHONY: demo test test-slow test-pretend test-oldest lint types docs wheel publish clean
.DELETE_ON_ERROR:

demo: $(PACKAGE)
	$(BIN)/lightning-gnn-dist demo

# Some thousand processes import the package: each would compile it anew where the environment forbids to keep that.
demo test test-slow test-pretend test-oldest wheel: export PYTHONDONTWRITEBYTECODE =

# Three at a time on two cores, as tests of several ranks wait for each other: two take a fifth longer.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 3 --dist worksteal --durations=10

# Four at a time: for a third of it these tests wait. One file has most of the long ones: all workers take of it.
test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu and not alone" -n 4 --dist worksteal --durations=10
	$(BIN)/python -m pytest -m "slow and not gpu and alone" --durations=10

# What is marked for GPUs, on devices that a CPU build of torch pretends to have.
test-pretend: $(READY)
	.ci/test_pretend

# The oldest versions that pyproject.toml allows, in an environment of their own.
test-oldest:
	$(PYTHON) -m venv build/oldest
	$(OLDEST)/python -m pip install --constraint constraints-oldest.txt "$(OLDEST_TORCH)"
	$(OLDEST)/python -m pip install --constraint constraints-oldest.txt --editable ".[dev]"
	$(OLDEST)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --durations=10

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini

# The variable spares the theme's notice, at every start, that it is maintained until May 2027.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is published: the sdist, the wheel that pip makes of it, and that wheel alone in an environment of its own.
wheel: $(READY)
	rm -rf dist build
	$(BIN)/hatchling build --target sdist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(BIN)/python .ci/check_dist.py dist
	$(PYTHON) -m venv --without-pip build/alone
	$(ALONE) "$(TORCH)"
	$(ALONE) dist/*.whl
	cd build && env -u PYTHONPATH alone/bin/lightning-gnn-dist demo

# Upload what `make wheel` has built; in the release workflow, where twine gets its token from the index by itself.
publish:
	$(PYTHON) -m venv build/twine
	build/twine/bin/python -m pip install --quiet "twine==7.0.0"
	build/twine/bin/twine check --strict dist/*
	build/twine/bin/twine upload --non-interactive dist/*

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# What the demo needs. torch by its exact version and first: resolving an open range downloads several gigabytes of
# builds. Python compiles what is imported; pip would compile all of torch.
$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	rm -rf .venv
	$(PYTHON) -m venv --without-pip .venv
	$(PIP) install --no-compile --constraint constraints.txt pip "$(TORCH)"
	$(PIP) install --no-compile --constraint constraints.txt --editable .
	touch $@

# What tests, lint, types and docs need beside that.
$(READY): $(PACKAGE)
	$(PIP) install --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@
