# The front door. `make help` says what there is.

PYTHON ?= python3
PORT ?= 8000
DIR ?= brought
KIND ?= cpu
BUDGET ?= 540
JOBS ?= 4
RANKS ?= 2

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
SET_UP := $(PYTHON) tools/set_up.py
BOOK := index.qmd chapters appendix runs

.PHONY: help site downloads serve preview test site-to-test is-exercise is-stage lighthouse test-gpu lint types format record prose accept record-gpu merge-recordings check exercise stage parity address bench faults cluster fuzz soak constraints clean

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

site: ## make the book's site in _site: with Quarto, else with Pandoc (WITH=quarto, WITH=plain)
	@$(PYTHON) tools/build_site.py $(if $(WITH),--$(WITH))

downloads: ready-site ## add EPUB, text, exercises to _site, linked from every page (PDF, with typst installed)
	@$(BIN)/python tools/downloads.py

serve: ## serve _site on this machine (PORT=8000)
	@$(PYTHON) tools/build_site.py --serve --port $(PORT)

preview: ## serve the plain build, render what changes and reload the browser (PORT=8000)
	@$(PYTHON) tools/build_site.py --preview --port $(PORT)

# Tests of an AREA run alone: without checks, and without the site if they do not look at it.
BEFORE := $(if $(AREA),$(if $(findstring tests/book/site,$(AREA)),site-to-test),types lint check site-to-test)
ALL := -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(COV),--cov)

test: ready-test ## every check and test, with all the set-up they need (AREA=tests/package/test_ring.py, COV=1: list lines that none runs)
	@$(if $(BEFORE),$(MAKE) --no-print-directory -j 2 $(BEFORE))
	@echo "==> pytest $(AREA)"
	@$(if $(BEFORE),BOOK_SITE="$$PWD/_site") $(BIN)/pytest $(or $(AREA),$(ALL))

site-to-test:
	@echo "==> site"
	@$(BIN)/python tools/build_site.py $(if $(shell command -v quarto $(BIN)/quarto),,--plain)

test-gpu: ready-test ## the package's tests on this machine's GPUs, over NCCL and over gloo
	@gpus=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count())"); \
	if [ "$$gpus" = 0 ]; then echo "test-gpu: torch sees no GPU on this machine" >&2; exit 2; fi; \
	echo "==> NCCL, one rank"; \
	$(BIN)/pytest tests/package --device cuda --backend nccl --max-ranks 1; \
	echo "==> gloo, two ranks on one GPU"; \
	CUDA_VISIBLE_DEVICES=0 $(BIN)/pytest tests/package --device cuda --max-ranks 2; \
	if [ "$$gpus" -gt 1 ]; then \
		echo "==> NCCL, $$gpus ranks"; $(BIN)/pytest tests/package --device cuda --backend nccl; \
	fi

lint: ready-lint ## check the style of code and prose, the spelling, the workflows, quotes of code
	@failed=0; for check in "ruff check" "ruff format --check" "panache format --check $(BOOK)" \
		"panache lint $(BOOK)" typos "zizmor --offline --quiet .github"; do \
		echo "==> $$check"; $(BIN)/$$check || failed=1; \
	done; echo "==> quotes"; $(PYTHON) tools/quoted.py || failed=1; exit $$failed

types: ready-test ## check the types of src
	@echo "==> mypy"
	@$(BIN)/mypy

check: ## check the book: recordings fresh, numbers quoted, diagrams sound
	@echo "==> check"
	@$(PYTHON) tools/check.py

format: ready-lint ## write code and prose in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/panache format $(BOOK)

record: ready-record ## record RUN=05-ring, or all that is stale (KIND=gpu, DATA_DIR=folder of MRPC)
	@$(BIN)/python tools/record.py $(RUN) --kind $(KIND) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)")

prose: ## bring a run's texts into its recording, without executing: RUN=05-ring, or all (KIND=gpu)
	@$(PYTHON) tools/record.py --prose $(RUN) --kind $(KIND)

accept: ## declare that RUN=05-ring still does what was recorded: REASON="…"
	@$(PYTHON) tools/record.py --accept $(RUN) --reason "$(REASON)" --kind $(KIND)

record-gpu: ## on a borrowed machine: record on its GPU into DIR, within BUDGET seconds (DATA_DIR=…)
	@$(PYTHON) tools/record.py --kind gpu --output "$(DIR)" --budget $(BUDGET) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)") $(if $(COMMIT),--commit $(COMMIT))

merge-recordings: ## check the recordings in DIR and bring them into the book
	@$(PYTHON) tools/record.py --merge "$(DIR)"

exercise: is-exercise ready-exercise ## the first step that your solution of an exercise misses: N=05 (HINT=1, WATCH=1)
	@$(BIN)/python exercises/walk.py $(N) $(if $(HINT),--hint) $(if $(WATCH),--watch) || test $$? = 1

is-exercise:
	@test -z "$(N)" -o -n "$(wildcard exercises/$(N)_*.py exercises/0$(N)_*.py)" || \
		{ echo "there is no exercise $(N): make exercise N=05" >&2; exit 2; }

STAGE := $(firstword $(wildcard stages/$(N)_*.py stages/$(N:0%=%)_*.py))

stage: is-stage ready-stage ## train with the book's program as it is after chapter N=3 (RANKS=2)
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone \
		--nproc_per_node=$(if $(findstring /0_,$(STAGE)),1,$(RANKS)) $(STAGE)

is-stage:
	@test -n "$(STAGE)" || { echo "$(if $(N),there is no stage $(N),say which stage): make stage N=3" >&2; exit 2; }

lighthouse: ready-test ## print each page's scores by Lighthouse, weight and requests, from _site (needs Node)
	@$(BIN)/python -m tests.book.site.lighthouse _site

parity: ready-test ## write the book's table of what torch and miniddp do, from the tests that compare them
	@$(BIN)/pytest -q tests/package tests/finetune tests/instruments -m parity --parity=tests/parity.json

address: ## say where the book lives: SITE=https://… REPO=https://… BRANCH=main
	@$(PYTHON) tools/address.py "$(SITE)" "$(REPO)" $(BRANCH)

bench: ready-test ## time the DDPs and the ring beside torch's, as ratios (takes some minutes)
	@$(BIN)/python -m instruments.bench_host
	@$(BIN)/python -m instruments.bench_ddp
	@$(BIN)/python -m instruments.bench_ring

faults: ready-test ## break trainings in every way, and count what survives (REPEAT=20, SEED=1)
	@$(BIN)/python runs/faults.py $(if $(REPEAT),--repeat $(REPEAT)) $(if $(SEED),--seed $(SEED))

cluster: ready-test ## queue the runbook's batch script on a SLURM of this machine (as root; slurm-wlm, munge)
	@$(BIN)/pytest tests/endurance/test_cluster.py
	@$(BIN)/python runs/13-slurm.py

fuzz: ready-test ## run programs from a grammar on both classes and one process (PROGRAMS=10000, SEED=1)
	@$(BIN)/python -m tests.endurance.fuzz $(if $(PROGRAMS),--programs $(PROGRAMS)) $(if $(SEED),--seed $(SEED))

soak: ready-test ## train 20,000 steps: memory, files and threads flat, a resume equal (STEPS=20000)
	@$(BIN)/python runs/soak.py $(if $(STEPS),--steps $(STEPS))

clean: ## remove what was built and what tests left behind
	@rm -rf _site _preview .quarto .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage*
	@rm -f .venv/quarto-unavailable

constraints: ready-lint ## pin the versions for every Python and platform (RENEW=--upgrade: the latest)
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --extra train --group test --universal --quiet --no-annotate \
		--no-emit-index-url --custom-compile-command "make constraints" $(RENEW) -o constraints.txt
	@sed -i.bak -E '/^(nvidia|cuda|triton)/d' constraints.txt && rm constraints.txt.bak  # torch pins these

ready-%:
	@$(SET_UP) $*
