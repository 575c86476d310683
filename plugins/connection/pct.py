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
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Runs modules and commands inside an LXC container of Proxmox VE, by C(pct exec) on the hypervisor, over the OpenSSH
    client. All containers of a hypervisor share few multiplexed connections, see O(sessions).
  - The container needs no SSH server, no address and no agent, only C(/bin/sh), and Python for modules.
  - Commands run as root of the container, in its home directory, with an environment of the container's own.
  - Arguments arrive unchanged whatever they contain. A command's exit code is its own, also 255. A container that does
    not run, does not exist or is on another node is unreachable, and the message says which, and what to do about it.
  - Files are streamed, in memory of constant size, and their length is compared on arrival; modules like
    M(ansible.builtin.copy) and M(ansible.builtin.fetch) compare checksums on top. Nothing is put on the hypervisor.
extends_documentation_fragment:
  - cleanslate.inference.ssh_options
notes:
  - Options that begin with C(ssh) are those of P(ansible.builtin.ssh#connection), for the connection to the hypervisor.
  - Without a terminal (see O(use_tty)) a command keeps running in the container when the connection is lost. It is not
    started again, whatever O(reconnection_retries) says, and the next task on that container warns of it, with its pid.
  - A user who may run C(pct) or C(lxc-attach) by C(sudo) is root in every container of that hypervisor.
  - M(ansible.builtin.reboot) tells a reboot by the boot id, which is the hypervisor's. Give it
    C(boot_time_command=cut -d " " -f 22 /proc/1/stat), the start time of the container's own first process.
  - C(su) as become method needs no terminal and no file in the container, since it starts from root.
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
      - V(pct) is Proxmox VE's own way. V(lxc-attach) saves the start-up time of C(pct), 0.3 to 1 second a task, and is
        what C(pct exec) ends in; but it skips the checks of Proxmox VE, and what later versions of C(pct) may add.
      - V(local) is V(pct) without SSH, for a control node that is the hypervisor itself.
    type: str
    choices: [pct, lxc-attach, local]
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
  entry_timeout:
    description:
      - Seconds after which a C(pct) that has not entered the container is looked at on the hypervisor. When it hangs
        there (a storage or the cluster's file system that does not answer) it is ended and the container unreachable.
        A command that has begun may take as long as it likes.
    type: int
    default: 30
    vars:
      - name: ansible_pct_entry_timeout
  alive_timeout:
    description:
      - Seconds without an answer of the hypervisor's SSH server after which the connection counts as lost, also in the
        middle of a command. C(ServerAliveInterval) in O(ssh_args) or O(ssh_common_args) goes before it.
    type: int
    default: 60
    vars:
      - name: ansible_pct_alive_timeout
  sessions:
    description:
      - Commands at a time over one SSH connection to a hypervisor; further ones get a further connection. Below the
        C(MaxSessions) of the hypervisor's SSH server, which is 10 unless set.
    type: int
    default: 8
    vars:
      - name: ansible_pct_sessions
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
        stdout.
    type: bool
    default: false
    vars:
      - name: ansible_ssh_use_tty
"""

import contextlib
import getpass
import hashlib
import os
import shutil
import subprocess
import threading
import time
import typing as t
from collections.abc import Iterator
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.module_utils.common.text.converters import to_bytes, to_native, to_text
from ansible.plugins.connection.ssh import Connection as SshConnection
from ansible.utils.display import Display
from ansible.utils.path import makedirs_safe, unfrackpath

from ansible_collections.cleanslate.inference.plugins.plugin_utils import guest_view, waiter
from ansible_collections.cleanslate.inference.plugins.plugin_utils.guest_entry import (
    MODES,
    Cause,
    Entry,
    Left,
    OldPctExec,
    Outcome,
)
from ansible_collections.cleanslate.inference.plugins.plugin_utils.ssh_sessions import Hypervisor

display = Display()

Result = tuple[int, bytes, bytes]

NO_INPUT = b"no input"  # this very object stands for: give ssh a pipe, and nothing through it
LOOK_SECONDS = 15
STOPPING_SECONDS = 3
ALIVE_PROBES = 4

# Words: the local file, then ssh. The file's content passes through no memory; and cat, unlike ssh, says so when there
# is no room for it. lxc-attach would change the mode of a file that is its own output.
STORE_FAILED = 111
INTO_FILE = f"""r=$({{ {{ "$@" 3>&-; echo $? >&3; }} | cat >"$0"; }} 3>&1) || exit {STORE_FAILED}; exit "$r\""""


class Connection(SshConnection):
    """A guest of a hypervisor that the parent class reaches."""

    transport = "cleanslate.inference.pct"

    def __init__(self, *args: t.Any, **kwargs: t.Any) -> None:
        super().__init__(*args, **kwargs)
        self._entry_made: Entry | None = None
        self._outcome = Outcome(None, b"", b"")
        self._source: str | None = None
        self._sent = 0
        self._store_failed = ""
        self._socket: Path | None = None
        self._opening = False
        self._way: list[bytes] = []  # to the hypervisor, without the line for its shell
        self._watch: Watch | None = None
        self._told: set[int] = set()

    # --- the guest ----------------------------------------------------------------------------------------------------

    @property
    def _entry(self) -> Entry:
        if self._entry_made is None:
            vmid = self.get_option("vmid")
            if vmid is None:
                raise AnsibleError("which container? Set ansible_pct_vmid (or proxmox_vmid) to its id.")
            way = MODES[self.get_option("mode")]
            if self.get_option("mode") != "lxc-attach" and self._old_pct_file.exists():
                way = OldPctExec
            try:
                self._entry_made = way(str(vmid), sudo=self._needs_sudo(), owner=str(waiter.myself()))
            except ValueError as error:
                raise AnsibleError(f"ansible_pct_vmid: {error}") from error
        return self._entry_made

    def _needs_sudo(self) -> bool:
        wanted = self.get_option("sudo")
        if wanted is not None:
            return bool(wanted)
        user = None if self._is_local else self.get_option("hypervisor_user")
        return (user or getpass.getuser()) != "root"

    @property
    def _is_local(self) -> bool:
        return bool(self.get_option("mode") == "local")

    # --- connections to the hypervisor --------------------------------------------------------------------------------

    @property
    def _hypervisor(self) -> Hypervisor:
        folder = unfrackpath(self.get_option("control_path_dir"))
        makedirs_safe(folder, 0o700)
        way = f"{self._address}-{self.get_option('port')}-{self.get_option('hypervisor_user')}"
        key = hashlib.sha256(way.encode()).hexdigest()[:10]
        return Hypervisor(Path(folder), key, max(1, self.get_option("sessions")))

    @property
    def _address(self) -> str:
        if self._is_local:
            return "localhost"
        return str(self.get_option("host") or self._play_context.remote_addr)

    @property
    def _old_pct_file(self) -> Path:
        """There when the hypervisor's pct was seen to lack --keep-env. Wrong after its upgrade, and still harmless."""
        hypervisor = self._hypervisor
        return hypervisor.folder / f"{hypervisor.key}.old-pct"

    @property
    def _shares_connections(self) -> bool:
        """Whether ssh's connections are ours to arrange: multiplexed, and no ControlPath of the user's own."""
        if self._is_local or self.get_option("control_path"):
            return False
        options = ("ssh_args", "ssh_common_args", "ssh_extra_args")
        given = " ".join(str(self.get_option(name) or "") for name in options).lower()
        return "controlpersist" in given and "controlpath" not in given

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """A place on a connection to the hypervisor, which is made when it is not there."""
        self.host = self._address
        self._entry.enter()  # a wrong id is told before anything is reached
        if not self._shares_connections:
            yield
            return
        hypervisor = self._hypervisor
        with hypervisor.place() as self._socket:
            hypervisor.connected(self._socket, self._open_connection, AnsibleConnectionFailure)
            yield

    def _open_connection(self) -> None:
        """Log in, run nothing. A failure here is ssh's own, whatever it says, and may be tried again."""
        self._opening = True
        try:
            self._run(self._build_command(self.get_option("ssh_executable"), "ssh", self._address, ":"), None, False)
        finally:
            self._opening = False

    def _build_command(self, binary: str, subsystem: str, *other_args: bytes | str) -> list[bytes]:
        """Log in as the hypervisor's user; `remote_user` is the one inside the guest."""
        if self._is_local:
            # ssh's name is a word of the command for the parent class, which looks for it to wait for become's prompt.
            return [to_bytes(word) for word in ("/bin/sh", "-c", other_args[-1], binary)]
        interval = max(1, self.get_option("alive_timeout") // ALIVE_PROBES)
        alive = ("-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={ALIVE_PROBES}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._option("remote_user", self.get_option("hypervisor_user")))
            if self._socket is not None:
                # The parent class fills in %(directory)s.
                stack.enter_context(self._option("control_path", f"%(directory)s/{self._socket.name}"))
            made = super()._build_command(binary, subsystem, *alive)
        self._way = [*made, to_bytes(self._address)]
        return [*made, *(to_bytes(word) for word in other_args)]

    @contextlib.contextmanager
    def _option(self, name: str, value: t.Any) -> Iterator[None]:
        kept = self.get_option(name)
        self.set_option(name, value)
        try:
            yield
        finally:
            self.set_option(name, kept)

    def reset(self) -> None:
        """Close this user's connections to the hypervisor; what runs through them goes on."""
        self.host = self._address
        if self._is_local:
            return
        if not self._shares_connections:
            super().reset()
            return
        for path in self._hypervisor.sockets():
            self._socket = path
            super().reset()
        self._socket = None

    # --- one call -----------------------------------------------------------------------------------------------------

    def _bare_run(self, cmd: list[bytes], in_data: bytes | None, sudoable: bool = True, checkrc: bool = True) -> Result:
        """One run of ssh. The parent sees 255, and may try again, only when ssh failed before the command began."""
        if self._opening:
            return super()._bare_run(cmd, in_data, sudoable=sudoable, checkrc=False)
        if not in_data and b"-tt" not in cmd:
            in_data = NO_INPUT
        try:
            returncode, stdout, stderr = super()._bare_run(cmd, in_data, sudoable=sudoable, checkrc=False)
        except AnsibleConnectionFailure as error:
            # Become's prompt did not come. Perhaps pct has not even entered the guest.
            view = self._look(end=True)
            if view is None or view.waiting is None:
                raise
            self._outcome = self._hung(view, 2 + self.get_option("timeout"), error)
            return 254, b"", b""
        finally:
            watch, self._watch = self._watch, None
            view = watch.end() if watch else None
        if view is not None:
            self._outcome = self._hung(view, self.get_option("entry_timeout"))
            return 254, b"", b""
        self._outcome = self._entry.outcome(returncode, stdout, stderr)
        if returncode == STORE_FAILED and INTO_FILE.encode() in cmd:
            self._store_failed = to_native(self._outcome.stderr).strip()
            return 254, b"", b""
        code = 255 if self._outcome.cause is Cause.LOST else min(returncode, 254)
        return code, self._outcome.stdout, self._outcome.stderr

    def _hung(self, view: guest_view.View, seconds: float, error: Exception | None = None) -> Outcome:
        problem = guest_view.hung(self._entry.vmid, seconds, view)
        return Outcome(None, b"", b"", f"{problem} ({error})" if error else problem, Cause.OTHER)

    def _send_initial_data(self, fh: t.Any, in_data: bytes, ssh_process: t.Any) -> None:
        """Input comes from memory, or straight from the file that put_file sends."""
        if not self._opening:
            self._watch = Watch(ssh_process, self.get_option("entry_timeout"), self._look)
        if in_data is not NO_INPUT:
            super()._send_initial_data(fh, in_data, ssh_process)
            return
        # A guest that takes no more (no room, no such directory) says so on stderr; its report is what counts.
        with contextlib.suppress(BrokenPipeError):
            if self._source is not None:
                with open(to_bytes(self._source), "rb") as source:
                    shutil.copyfileobj(source, fh, 1 << 20)
                    self._sent = source.tell()
            fh.close()

    def _look(self, end: bool = False) -> guest_view.View | None:
        """Ask the hypervisor about the guest, on a session of its own; None when it does not answer."""
        line = guest_view.look(self._entry.vmid, self._entry.token, self._entry.sudo, end)
        way = [b"/bin/sh", b"-c"] if self._is_local else self._way
        try:
            done = subprocess.run(
                [*way, to_bytes(line)], stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOK_SECONDS, check=False
            )
        except (subprocess.TimeoutExpired, OSError):
            return None
        return guest_view.read(to_text(done.stdout)) if done.returncode == 0 else None

    def _settled_look(self) -> guest_view.View | None:
        """The same, a little later: a guest that is being stopped loses this command before it has stopped."""
        deadline, pause = time.monotonic() + STOPPING_SECONDS, 0.1
        while (view := self._look()) and view.running is not False and time.monotonic() < deadline:
            time.sleep(pause)
            pause *= 2
        return view

    # --- the connection's contract ------------------------------------------------------------------------------------

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> Result:
        """Run a shell command in the guest."""
        with self._session():
            for _attempt in self._until_entered():
                super().exec_command(self._entry.line(cmd), in_data=in_data, sudoable=sudoable)
        return self._result()

    def put_file(self, in_path: str, out_path: str) -> Result:
        """Stream a file into the guest; it is as Ansible's own transfers leave it: owned by root, mode by umask."""
        if not os.path.exists(to_bytes(in_path, errors="surrogate_or_strict")):
            raise AnsibleFileNotFound(f"file or module does not exist: {to_native(in_path)}")
        display.vvv(f"PUT {in_path} TO {out_path}", host=self.host)
        self._source, self._sent = in_path, 0
        try:
            with self._session():
                for _attempt in self._until_entered():
                    line = self._entry.line(self._entry.receive(out_path))
                    super().exec_command(line, in_data=NO_INPUT, sudoable=False)
            result = self._transferred(in_path)
        finally:
            self._source = None
        arrived = self._outcome.sizes
        if arrived and arrived != (self._sent,):
            raise AnsibleError(f"failed to transfer {in_path}: {self._sent} bytes sent, {arrived[0]} arrived")
        return result

    def fetch_file(self, in_path: str, out_path: str) -> Result:
        """Stream a file out of the guest."""
        display.vvv(f"FETCH {in_path} TO {out_path}", host=self.host)
        target, self._store_failed = to_bytes(out_path, errors="surrogate_or_strict"), ""
        try:
            with self._session():
                for _attempt in self._until_entered():
                    line = self._entry.line(self._entry.send(in_path))
                    ssh = self._build_command(self.get_option("ssh_executable"), "ssh", self.host, line)
                    self._run([b"/bin/sh", b"-c", INTO_FILE.encode(), target, *ssh], None, sudoable=False)
            if self._store_failed:
                raise AnsibleError(f"cannot write {to_native(out_path)} on the control node: {self._store_failed}")
            result = self._transferred(in_path)
            sizes, stored = self._outcome.sizes, os.path.getsize(target)
            # A file that changed meanwhile has no size to compare with.
            if len(set(sizes)) == 1 and stored != sizes[0]:
                raise AnsibleError(f"failed to transfer {in_path}: it has {sizes[0]} bytes, {stored} arrived")
        except AnsibleError:
            if os.path.isfile(target):  # not a device that somebody fetches into
                os.unlink(target)
            raise
        return result

    def is_pipelining_enabled(self, wrap_async: bool = False) -> bool:
        """Also for su: root, who we are, is asked for nothing, so that input and prompt cannot meet."""
        become = self.become
        if become is not None and become.name in ("su", "ansible.builtin.su") and not become.get_option("become_pass"):
            return bool(self.get_option("pipelining")) and not wrap_async and not self._is_tty_requested()
        return bool(super().is_pipelining_enabled(wrap_async))

    # --- results ------------------------------------------------------------------------------------------------------

    def _until_entered(self) -> Iterator[None]:
        """Once; and once more when this pct turns out to have no --keep-env."""
        yield
        if self._outcome.cause is Cause.OLD_PCT:
            self._old_pct_file.touch()
            self._entry_made = None
            yield

    def _result(self) -> Result:
        outcome = self._outcome
        for left in outcome.left:
            self._tell(left)
        if outcome.returncode is not None:
            return outcome.returncode, outcome.stdout, outcome.stderr
        problem = outcome.problem
        if outcome.cause in (Cause.ENDED, Cause.STOPPED, Cause.ABSENT):
            view = self._settled_look() if outcome.cause is Cause.ENDED else self._look()
            problem = guest_view.explain(self._entry.vmid, outcome, view) if view else problem
        raise AnsibleConnectionFailure(f"{self.host}: {problem}")

    def _tell(self, left: Left) -> None:
        """Name a process in the guest whose connection was lost."""
        if left.pid in self._told:
            return
        self._told.add(left.pid)
        who = waiter.Waiter.read(left.owner)
        state = who.state() if who else waiter.State.ELSEWHERE
        vmid = self._entry.vmid
        what = f"container {vmid}: process {left.pid} ({left.name}, {left.innermost}) still runs"
        if left.parent == 1 or state is waiter.State.GONE:
            mend = f"pct exec {vmid} -- kill {left.innermost} ends it"
            display.warning(f"{what} from a connection that was lost; {mend}")
        elif state is waiter.State.ELSEWHERE:
            display.v(f"{what} for control node {who.node if who else '?'}", host=self.host)

    def _transferred(self, path: str) -> Result:
        result = self._result()
        if result[0] != 0:
            raise AnsibleError(f"failed to transfer {to_native(path)}: {to_native(result[2]).strip()}")
        return result


class Watch:
    """Ends an ssh whose pct does not enter the guest. One look, after `seconds`: later the command is simply long."""

    def __init__(self, process: t.Any, seconds: float, look: t.Any) -> None:
        self._process = process
        self._seconds = seconds
        self._look = look
        self._ended = threading.Event()
        self._view: guest_view.View | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        if self._ended.wait(self._seconds):
            return
        view = self._look(end=True)
        if view is not None and view.waiting is not None and not self._ended.is_set():
            self._view = view
            self._process.terminate()

    def end(self) -> guest_view.View | None:
        """What was seen, if ssh was ended for it."""
        self._ended.set()
        self._thread.join()
        return self._view
