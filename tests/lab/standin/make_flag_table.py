#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write sglang/flags.json out of SGLang's own argument parser, or compare it with that parser.

    make_flag_table.py                 write the table
    make_flag_table.py --check         exit 1 and show the difference if the table is not what the parser says
    make_flag_table.py --venv DIR      keep the installed packages in DIR (default: a temporary folder)

It makes a virtual environment with `sglang` at the version below, without its dependencies (about 40 MB), and replaces
torch and the other heavy modules by hollow ones while the parser is imported: the parser declares flags, it computes
nothing. Help texts are left out: the table describes what is accepted.
"""

from __future__ import annotations

import abc
import argparse
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import venv

VERSION = "0.5.23"
PACKAGES = [f"sglang=={VERSION}", "msgspec", "packaging", "psutil", "pyyaml", "typing_extensions"]
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sglang", "flags.json")
HOLLOW = {
    "IPython", "PIL", "aiohttp", "fastapi", "huggingface_hub", "numpy", "orjson", "pybase64", "pydantic",
    "pydantic_core", "requests", "setproctitle", "sgl_kernel", "starlette", "torch", "tqdm", "transformers", "triton",
    "urllib3", "zmq",
}  # fmt: skip
HOLLOW_SUBPACKAGES = ("sglang.srt.distributed",)


class HollowType(abc.ABCMeta):
    """The class of names that look like classes: any attribute exists."""

    def __getattr__(cls, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return Hollow()


class HollowBase(metaclass=HollowType):
    """What a hollow class is when something inherits from it or calls it."""

    def __init__(self, *args, **kwargs):
        pass

    def __class_getitem__(cls, item):
        return cls


class Hollow(str):
    """Any value out of a hollow module: callable, comparable, false, a decorator when asked to be one."""

    def __new__(cls):
        return super().__new__(cls, "cpu")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Hollow()

    def __mro_entries__(self, bases):
        return (HollowBase,)

    def __getitem__(self, item):
        return Hollow()

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __int__(self):
        return 0

    __index__ = __int__

    def __or__(self, other):
        return Hollow()

    __ror__ = __or__

    def __lt__(self, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __neg__(self):
        return 0

    def __add__(self, other):
        return 0

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __add__


def make(name: str):
    if name == "__version__":
        return "999.0.0"
    return HollowType(name, (HollowBase,), {}) if name[:1].isupper() else Hollow()


class HollowModule(types.ModuleType):
    def __getattr__(self, name: str):
        # These names are asked for to find out whether a platform is there: it is not.
        if (name.startswith("__") and name != "__version__") or name in ("npu", "hpu", "musa", "mlu"):
            raise AttributeError(name)
        value = make(name)
        setattr(self, name, value)
        return value


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        inside = any(name == package or name.startswith(package + ".") for package in HOLLOW_SUBPACKAGES)
        if inside or name.split(".")[0] in HOLLOW:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = HollowModule(spec.name)
        module.__path__ = []
        module.__file__ = "<hollow>"
        return module

    def exec_module(self, module):
        pass


def import_parser():
    """SGLang's server_args module, imported over hollow dependencies."""
    # The folder of this script holds the stand-in, which is not what we are asking.
    sys.path[:] = [
        entry for entry in sys.path if entry and os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))
    ]
    sys.meta_path.insert(0, HollowFinder())
    import torch

    torch.__dict__["__version__"] = "2.14.1"
    torch.version = types.SimpleNamespace(hip=None, cuda=None, musa=None)
    for device in ("cuda", "xpu", "mps"):
        setattr(torch, device, types.SimpleNamespace(is_available=lambda: False, device_count=lambda: 0))
    # The package's __init__ imports the whole engine; its submodules are enough.
    spec = importlib.util.find_spec("sglang")
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    package.__version__ = VERSION
    sys.modules["sglang"] = package
    from sglang.srt import server_args

    return server_args


def plain(value):
    """A value as JSON can hold it. A set has no order of its own: sorted."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def describe(action: argparse.Action) -> dict:
    """One row of the table: what is not argparse's default."""
    options = [o for o in action.option_strings if not (o.startswith("--no-") and is_pair(action))]
    row = {"flags": options, "dest": action.dest}
    kind = type(action).__name__
    if kind != "_StoreAction":
        row["action"] = kind
    if action.type is not None:
        row["type"] = action.type.__name__
    for key in ("nargs", "const", "choices", "default", "metavar"):
        value = plain(getattr(action, key))
        implied = {
            "_StoreTrueAction": {"nargs": 0, "const": True, "default": False},
            "BooleanOptionalAction": {"nargs": 0},
        }
        if value is not None and implied.get(kind, {}).get(key) != value:
            row[key] = value
    if action.required:
        row["required"] = True
    for key in ("new_flag", "const_value"):
        if getattr(action, key, None) is not None:
            row[key] = getattr(action, key)
    return row


def is_pair(action: argparse.Action) -> bool:
    return type(action).__name__ == "BooleanOptionalAction"


def declared_default(server_args, name: str):
    """The default of a field that no flag sets, if JSON can hold it."""
    value = plain(server_args._declared_default(name))
    try:
        json.dumps(value)
    except TypeError:
        return None
    return value


def dump() -> str:
    """The table as text: a line for each flag, in the parser's order, and the record's fields in their order."""
    server_args = import_parser()
    parser = argparse.ArgumentParser(prog="sglang serve")
    server_args.ServerArgs.add_cli_args(parser)
    rows = [describe(action) for action in parser._actions if action.dest != "help"]
    by_flag = {action.dest for action in parser._actions}
    fields = []
    for field in server_args.record_fields(server_args.ServerArgs):
        fields.append(
            [field.name] if field.name in by_flag else [field.name, declared_default(server_args, field.name)]
        )
    lines = ["{", f' "version": {json.dumps(VERSION)},', ' "flags": [']
    lines.append(",\n".join("  " + json.dumps(row) for row in rows))
    lines += [" ],", ' "fields": [', ",\n".join("  " + json.dumps(field) for field in fields), " ]", "}", ""]
    return "\n".join(lines)


def run_in(folder: str) -> str:
    """Make the virtual environment in `folder` if it is not there, and dump with its interpreter."""
    python = os.path.join(folder, "bin", "python")
    if not os.path.exists(os.path.join(folder, f"sglang-{VERSION}")):
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        open(os.path.join(folder, f"sglang-{VERSION}"), "w").close()
    # A clean environment: choices of some flags depend on SGLANG_* variables.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "PYTHON"))}
    done = subprocess.run(
        [python, os.path.abspath(__file__), "--dump"], check=True, stdout=subprocess.PIPE, env=environment
    )
    return done.stdout.decode()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true")
    options.add_argument("--venv")
    options.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.dump:
        sys.stdout.write(dump())
        return 0
    if chosen.venv:
        table = run_in(os.path.abspath(chosen.venv))
    else:
        with tempfile.TemporaryDirectory(prefix="flag-table-") as folder:
            table = run_in(folder)
    if not chosen.check:
        with open(TABLE, "w", encoding="utf-8") as out:
            out.write(table)
        return 0
    with open(TABLE, encoding="utf-8") as present:
        difference = list(
            difflib.unified_diff(present.read().splitlines(), table.splitlines(), "table", "parser", "", "", 0)
        )
    print("\n".join(difference) or f"the table agrees with the parser of sglang {VERSION}")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
