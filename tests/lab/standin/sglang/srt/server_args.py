# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The server's arguments: argparse over the flag table, then the rules that the resolver enforces.

As in the real package, prepare_server_args() only parses; resolve_once() and check_server_args() judge.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from decimal import Decimal

logger = logging.getLogger(__name__)

TABLE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "flags.json")


# -- Value types. argparse names them in its messages: the names are the real ones. ------------------------------------


def loads(value):
    return json.loads(value)


def nullable_str(value):
    return None if not value or value == "None" else value


def human_readable_int(value):
    value = value.strip()
    factor = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", value)
    if match:
        number, suffix = match.groups()
        if "." in number and suffix.endswith("i"):
            raise argparse.ArgumentTypeError(
                f"Decimals are not allowed with IEC suffixes like '{suffix}'. Use an integer IEC value such as "
                f"'{int(Decimal(number))}{suffix}', or an SI value such as '{number}{suffix[0]}'."
            )
        return int(Decimal(number) * factor[suffix])
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"Invalid integer value: '{value}'. Use a plain integer, SI suffixes (1k, 1M), or IEC suffixes (1Ki, 1Mi). "
            "Suffixes are case-sensitive."
        ) from None


def json_list_type(value):
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"Invalid JSON list: {value}. Please provide a valid JSON list.") from None


def parse_cuda_graph_backend_arg(value):
    if value == "tc_piecewise":
        raise argparse.ArgumentTypeError("tc_piecewise was removed; select breakable, full, or disabled")
    return value


GRAPH_KEYS = {
    "decode": ("backend", "max_bs", "bs"),
    "prefill": (
        "backend", "max_bs", "bs", "max_context_size", "full_prefill_max_req", "full_prefill_prefix_chunk_tokens",
        "max_seq_len",
    ),
}  # fmt: skip


def parse_cuda_graph_config_arg(value):
    flag = "--cuda-graph-config"
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{flag} must be JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{flag} must be a JSON object, got {type(parsed).__name__}")
    for phase, settings in parsed.items():
        if phase not in GRAPH_KEYS:
            raise argparse.ArgumentTypeError(f"{flag}: unknown phase '{phase}', expected one of {tuple(GRAPH_KEYS)}")
        if not isinstance(settings, dict):
            kind = type(settings).__name__
            raise argparse.ArgumentTypeError(f"{flag}['{phase}'] must be a JSON object, got {kind}")
        if "backend" in settings:
            parse_cuda_graph_backend_arg(settings["backend"])
        for key in settings:
            if key not in GRAPH_KEYS[phase]:
                raise argparse.ArgumentTypeError(
                    f"{flag}['{phase}']: unknown key '{key}', expected one of {GRAPH_KEYS[phase]}"
                )
    return parsed


TYPES = {
    "str": str, "int": int, "float": float, "loads": loads, "nullable_str": nullable_str,
    "human_readable_int": human_readable_int, "json_list_type": json_list_type,
    "parse_cuda_graph_backend_arg": parse_cuda_graph_backend_arg,
    "parse_cuda_graph_config_arg": parse_cuda_graph_config_arg,
}  # fmt: skip


# -- Actions that argparse does not have ------------------------------------------------------------------------------


class LoRAPathAction(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        paths = []
        for value in values or ():
            value = value.strip()
            if value.startswith("{") and value.endswith("}"):
                entry = json.loads(value)
                assert "lora_path" in entry and "lora_name" in entry, (
                    f"{value!r} looks like a JSON str, but it does not contain 'lora_name' and 'lora_path' keys."
                )
                paths.append(entry)
            else:
                paths.append(value)
        setattr(namespace, self.dest, paths)


class Deprecated(argparse.Action):
    """A retired flag: warns, names its successor, stores a fixed value."""

    def __init__(self, option_strings, dest, new_flag=None, const_value=True, nargs=0, **kwargs):
        self.new_flag, self.const_value = new_flag, const_value
        super().__init__(option_strings, dest, nargs=nargs, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        logger.warning(
            "\033[1;33m'%s' is deprecated and will be removed in a future release. Use '%s' instead.\033[0m",
            option_string,
            self.new_flag,
        )
        setattr(namespace, self.dest, self.const_value)


ACTIONS = {
    "_StoreTrueAction": "store_true",
    "BooleanOptionalAction": argparse.BooleanOptionalAction,
    "LoRAPathAction": LoRAPathAction,
    "DeprecatedStoreTrueAction": Deprecated,
    "DeprecatedStoreConstAction": Deprecated,
}


def read_table():
    with open(TABLE, encoding="utf-8") as table:
        return json.load(table)


def make_parser(table):
    """The real parser's twin: same flags in the same order, so that it refuses with the same message."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    for row in table["flags"]:
        row = dict(row)
        flags, action = row.pop("flags"), row.pop("action", None)
        if action is not None:
            row["action"] = ACTIONS[action]
        if action == "DeprecatedStoreConstAction":
            row.setdefault("nargs", None)
        if action == "DeprecatedStoreTrueAction":
            row.pop("nargs")
        if "type" in row:
            row["type"] = TYPES[row["type"]]
        parser.add_argument(*flags, **row)
    return parser


# -- --config FILE.yaml ------------------------------------------------------------------------------------------------


def read_config(path):
    suffix = os.path.splitext(path)[1]
    if suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be YAML format, got: {suffix}")
    if not os.path.exists(path):
        raise ValueError(f"Config file not found: {path}")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        import yaml
    except ImportError:
        # JSON is YAML, too; without PyYAML that is all we read.
        data = json.loads(text) if text.strip() else None
    else:
        data = yaml.safe_load(text)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError("Config file must contain a dictionary at root level")
    return data


def merge_config(parser, argv):
    """Replace `--config FILE` by what the file says, before the other arguments: those win."""
    if argv.count("--config") > 1:
        raise ValueError("Multiple config files specified! Only one allowed.")
    at = argv.index("--config")
    if at == len(argv) - 1:
        raise ValueError("No config file specified after --config flag!")

    def keys(action):
        return {action.dest} | {o[2:].replace("-", "_") for o in action.option_strings if o.startswith("--")}

    flags = {key for a in parser._actions if isinstance(a, argparse._StoreTrueAction) for key in keys(a)}
    single = {
        key for a in parser._actions if isinstance(a, argparse._StoreAction) or a.nargs is None for key in keys(a)
    }
    refused = {}
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction) and "--config" not in action.option_strings:
            refused.update({key: action for key in keys(action) if key not in flags | single})
    words = []
    for key, value in read_config(argv[at + 1]).items():
        name = key.replace("-", "_")
        if name in refused:
            kind = {"Deprecated": "DeprecatedStoreTrueAction"}.get(
                type(refused[name]).__name__, type(refused[name]).__name__
            )
            raise ValueError(f"Unsupported config option '{name}' with action '{kind}'")
        if isinstance(value, bool) and name in flags:
            words += [f"--{key}"] if value else []
        elif isinstance(value, bool):
            words += [f"--{key}", str(value).lower()]
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words + argv[:at] + argv[at + 2 :]


# -- The record --------------------------------------------------------------------------------------------------------


class ServerArgs:
    """What was asked for, as attributes; what resolution makes of it, from resolved_dict()."""

    def __init__(self, values, launch_command=None):
        self.__dict__.update(values)
        self._names = list(values)
        self._launch_command = launch_command
        self._resolved = None
        self._failed = False

    @property
    def launch_command(self):
        return self._launch_command

    def __repr__(self):
        hidden = {"watermark_key", "watermark_key_b", "watermark_config"}
        return f"ServerArgs({', '.join(f'{n}={getattr(self, n)!r}' for n in self._names if n not in hidden)})"

    def resolve_once(self):
        """Apply the resolver's rules, once; the errors are the real ones (AssertionError, TypeError, ValueError)."""
        if self._resolved is not None:
            return
        if self._failed:
            raise RuntimeError("resolution already failed on this ServerArgs; build a new record")
        from sglang.standin.resolve import resolve

        self._failed = True
        self._resolved = resolve({name: getattr(self, name) for name in self._names})
        self._failed = False

    def check_server_args(self):
        """The checks that come after resolution."""
        from sglang.standin.resolve import check

        check(self._resolved)

    def resolved_dict(self):
        """Every field after resolution."""
        resolved = dict(self._resolved)
        resolved["enable_dp_attention"] = resolved["attn_dp_size"] > 1
        return resolved


def prepare_server_args(argv):
    """Parse a command line (without the program). Wrong ones end in argparse's message and exit code 2."""
    table = read_table()
    parser = make_parser(table)
    if "--config" in argv:
        argv = merge_config(parser, argv)
    parsed = parser.parse_args(argv)
    logging.basicConfig(
        level=getattr(logging, parsed.log_level.upper()),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    parsed._radix_eviction_policy_explicitly_set = any(
        word == "--radix-eviction-policy" or word.startswith("--radix-eviction-policy=") for word in argv
    )
    values = {}
    for name, *default in table["fields"]:
        values[name] = getattr(parsed, name, default[0] if default else None)
    return ServerArgs(values, launch_command=" ".join(argv))
