# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Declared = running: every process of an instance against the declared environment, the server's own account of
itself against the declared arguments.

Facts (sglang 0.5.23: srt/entrypoints/engine.py, srt/arg_groups/attention_hook.py, parallel_hook.py): SGLang itself
writes some variables before it starts its workers; those are told apart from what somebody else changed.
"""

from __future__ import annotations

import json
import typing as t

from ..common.text import HIDDEN, is_secret_name, show
from ..proc.table import Process
from . import command
from .http import Reply
from .models import is_local
from .roles import Role, role_of

ENVIRONMENT = "environment "


class OwnRule(t.NamedTuple):
    """A variable that SGLang writes: when, what, why."""

    name: str
    #: Switches of which one must be declared for the rule to hold; empty: always.
    flags: tuple[str, ...]
    #: Whether it overrules a declared value; otherwise it only fills a gap.
    overrules: bool
    #: None: any value.
    value: str | None
    why: str


OWN_RULES = (
    OwnRule("CUDA_DEVICE_MAX_CONNECTIONS", (), True, "8", "SGLang always sets 8"),
    OwnRule("NCCL_CUMEM_ENABLE", ("--enable-symm-mem",), True, "1", "--enable-symm-mem sets 1"),
    OwnRule("NCCL_NVLS_ENABLE", ("--enable-symm-mem", "--enable-nccl-nvls"), True, "1", "NVLS was asked for by a flag"),
    OwnRule("NCCL_CUMEM_ENABLE", (), False, None, "SGLang sets it where nothing is declared"),
    OwnRule("NCCL_NVLS_ENABLE", (), False, None, "SGLang sets it where nothing is declared"),
    OwnRule("NCCL_GRAPH_MIXING_SUPPORT", (), False, "0", "SGLang sets it with decode context parallelism"),
    OwnRule("NCCL_GRAPH_REGISTER", (), False, "0", "SGLang sets it in memory-saver and LM-head modes"),
    OwnRule("NCCL_ALGO", ("--enable-deterministic-inference",), True, None, "--enable-deterministic-inference decides"),
    OwnRule(
        "NCCL_MIN_NCHANNELS",
        ("--enable-deterministic-inference",),
        True,
        None,
        "--enable-deterministic-inference decides",
    ),
    OwnRule(
        "NCCL_MAX_NCHANNELS",
        ("--enable-deterministic-inference",),
        True,
        None,
        "--enable-deterministic-inference decides",
    ),
)


def own_rule(name: str, actual: str, declared: bool, flags: t.Container[str]) -> OwnRule | None:
    """The rule by which SGLang itself explains this value."""
    for rule in OWN_RULES:
        if rule.name != name or (rule.flags and not any(flag in flags for flag in rule.flags)):
            continue
        if declared and not rule.overrules:
            continue
        if rule.value is None or rule.value == actual:
            return rule
    return None


def prove_process(process: Process, role: Role, declared: t.Mapping[str, str], salt: str) -> dict[str, t.Any]:
    """One process: C(missing), C(different), C(set_by_sglang); C(readable) false proves nothing.

    C(declared): the recorded state (command.declared_state); secrets are compared by fingerprint and never shown.
    """
    row: dict[str, t.Any] = {
        "pid": process.pid,
        "start_time": process.start_time,
        "role": role.kind,
        "rank": role.rank,
        "readable": process.environ is not None,
        "checked": 0,
        "missing": [],
        "different": [],
        "set_by_sglang": [],
    }
    environ = process.environ
    if environ is None:
        return row
    wanted = {key[len(ENVIRONMENT) :]: value for key, value in declared.items() if key.startswith(ENVIRONMENT)}
    flags = set(declared)
    for name, value in sorted(wanted.items()):
        row["checked"] += 1
        hidden = value.startswith("hidden:")
        actual = environ.get(name)
        if actual is None:
            row["missing"].append(name)
            continue
        same = command.fingerprint(salt, actual) == value if hidden else actual == value
        if same:
            continue
        rule = own_rule(name, actual, True, flags)
        found: dict[str, t.Any] = {
            "name": name,
            "requested": HIDDEN if hidden else show(value),
            "effective": HIDDEN if hidden or is_secret_name(name) else show(actual),
        }
        if rule is not None:
            row["set_by_sglang"].append(dict(found, reason=rule.why))
        else:
            row["different"].append(found)
    for name in sorted(environ):
        known = any(rule.name == name for rule in OWN_RULES)
        if name in wanted or not (name.startswith("NCCL_") or known):
            continue
        rule = own_rule(name, environ[name], False, flags)
        found = {"name": name, "requested": None, "effective": show(environ[name])}
        if rule is not None:
            row["set_by_sglang"].append(dict(found, reason=rule.why))
        elif name.startswith("NCCL_"):
            # Nobody declared it: it came with the machine, and it steers the server all the same.
            row["different"].append(found)
    return row


#: Arguments that SGLang changes by its own rules, with the reason; what it makes of them is shown, not refused.
ADJUSTED = {
    "speculative_num_draft_tokens": "with eagle_topk 1 it is num_steps + 1",
    "speculative_algorithm": "NEXTN is another name of EAGLE",
    "max_running_requests": "limited by memory and by speculation",
    "mem_fraction_static": "adjusted to the model",
    "chunked_prefill_size": "adjusted to the attention back end",
    "page_size": "adjusted to the attention back end",
    "attention_backend": "adjusted to the model",
    "enable_dp_attention": "replaced by attn_dp_size",
    "disable_overlap_schedule": "switched by other arguments",
    "enable_mixed_chunk": "switched off by speculation",
    "schedule_conservativeness": "adjusted by attention data parallelism",
}
#: Names of models, which SGLang replaces by where it put what it fetched (a bucket, a repository), or by what it found
#: in them (a GGUF file); a folder of the node stays what it is.
_MODELS = frozenset(["model_path", "tokenizer_path", "speculative_draft_model_path"])


def compare_arguments(requested: t.Mapping[str, t.Any], effective: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Each declared argument against the server's own account: C(equal), and C(reason) where SGLang changes it."""
    out: list[dict[str, t.Any]] = []
    for field, wanted in requested.items():
        if field not in effective or is_secret_name(field):
            continue
        actual = effective[field]
        if field == "served_model_name" and isinstance(actual, list):
            actual = actual[0] if len(actual) == 1 else actual
        row = {"argument": field, "requested": wanted, "effective": actual, "equal": same(wanted, actual)}
        if not row["equal"] and field in ADJUSTED:
            row["reason"] = ADJUSTED[field]
        elif not row["equal"] and field in _MODELS and not _stays(str(wanted)):
            row["reason"] = "SGLang replaces it by the local copy"
        out.append(row)
    return out


def _stays(path: str) -> bool:
    return is_local(path) and not path.lower().endswith(".gguf")


def same(wanted: t.Any, actual: t.Any) -> bool:
    """Equality across YAML, command line and JSON: C(1) is C("1"), a list is its words, a dictionary its JSON text."""
    if wanted == actual and isinstance(wanted, bool) == isinstance(actual, bool):
        return True
    if isinstance(wanted, bool) or isinstance(actual, bool):
        return (wanted is True and str(actual).lower() == "true") or (wanted is False and actual in (None, "false"))
    if isinstance(wanted, (int, float)) and isinstance(actual, (int, float)):
        return abs(float(wanted) - float(actual)) < 1e-9
    if isinstance(wanted, dict):
        try:
            return bool((json.loads(actual) if isinstance(actual, str) else actual) == wanted)
        except ValueError:
            return False
    if isinstance(wanted, (list, tuple)) and isinstance(actual, (list, tuple)):
        return [str(item) for item in wanted] == [str(item) for item in actual]
    human = str(wanted).strip().lower()
    factor = {"k": 1000, "m": 1000000}.get(human[-1:], 0)
    if factor and human[:-1].isdigit() and isinstance(actual, int):
        return actual in (int(human[:-1]) * factor, int(human[:-1]) * (1024 if factor == 1000 else 1024 * 1024))
    return str(wanted) == str(actual)


def account_of(reply: Reply) -> dict[str, t.Any]:
    """What /server_info says, without what must not be shown."""
    if not reply.ok or not isinstance(reply.body, dict):
        return {}
    return {key: value for key, value in reply.body.items() if not is_secret_name(key) and key != "launch_command"}


class Account(t.NamedTuple):
    """What a server says of itself. C(values) None: it was too busy to say anything."""

    values: dict[str, t.Any] | None
    note: str = ""


def hear(reply: Reply, earlier: t.Mapping[str, t.Any] | None) -> Account:
    """An answer of /server_info, which waits for the scheduler: a server that is busy for too long is no other one for
    that, and what it said after its launch (C(earlier)) still holds, for arguments do not change."""
    if reply.error != "timeout":
        return Account(account_of(reply))
    if earlier:
        return Account(dict(earlier), "The server was too busy to say how it runs: what it said earlier was compared.")
    return Account(None, "The server was too busy to say how it runs: its arguments were not compared.")


def prove_members(
    members: t.Sequence[Process],
    main_pid: int,
    supervisor: int,
    declared: t.Mapping[str, str],
    salt: str,
) -> list[dict[str, t.Any]]:
    """All processes that run the server; its supervisor is ours, has nothing of the declaration and is left out."""
    rows = []
    for process in sorted(members, key=lambda p: p.pid):
        role = role_of(process, main_pid, supervisor)
        if role.kind != "supervisor":
            rows.append(prove_process(process, role, declared, salt))
    return rows


def verdict(
    rows: t.Sequence[t.Mapping[str, t.Any]],
    arguments: t.Sequence[t.Mapping[str, t.Any]],
    wanted_workers: int,
    account: t.Mapping[str, t.Any] | None,
) -> list[str]:
    """What is not as declared, in sentences; empty when everything is proven. C(account) None: it was too busy."""
    out: list[str] = []
    workers = [row for row in rows if row["role"] == "scheduler"]
    if len(workers) != wanted_workers:
        out.append("%d workers are declared, %d run." % (wanted_workers, len(workers)))
    for row in rows:
        who = "process %d (%s%s)" % (row["pid"], row["role"], " " + row["rank"] if row["rank"] else "")
        if not row["readable"]:
            out.append("%s: its environment cannot be read; run the play as root or as the server's user." % who)
        if row["missing"]:
            out.append("%s: %s did not arrive." % (who, ", ".join(row["missing"])))
        for item in row["different"]:
            if item["requested"] is None:
                out.append("%s: %s=%s was declared by nobody." % (who, item["name"], item["effective"]))
            else:
                out.append("%s: %s is %s, declared is %s." % (who, item["name"], item["effective"], item["requested"]))
    if account is not None and not account:
        out.append("The server did not say how it runs (/server_info).")
    for item in arguments:
        if not item["equal"] and not item.get("reason"):
            out.append(
                "%s is %s, declared is %s."
                % (item["argument"], show(str(item["effective"])), show(str(item["requested"])))
            )
    return out
