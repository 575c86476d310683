# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What an operator declares of one server: its shape (the argument spec) and what is wrong with it on paper."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ..common.text import is_secret_name, show
from ..state.record import check_name
from . import nccl, speculative
from .findings import Finding, variable

#: Suboptions of the modules' option C(declaration). The role has each as C(sglang_server_FIELD).
DECLARATION_SPEC: dict[str, t.Any] = {
    "model_path": {"type": "str", "required": True},
    "served_model_name": {"type": "str"},
    "gpus": {"type": "list", "elements": "str", "default": []},
    "tp_size": {"type": "int", "default": 1},
    "dp_size": {"type": "int", "default": 1},
    "pp_size": {"type": "int", "default": 1},
    "mem_fraction_static": {"type": "float"},
    "attention_backend": {"type": "str"},
    "host": {"type": "str", "default": "127.0.0.1"},
    "port": {"type": "int", "default": 30000},
    "api_key": {"type": "str", "no_log": True},
    "admin_api_key": {"type": "str", "no_log": True},
    "speculative": {"type": "dict", "default": {}},
    "nccl": {"type": "dict", "default": {}},
    "nccl_host": {"type": "dict", "default": {}},
    "environment": {"type": "dict", "default": {}},
    "args": {"type": "dict", "default": {}},
    "python": {"type": "path"},
    "backend": {"type": "str", "choices": ["systemd", "process"], "default": "systemd"},
    "user": {"type": "str"},
    "stall_timeout": {"type": "float", "default": 120.0},
    "ready_timeout": {"type": "float", "default": 900.0},
    "stop_timeout": {"type": "float", "default": 30.0},
}

#: Arguments (field names, aliases too) that have a variable of their own.
OWN_VARIABLE = {
    "model_path": "model_path",
    "model": "model_path",
    "served_model_name": "served_model_name",
    "tp_size": "tp_size",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp_size": "dp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "pp_size": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "mem_fraction_static": "mem_fraction_static",
    "attention_backend": "attention_backend",
    "host": "host",
    "port": "port",
    "api_key": "api_key",
    "admin_api_key": "admin_api_key",
    "speculative_draft_model": "speculative",
}
#: Environment variables that the launch sets itself, and the variable that decides them.
OWN_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "gpus",
    "NVIDIA_VISIBLE_DEVICES": "gpus",
    "SPT_NOENV": "",
    "CLEANSLATE_INSTANCE": "",
}
SHORTEST_SECRET = 4
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIELD = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass
class Declaration:
    """One declared server. Fields as in DECLARATION_SPEC; times in seconds."""

    name: str
    model_path: str
    served_model_name: str | None = None
    gpus: list[str] = dataclasses.field(default_factory=list)
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    mem_fraction_static: float | None = None
    attention_backend: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    speculative: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    nccl: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    nccl_host: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    args: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    python: str | None = None
    backend: str = "systemd"
    user: str | None = None
    stall_timeout: float = 120.0
    ready_timeout: float = 900.0
    stop_timeout: float = 30.0

    @classmethod
    def from_params(cls, name: str, params: t.Mapping[str, t.Any]) -> Declaration:
        """Out of a module's parameters. Empty text counts as not declared. Raises CleanslateError for a bad name."""
        check_name(name)
        known = {field.name for field in dataclasses.fields(cls)}
        values = {
            key: value for key, value in params.items() if key in known and key != "name" and value not in (None, "")
        }
        values.setdefault("model_path", "")
        return cls(name=name, **values)

    @property
    def attention_dp(self) -> bool:
        """Data parallelism inside the tensor-parallel group: it takes no GPUs of its own."""
        width = self.args.get("attn_dp_size", self.args.get("attention_data_parallel_size", 1))
        return bool(self.args.get("enable_dp_attention")) or str(width) not in ("1", "None")

    @property
    def schedulers(self) -> int:
        """Worker processes (C(sglang::scheduler…)) that this node runs: one a GPU."""
        count = self.tp_size * self.pp_size * (1 if self.attention_dp else self.dp_size)
        nodes = self.args.get("nnodes", 1)
        return max(1, count // nodes) if isinstance(nodes, int) and nodes > 1 else count

    @property
    def spread(self) -> bool:
        """Whether the declaration chooses among the visible GPUs itself."""
        return any(self.args.get(key) not in (None, 0, 1) for key in ("base_gpu_id", "gpu_id_step"))

    @property
    def skips_tokenizer(self) -> bool:
        return bool(self.args.get("skip_tokenizer_init"))

    @property
    def embeds(self) -> bool:
        """Whether it answers /encode instead of /generate."""
        return bool(self.args.get("is_embedding"))

    def public(self) -> dict[str, t.Any]:
        """All of it but the secrets, to be kept and brought back (with_public)."""
        out = dataclasses.asdict(self)
        for field in ("name", "api_key", "admin_api_key"):
            del out[field]
        out["environment"] = {k: v for k, v in self.environment.items() if not is_secret_name(str(k))}
        out["args"] = {k: v for k, v in self.args.items() if not (is_secret_name(str(k)) and isinstance(v, str))}
        return out

    def with_public(self, public: t.Mapping[str, t.Any]) -> Declaration:
        """An earlier declaration with this one's secrets: a key that was changed stays changed."""
        earlier = Declaration.from_params(self.name, public)
        earlier.api_key, earlier.admin_api_key = self.api_key, self.admin_api_key
        for kept, now in ((earlier.environment, self.environment), (earlier.args, self.args)):
            kept.update({k: v for k, v in now.items() if is_secret_name(str(k)) and isinstance(v, str)})
        return earlier

    def secrets(self) -> list[str]:
        """Every value that must never be shown. What is shorter than SHORTEST_SECRET guards nothing, and hiding it
        wherever it occurs would make everything unreadable."""
        found = [self.api_key, self.admin_api_key]
        found += [str(v) for k, v in self.environment.items() if is_secret_name(str(k)) and v is not None]
        found += [v for k, v in self.args.items() if is_secret_name(str(k)) and isinstance(v, str)]
        return [value for value in found if value and len(value) >= SHORTEST_SECRET]


class Checked(t.NamedTuple):
    nccl: nccl.Effective
    errors: list[Finding]
    notes: list[str]


def check(declaration: Declaration) -> Checked:
    """Everything that can be said without looking at the node."""
    errors: list[Finding] = []

    def wrong(code: str, field: str, msg: str) -> None:
        errors.append(Finding(code, "%s: %s" % (variable(field), msg), variable(field)))

    if not declaration.model_path:
        wrong("declaration", "model_path", "is missing. Name the model's folder, or its repository.")
    for field in ("tp_size", "dp_size", "pp_size"):
        if getattr(declaration, field) < 1:
            wrong("declaration", field, "%d is less than 1." % getattr(declaration, field))
    fraction = declaration.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        wrong("declaration", "mem_fraction_static", "%s is not between 0 and 1." % fraction)
    if not 1 <= declaration.port <= 65535:
        wrong("declaration", "port", "%d is not between 1 and 65535." % declaration.port)
    if declaration.served_model_name and ":" in declaration.served_model_name:
        wrong("declaration", "served_model_name", "SGLang allows no ':' in it.")
    if len(set(declaration.gpus)) != len(declaration.gpus):
        wrong("declaration", "gpus", "names a GPU twice.")
    for field in ("stall_timeout", "ready_timeout", "stop_timeout"):
        if getattr(declaration, field) <= 0:
            wrong("declaration", field, "%s is not above 0 s." % getattr(declaration, field))
    for field in ("api_key", "admin_api_key"):
        value = getattr(declaration, field) or ""
        if value.startswith("-") or value != value.strip() or not (value.isascii() and value.isprintable()):
            # It travels in an HTTP header and behind an option of a command line.
            wrong(
                "declaration", field, "a key is printable ASCII, may not begin with '-', nor have spaces at its ends."
            )
        elif value and len(value) < SHORTEST_SECRET:
            wrong("declaration", field, "a key has at least %d characters." % SHORTEST_SECRET)
    _check_environment(declaration, wrong)
    _check_args(declaration, wrong)
    effective = nccl.merge(declaration.nccl, declaration.nccl_host, declaration.environment)
    errors.extend(effective.errors)
    found, notes = speculative.check(
        declaration.speculative, declaration.args, declaration.attention_backend, declaration.pp_size
    )
    errors.extend(found)
    return Checked(effective, errors, effective.warnings + notes)


def _check_environment(declaration: Declaration, wrong: t.Callable[[str, str, str], None]) -> None:
    for key, value in declaration.environment.items():
        name = str(key)
        if _ENVIRONMENT_NAME.fullmatch(name) is None:
            wrong("declaration", "environment", "%r is no name of a variable." % show(name))
        elif name in OWN_ENVIRONMENT:
            owner = OWN_ENVIRONMENT[name]
            hint = "change %s instead" % variable(owner) if owner else "the launch sets it itself"
            wrong("duplicate", "environment", "%s may not be set here: %s." % (name, hint))
        elif value is not None and environment_text(value) is None:
            wrong("declaration", "environment", "%s wants a text, a number or a truth value in one line." % name)


def _check_args(declaration: Declaration, wrong: t.Callable[[str, str, str], None]) -> None:
    speculative_keys = {str(key) for key, value in declaration.speculative.items() if value is not None}
    for key in declaration.args:
        field = field_name(str(key))
        if _FIELD.fullmatch(field) is None:
            wrong(
                "declaration",
                "args",
                "%r is no name of an argument. Write it as chunked_prefill_size." % show(str(key)),
            )
        elif field in OWN_VARIABLE:
            wrong(
                "duplicate", "args", "%s may not be set here: change %s instead." % (key, variable(OWN_VARIABLE[field]))
            )
        elif field == "config":
            wrong("duplicate", "args", "config may not be set here: each of its entries has a name of its own.")
        elif field.startswith("speculative_") and field[len("speculative_") :] in speculative_keys:
            wrong(
                "duplicate",
                "args",
                "%s is set here and in %s (%s). Keep one of them."
                % (field, speculative.VARIABLE, field[len("speculative_") :]),
            )
    names = [field_name(str(key)) for key in declaration.args]
    for name in sorted({name for name in names if names.count(name) > 1}):
        wrong("duplicate", "args", "%s is set twice, in two spellings." % name)


def field_name(key: str) -> str:
    """C(--chunked-prefill-size), C(chunked-prefill-size) and C(chunked_prefill_size) are the same argument."""
    return key.lstrip("-").replace("-", "_").lower()


def environment_text(value: t.Any) -> str | None:
    """A YAML value as an environment variable's text; None when it cannot be one."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str) and not set(value) & {"\n", "\r", "\0"}:
        return value
    return None
