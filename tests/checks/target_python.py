# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What runs on managed nodes can be loaded by the oldest Python that they may have, with its standard library alone.

Started by the Python of the checks with a version, this file runs itself by that Python.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ansible_collections.cleanslate.inference.plugins.module_utils"


def load_all() -> int:
    """Import every file of module_utils and compile every module; the exit code."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / ".collections"))
    utils = sorted((ROOT / "plugins/module_utils").rglob("*.py"))
    modules = sorted((ROOT / "plugins/modules").glob("*.py"))
    for path in utils:
        relative = path.relative_to(ROOT / "plugins/module_utils").with_suffix("")
        importlib.import_module(".".join((PACKAGE, *relative.parts)))
    for path in modules:
        compile(path.read_bytes(), str(path), "exec")
    foreign = sorted(
        name
        for name, module in sys.modules.items()
        if "site-packages" in (getattr(module, "__file__", None) or "") and not name.startswith("_")
    )
    print(f"Python {sys.version.split()[0]}: {len(utils)} utilities, {len(modules)} modules")
    if foreign:
        print(f"loaded from outside the standard library: {', '.join(foreign)}")
    return 0 if utils and modules and not foreign else 1


def main() -> int:
    sys.path.insert(0, str(ROOT / "tests/suite"))
    from stage import find_python

    version = sys.argv[1]
    interpreter = find_python(version)
    if interpreter is None:
        sys.exit(f"there is no Python {version}")
    # -I: nothing of the user's environment or site.
    return subprocess.run([interpreter, "-I", __file__], check=False).returncode


if __name__ == "__main__":
    sys.exit(load_all() if len(sys.argv) == 1 else main())
