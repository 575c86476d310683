# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Programs that hold GPUs and must live: spared by their whole name, confirmed by what they really are.

A name is what the kernel calls the process (cut to 15 bytes), and must agree with the program file, or, for a script,
with the script's: C(python3 /opt/dcgm-exporter-report/train.py) is no dcgm-exporter, nor is a trainer that calls itself
one. Why they must live: a killed dcgm-exporter froze a GPU (dcgm-exporter#84); without nvidia-persistenced the next
last client resets clocks and power caps (NVIDIA driver persistence documentation).
"""

from __future__ import annotations

import os
import re
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.table import Process
from .nvml import CHILD_NAME

_COMM_BYTES = 15


class Family(t.NamedTuple):
    """Names of one program: the kernel's name may be one of them and the file's another (kvm, qemu-system-x86_64)."""

    names: tuple[str, ...]
    why: str
    pattern: str = ""


_DAEMON = "a daemon of the NVIDIA driver"
_MONITOR = "a monitoring tool"
_DISPLAY = "a display server or compositor"
_MPS = "the CUDA MPS daemon (end it with: echo quit | nvidia-cuda-mps-control)"
_FAMILIES = (
    *(
        Family((name,), _DAEMON)
        for name in (
            "nvidia-persistenced",
            "nvidia-powerd",
            "nv-fabricmanager",
            "nvidia-imex",
            "nvidia-device-plugin",
            "gpu-feature-discovery",
            "nvidia-mig-manager",
            "nvidia-container-cli",
        )
    ),
    Family(("nv-hostengine",), _MONITOR),
    Family(("nvsm",), _MONITOR, r"nvsm[_-][A-Za-z0-9_-]+"),
    *(
        Family((name,), _MONITOR)
        for name in (
            "dcgm-exporter",
            "dcgmi",
            "nvidia_gpu_exporter",
            "nvidia-smi",
            "nvidia-settings",
            "nvtop",
            "nvitop",
            "gpustat",
            "gpud",
            "btop",
        )
    ),
    Family(("Xorg", "X"), _DISPLAY),
    *(
        Family((name,), _DISPLAY)
        for name in (
            "Xwayland",
            "gnome-shell",
            "mutter",
            "kwin_wayland",
            "kwin_x11",
            "plasmashell",
            "cinnamon",
            "weston",
            "sway",
            "Hyprland",
            "wayfire",
            "labwc",
            "cosmic-comp",
        )
    ),
    Family(("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"), _MPS),
    Family(("kvm", "qemu-kvm"), "a virtual machine", r"qemu-system-[A-Za-z0-9_]+"),
)
_INTERPRETER = re.compile(r"(?:python[\d.]*|pypy[\d.]*|perl[\d.]*|ruby[\d.]*|node|bash|dash|sh)")


def cut(name: str) -> str:
    """A name as the kernel keeps it: at most 15 bytes."""
    return name.encode("utf-8", "surrogateescape")[:_COMM_BYTES].decode("utf-8", "surrogateescape")


def program_names(process: Process) -> set[str]:
    """Base names of what is really run: the program file; for an interpreter that was started on a script, the script.

    The first word of the command line, which a process may rewrite, counts only where the file cannot be read.
    """
    argv = process.argv
    exe = process.exe
    if exe is None:
        return {os.path.basename(argv[0])} if argv else set()
    name = os.path.basename(exe)
    if _INTERPRETER.fullmatch(name) and len(argv) > 1 and _INTERPRETER.fullmatch(os.path.basename(argv[0])):
        script = argv[1]
        return {os.path.basename(script)} if not script.startswith("-") else {name}
    return {name}


def _is(family: Family, name: str, short: bool) -> bool:
    if short:
        if name in [cut(other) for other in family.names]:
            return True
        # A cut name of a family that is known by a pattern is as much of it as the kernel keeps.
        return bool(family.pattern) and re.fullmatch(family.pattern, name) is not None
    return name in family.names or (bool(family.pattern) and re.fullmatch(family.pattern, name) is not None)


def is_mps(process: Process) -> bool:
    """Whether it is the MPS control daemon or server."""
    return safe_reason(process) == _MPS


def is_own_child(process: Process) -> bool:
    """Whether another run of this collection asks NVML through it."""
    return process.comm == CHILD_NAME and any(_INTERPRETER.fullmatch(name) for name in _interpreter(process))


def _interpreter(process: Process) -> list[str]:
    return [os.path.basename(name) for name in [process.exe or "", *process.argv[:1]] if name]


def check_protect(names: t.Iterable[str]) -> None:
    """Raises CleanslateError when one of them can be nobody's name, so that it would protect nobody."""
    for name in names:
        if not name.strip() or name == "/" or any(letter in name for letter in "*?"):
            raise CleanslateError(
                "protect: %r protects nobody. Names are compared whole, there are no wildcards: write a program's name "
                "or path, or a process's title." % show(name),
                option="protect",
            )


def safe_reason(process: Process, protect: t.Iterable[str] = ()) -> str | None:
    """Why this process is spared by its name, None when it is not.

    C(protect) are more whole names: of the process, its title, its program or its script.
    """
    programs = program_names(process)
    for family in _FAMILIES:
        if _is(family, process.comm, True) and any(_is(family, name, False) for name in programs):
            return family.why
    argv = process.argv
    own = programs | {process.title, os.path.basename(process.title), os.path.basename(process.exe or "")}
    if len(argv) > 1 and _INTERPRETER.fullmatch(os.path.basename(argv[0])):
        own.add(os.path.basename(argv[1]))
    for name in protect:
        if (name and name in own) or (len(name.encode()) <= _COMM_BYTES and name == process.comm):
            return "named in protect"
    if is_own_child(process):
        return "another run of this collection looks at the GPUs through it"
    return None
