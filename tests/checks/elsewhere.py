# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A checkout in a folder with a space in its name: everything a user starts there works.

The copy shares this checkout's virtual environment by a symbolic link: its Python, too, then has a space in its path.
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import BUILD, COLLECTION, ROOT, CheckError, ansible, copy_sources, modules, run

PLACE = BUILD / "elsewhere/it's a checkout"


def main() -> int:
    copy_sources(PLACE, keep=("build",))
    environment = PLACE / ".venv"
    if not environment.is_symlink():
        environment.symlink_to(ROOT / ".venv")
    python = environment / "bin/python"

    def do(*command: object, cwd: str = ".") -> str:
        return run([python, *(str(word) for word in command[1:])], cwd=PLACE / cwd)

    do(*ansible("inventory", "--list"))
    do(*ansible("playbook", "--syntax-check", "reset_and_launch.yml"), cwd="playbooks")
    names = [f"{COLLECTION}.{name}" for name in modules()]
    documented = json.loads(do(*ansible("doc", "--json", "--type", "module", *names)))
    for name in names:
        path = documented[name]["doc"]["filename"]
        if not path.startswith(str(PLACE)):
            raise CheckError(f"{name} was found in {path}")
    print("Found from the root, from playbooks/ and by full name. Now the demo:", flush=True)
    return subprocess.run(["make", "--no-print-directory", "demo"], cwd=PLACE, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
