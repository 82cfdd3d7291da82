# Two commands do everything from a bare clone: `make reproduce` and `make test`. Each sets up .venv by itself, once.
#
#   PYTHON       interpreter that .venv is made from (3.10 to 3.13)     make PYTHON=python3.12 test
#   TORCH_INDEX  extra package index, for a CPU build of torch
#                                        make TORCH_INDEX=https://download.pytorch.org/whl/cpu test
#   PIP_ARGS     anything else for pip                                  make PIP_ARGS=--no-cache-dir test
#   FULL=1       reproduce: the whole schedule, and its last columns    make FULL=1 reproduce
#   ITEM         paper: an item of the registry, e.g. tab1, fig15, audit  make ITEM=fig15 paper
#   AGAIN=1      paper: also what results/ holds already, from the start  make ITEM=tab1 AGAIN=1 paper
#   ARGS         passed on to moe-redistribution                        make ARGS=--help reproduce
#   PART         test: a part's notebooks, and the tests that it can break  make PART=opened test
#   SINCE        test: what the changes since a commit can break        make SINCE=main test
#   NB           outputs: only these notebooks                          make NB=nbs/01_tasks/01_task.ipynb outputs
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TORCH_INDEX ?=
FULL ?=
ARGS ?=
AGAIN ?=
PART ?=
SINCE ?=
NB ?= $(sort $(wildcard nbs/*.ipynb nbs/*/*.ipynb nbs/*/*/*.ipynb))

BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
CLI := "$(BIN)/moe-redistribution"
PY := "$(BIN)/python"

.DEFAULT_GOAL := help
.PHONY: help setup reproduce paper test durations audit weekly versions check record machines registrations sums pages outputs readme docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## .venv with everything installed; the other targets call it

$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  got=$$("$(PYTHON)" -V 2>&1) || got='nothing that runs'; \
	  for p in python3.13 python3.12 python3.11 python3.10; do $$p -V >/dev/null 2>&1 && break; p=python3.12; done; \
	  echo "Python 3.10 to 3.13 is needed; PYTHON=$(PYTHON) is $$got." \
	    "Name one that fits: make PYTHON=$$p $(or $(MAKECMDGOALS),test)" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) (a minute or two, once)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_ARGS) \
	  -e '.[dev]' -c constraints.txt
	@touch $@

reproduce: $(READY)  ## train, print Table 1 beside the paper's, write Figure 1 and the rows to out/ (FULL=1: all steps)
	@$(CLI) reproduce $(if $(filter 1 yes true,$(FULL)),--full) $(ARGS)

# Notebooks and tests wait in one queue, what takes longest first (tests/cpu.py); what a notebook is given, tests/test_notebooks.py says.
test: $(READY)  ## the library's notebooks, the pages of a paper's sections, and every test, but for what `make audit` runs
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n logical --dist loadgroup --no-loadscope-reorder \
	  $(if $(PART)$(SINCE),--touched $(or $(PART),$(SINCE))) $(ARGS)

durations:  ## `make test`, which then writes down what each file and notebook takes: tests/durations.csv
	@$(MAKE) --no-print-directory ARGS=--write-durations test

# What `make test` leaves out, and the notebooks whole: cells and tests that carry the mark `audit`. A page whose stored outputs
# are not what a run shows today is stale, and fails. Every step runs, whatever an earlier one found, since an audit that stops
# at its first finding has to be run once a finding.
audit: $(READY)  ## the second tier: notebooks whole and their outputs compared, kills, every recorded number again (an hour)
	@failed=; home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT; \
	  OMP_NUM_THREADS=1 MOE_REDISTRIBUTION_HOME="$$home" $(PY) tools/outputs.py --check $(NB) || failed="$$failed notebooks"; \
	  OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -m audit -n logical --dist worksteal || failed="$$failed tests"; \
	  OMP_NUM_THREADS=1 $(PY) -m pytest -q -m hypothesis --hypothesis-profile search -n logical || failed="$$failed properties"; \
	  $(PY) -c 'from nbdev.serve import proc_nbs; proc_nbs(force=True)' || failed="$$failed site"; \
	  $(MAKE) --no-print-directory versions || failed="$$failed versions"; \
	  [ -z "$$failed" ] || { echo "Audit failed:$$failed" >&2; exit 1; }

# The part of it that is run every week, 14 minutes on two cores: kills, forgeries, workers, others' rows and users' files.
WEEKLY := kills forged executors recording check outputs study kinds plugins jobs groups store rules data
weekly: $(READY)  ## of the second tier what is run every week
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -m audit -n logical --dist worksteal $(WEEKLY:%=tests/test_%.py)

# pyproject.toml's oldest and newest, each in a .venv-3.x of its own with what constraints.txt has for it.
VERSIONS := 3.10 3.13
versions:  ## every test on the oldest and the newest Python, where these are there
	@failed=; for v in $(VERSIONS); do \
	  python$$v -V >/dev/null 2>&1 || { echo "Python $$v: not there, nothing ran on it"; continue; }; echo "Python $$v:"; \
	  { $(MAKE) --no-print-directory PYTHON=python$$v VENV=.venv-$$v setup && OMP_NUM_THREADS=1 \
	    .venv-$$v/bin/python -m pytest -q -n logical --dist loadfile --ignore tests/test_notebooks.py; } || failed="$$failed $$v"; \
	done; [ -z "$$failed" ] || { echo "Tests failed on Python:$$failed" >&2; exit 1; }

paper: $(READY)  ## train what nobody has recorded yet, most decisive first (ITEM=fig15: for one item; AGAIN=1: recorded runs, too)
	@$(CLI) train --item $(or $(ITEM),all) $(if $(filter 1 yes true,$(AGAIN)),,--unrecorded) $(ARGS)

check: $(READY)  ## git holds what the notebooks make: modules exported, notebooks clean
	@"$(BIN)/nbdev_export"
	@"$(BIN)/nbdev_clean"
	@git --no-pager diff --exit-code -- nbs moe_redistribution
	@new=$$(git ls-files --others --exclude-standard -- nbs moe_redistribution); \
	  [ -z "$$new" ] || { echo "Not in git, though nbdev_export made it or the site needs it: $$new" >&2; exit 1; }

record: $(READY)  ## add what the store has to results/ and checkpoints/; nothing else writes them
	@$(CLI) record $(ARGS)
	@$(MAKE) --no-print-directory machines

machines: $(READY)  ## what machines read, from what is recorded: machines/, reproduce.sh, codemeta.json and others
	@$(CLI) ledger --formats ./
	@$(MAKE) --no-print-directory sums

registrations: $(READY)  ## write down when definitions in data/ were made or changed: adds to results/registrations.csv
	@$(PY) tools/registrations.py $(ARGS)
	@$(MAKE) --no-print-directory machines

sums: $(READY)  ## SHA256SUMS of all that is recorded, shown or served again, after a deliberate change by hand
	@$(PY) -c 'from moe_redistribution.evidence.table_files import write_sums; write_sums()'

pages: $(READY)  ## execute again the pages whose rows have changed since they were last run
	@$(PY) tools/pages.py $(ARGS)

outputs: $(READY)  ## run notebooks and keep their outputs in them (NB=...: only these)
	@$(PY) tools/outputs.py $(NB)

readme: $(READY)  ## README.md from nbs/index.ipynb
	@$(PY) tools/readme.py

docs: $(READY)  ## the site's pages in _proc/, and the site in _docs/ where Quarto is installed
	@$(PY) -c 'from nbdev.serve import proc_nbs; proc_nbs(force=True)'
	@$(PY) tools/frame.py
	@$(PY) tools/card.py
	@if command -v quarto >/dev/null; \
	  then (cd _proc && quarto render --no-cache) && rm -rf _docs && mv _proc/_docs _docs && $(PY) tools/after.py; \
	  else echo "Pages are in _proc/; rendering them needs Quarto (https://quarto.org)."; fi

clean:  ## remove .venv, caches and what the site build left (results, checkpoints and out/ stay)
	rm -rf "$(VENV)" .venv-3.* _proc _docs nbs/nbdev.yml .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
