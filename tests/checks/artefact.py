# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The artefact of ``ansible-galaxy collection build`` holds what it should, installs without a network, and works.

It is used from a folder that has nothing to do with the checkout: every plugin's documentation, every playbook and role
by its full name, and a module at work.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from pathlib import Path

from common import BUILD, COLLECTION, ROOT, CheckError, ansible, finish, modules, playbooks, roles, run, sources

PLACE = BUILD / "artefact"

#: What of the sources is for users; all the rest is for contributors.
SHIPPED = ("changelogs/", "docs/", "meta/", "playbooks/", "plugins/", "roles/", "CHANGELOG.rst", "LICENSE", "README.md")
#: What the build adds.
ADDED = {"FILES.json", "MANIFEST.json"}


def build() -> Path:
    shutil.rmtree(PLACE, ignore_errors=True)
    (PLACE / "elsewhere").mkdir(parents=True)
    run(ansible("galaxy", "collection", "build", "--output-path", PLACE, "."), cwd=ROOT)
    (artefact,) = PLACE.glob("*.tar.gz")
    return artefact


def contents(artefact: Path) -> list[str]:
    """Findings about what the artefact holds."""
    with tarfile.open(artefact) as archive:
        held = {member.name for member in archive.getmembers() if not member.isdir()} - ADDED
    wanted = {name for name in sources() if name.startswith(SHIPPED)}
    return [f"{name} is not in the artefact" for name in sorted(wanted - held)] + [
        f"{name} should not be in the artefact" for name in sorted(held - wanted)
    ]


def use(environment: dict[str, str]) -> None:
    """Use what was installed, by full names only; raises ``CheckError``."""
    elsewhere = PLACE / "elsewhere"

    def do(*command: str | Path) -> str:
        return run(command, cwd=elsewhere, env=environment)

    names = [f"{COLLECTION}.{name}" for name in modules()]
    documented = json.loads(do(*ansible("doc", "--json", "--type", "module", *names)))
    if undocumented := set(names) - documented.keys():
        raise CheckError(f"ansible-doc does not find {', '.join(sorted(undocumented))}")
    documented = json.loads(
        do(*ansible("doc", "--json", "--type", "role", *(f"{COLLECTION}.{r.name}" for r in roles())))
    )
    if len(documented) != len(roles()):
        raise CheckError(f"ansible-doc finds only the roles {', '.join(sorted(documented))}")
    plays = [f"{COLLECTION}.{path.stem}" for path in playbooks()]
    do(*ansible("playbook", "-i", "gpu_nodes,", "--syntax-check", *plays))
    empty = json.dumps({"empty_folder": str(elsewhere)})
    do(*ansible("playbook", "-i", "localhost,", "-e", empty, ROOT / "tests/checks/by_full_name.yml"))


def main() -> int:
    artefact = build()
    findings = contents(artefact)
    # A space in the path of the installed collections is as likely as one in that of a checkout.
    installed = PLACE / "installed collections"
    settings = PLACE / "ansible.cfg"
    settings.write_text("[defaults]\n", encoding="utf-8")
    environment = {"ANSIBLE_COLLECTIONS_PATH": str(installed), "ANSIBLE_CONFIG": str(settings)}
    run(
        ansible("galaxy", "collection", "install", "--offline", "--collections-path", installed, artefact),
        cwd=PLACE,
        env=environment,
    )
    use(environment)
    return finish(findings, artefact.name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
