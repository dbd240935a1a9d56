# Two commands do everything on a machine with Python and make: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS ?= .peers
NTKGP_DATA ?= ../shared/data
THREADS ?= 2
START := $(shell date +%s)
TOOK = echo "make $(MAKECMDGOALS): $$(( ($$(date +%s) - $(START) + 30) / 60 )) minutes"
PIP := $(BIN)/python -m pip install --quiet --retries 10 --timeout 60 --constraint constraints.txt

.PHONY: help demo test lint types suite docs screenshots bench-kernel bench-posteriors bench-evidence bench-variational bench-training reproduce-uci reproduce-regression reproduce-figures reproduce-images reproduce-shifts reproduce-adapted reproduce-ct reproduce-ct-measured reproduce-training clean
.DEFAULT_GOAL := help

help:  ## list every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(PIP) torch setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(VENV)/.ready  ## an overconfident classifier put right, and a network as an exact GP; tables, and figures in demo/
	@$(BIN)/python examples/overconfident.py --output demo
	@$(BIN)/python examples/exact_gp_regression.py --output demo
	@$(TOOK)

test: lint types docs suite  ## lint, types, the documentation, its snippets and the whole suite

lint: $(VENV)/.ready  ## formatting and lint
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(VENV)/.ready  ## static types of the package
	@$(BIN)/mypy

suite: $(VENV)/.ready  ## every test, with coverage
	@$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --cov --cov-report=term -q
	@$(TOOK)

docs: $(VENV)/.ready  ## the documentation, built strictly, into build/site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

bench-kernel: $(VENV)/.ready  ## the tangent kernel beside laplace-torch and neural-tangents; a table in benchmarks/results/
	@test -n "$$(ls -A $(PEERS) 2>/dev/null)" || bash ../shared/peers/setup $(PEERS)
	@test -d $(PEERS)/asdl || $(PEERS)/laplace/bin/pip install --quiet --no-deps --target $(PEERS)/asdl asdfghjkl==0.1a4
	@$(BIN)/python benchmarks/kernel.py --peers $(PEERS)

bench-posteriors: $(VENV)/.ready  ## posteriors beside laplace-torch; a table in benchmarks/results/
	@test -n "$$(ls -A $(PEERS) 2>/dev/null)" || bash ../shared/peers/setup $(PEERS)
	@$(BIN)/python benchmarks/posteriors.py --peers $(PEERS) --data $(NTKGP_DATA)

bench-evidence: $(VENV)/.ready reproduce-adapted reproduce-figures  ## estimators, tuning and the linear model of all of FashionMNIST; a table in benchmarks/results/
	@$(BIN)/python benchmarks/evidence.py --data $(NTKGP_DATA) --threads $(THREADS)

bench-variational: $(VENV)/.ready  ## sparse processes beside VaLLA and ELLA, and on a ResNet-20; a table in benchmarks/results/
	@test -n "$$(ls -A $(PEERS) 2>/dev/null)" || bash ../shared/peers/setup $(PEERS)
	@$(BIN)/python benchmarks/variational.py --peers $(PEERS) --data $(NTKGP_DATA) --threads $(THREADS)

bench-training: $(VENV)/.ready  ## curvature by resolution beside BackPACK, steps of variational Laplace; a table in benchmarks/results/
	@test -n "$$(ls -A $(PEERS) 2>/dev/null)" || bash ../shared/peers/setup $(PEERS)
	@$(BIN)/python benchmarks/training.py --peers $(PEERS) --threads $(THREADS)

reproduce-uci: $(VENV)/.ready  ## Table 1 and Fig. 5 of the local-linearisation paper into docs/results/uci/
	@$(BIN)/python benchmarks/reproduce/uci.py --data $(NTKGP_DATA)

reproduce-regression: $(VENV)/.ready  ## standard and gap splits of UCI regression into docs/results/regression/
	@$(BIN)/python benchmarks/reproduce/regression.py --data $(NTKGP_DATA)

reproduce-figures: $(VENV)/.ready  ## the banana, and posteriors in one dimension, into docs/results/figures/
	@$(BIN)/python benchmarks/reproduce/figures.py --data $(NTKGP_DATA)

reproduce-images: $(VENV)/.ready  ## Table 2 of the paper, FashionMNIST and MNIST, into docs/results/images/
	@$(BIN)/python benchmarks/reproduce/images.py --data $(NTKGP_DATA)

reproduce-shifts: $(VENV)/.ready  ## rotated MNIST and corrupted CIFAR-10 into docs/results/shifts/
	@$(BIN)/python benchmarks/reproduce/shifts.py --data $(NTKGP_DATA)

reproduce-adapted: $(VENV)/.ready  ## evidence at θ* and at θ_⋆ for five kinds of network on MNIST, into docs/results/adapted/
	@$(BIN)/python benchmarks/reproduce/adapted.py --data $(NTKGP_DATA)

reproduce-ct: $(VENV)/.ready  ## KMNIST, a head at 128², experimental design, real measurements, into docs/results/ct/
	@$(BIN)/python benchmarks/reproduce/ct.py --data $(NTKGP_DATA) --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/ct_large.py --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/design.py --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/design.py --blind --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/ct_figures.py --data $(NTKGP_DATA) --threads $(THREADS)
	@$(MAKE) --no-print-directory reproduce-ct-measured

reproduce-ct-measured: $(VENV)/.ready  ## Helsinki challenge and a tooth into docs/results/ct/
	@$(BIN)/python benchmarks/reproduce/ct_measured.py --data $(NTKGP_DATA) --threads $(THREADS)

reproduce-training: $(VENV)/.ready  ## variational Laplace, autoencoders, evidence-driven training into docs/results/training/
	@$(BIN)/python benchmarks/reproduce/variational_laplace.py --data $(NTKGP_DATA) --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/autoencoders.py --data $(NTKGP_DATA) --threads $(THREADS)
	@$(BIN)/python benchmarks/reproduce/evidence_training.py --data $(NTKGP_DATA) --threads $(THREADS)

screenshots: $(VENV)/.ready  ## the report in light, dark and on a phone into docs/results/report/; needs Chromium
	@command -v chromium chromium-browser google-chrome > /dev/null || { echo "install Chromium first (Debian: apt-get install chromium)"; exit 1; }
	@NTKGP_SCREENSHOTS=docs/results/report $(BIN)/python -m pytest -q tests/report/test_browser.py

clean:  ## remove what the targets made, the environments included
	rm -rf $(VENV) $(PEERS) demo build *.egg-info .pytest_cache .ruff_cache .mypy_cache .coverage
