# Everything happens in .venv, with a wheel of this checkout installed as users get it; `make` reinstalls after a change.
# To develop with an editable install, see AGENTS.md.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo dev test test-all check clean

VENV := .venv
BIN := $(VENV)/bin
FOLDERS := actors cluster core examples gateway node observability store supervisor tool_host
SOURCES := pyproject.toml README.md LICENSE $(shell find $(FOLDERS) -name __pycache__ -prune -o -print)

# Two processes: one has all that needs Ray, one test after the other, and the other begins with the rest.
PARALLEL := -n 2 --dist loadgroup --no-loadscope-reorder

# Python's own venv and pip are all that is needed; PYTHON=/path/to/python chooses one.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3 python; do \
	$$name -c '$(USABLE)' 2>/dev/null && { command -v $$name; break; }; done)

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST)

install: $(VENV)/installed$(addprefix -,$(EXTRAS)) ## .venv with the command `understudy`; EXTRAS=mcp: for MCP as well

demo: $(VENV)/installed ## agents at work, some of them killed on the way; needs no key
	$(BIN)/python -P -m understudy.examples.survey --chaos 2

dev: $(VENV)/installed-dev ## .venv with everything that tests and checks need

test: dev ## the quick tier of the tests, against the installed wheel: some 15 minutes on two cores
	$(BIN)/pytest $(PARALLEL) --tier quick

test-all: dev ## all tests: over an hour on two cores
	$(BIN)/pytest $(PARALLEL)

check: dev ## lint, types and tests, as CI does
	PYTHON=$(BIN)/python scripts/check

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@[ -n "$(PYTHON)" ] || { echo "Understudy needs Python 3.11 or newer with its venv module (Debian:" \
		"apt install python3-venv). Install it, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ($(PYTHON))"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# `build/` is removed before, as setuptools would take deleted modules from it into the wheel, and after.
define install
	@echo "Installing $(1) into $(VENV): about 150 MB of downloads the first time"
	@rm -rf build
	@$(BIN)/python -u -m pip install --disable-pip-version-check '$(1)' \
		| { grep --line-buffered -E '^ *(Downloading|Using cached) .*MB\)|^Successfully' | cut -c1-120 || true; }
	@rm -rf build *.egg-info
endef

$(VENV)/installed: $(VENV)/created $(SOURCES)
	$(call install,.)
	@touch $@

$(VENV)/installed-%: $(VENV)/created $(SOURCES)
	$(call install,.[$*])
	@touch $(VENV)/installed $@
