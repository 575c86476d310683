# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``make demo`` as an ordinary user, in a fresh copy of the sources, with the Python of the system.

Nothing may be written outside that copy, and nothing may be left running. Needs root, to become the other user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import CheckError, copy_sources

USER = "nobody"
#: What a machine says about its package index and proxy; everything else is as for a user who has just logged in.
HANDED_ON = (
    "PIP_",
    "SSL_CERT",
    "REQUESTS_CA",
    "CURL_CA",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "LANG",
    "CI",
    "CLEANSLATE_",
)


def processes(uid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == uid:
                found.add(int(entry.name))
        except OSError:
            continue  # gone meanwhile
    return found


def left_running(uid: int, before: set[int]) -> set[int]:
    """Processes of the user that outlive the demo by more than a moment."""
    deadline = time.monotonic() + 5
    while left := processes(uid) - before:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return set()


def main() -> int:
    # Told to end, it still cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))
    account = pwd.getpwnam(USER)
    place = Path(tempfile.mkdtemp(prefix="cleanslate-ordinary-"))
    try:
        return as_user(account, place)
    finally:
        shutil.rmtree(place)


def as_user(account: pwd.struct_passwd, place: Path) -> int:
    home, checkout = place / "home", place / "checkout"
    home.mkdir()
    copy_sources(checkout)
    for path in (place, *place.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    environment = {key: value for key, value in os.environ.items() if key.upper().startswith(HANDED_ON)} | {
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "USER": USER,
        "LOGNAME": USER,
    }
    before = processes(account.pw_uid)
    demo = subprocess.run(
        ["make", "--no-print-directory", "demo"],
        cwd=checkout,
        env=environment,
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        stdin=subprocess.DEVNULL,
        check=False,
    )
    findings = [f"the demo ended with {demo.returncode}"] if demo.returncode else []
    for pid in sorted(left_running(account.pw_uid, before)):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        findings.append(f"left running: {pid} {command}")
        os.kill(pid, signal.SIGKILL)
    written = [path.relative_to(home) for path in home.rglob("*") if path.is_file()]
    outside = sorted({path.parts[0] for path in written if path.parts[:2] != (".cache", "pip")})
    if outside:
        findings.append(f"written into the home directory: {', '.join(outside)}")
    print("\n".join(findings) or f"the demo ran as {USER}, left nothing running and wrote nothing elsewhere")
    return 1 if findings else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
