# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of all scenarios have: hosts of the lab as testinfra hosts, and their journals where a test fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import testinfra

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "resources"), str(HERE.parent / "tests/lab")]

import testinfra_lab  # noqa: E402, F401  makes lab:// known
from look import Machine  # noqa: E402

#: Shown of a host on which a test failed.
JOURNAL = "journalctl --boot --no-pager --lines=40; tail -n 30 /var/lib/cleanslate/servers/*/*.log"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A report for each folder of tests: a scenario verifies more than once."""
    if config.option.xmlpath:
        folder = Path(config.args[0]).parent.name
        config.option.xmlpath = str(Path(config.option.xmlpath).with_suffix("") / f"{folder}.xml")


@pytest.fixture
def machine(host: testinfra.host.Host) -> Machine:
    """The host of the test, looked at from outside: from its hypervisor's /proc."""
    return Machine(host)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    host = getattr(item, "funcargs", {}).get("host")
    if report.when == "call" and report.failed and host is not None:
        report.sections.append((f"journal of {host.backend.get_hostname()}", host.run(JOURNAL).stdout))
    return report
