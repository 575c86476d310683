# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-test, in a copy of the sources: it insists on a folder ansible_collections/NAMESPACE/NAME.

``ansible_test.py sanity`` or ``ansible_test.py units``. Everything it writes lies in build/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import BUILD, CheckError, copy_sources, run
from leftovers import end_left_behind

COPY = BUILD / "ansible-test/ansible_collections/cleanslate/inference"
HOME = BUILD / "ansible-test/home"

# ansible-test wants to download get-pip.py to put pip into its environments, and says where a copy of it may lie.
# Python carries a pip of its own, which does as well and needs no other host than the package index.
GET_PIP = """\
import subprocess
import sys

packages = [word for word in sys.argv[1:] if word not in ("install", "--no-setuptools", "--no-wheel")]
subprocess.check_call([sys.executable, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
subprocess.check_call([sys.executable, "-m", "pip", "install", *packages])
"""
GET_PIP_VERSIONS = ("24_2", "25_2")  # asked for by ansible-core 2.19 and by 2.21


#: For sanity: what the artefact does not hold; stage ruff-check reads that, too. For units: the tests of the lab and of
#: these checks, which stage unit runs: ansible-test runs each test in a child and does not end the fixtures that
#: several tests share, here whole servers.
LEFT_OUT = {
    "sanity": (".collections", "benchmarks", "inventories", "molecule", "tests"),
    "units": ("molecule", "tests/unit/checks", "tests/unit/lab", "tests/unit/standin"),
}


def prepare(command: str) -> None:
    copy_sources(COPY, leave_out=LEFT_OUT[command], keep=("tests/output", ".git"))
    # ansible-test asks git for the files, and would find the checkout around it, which ignores build/.
    run(["git", "init", "--quiet"], cwd=COPY)
    cache = HOME / ".ansible/test/cache"
    cache.mkdir(parents=True, exist_ok=True)
    for version in GET_PIP_VERSIONS:
        (cache / f"get_pip_{version}.py").write_text(GET_PIP, encoding="utf-8")
    # It hands no PIP_ variables on: settings of the user's pip (a mirror) have to come from a file.
    for settings in (".config/pip", ".pip"):
        theirs, ours = Path.home() / settings, HOME / settings
        if theirs.is_dir() and not ours.exists():
            ours.parent.mkdir(parents=True, exist_ok=True)
            ours.symlink_to(theirs)


def main() -> int:
    prepare(sys.argv[1])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = {
        "sanity": ["--requirements", "--python", version],
        "units": ["--venv", "--python", version, "--num-workers", "2"],
    }[sys.argv[1]]
    environment = {**os.environ, "HOME": str(HOME), "ANSIBLE_HOME": str(HOME / ".ansible")}
    command = [sys.executable, "-m", "ansible", "test", sys.argv[1], *options, "--color", "no"]
    process = subprocess.Popen(command, cwd=COPY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    errors = []
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        if line.startswith((b"ERROR: ", b"FATAL: ")):
            errors.append(line)
    # What was found lies between pages about packages: say it once more, where it is seen.
    sys.stdout.buffer.write(b"\n" + b"".join(errors))
    sys.stdout.flush()
    code = process.wait()
    # Of the environment, ansible-test hands little on but HOME.
    left = end_left_behind(f"HOME={HOME}")
    if left:
        print("left running:", *left, sep="\n  ")
    return code or bool(left)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
