# `make train` and `make test` set everything up on a machine that has Python 3.11+, pip and venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test

setup: .venv/run.stamp

train: setup
	$(BIN)/weft train demo

test: .venv/dev.stamp
	@$(BIN)/python -m compileall -q weft  # once, and not in every process
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

.venv/run.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Weft needs Python 3.11 or newer; try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorboard]'
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
