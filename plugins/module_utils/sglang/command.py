# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""From a declaration to what is started: command line, environment, and the one file that holds keys.

No key is ever part of the command line, where every user of the machine could read it: SGLang reads keys from a YAML
file as well (C(--config FILE), two words; srt/utils/server_args_config_parser.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import typing as t

from ..common.text import HIDDEN, is_secret_name, redact_value
from . import nccl as nccl_rules
from . import speculative as speculative_rules
from .declaration import Declaration, environment_text, field_name

MODULE = "sglang.launch_server"
#: Switches with an off form of their own (argparse.BooleanOptionalAction in sglang 0.5.23): false is said.
PAIRED = frozenset(
    """
    dcp_replicate_q_proj dllm_fdfo enable_decoder_swa_bounded_replay enable_dsa_fused_indexer
    enable_fused_qk_norm_rope enable_tf32_matmul enable_tp_lm_head_all_to_all experts_shared_outer_loras
    lora_strict_loading mm_enable_dp_encoder ple_offload_embedding speculative_enable_w4a4_mxfp4_megamoe
    """.split()
)
#: Arguments whose list is one JSON text and not several words (C(json_list_type) in sglang 0.5.23).
JSON_LISTS = frozenset(
    """
    decoupled_spec_connect_endpoints forward_hooks remote_instance_weight_loader_send_weights_group_ports sidecar_args
    """.split()
)


@dataclasses.dataclass
class Command:
    """What is started."""

    argv: list[str]
    #: What the declaration adds to the plain environment (see base_environment).
    environment: dict[str, str]
    #: Arguments that go into the 0600 file, by flag without dashes.
    config: dict[str, str]
    secrets: list[str]

    def shown_argv(self) -> list[str]:
        return [redact_value(word, self.secrets) for word in self.argv]

    def shown_environment(self) -> dict[str, str]:
        return {
            name: HIDDEN if is_secret_name(name) else redact_value(value, self.secrets)
            for name, value in sorted(self.environment.items())
        }

    def config_text(self) -> str:
        """The file's content: JSON, which is YAML too, and has one way to quote."""
        return json.dumps(self.config, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def words(field: str, value: t.Any) -> list[str]:
    """One argument as it is written on a command line. Null and a switch that is off are no words at all.

    Lists are several words, or one JSON text where the argument takes JSON; dictionaries are JSON.
    """
    flag = "--" + field.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        if value:
            return [flag]
        return ["--no-" + field.replace("_", "-")] if field in PAIRED else []
    if isinstance(value, dict) or (isinstance(value, (list, tuple)) and field in JSON_LISTS):
        return [flag, json.dumps(value, sort_keys=True, separators=(",", ":"))]
    if isinstance(value, (list, tuple)):
        return [flag, *(json.dumps(v, sort_keys=True) if isinstance(v, (dict, list)) else _plain(v) for v in value)]
    return [flag, _plain(value)]


def _plain(value: t.Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return "%.1f" % value
    return str(value)


def is_secret(field: str, value: t.Any) -> bool:
    """Whether an argument goes into the file for keys. A switch or a number is none, whatever it is called."""
    return is_secret_name(field) and isinstance(value, str)


def arguments(declaration: Declaration) -> dict[str, t.Any]:
    """Every declared argument by field name, in the order in which they are written; without keys."""
    out: dict[str, t.Any] = {
        "model_path": declaration.model_path,
        "served_model_name": declaration.served_model_name,
        "host": declaration.host,
        "port": declaration.port,
        "tp_size": declaration.tp_size,
        "pp_size": declaration.pp_size if declaration.pp_size != 1 else None,
        "dp_size": declaration.dp_size if declaration.dp_size != 1 else None,
        "mem_fraction_static": declaration.mem_fraction_static,
        "attention_backend": declaration.attention_backend,
    }
    given = {field_name(str(key)): value for key, value in declaration.speculative.items()}
    rest = sorted(set(given) - set(speculative_rules.ORDER))
    for key in (*speculative_rules.ORDER, *rest):
        if key in given:
            value = given[key]
            out["speculative_" + key] = value.upper() if key == "algorithm" and isinstance(value, str) else value
    for key in sorted(declaration.args, key=lambda k: field_name(str(k))):
        field = field_name(str(key))
        if not is_secret(field, declaration.args[key]):
            out[field] = declaration.args[key]
    return {field: value for field, value in out.items() if value is not None}


def build(
    declaration: Declaration, python: str, gpus: t.Sequence[str], nccl: t.Mapping[str, str], config_path: str
) -> Command:
    """Put the command together. C(gpus): UUIDs in the declared order; C(nccl): the effective set by full name."""
    argv = [python, "-m", MODULE]
    for field, value in arguments(declaration).items():
        argv += words(field, value)
    config: dict[str, str] = {}
    if declaration.api_key:
        config["api-key"] = declaration.api_key
    if declaration.admin_api_key:
        config["admin-api-key"] = declaration.admin_api_key
    for key, value in declaration.args.items():
        field = field_name(str(key))
        if is_secret(field, value):
            config[field.replace("_", "-")] = _plain(value)
    if config:
        argv += ["--config", config_path]
    environment = {
        name: text
        for name, text in ((str(k), environment_text(v)) for k, v in declaration.environment.items() if v is not None)
        if text is not None
    }
    environment.update(nccl)
    gloo = nccl_rules.gloo_interface(nccl)
    if gloo is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", gloo)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # setproctitle writes over the environment of titled workers unless told not to; the proof reads it.
    environment["SPT_NOENV"] = "1"
    environment["CLEANSLATE_INSTANCE"] = declaration.name
    return Command(argv, environment, config, declaration.secrets())


def base_environment(python: str, home: str, user: str) -> dict[str, str]:
    """What every launched process gets beside the declaration: the same for each back end, nothing of the caller's.

    Compiled kernels survive a restart: torch keeps its own below /tmp unless told otherwise.
    """
    folder = os.path.dirname(python)
    path = [
        folder,
        "/usr/local/cuda/bin",
        "/usr/local/sbin",
        "/usr/local/bin",
        "/usr/sbin",
        "/usr/bin",
        "/sbin",
        "/bin",
    ]
    return {
        "PATH": ":".join(dict.fromkeys(path)),
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(home, ".cache", "sglang", "torchinductor"),
    }


def fingerprint(salt: str, value: str) -> str:
    """Tells whether a secret has changed without keeping it: a keyed digest, the key lives in the 0600 record only."""
    return "hidden:" + hmac.new(salt.encode("ascii"), value.encode("utf-8"), hashlib.sha256).hexdigest()


def declared_state(
    declaration: Declaration, command: Command, version: str, salt: str, extra: t.Mapping[str, str] | None = None
) -> dict[str, str]:
    """Everything that makes one launch differ from another, flat, by a name that people understand.

    Secrets are replaced by fingerprints, so that a rotated key is a change. This is what records keep and compare.
    """
    out = {"python": command.argv[0], "sglang version": version, "backend": declaration.backend}
    if declaration.user:
        out["user"] = declaration.user
    for field, value in arguments(declaration).items():
        said = words(field, value)
        if said:
            out["--" + field.replace("_", "-")] = " ".join(said[1:]) if len(said) > 1 else said[0]
    for name, value in command.config.items():
        out["--" + name] = fingerprint(salt, value)
    for name, value in command.environment.items():
        secret = is_secret_name(name) or redact_value(value, command.secrets) != value
        out["environment " + name] = fingerprint(salt, value) if secret else value
    out.update(extra or {})
    return out


def digest(state: t.Mapping[str, str], environment: bool) -> str:
    """Digest of the environment's half of a declared state, or of the rest."""
    part = {k: v for k, v in state.items() if k.startswith("environment ") is environment}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode("utf-8")).hexdigest()


def changes(before: t.Mapping[str, str], after: t.Mapping[str, str]) -> list[dict[str, str | None]]:
    """Per key, what differs between two declared states; secrets only as changed."""

    def shown(value: str | None) -> str | None:
        return HIDDEN if value is not None and value.startswith("hidden:") else value

    out: list[dict[str, str | None]] = []
    for key in sorted(set(before) | set(after)):
        if before.get(key) != after.get(key):
            out.append({"key": key, "before": shown(before.get(key)), "after": shown(after.get(key))})
    return out
