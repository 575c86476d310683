# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection plugin; what happens to commands and results on the way is plugin_utils/guest_entry.py."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pct
short_description: Any module, in any Proxmox VE container, through its hypervisor
version_added: 0.1.0
author:
  - Contributors to the cleanslate.inference collection (@cleanslate)
description:
  - Runs modules and commands inside an LXC container of Proxmox VE, by C(pct exec) on the hypervisor, over the OpenSSH
    client with one multiplexed connection for all containers of a hypervisor.
  - The container needs no SSH server, no address and no agent, only C(/bin/sh), and Python for modules.
  - Commands run as root of the container, in its home directory, with an environment of the container's own.
  - Arguments arrive unchanged whatever they contain. A command's exit code is its own, also 255; a container that does
    not run or does not exist is unreachable.
extends_documentation_fragment:
  - cleanslate.inference.ssh_options
notes:
  - Options that begin with C(ssh) are those of P(ansible.builtin.ssh#connection), for the connection to the hypervisor.
  - Without a terminal (see O(use_tty)) a command keeps running in the container when the connection is lost.
options:
  vmid:
    description:
      - Id of the container.
    type: str
    vars:
      - name: proxmox_vmid
      - name: ansible_pct_vmid
  host:
    description:
      - The hypervisor on which the container lives, as SSH reaches it.
    type: str
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: ansible_host
      - name: ansible_ssh_host
      - name: ansible_pct_host
  mode:
    description:
      - How to enter the container.
      - V(pct) is Proxmox VE's own way. V(lxc-attach) saves the start-up time of C(pct), 0.3 to 1 second a task; it does
        not look at the container's configuration, and cannot tell a stopped container from one that does not exist.
    type: str
    choices: [pct, lxc-attach]
    default: pct
    vars:
      - name: ansible_pct_mode
  hypervisor_user:
    description:
      - User to log in with on the hypervisor. When unset, SSH chooses.
    type: str
    vars:
      - name: ansible_user
      - name: ansible_ssh_user
      - name: ansible_pct_user
    ini:
      - section: defaults
        key: remote_user
    env:
      - name: ANSIBLE_REMOTE_USER
    cli:
      - name: user
    keyword:
      - name: remote_user
  sudo:
    description:
      - Enter by C(sudo -n) on the hypervisor. When unset, it is used for every O(hypervisor_user) but root.
    type: bool
    vars:
      - name: ansible_pct_sudo
  remote_user:
    description:
      - User inside the container. C(pct exec) enters as root; use C(become) for others. It is an option because Ansible
        asks for it to find home directories.
    type: str
    default: root
  pipelining:
    description:
      - Send a module through the connection's standard input rather than as a file, one round trip instead of six.
    type: bool
    default: true
    env:
      - name: ANSIBLE_PIPELINING
      - name: ANSIBLE_SSH_PIPELINING
    ini:
      - section: defaults
        key: pipelining
      - section: connection
        key: pipelining
      - section: ssh_connection
        key: pipelining
    vars:
      - name: ansible_pipelining
      - name: ansible_ssh_pipelining
  use_tty:
    description:
      - Ask for a terminal on the hypervisor for commands that get no input. It mixes the command's stderr into its
        stdout; C(su) as become method needs it.
    type: bool
    default: false
    vars:
      - name: ansible_ssh_use_tty
"""

import contextlib
import getpass
import os
import shlex
import shutil
import typing as t
from collections.abc import Iterator

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_native
from ansible.plugins.connection.ssh import Connection as SshConnection
from ansible.utils.display import Display

from ansible_collections.cleanslate.inference.plugins.plugin_utils.guest_entry import MODES, Entry, Outcome

display = Display()

Result = tuple[int, bytes, bytes]

# Words: the local file, then ssh. The file is ssh's own standard output, so that nothing of it passes through memory.
INTO_FILE = 'exec "$@" > "$0"'


class Connection(SshConnection):
    """A guest of a hypervisor that the parent class reaches."""

    transport = "cleanslate.inference.pct"

    def __init__(self, *args: t.Any, **kwargs: t.Any) -> None:
        super().__init__(*args, **kwargs)
        self._entry_made: Entry | None = None
        self._outcome = Outcome(None, b"", b"")
        self._source: str | None = None

    # --- the guest ----------------------------------------------------------------------------------------------------

    @property
    def _entry(self) -> Entry:
        if self._entry_made is None:
            vmid = self.get_option("vmid")
            if vmid is None:
                raise AnsibleError("which container? Set ansible_pct_vmid (or proxmox_vmid) to its id.")
            try:
                self._entry_made = MODES[self.get_option("mode")](str(vmid), sudo=self._needs_sudo())
            except ValueError as error:
                raise AnsibleError(f"ansible_pct_vmid: {error}") from error
        return self._entry_made

    def _needs_sudo(self) -> bool:
        wanted = self.get_option("sudo")
        if wanted is not None:
            return bool(wanted)
        return (self.get_option("hypervisor_user") or getpass.getuser()) != "root"

    # --- what the parent does differently for us ----------------------------------------------------------------------

    def _build_command(self, binary: str, subsystem: str, *other_args: bytes | str) -> list[bytes]:
        """Log in as the hypervisor's user; `remote_user` is the one inside the guest."""
        with self._option("remote_user", self.get_option("hypervisor_user")):
            return super()._build_command(binary, subsystem, *other_args)

    @contextlib.contextmanager
    def _option(self, name: str, value: t.Any) -> Iterator[None]:
        kept = self.get_option(name)
        self.set_option(name, value)
        try:
            yield
        finally:
            self.set_option(name, kept)

    def _bare_run(self, cmd: list[bytes], in_data: bytes | None, sudoable: bool = True, checkrc: bool = True) -> Result:
        """One run of ssh. The parent sees 255, and may try again, only when it was ssh that failed."""
        returncode, stdout, stderr = super()._bare_run(cmd, in_data, sudoable=sudoable, checkrc=False)
        self._outcome = self._entry.outcome(returncode, stdout, stderr)
        if self._outcome.lost:
            return 255, stdout, stderr
        return min(returncode, 254), stdout, stderr

    def _send_initial_data(self, fh: t.Any, in_data: bytes, ssh_process: t.Any) -> None:
        """Input comes from memory, or straight from the file that put_file sends."""
        if self._source is None:
            super()._send_initial_data(fh, in_data, ssh_process)
            return
        # A guest that takes no more (no room, no such directory) says so on stderr; its report is what counts.
        with contextlib.suppress(BrokenPipeError), open(to_bytes(self._source), "rb") as source:
            shutil.copyfileobj(source, fh, 1 << 20)
        with contextlib.suppress(BrokenPipeError):
            fh.close()

    # --- the connection's contract ------------------------------------------------------------------------------------

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> Result:
        """Run a shell command in the guest."""
        super().exec_command(self._entry.line(cmd), in_data=in_data, sudoable=sudoable)
        return self._result()

    def put_file(self, in_path: str, out_path: str) -> Result:
        """Stream a file into the guest; it is as Ansible's own transfers leave it: owned by root, mode by umask."""
        if not os.path.exists(to_bytes(in_path, errors="surrogate_or_strict")):
            raise AnsibleFileNotFound(f"file or module does not exist: {to_native(in_path)}")
        display.vvv(f"PUT {in_path} TO {out_path}", host=self.host)
        self._source = in_path
        try:
            # Not empty, so that the parent gives ssh a pipe; what goes through it is the file.
            return self._transferred(self.exec_command(f"cat > {shlex.quote(out_path)}", b"-", sudoable=False), in_path)
        finally:
            self._source = None

    def fetch_file(self, in_path: str, out_path: str) -> Result:
        """Stream a file out of the guest."""
        display.vvv(f"FETCH {in_path} TO {out_path}", host=self.host)
        self.host = self.get_option("host") or self._play_context.remote_addr
        line = self._entry.line(f"cat < {shlex.quote(in_path)}")
        ssh = self._build_command(self.get_option("ssh_executable"), "ssh", self.host, line)
        target = to_bytes(out_path, errors="surrogate_or_strict")
        try:
            self._run([b"/bin/sh", b"-c", INTO_FILE.encode(), target, *ssh], None, sudoable=False)
            return self._transferred(self._result(), in_path)
        except AnsibleError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            raise

    def _result(self) -> Result:
        outcome = self._outcome
        if outcome.returncode is None:
            raise AnsibleConnectionFailure(f"{self.host}: {outcome.problem}")
        return outcome.returncode, outcome.stdout, outcome.stderr

    def _transferred(self, result: Result, path: str) -> Result:
        returncode, _stdout, stderr = result
        if returncode != 0:
            raise AnsibleError(f"failed to transfer {to_native(path)}: {to_native(stderr).strip()}")
        return result
