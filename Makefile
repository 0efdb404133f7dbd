# The front door. `make help` says what there is.

PYTHON ?= python3
PORT ?= 8000
DIR ?= brought
KIND ?= cpu
BUDGET ?= 540

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/.ready
BOOK := index.qmd chapters runs

.PHONY: help site serve preview test lint types format record record-gpu merge-recordings check exercise parity address bench clean

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

site: ## make the book's site in _site: with Quarto, else with Pandoc
	@$(PYTHON) tools/site.py

serve: ## serve _site on this machine (PORT=8000)
	@test -f _site/index.html || { echo "there is no _site yet: make site"; exit 1; }
	@echo "http://127.0.0.1:$(PORT) (Ctrl+C ends it)"
	@$(PYTHON) -m http.server $(PORT) --bind 127.0.0.1 --directory _site

preview: ## serve the book and render it again on each change (PORT=8000)
	@$(PYTHON) tools/site.py --preview --port $(PORT)

test: lint types check ## every check and test, with all the set-up they need
	@echo "==> site"
	@$(BIN)/python tools/site.py $(if $(shell command -v quarto),,--plain)
	@echo "==> pytest"
	@$(BIN)/pytest

lint: $(READY) ## check the style of code and prose, and the spelling
	@echo "==> ruff check"
	@$(BIN)/ruff check
	@echo "==> ruff format"
	@$(BIN)/ruff format --check
	@echo "==> panache format"
	@$(BIN)/panache format --check $(BOOK)
	@echo "==> panache lint"
	@$(BIN)/panache lint $(BOOK)
	@echo "==> spelling"
	@$(BIN)/python tools/spell.py

types: $(READY) ## check the types of src
	@echo "==> mypy"
	@$(BIN)/mypy

check: ## check the book: recordings fresh, numbers quoted, diagrams sound
	@echo "==> check"
	@$(PYTHON) tools/check.py

format: $(READY) ## write code and prose in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/panache format $(BOOK)

record: $(READY) ## record RUN=05-ring, or all that is stale (KIND=gpu, DATA_DIR=folder of MRPC)
	@$(BIN)/python tools/record.py $(RUN) --kind $(KIND) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)")

record-gpu: ## on a borrowed machine: record on its GPU into DIR, within BUDGET seconds (DATA_DIR=…)
	@$(PYTHON) tools/record.py --kind gpu --output "$(DIR)" --budget $(BUDGET) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)") $(if $(COMMIT),--commit $(COMMIT))

merge-recordings: ## check the recordings in DIR and bring them into the book
	@$(PYTHON) tools/record.py --merge "$(DIR)"

exercise: $(READY) ## test your solution of an exercise: N=05
	@test -n "$(N)" || { echo "say which exercise: make exercise N=05"; exit 2; }
	@compgen -G "exercises/test_$(N)_*.py" >/dev/null || { echo "there is no exercise $(N)"; exit 2; }
	@$(BIN)/pytest -q exercises/test_$(N)_*.py

parity: $(READY) ## write the book's table of what torch and miniddp do, from the tests that compare them
	@$(BIN)/pytest -q tests/miniddp -m parity --parity=tests/parity.json

address: ## say where the book lives: SITE=https://… REPO=https://… BRANCH=main
	@$(PYTHON) tools/address.py "$(SITE)" "$(REPO)" $(BRANCH)

bench: $(READY) ## time the DDPs and the ring beside torch's, as ratios (takes some minutes)
	@$(BIN)/python -m instruments.bench_ddp
	@$(BIN)/python -m instruments.bench_ring

clean: ## remove what was built and what tests left behind
	@rm -rf _site _preview .quarto .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
	@rm -f .venv-site/quarto-unavailable

$(READY): pyproject.toml constraints.txt
	@echo "==> set up .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]' \
		| awk '/^Collecting/ { print "    " $$2 } /^Installing/ { print "    installing" } { fflush() }'
	@touch $@
