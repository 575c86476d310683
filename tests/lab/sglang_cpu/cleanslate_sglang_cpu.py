# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the real SGLang run on a CPU, in a guest whose GPUs are stand-ins. A .pth file loads it whenever Python starts.

Two things, both by an import hook, so that `python -m sglang.launch_server` needs no wrapper:
- packages that a CPU server imports but never calls (torchvision, triton, …) are replaced by empty ones;
- a server's processes open the GPUs' device nodes when they import torch, and keep them, as CUDA does: the main process
  and its workers (spawned by multiprocessing), not its resource tracker, and nobody who is told to see no GPU.
"""

from __future__ import annotations

import glob
import importlib.abc
import importlib.machinery
import os
import sys
import types

EMPTY_PACKAGES = {"datasets", "torchvision", "torchaudio", "triton", "vllm"}
# Whoever asks whether a package is there, rather than for it, is told the truth.
SURVEYORS = ("transformers.", "importlib.metadata")
DEVICE_NODES = "/dev/nvidia*"
held: list[int] = []


class EmptyType(type):
    """A class with any attribute, good as a base class, an annotation and an exception that never comes."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return Nothing(f"{cls.__name__}.{name}")

    def __iter__(cls):
        return iter(())


class EmptyBase(metaclass=EmptyType):
    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls


class Nothing(str):
    """A value out of an empty package: may be called, indexed, compared, used as a decorator or a base class.

    As text it is "cpu": what SGLang asks triton for is mostly the name of the device.
    """

    def __new__(cls, name: str) -> Nothing:
        value = super().__new__(cls, "cpu")
        value.__dict__["__name__"] = name
        return value

    def __getattr__(self, name: str) -> object:
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return part_of(self.__dict__["__name__"], name)

    def __call__(self, *args: object, **options: object) -> object:
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]  # a decorator
        return Nothing(f"{self.__dict__['__name__']}()")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (EmptyBase,)

    def __getitem__(self, item: object) -> object:
        return Nothing(f"{self.__dict__['__name__']}[]")

    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __add__(self, other: object) -> int:
        return 0

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __add__

    def __index__(self) -> int:
        return 0

    __int__ = __index__


def part_of(package: str, name: str) -> object:
    full = f"{package}.{name}"
    return EmptyType(name, (EmptyBase,), {"__module__": package}) if name[:1].isupper() else Nothing(full)


class EmptyModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = part_of(self.__name__, name)
        setattr(self, name, value)
        return value


class EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is in EMPTY_PACKAGES, after everything else: an installed package goes first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in EMPTY_PACKAGES or asked_by_a_surveyor():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = f"<empty package {module.__name__}>"


def asked_by_a_surveyor() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib.") or name == "importlib.metadata":
            return (name + ".").startswith(SURVEYORS)
        frame = frame.f_back
    return False


class OnTorch(importlib.abc.MetaPathFinder):
    """Opens the GPUs at the first import of torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            sys.meta_path.remove(self)
            for node in sorted(glob.glob(DEVICE_NODES)):
                try:
                    held.append(os.open(node, os.O_RDWR | os.O_CLOEXEC))
                except OSError as error:
                    print(f"cannot open {node}: {error.strerror}", file=sys.stderr)


def serves() -> bool:
    """Whether this process is a server's main process or one of its workers."""
    words = sys.orig_argv
    if "--multiprocessing-fork" in words:
        return True
    if "-m" in words:
        return words[words.index("-m") + 1 : words.index("-m") + 2] == ["sglang.launch_server"]
    return any(os.path.basename(word) == "sglang" for word in words[:2]) and "serve" in words


sys.meta_path.append(EmptyPackages())
if serves() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.meta_path.insert(0, OnTorch())
