# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Modules pct_passthrough_info and pct_passthrough: look, tell, and for the second one mend the configurations.

A configuration is written as Proxmox VE itself writes it: under its lock (C(/run/lock/lxc/pve-config-VMID.lock),
PVE/AbstractConfig.pm, lock_config), to a draft beside it and renamed. The cluster file system takes no other modes than
its own, so none is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..state.files import Locked, ensure_dir, locked, make_dir, write_atomic
from .check import ERROR, Finding, check, mended
from .conf import parse_conf
from .devices import handed, shared_gpus
from .host import Device, GuestView, HostView, Place, conf_path, read_conf, view

_LOCK_SECONDS = 10.0


@dataclasses.dataclass
class Outcome:
    """What became of one container's configuration."""

    guest: GuestView
    before: str
    after: str
    done: list[Finding]
    backup: str = ""
    #: Why it was left as it is; empty when it was not.
    kept: str = ""


def choose(guests: t.Sequence[GuestView], wanted: t.Sequence[int]) -> list[GuestView]:
    """The containers that option C(containers) means, all when empty. Raises CleanslateError when one is not here."""
    known = {guest.vmid: guest for guest in guests}
    missing = sorted(set(wanted) - set(known))
    if missing:
        raise CleanslateError(
            "containers: %s: not on this node, or a template. Here are: %s."
            % (", ".join(map(str, missing)), ", ".join(map(str, sorted(known))) or "none")
        )
    return [known[vmid] for vmid in sorted(set(wanted))] if wanted else list(guests)


def look(params: t.Mapping[str, t.Any], place: Place | None = None) -> dict[str, t.Any]:
    """What pct_passthrough_info returns. Raises CleanslateError."""
    host, guests = view(place or Place())
    chosen = choose(guests, params["containers"])
    outcomes = [_predict(host, guest) for guest in chosen]
    return dict(describe(host, guests, chosen), changed=False, diff=_diffs(outcomes))


def mend(params: t.Mapping[str, t.Any], check_mode: bool, place: Place | None = None) -> dict[str, t.Any]:
    """What pct_passthrough returns. Raises CleanslateError."""
    place = place or Place()
    host, guests = view(place)
    chosen = choose(guests, params["containers"])
    outcomes: list[Outcome] = []
    for guest in chosen:
        outcome = _predict(host, guest)
        if outcome.done and not outcome.kept and not check_mode:
            outcome = _write(host, guest, params["backup_dir"], place)
        outcomes.append(outcome)
    changed = {outcome.guest.vmid: outcome for outcome in outcomes if outcome.done and not outcome.kept}
    if changed:
        guests = [_with_text(g, changed[g.vmid].after) if g.vmid in changed else g for g in guests]
    result = describe(host, guests, [guest for guest in guests if guest.vmid in {g.vmid for g in chosen}])
    return dict(
        result,
        changed=bool(changed),
        fixed=[
            {
                "vmid": vmid,
                "name": show(outcome.guest.name),
                "codes": sorted({finding.code for finding in outcome.done}),
                "backup_file": outcome.backup,
                # What a running container was given at its start stays until the next one.
                "restart": outcome.guest.running,
            }
            for vmid, outcome in sorted(changed.items())
        ],
        kept=[{"vmid": o.guest.vmid, "name": show(o.guest.name), "reason": o.kept} for o in outcomes if o.kept],
        diff=_diffs(outcomes),
    )


# -- mending -------------------------------------------------------------------------------------------------------


def _text(guest: GuestView) -> str:
    return "".join(line + "\n" for line in guest.conf.lines)


def _with_text(guest: GuestView, text: str) -> GuestView:
    conf = parse_conf(text)
    return dataclasses.replace(guest, conf=conf, handed=handed(conf))


def _predict(host: HostView, guest: GuestView) -> Outcome:
    after, done = mended(host, guest)
    outcome = Outcome(guest, _text(guest), after if done else _text(guest), done)
    if done and guest.conf.lock:
        outcome.kept = "it is locked (%s): wait for its end, or `pct unlock %d`" % (show(guest.conf.lock), guest.vmid)
    return outcome


def _write(host: HostView, guest: GuestView, backup_dir: str, place: Place) -> Outcome:
    """Mend what the file holds under the lock, which may be newer than what was looked at."""
    lock = place.path("/run/lock/lxc/pve-config-%d.lock" % guest.vmid)
    make_dir(os.path.dirname(lock))
    try:
        with locked(lock, _LOCK_SECONDS):
            conf = read_conf(place, guest.vmid)
            if conf is None:
                return Outcome(guest, _text(guest), _text(guest), [], kept="it went away meanwhile")
            outcome = _predict(host, dataclasses.replace(guest, conf=conf, handed=handed(conf)))
            if outcome.done and not outcome.kept:
                outcome.backup = _back_up(guest.vmid, outcome.before, backup_dir)
                _replace(place.path(conf_path(guest.vmid)), outcome.after)
            return outcome
    except Locked:
        kept = "its configuration is being changed by another program for more than %d s" % _LOCK_SECONDS
        return Outcome(guest, _text(guest), _text(guest), [], kept=kept)


def _back_up(vmid: int, text: str, folder: str) -> str:
    ensure_dir(folder, "backup_dir", 0o700)
    name = os.path.join(folder, "%d.conf.%s" % (vmid, time.strftime("%Y%m%d-%H%M%S")))
    path, number = name, 1
    while os.path.lexists(path):
        number += 1
        path = "%s-%d" % (name, number)
    write_atomic(path, text.encode("utf-8", "surrogateescape"), 0o600)
    return path


def _replace(path: str, text: str) -> None:
    draft = "%s.tmp.%d" % (path, os.getpid())
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with os.fdopen(fd, "wb") as handle:
            handle.write(text.encode("utf-8", "surrogateescape"))
        os.rename(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise CleanslateError(
            "%s cannot be written: %s. It is as it was. Is the cluster quorate (pvecm status)?"
            % (show(path), os.strerror(error.errno or 0))
        ) from None


# -- telling -------------------------------------------------------------------------------------------------------


def _diffs(outcomes: t.Iterable[Outcome]) -> list[dict[str, str]]:
    return [
        {
            "before_header": conf_path(outcome.guest.vmid),
            "after_header": conf_path(outcome.guest.vmid),
            "before": _shown(outcome.before),
            "after": _shown(outcome.after),
        }
        for outcome in outcomes
        if outcome.before != outcome.after
    ]


def _shown(text: str) -> str:
    return "".join(show(line) + "\n" for line in text.split("\n")[:-1])


def _on_host(device: Device | None) -> str:
    if device is None:
        return ""
    return device.numbers if device.is_node else device.kind


def describe(host: HostView, guests: t.Sequence[GuestView], chosen: t.Sequence[GuestView]) -> dict[str, t.Any]:
    """Host, containers and findings as modules return them."""
    ids = {guest.vmid for guest in chosen}
    findings = [finding for finding in check(host, guests) if finding.vmid is None or finding.vmid in ids]
    lines = {guest.vmid: guest.conf.lines for guest in guests}
    shared = shared_gpus({guest.vmid: guest.handed.gpus for guest in guests})
    rows = [finding.data(lines.get(finding.vmid or 0, ())) for finding in findings]
    errors = sum(1 for finding in findings if finding.severity == ERROR)
    return {
        "ok": errors == 0,
        "msg": "%d containers, %d errors, %d warnings" % (len(chosen), errors, len(findings) - errors),
        "findings": rows,
        "host": {
            "node": show(host.node),
            "driver_version": show(host.version),
            "majors": {
                show(name): sorted(majors) for name, majors in sorted(host.majors.items()) if name.startswith("nvidia")
            },
            "devices": {show(path): _on_host(device) for path, device in sorted(host.devices.items())},
        },
        "containers": [
            {
                "vmid": guest.vmid,
                "name": show(guest.name),
                "running": guest.running,
                "lock": show(guest.conf.lock),
                "unprivileged": guest.conf.unprivileged,
                "gpu_minors": guest.handed.gpus,
                "gpu_shared_with": sorted(
                    {vmid for gpu in guest.handed.gpus for vmid in shared.get(gpu, ())} - {guest.vmid}
                ),
                "libraries": list(guest.inside.libraries) if guest.inside else [],
                "devices": [
                    {
                        "line": show(device.line),
                        "source": show(device.source),
                        "target": show(device.target),
                        "on_host": _on_host(host.devices.get(device.source)),
                        "in_container": _on_host(guest.inside.devices.get(device.target)) if guest.inside else "",
                    }
                    for device in guest.handed.devices
                ],
                "rules": [show(rule.line) for rule in guest.handed.rules],
                "findings": sorted({finding.code for finding in findings if finding.vmid == guest.vmid}),
            }
            for guest in chosen
        ],
    }
