# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of the checks, in the order in which they run. A new check is a line here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stage import BUILD, ROOT, Stage, commands, linux, python, root

PYTHON = ROOT / ".venv/bin/python"
OLDEST = ROOT / ".venv-3.11/bin/python"
CHECKS = ROOT / "tests/checks"
REPORTS = BUILD / "reports"


def lint(name: str, *command: str | Path, **more: Any) -> Stage:
    """A check that reads the sources and may run beside another one."""
    return Stage(name, [PYTHON, *command], group="lint", shares_machine=True, **more)


def tests(name: str, interpreter: Path, group: str, **more: Any) -> Stage:
    """The unit tests under one Python."""
    report = REPORTS / f"{name}.xml"
    command: list[str | Path] = [interpreter, "-m", "pytest", "-q", "--junit-xml", report, "tests/unit"]
    return Stage(name, command, group=group, tools=interpreter.parent, junit=report, **more)


def yaml_places() -> list[str]:
    """What yamllint looks at: given the whole checkout, it would walk through every virtual environment."""
    made = {".ansible", ".collections", ".git", "build"}
    return sorted(
        path.name
        for path in ROOT.iterdir()
        if (path.is_dir() and path.name not in made and not path.name.startswith(".venv")) or path.suffix == ".yml"
    )


STAGES: list[Stage] = [
    lint("ansible-lint", "-m", "ansiblelint", "--offline", "--strict", "--profile", "production"),
    lint(
        "ansible-lint-outsider",
        *("-m", "ansiblelint", "--offline", "--strict", "--profile", "production", "."),
        cwd=ROOT / "molecule/outsider",
        env={"ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/molecule/outsider/collections:{ROOT}/.collections"},
    ),
    lint("yamllint", "-m", "yamllint", "--strict", "--config-file", ".config/yamllint.yml", *yaml_places()),
    lint("ruff-check", "-m", "ruff", "check", "."),
    lint("ruff-format", "-m", "ruff", "format", "--check", "."),
    lint("mypy", "-m", "mypy", "-p", "ansible_collections.cleanslate.inference.plugins.module_utils"),
    lint("mypy-tests", "-m", "mypy", "tests/suite", "tests/checks"),
    lint("argument-specs", CHECKS / "argument_specs.py"),
    lint("role-variables", CHECKS / "role_variables.py"),
    lint("action-groups", CHECKS / "action_groups.py"),
    lint(
        "collection-docs",
        *("-m", "antsibull_docs.cli.antsibull_docs", "lint-collection-docs", "--plugin-docs", "--skip-rstcheck"),
        *("--validate-collection-refs=all", "--disallow-unknown-collection-refs", "."),
        env={"HOME": str(BUILD)},  # where it writes antsibull.log
    ),
    lint("changelog", "-m", "antsibull_changelog", "lint"),
    lint("dependencies", CHECKS / "dependencies.py"),
    lint("inventories", CHECKS / "inventories.py"),
    lint("flag-table", "tests/lab/standin/make_flag_table.py", "--check", "--venv", BUILD / "flag-table"),
    lint("target-3.9", CHECKS / "target_python.py", "3.9", needs=[python("3.9")]),
    # -- behaviour
    tests("unit", PYTHON, "unit"),
    Stage("demo", [PYTHON, "tests/lab/demo"], group="demo", needs=[linux, commands("cc")], timeout=240),
    # -- the collection as others use it
    Stage("artefact", [PYTHON, CHECKS / "artefact.py"], group="package"),
    Stage("checkout-with-space", [PYTHON, CHECKS / "elsewhere.py"], group="package"),
    Stage("ordinary-user", [PYTHON, CHECKS / "ordinary_user.py"], group="package", needs=[root, linux, commands("cc")]),
    # -- ansible-test
    Stage("ansible-test-sanity", [PYTHON, CHECKS / "ansible_test.py", "sanity"], group="sanity", timeout=900),
    Stage(
        "ansible-test-units",
        [PYTHON, CHECKS / "ansible_test.py", "units"],
        group="sanity",
        junit=BUILD / "ansible-test/ansible_collections/cleanslate/inference/tests/output/junit",
        timeout=1200,
    ),
    # -- the oldest Ansible and Python of a control node
    Stage(
        "venv-3.11",
        ["make", "--no-print-directory", ".venv-3.11/.unit"],
        group="oldest",
        needs=[python("3.11")],
    ),
    tests("unit-3.11", OLDEST, "oldest", needs=[python("3.11")]),
    Stage(
        "demo-3.11",
        [OLDEST, "tests/lab/demo"],
        group="oldest",
        tools=OLDEST.parent,
        needs=[linux, commands("cc"), python("3.11")],
        timeout=240,
    ),
]

# -- the lab: real guests, started for it
STAGES += [
    Stage(
        "lab",
        # Real SGLang in a guest is Molecule's matter.
        [
            *(PYTHON, "-m", "pytest", "-q", "--junit-xml", REPORTS / "lab.xml"),
            *("tests/lab/tests", "--ignore", "tests/lab/tests/test_sglang_cpu.py"),
        ],
        group="lab",
        junit=REPORTS / "lab.xml",
        needs=[linux, root],
        timeout=1200,
    )
]

# -- Molecule: every scenario is a stage, in a lab of its own
STAGES += [
    Stage(
        f"molecule-{scenario.parent.name}",
        [PYTHON, "molecule/run.py", scenario.parent.name],
        group="molecule",
        junit=REPORTS / "molecule" / scenario.parent.name,
        needs=[linux, root, commands("lxc-start", "mmdebstrap", "ip", "newuidmap")],
        # Half of a scenario is waiting, and nothing in it measures time.
        shares_machine=True,
        timeout=900,
    )
    for scenario in sorted(ROOT.glob("molecule/*/molecule.yml"))
]
