# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The story of the demo, act by act. Each act says what is about to happen, does it, and checks that it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from . import node

PLAYBOOKS = node.ROOT / "playbooks"
WIDTH = 100


class Wrong(Exception):
    """Something did not happen as the story says."""


def tell() -> int:
    """Tell it; returns the exit code. Runs inside the demo's own PID namespace where there is one."""
    started = time.monotonic()
    try:
        acts()
    except (Wrong, OSError) as wrong:
        print(f"\nThe demo failed: {wrong}", file=sys.stderr)
        return 1
    say(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


def acts() -> None:
    title("A node after a crash")
    node.make()
    port = os.environ["CLEANSLATE_DEMO_PORT"] = str(node.choose_port())
    neighbour, orphans = crash(port)
    say(
        "One embedded node: eight stand-in GPUs (files that processes hold, and a libnvidia-ml whose memory figures",
        "follow from who holds them). A server was killed here in an earlier life:",
    )
    for process in processes():
        print(f"    {process}")
    say(
        f"Its main process is gone. A worker still has GPUs 0-3, an orphan still listens on port {port}, a stale",
        "socket and shared memory are left. The job on GPU 7 is somebody else's, and has all eight nodes open.",
    )

    title("1. Claim all eight GPUs: stopped by the plan, before anything was touched")
    report = play("reset_and_launch.yml", "-e", json.dumps({"sglang_server_gpus": list(range(8))}), succeeds=False)
    expect(row(report)["outcome"] == "blocked", "the neighbour on GPU 7 blocks the plan")
    expect(all(alive(pid) for pid in [neighbour, *orphans]), "nobody was signalled")

    title("2. The inventory says GPUs 0-3: what would happen (--check)")
    report = play("reset_and_launch.yml", "--check", succeeds=True)
    expect(row(report)["outcome"] == "would launch", "the plan passes")
    expect(all(alive(pid) for pid in [neighbour, *orphans]), "check mode signalled nobody")

    title(
        "3. Do it: tear down, prove, sweep, launch, wait for a real generation, prove the environment of every worker"
    )
    report = play("reset_and_launch.yml", succeeds=True)
    expect(row(report)["outcome"] == "serving", "the declared server serves")
    ended = {process["pid"] for process in row(report)["ended"]}
    expect(ended == set(orphans), "exactly the remains of the old server were ended")
    expect(alive(neighbour), "the neighbour on GPU 7 lives")
    expect(not list(node.SHM.glob("sgl_shm_mq_*_0a1b2c3d")), "the old server's shared memory is swept")
    expect(not (node.TMP / "tmpq1w2e3r4").exists(), "the stale socket is swept")
    expect(generation(port) > 0, "it answers a generation")

    title("4. Kill one worker behind its back, and converge")
    worker = next(pid for pid, name in titled() if name.startswith("sglang::scheduler_TP2"))
    os.kill(worker, signal.SIGKILL)
    say(f"Killed sglang::scheduler_TP2 (pid {worker}).")
    report = play("reset_and_launch.yml", succeeds=True)
    expect(row(report)["outcome"] == "serving", "the server serves again")
    expect(alive(neighbour), "the neighbour still lives")

    title("5. Run it again: nothing to do")
    report = play("reset_and_launch.yml", succeeds=True)
    expect(row(report)["outcome"] == "converged" and not row(report)["changed"], "changed=0")

    if os.environ.get("KEEP", "") not in ("", "0"):
        say(f"KEEP=1: the server stays at http://127.0.0.1:{port}/server_info. Stop it with: make demo-stop")
        return
    title("6. Tear it down")
    report = play("teardown.yml", succeeds=True)
    expect(row(report)["outcome"] == "free", "GPUs 0-3 are proven free")
    expect(alive(neighbour), "the neighbour outlives everything")
    expect(not list(titled()), "nothing of the server is left")


# -- What happens ----------------------------------------------------------------------------------------------------


def crash(port: str) -> tuple[int, list[int]]:
    """The earlier life and its end. Returns the pids of the neighbour and of what the server left."""
    environment = dict(os.environ, **node.environment(), SPT_NOENV="1")
    parts = {}
    for part, gpus in (("neighbour", "7"), ("server", "0,1,2,3")):
        process = subprocess.Popen(
            [node.python(), "crash.py", part, port],
            cwd=Path(__file__).parent,
            env=dict(environment, CUDA_VISIBLE_DEVICES=gpus),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise Wrong(f"the {part} of the earlier life did not start")
        parts[part] = process
    orphans = [pid for pid, _name in titled()]
    parts["server"].kill()
    parts["server"].wait()
    node.litter(parts["server"].pid)
    return parts["neighbour"].pid, orphans


def play(playbook: str, *more: str, succeeds: bool) -> dict:
    """Run a playbook as a user would, and return its JSON report."""
    report = node.HOME / "report.json"
    report.unlink(missing_ok=True)
    shown = " ".join(["ansible-playbook", "-i", "inventories/demo", f"playbooks/{playbook}", *more])
    print(f"$ {shown}\n", flush=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    environment.update(
        ANSIBLE_CONFIG=str(node.ROOT / "ansible.cfg"),
        # Only what changes, fails or has something to say.
        ANSIBLE_DISPLAY_OK_HOSTS="false",
        ANSIBLE_DISPLAY_SKIPPED_HOSTS="false",
        ANSIBLE_LOCAL_TEMP=str(node.HOME / "ansible"),
        ANSIBLE_REMOTE_TEMP=str(node.HOME / "ansible"),
        ANSIBLE_LOCALHOST_WARNING="false",
        ANSIBLE_INVENTORY_UNPARSED_WARNING="false",
    )
    inventory = node.ROOT / "inventories" / "demo"
    command = [node.python(), "-m", "ansible", "playbook", "-i", str(inventory), str(PLAYBOOKS / playbook), *more]
    command += ["-e", json.dumps({"cleanslate_report": str(report)})]
    done = subprocess.run(command, env=environment, cwd=node.ROOT, stdin=subprocess.DEVNULL, check=False)
    if (done.returncode == 0) != succeeds:
        raise Wrong(f"{shown} ended with {done.returncode}")
    try:
        return json.loads(report.read_text())
    except (OSError, ValueError) as error:
        raise Wrong(f"{shown} left no report ({error})") from error


def row(report: dict) -> dict:
    return report["nodes"][0]


def generation(port: str) -> int:
    """Tokens of one generation, asked for as a client would."""
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
        return json.loads(answer.read())["meta_info"]["completion_tokens"]


# -- What is to be seen ----------------------------------------------------------------------------------------------


def own_processes() -> Iterator[tuple[int, list[str]]]:
    """Living processes of the demo: those that see the stand-in GPUs."""
    mark = f"STANDIN_DEV_DIR={node.DEV}".encode()
    for name in sorted(os.listdir("/proc"), key=lambda name: (len(name), name)):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            folder = Path("/proc") / name
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        yield int(name), words


def titled() -> Iterator[tuple[int, str]]:
    for pid, words in own_processes():
        if words[0].startswith("sglang::"):
            yield pid, words[0]


def processes() -> Iterator[str]:
    for pid, words in own_processes():
        yield f"pid {pid:<6} {' '.join(Path(word).name if '/' in word else word for word in words)}"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] != b"Z"
    except OSError:
        return False


def expect(true: bool, what: str) -> None:
    if not true:
        raise Wrong(f"not so: {what}")
    print(f"  ok: {what}", flush=True)


def title(text: str) -> None:
    print(f"\n{'=' * WIDTH}\n{text}\n{'=' * WIDTH}", flush=True)


def say(*lines: str) -> None:
    print("\n" + "\n".join(lines), flush=True)
