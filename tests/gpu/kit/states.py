# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The starting states: who holds what, who may be ended, who must live, and what would be the truth afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Named in option protect where a state says so.
COLLEAGUE = "colleague.py"


@dataclass(frozen=True)
class Actor:
    """One process that is started for a trial."""

    label: str
    #: Minor of the GPU whose memory it takes.
    gpu: int = 0
    mib: int = 4096
    behaviour: str = "plain"
    #: Name of the script that python3 runs; ignored where there is a title.
    script: str = "train.py"
    #: What it calls itself, instead of a Python command line.
    title: str = ""
    #: CUDA_VISIBLE_DEVICES; None: unset.
    visible: str | None = None
    #: It has the nodes of all GPUs open, whatever it uses.
    nodes: bool = False
    #: In a PID namespace of its own, below that of the trial.
    namespace: bool = False
    #: Outside of the trial's PID namespace: out of everybody's sight there.
    outside: bool = False
    #: It must live.
    spared: bool = False
    #: Ended as soon as all stand: what is tested is what it leaves.
    dies: bool = False


@dataclass(frozen=True)
class State:
    name: str
    text: str
    actors: tuple[Actor, ...] = ()
    #: How many GPUs it takes.
    gpus: int = 1
    #: Options of the modules; devices holds for the other tools too, as far as they know such a thing.
    scope: str = "all"
    devices: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    #: Whether the GPUs can be free afterwards, if only what may be ended is ended.
    can_be_free: bool = True


def sglang(gpu: int, *, spared: bool, visible: str | None, suffix: str = "") -> tuple[Actor, ...]:
    """What stays of a server when its main process is gone: the scheduler has the memory; the detokenizer has only
    initialised CUDA, and NVML never lists it."""
    common = {"gpu": gpu, "visible": visible, "spared": spared, "nodes": True}
    return (
        Actor("scheduler" + suffix, title="sglang::scheduler_TP0", **common),
        Actor("detokenizer" + suffix, title="sglang::detokenizer", mib=0, **common),
    )


STATES = (
    State("idle", "nobody holds a GPU"),
    State("plain", "one CUDA process", (Actor("job"),)),
    State("server", "scheduler and detokenizer of an SGLang server whose main process is gone",
          sglang(0, spared=False, visible=None), scope="match"),
    State("heir", "a forked child whose parent is gone: NVML names the dead parent", (Actor("job", behaviour="heir"),)),
    State("leaderless", "a worker whose main thread has ended, a CUDA thread lives: a zombie with memory",
          (Actor("job", behaviour="leaderless", title="worker"),)),
    State("stubborn", "a CUDA process that ignores TERM", (Actor("job", behaviour="stubborn"),),
          options={"term_timeout": 1.0}),
    State("namespace", "a CUDA process that is process 1 of its own PID namespace",
          (Actor("job", behaviour="polite", namespace=True),)),
    State("protected", "two CUDA processes on one GPU, one of them protected",
          (Actor("job"), Actor("colleague", mib=1024, script=COLLEAGUE, spared=True)),
          options={"protect": [COLLEAGUE]}, can_be_free=False),
    State("out-of-sight", "a CUDA process in a PID namespace that nobody here sees",
          (Actor("foreigner", mib=8192, outside=True, spared=True),), can_be_free=False),
    State("neighbour", "a crashed server on GPU 0; one on GPU 1 serves, with all nodes open",
          sglang(0, spared=False, visible="0") + sglang(1, spared=True, visible="1", suffix=" of GPU 1"),
          gpus=2, scope="match", devices=("0",)),
)  # fmt: skip


def named(names: str) -> list[State]:
    """The states of these names, comma-separated; all when empty. Raises KeyError on an unknown one."""
    known = {state.name: state for state in STATES}
    return [known[name] for name in names.split(",")] if names else list(STATES)
