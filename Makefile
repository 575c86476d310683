# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Every path is relative and every tool is started by the virtual environment's Python, so that the checkout may lie
# in any folder. All that is made lies in .venv*, build and .ansible.

PYTHONS := 3.14 3.13 3.12 3.11
PYTHON := .venv/bin/python

# Variables of the user's own environment must not lead Ansible or Python past the files of the checkout.
unexport PYTHONPATH PYTHONHOME ANSIBLE_CONFIG ANSIBLE_COLLECTIONS_PATH ANSIBLE_INVENTORY

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	    printf '%-20s %s\n' "$$target" "$$text"; done

# -- What the user wants ---------------------------------------------------------------------------------------------

.PHONY: demo
demo: .venv/.demo ## Reset and launch on an embedded node; KEEP=1 leaves it running
	@$(PYTHON) tests/lab/demo

.PHONY: demo-stop
demo-stop: .venv/.demo ## Stop what KEEP=1 left running
	@$(PYTHON) tests/lab/demo --stop

.PHONY: test
test: .venv/.test ## Run every check that this user may run; CI=true insists on all of them
	@$(PYTHON) tests/suite

# H hypervisors, each with G guests and GPUS GPUs.
H := 1
G := 4
GPUS := 8

.PHONY: lab-up
lab-up: ## Start hypervisors, guests and GPUs for inventories/lab (root): H=1 G=4 GPUS=8
	@tests/lab/lab deps && tests/lab/lab up $(H) $(G) $(GPUS) && tests/lab/lab inventory

.PHONY: lab-down
lab-down: ## End the lab
	@tests/lab/lab down

.PHONY: build
build: .venv/.demo ## Build the artefact in build/
	@$(PYTHON) -m ansible galaxy collection build --force --output-path build .

# -- Parts of the checks ---------------------------------------------------------------------------------------------

.PHONY: lint
lint: .venv/.test ## Run the checks that read the sources
	@$(PYTHON) tests/suite lint

.PHONY: unit
unit: .venv/.test ## Run the unit tests
	@$(PYTHON) tests/suite unit

.PHONY: sanity
sanity: .venv/.test ## Run ansible-test sanity and units
	@$(PYTHON) tests/suite sanity

.PHONY: molecule
molecule: .venv/.test ## Run the Molecule scenarios (root)
	@$(PYTHON) tests/suite molecule

.PHONY: stages
stages: .venv/.test ## List the stages of 'make test', each of which tests/run NAME runs alone
	@$(PYTHON) tests/suite --list

# -- Virtual environments --------------------------------------------------------------------------------------------
# A stamp a level: the demo must not wait for the linters.

.PHONY: venv
venv: .venv/.test ## Make the virtual environment with everything in it

# A virtual environment whose Python is gone (moved, upgraded, copied from elsewhere) is made anew.
working = $(if $(shell $(1)/bin/python -c pass 2>/dev/null && echo yes),,FORCE)
.PHONY: FORCE
FORCE:

.venv/.python: .config/find-python $(call working,.venv)
	@python="$$(.config/find-python $(PYTHONS))" && echo "Making .venv with $$python" && \
	    rm -rf .venv && "$$python" -m venv .venv && touch $@

.venv/.demo: .venv/.python requirements/demo.txt
	@echo "Installing Ansible into .venv"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --upgrade -r requirements/demo.txt
	@touch $@

.venv/.test: .venv/.demo requirements/unit.txt tests/unit/requirements.txt requirements/test.txt
	@echo "Installing the checking tools into .venv"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --upgrade -r requirements/test.txt
	@touch $@

# The oldest Python of a control node, with the oldest Ansible that is supported.
.venv-3.11/.unit: .config/find-python requirements/unit.txt requirements/demo.txt tests/unit/requirements.txt \
    $(call working,.venv-3.11)
	@python="$$(.config/find-python 3.11)" && echo "Making .venv-3.11 with $$python" && \
	    rm -rf .venv-3.11 && "$$python" -m venv .venv-3.11
	@.venv-3.11/bin/python -m pip install -qq --disable-pip-version-check -r requirements/unit.txt
	@touch $@

.PHONY: clean
clean: ## Remove everything that was made
	@[ ! -e build/lab ] || tests/lab/lab clean
	rm -rf .venv .venv-3.11 build .ansible .hypothesis
