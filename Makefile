# `make demo` and `make test` are all a newcomer needs. Everything runs in .venv.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test test-slow retest parity matrix lint examples bench clean install

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/paraflow launch -n 2 examples/digits.py

# Ranks share the cores, so each has one thread.
test test-slow retest parity matrix: export OMP_NUM_THREADS = 1

# So many tests at a time; 0 runs them in one process, as a debugger needs it.
WORKERS ?= 2

test: install
	$(BIN)/python -m pytest -m "not slow and not root and not matrix and not parity" -n $(WORKERS) --dist loadfile

# What failed beside another worker, once more and alone: tests of signals and clocks need a core of their own.
retest: install
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-slow: install
	$(BIN)/python -m pytest -m "slow or root"

# Whole trainings under each kind of plan, beside one process.
parity: install
	$(BIN)/python -m pytest tests -m "parity and not slow" -n $(WORKERS) --dist loadfile

# Every plan with every feature, as docs/compatibility.md has them; those with torch.compile are slow.
matrix: install
	$(BIN)/python -m pytest tests/matrix -m "matrix and not slow" -n $(WORKERS) --dist loadgroup

lint: install
	$(BIN)/ruff check paraflow tests examples benchmarks
	$(BIN)/ruff format --check paraflow tests examples benchmarks
	$(BIN)/mypy

examples: install
	for script in examples/*.py; do echo "== $$script" && $(BIN)/python $$script || exit 1; done

bench: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,peers]"
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache
