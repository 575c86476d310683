# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""From a declaration on this node to the command that would run: Python, account, GPUs by UUID, command line.

Nothing is changed, and nothing is raised for what an operator can mend: findings are collected, so that all are told
at once.
"""

from __future__ import annotations

import dataclasses

from ..common.errors import CleanslateError
from ..gpu.devices import Gpu
from ..gpu.survey import Survey
from . import resolver
from .account import Account, account
from .command import Command, base_environment, build, declared_state
from .declaration import Checked, Declaration, check
from .findings import Finding, variable
from .nccl import Effective
from .paths import Paths, paths

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Arguments whose value is one more fixed port of the server.
PORT_ARGUMENTS = ("nccl_port", "grpc_port", "gated_launch_port", "smg_http_sidecar_port", "engine_info_bootstrap_port")


@dataclasses.dataclass(frozen=True)
class Complete:
    """Everything that a launch needs, known."""

    declaration: Declaration
    nccl: Effective
    where: Paths
    gpus: list[Gpu]
    account: Account
    identity: resolver.Identity
    command: Command

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.gpus]

    @property
    def ports(self) -> list[int]:
        return fixed_ports(self.declaration)

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the server."""
        base = base_environment(self.identity.python, self.account.home, self.account.name)
        return dict(base, **self.command.environment)

    def state(self, salt: str) -> dict[str, str]:
        """What the record keeps to tell a changed declaration."""
        return declared_state(self.declaration, self.command, self.identity.version, salt)


@dataclasses.dataclass
class Prepared:
    """What is known so far, and what is wrong."""

    declaration: Declaration
    checked: Checked
    where: Paths
    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    account: Account | None = None
    identity: resolver.Identity | None = None
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    #: None when it cannot be known: no Python, no account, no such GPU.
    complete: Complete | None = None

    @property
    def nccl(self) -> Effective:
        return self.checked.nccl

    @property
    def ports(self) -> list[int]:
        return fixed_ports(self.declaration)

    def require(self) -> Complete:
        """All of it. Raises CleanslateError with every finding at once."""
        if self.complete is None or self.findings:
            raise CleanslateError(
                "\n".join(finding.msg for finding in self.findings) or "The GPUs' UUIDs are not known.",
                blocked=[finding.row() for finding in self.findings],
            )
        return self.complete


def fixed_ports(declaration: Declaration) -> list[int]:
    """Every port that is declared, the HTTP port first."""
    found = [declaration.port]
    for name in PORT_ARGUMENTS:
        value = declaration.args.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
    address = str(declaration.args.get("dist_init_addr") or "")
    if not declaration.args.get("node_rank") and address.rpartition(":")[2].isdigit():
        found.append(int(address.rpartition(":")[2]))
    return list(dict.fromkeys(found))


def prepare(declaration: Declaration, state_dir: str, survey: Survey, check_mode: bool = False) -> Prepared:
    """Work it all out, as far as it goes.

    In check mode a node without nvidia-ml-py, which the run itself would place, shows where UUIDs will be.
    """
    checked = check(declaration)
    out = Prepared(declaration, checked, paths(state_dir, declaration.name), list(checked.errors), list(checked.notes))
    out.gpus = choose_gpus(declaration, survey, out.findings, out.notes)
    try:
        out.account = account(declaration.user)
    except CleanslateError as error:
        out.findings.append(Finding("account", error.message, variable("user")))
    if out.account is not None:
        # Without the account nothing is asked: it would be asked as root.
        out.identity = _find_python(declaration, out.account, out.findings)
    uuids = [gpu.uuid for gpu in out.gpus]
    if check_mode and survey.nvml.reason == "binding_missing":
        uuids = [gpu.uuid or "UUID-of-GPU-%d" % gpu.index for gpu in out.gpus]
    if out.identity is None or out.account is None or not uuids or not all(uuids):
        return out
    made = build(declaration, out.identity.python, uuids, checked.nccl.values, out.where.config)
    out.complete = Complete(declaration, checked.nccl, out.where, out.gpus, out.account, out.identity, made)
    return out


def _find_python(declaration: Declaration, account: Account, findings: list[Finding]) -> resolver.Identity | None:
    search = dict(base_environment("/usr/bin/python3", account.home, ""))
    for key, value in declaration.environment.items():
        if isinstance(value, str):
            search[str(key)] = value
    try:
        return resolver.find(declaration.python, search, search.get("PATH", PATH) + ":" + PATH, account)
    except CleanslateError as error:
        findings.append(Finding("python", error.message, variable("python")))
        return None


def choose_gpus(declaration: Declaration, survey: Survey, findings: list[Finding], notes: list[str]) -> list[Gpu]:
    """The declared GPUs in the declared order; none declared: all of the node."""
    where = variable("gpus")
    chosen: list[Gpu] = []
    for name in declaration.gpus:
        gpu = survey.devices.find(name)
        if gpu is None:
            there = ", ".join("%d (%s)" % (g.index, g.uuid or "nvidia%s" % g.minor) for g in survey.devices.gpus)
            findings.append(
                Finding(
                    "gpu_unknown", "%s: there is no GPU %s here; here are: %s." % (where, name, there or "none"), where
                )
            )
        elif gpu in chosen:
            findings.append(Finding("gpu_unknown", "%s: GPU %s is named twice." % (where, name), where))
        else:
            chosen.append(gpu)
    if not declaration.gpus:
        chosen = [gpu for gpu in survey.devices.gpus if not gpu.hidden]
    if not chosen and not declaration.gpus:
        findings.append(
            Finding("gpu_unknown", "%s: this node shows no GPU in %s." % (where, survey.options.dev_dir), where)
        )
    if survey.nvml.ok and chosen and not all(gpu.uuid for gpu in chosen):
        # Where NVML is blind altogether that is the news, and not an error of the declaration.
        findings.append(Finding("gpu_unidentified", "%s: the driver gives a GPU no UUID." % where, where))
    needed = declaration.schedulers
    if chosen and len(chosen) < needed:
        findings.append(
            Finding(
                "gpu_count",
                "%s: %d GPUs for %d workers (tp_size, pp_size and dp_size of %s)."
                % (where, len(chosen), needed, declaration.name),
                where,
            )
        )
    elif len(chosen) > needed and not declaration.spread:
        notes.append(
            "%s: %d GPUs are given to %s, its %d workers will use the first %d of them."
            % (where, len(chosen), declaration.name, needed, needed)
        )
    return chosen
