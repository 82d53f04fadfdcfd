# `make demo` and `make test` do everything on a fresh machine; `make check` is what a change must pass.
PYTHON ?= python3
PINS := $(shell sha256sum constraints.txt | cut -c1-12)
READY := .venv/.ready-$(PINS)
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-device check format audit clean
DEVICE ?= emulated

setup: $(READY)

# Rebuilt only when the pins change.
$(READY):
	rm -rf .venv
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --progress-bar off -e '.[dev]'
	touch $@

# Profile this machine (once), train a controller of the embedded model, judge it by measured answers.
demo: setup
	rm -rf runs/demo
	$(BIN)/groupwise train controller --run-dir runs/demo
	$(BIN)/groupwise eval runs/demo

test: setup
	$(BIN)/pytest -n 2 --dist loadfile -m 'not slow and not device'

# On a device that is not the CPU: the emulated one, or what DEVICE names (cuda, npu, xpu, mps).
test-device: setup
	GROUPWISE_TEST_DEVICE=$(DEVICE) $(BIN)/pytest -p no:xdist tests/accelerator/on_device

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist loadfile

# Known vulnerabilities of the pinned versions, from a throw-away environment. Needs a network.
audit:
	$(PYTHON) -m venv --clear .venv-audit && .venv-audit/bin/pip install --quiet pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-audit runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
