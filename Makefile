# make mnist and make test set up their own virtual environment, once, with nothing but python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# kdist as users install it, then with what its developers need.
READY := $(VENV)/ready
DEV := $(VENV)/ready-for-dev

.PHONY: help mnist test short drills hosts slurm programs keras-suite long lint matrix bench docs

help:
	@echo "make mnist   set up .venv and train MNIST on 2 parameter servers and 2 workers, here"
	@echo "make test    set up .venv for developers; lint, types and all tests: what CI runs"
	@echo "make drills  every fault that kdist is to survive, injected for real, 19 minutes; writes its table in docs/drills.md"
	@echo "make hosts   runs over several hosts (network namespaces, as root), 21 minutes; writes its table there, too"
	@echo "make slurm   jobs of a Slurm system that it sets up on this machine (Debian, as root), 13 minutes"
	@echo "make programs  programs of docs/compatibility.md, by Keras and by kdist, 25 minutes; writes its table"
	@echo "make keras-suite  Keras's own tests of fit, evaluate and predict, with kdist in their place, an hour;"
	@echo "             writes its table in docs/compatibility.md"
	@echo "make long    make hosts, and other tests that take minutes, among them every command of the documentation, an hour"
	@echo "make lint    ruff, mypy, the order of the rooms and the rules of the code"
	@echo "make matrix  lint's import checks, unit, oracle and Keras's own tests with the lowest and highest versions, 25 minutes"
	@echo "make docs    the documentation, in build/site"
	@echo "make bench   kdist beside its peers on this machine, 33 to 86 minutes; with QUICK=1 one model in 5 to 8;"
	@echo "             with PEERS=torch beside PyTorch as well, which pip installs"

mnist: $(READY)
	$(BIN)/python -m kdist +recipe=mnist cluster=2ps2w

# Side by side: lint is done long before the tests are.
test: $(DEV)
	@$(MAKE) --no-print-directory --jobs 2 lint short

# Three at a time on two cores: a third of the time is waiting for tasks to start and to end.
short: $(DEV)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile -m "not long"

# The longest first, so that the others run beside it.
drills: $(DEV)
	$(BIN)/python -m pytest tests/drills/test_endurance.py tests/drills \
		--numprocesses 3 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=1500 --record-drills "make drills"

# What they measure is time: one at a time. What a tunnel costs takes minutes, and one that is cut off leaves its tunnel.
hosts: $(DEV)
	$(BIN)/python -m pytest tests/hosts --record-drills "make hosts" -o faulthandler_timeout=900

# One job after the other on a system that all tests share. Without Slurm, and no way to install it, they are skipped.
slurm: $(DEV)
	@command -v slurmctld >/dev/null || PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null || \
		apt-get install -y -qq slurm-wlm munge >/dev/null || echo "slurm-wlm and munge cannot be installed"
	$(BIN)/python -m pytest tests/slurm

programs: $(DEV) $(VENV)/ready-for-programs
	$(BIN)/python -m pytest tests/programs --numprocesses 2 --dist loadgroup --record-programs
	PYTHONPATH=tests $(BIN)/python tests/oracle/compatibility.py

keras-suite: $(DEV)
	$(BIN)/python tests/keras_suite/run.py --record $(PLACES); code=$$?; \
		PYTHONPATH=tests $(BIN)/python tests/oracle/compatibility.py && exit $$code

# An image takes minutes to build.
long: $(DEV) $(VENV)/ready-for-programs hosts
	$(BIN)/python -m pytest --numprocesses 2 -m long -o faulthandler_timeout=900 \
		--ignore tests/drills --ignore tests/hosts --ignore tests/slurm

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/lint/rules.py
	@# For Linux and macOS beside each other, each with a cache of its own.
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin & $(BIN)/mypy; code=$$?; wait $$! && exit $$code

matrix: $(DEV)
	$(BIN)/python tests/matrix.py $(ROW)

docs: $(VENV)/ready-for-docs
	$(BIN)/python docs/config_reference.py
	$(BIN)/python docs/rooms.py
	PYTHONPATH=tests $(BIN)/python tests/oracle/compatibility.py
	$(BIN)/python -m mkdocs build --strict

bench: $(VENV)/ready-for-bench
	$(if $(PEERS),$(PIP) $(PEERS))
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

$(READY): pyproject.toml
	@echo "make: installing kdist into $(VENV), with TensorFlow and Keras: 2.2 GB on disk, one or two minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable .
	@# On all cores, which pip does on one; and kdist, also where the environment lets Python write no bytecode.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib kdist recipes || true
	@touch $@

$(VENV)/ready-for-%: $(READY)
	@echo "make: adding the packages of kdist[$*] to $(VENV)"
	@$(PIP) --editable '.[$*]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib tests || true
	@touch $@
