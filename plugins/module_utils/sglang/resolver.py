# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""SGLang's own parser and resolver, asked through the probe (probe.py) while no GPU is visible; answers are cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import typing as t

from ..common.errors import CleanslateError
from ..common.text import is_secret_name, redact_value, show
from ..state.files import make_dir, read_bytes, remove, write_atomic
from .account import Account
from .findings import Finding, variable
from .sources import source_of

#: Seconds for one answer: importing torch from a cold network file system takes long.
PROBE_TIMEOUT = 180.0
#: Answers kept a node.
KEEP = 32
#: Places where people install SGLang, looked at when no Python is declared.
USUAL_PYTHONS = ("/opt/sglang/bin/python", "/opt/venv/bin/python", "/opt/sglang/.venv/bin/python")
#: Arguments that were renamed or removed: what to write now.
RENAMED = {
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "enable_piecewise_cuda_graph": "cuda_graph_backend_prefill",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
    "enable_beta_spec": "nothing: it is always on since 0.5.14",
    "enable_flashinfer_allreduce_fusion": "flashinfer_allreduce_fusion_backend",
    "grpc_mode": "smg_grpc_mode",
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "oltp_traces_endpoint": "otlp_traces_endpoint",
    "enable_breakable_cuda_graph": "cuda_graph_backend_prefill",
}


class Identity(t.NamedTuple):
    python: str
    version: str
    location: str


class Answer(t.NamedTuple):
    """What SGLang said of one command line."""

    resolved: dict[str, t.Any] | None
    errors: list[Finding]
    #: Rejections that only the GPU's own machine can judge.
    not_judged: list[str]
    cached: bool


def ask(
    python: str,
    environment: t.Mapping[str, str],
    request: t.Mapping[str, t.Any],
    timeout: float = PROBE_TIMEOUT,
    account: Account | None = None,
) -> dict[str, t.Any]:
    """Run the probe once, as the server's account: SGLang may run the model's own code (trust_remote_code). Raises
    CleanslateError when it gives no answer."""
    identity: dict[str, t.Any] = {}
    if account is not None and account.other:
        identity = {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
    env = dict(environment)
    # No GPU is touched, nothing is fetched, nothing is written beside the package.
    env.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    try:
        child = subprocess.Popen(  # pylint: disable=ansible-bad-function
            [python, "-c", source_of("probe")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=env,
            start_new_session=True,
            **identity,
        )
    except OSError as error:
        raise CleanslateError("%s cannot be run: %s." % (show(python), os.strerror(error.errno or 0))) from None
    try:
        out, err = child.communicate(json.dumps(request).encode("utf-8"), timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise CleanslateError(
            "%s did not say within %.0f s what it makes of the command line." % (show(python), timeout)
        ) from None
    try:
        answer = json.loads(out.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1])
        if isinstance(answer, dict):
            return answer
    except ValueError:
        pass
    last = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip()][-1:]
    raise CleanslateError(
        "%s gave no answer (exit %d): %s"
        % (show(python), child.returncode, show(last[0]) if last else "it said nothing")
    )


def candidates(declared: str | None, path: str) -> list[str]:
    """Pythons that may have SGLang, best first: the declared one alone, or those of the console script, usual places,
    this interpreter and python3."""
    if declared:
        return [declared]
    out: list[str] = []
    script = shutil.which("sglang", path=path)
    if script:
        first = ""
        with contextlib.suppress(OSError), open(script, "rb") as handle:
            first = handle.readline(300).decode("utf-8", "replace").strip()
        if first.startswith("#!") and os.path.isabs(first[2:].split(" ")[0]):
            out.append(first[2:].split(" ")[0])
    out += [python for python in USUAL_PYTHONS if os.access(python, os.X_OK)]
    out.append(sys.executable)
    found = shutil.which("python3", path=path)
    if found:
        out.append(found)
    return list(dict.fromkeys(out))


def find(
    declared: str | None,
    environment: t.Mapping[str, str],
    path: str,
    account: Account | None = None,
    timeout: float = 60.0,
) -> Identity:
    """The Python that has SGLang. Raises CleanslateError naming the variable when none has."""
    tried: list[str] = []
    for python in candidates(declared, path):
        full = python if os.path.isabs(python) else shutil.which(python, path=path)
        if full is None or not os.access(full, os.X_OK):
            tried.append("%s (is no program)" % show(python))
            continue
        try:
            answer = ask(full, environment, {"what": "identity"}, timeout, account)
        except CleanslateError as error:
            tried.append("%s (%s)" % (show(full), error.message))
            continue
        if answer.get("version"):
            return Identity(full, str(answer["version"]), str(answer.get("location", "")))
        tried.append("%s (has no sglang)" % show(full))
    raise CleanslateError(
        "%s: no Python with SGLang was found. Tried: %s." % (variable("python"), "; ".join(tried) or "nothing"),
        variable=variable("python"),
    )


def _stamp(path: str) -> list[t.Any]:
    """Size and time of a model's configuration: what the resolver reads of it."""
    try:
        status = os.stat(os.path.join(path, "config.json"))
        return [status.st_size, status.st_mtime_ns]
    except OSError:
        return []


def resolve(
    identity: Identity,
    environment: t.Mapping[str, str],
    argv: t.Sequence[str],
    config: t.Mapping[str, str],
    models: t.Sequence[str],
    cache_dir: str | None,
    secrets: t.Sequence[str] = (),
    timeout: float = PROBE_TIMEOUT,
    account: Account | None = None,
) -> Answer:
    """Ask for one command line (C(argv) after the module's name, C(config): the arguments kept out of it).

    The answer is kept in C(cache_dir) under a digest of the arguments, the environment, SGLang's version and place,
    and the models' configuration files; None keeps nothing.
    """
    asked = list(argv)
    for name, value in sorted(config.items()):
        asked += ["--" + name, value]
    if "--device" not in asked:
        # Without a GPU in sight SGLang cannot guess.
        asked += ["--device", "cuda"]
    question = [
        source_of("probe"),
        identity.version,
        identity.location,
        identity.python,
        asked,
        sorted(environment.items()),
        [_stamp(path) for path in models],
    ]
    digest = hashlib.sha256(json.dumps(question).encode("utf-8")).hexdigest()
    path = os.path.join(cache_dir, "resolve-%s.json" % digest) if cache_dir else None
    raw = read_bytes(path) if path else None
    answer: dict[str, t.Any] | None = None
    if raw is not None:
        try:
            answer = json.loads(raw.decode("utf-8"))
        except ValueError:
            answer = None
    cached = answer is not None
    if answer is None:
        answer = ask(identity.python, environment, {"what": "resolve", "argv": asked}, timeout, account)
        resolved = answer.get("resolved")
        if isinstance(resolved, dict):
            answer["resolved"] = {key: value for key, value in resolved.items() if not is_secret_name(key)}
        answer = json.loads(redact_value(json.dumps(answer), [json.dumps(secret)[1:-1] for secret in secrets]))
        if path and cache_dir and not any(error["stage"] == "import" for error in answer["errors"]):
            make_dir(cache_dir, 0o700)
            write_atomic(path, json.dumps(answer).encode("utf-8"), 0o600)
            _prune(cache_dir)
    return Answer(
        answer.get("resolved"),
        [_finding(error, identity) for error in answer["errors"]],
        [
            "SGLang's %s stage could not be judged without the GPU: %s" % (e["stage"], show(e["message"]))
            for e in answer["not_judged"]
        ],
        cached,
    )


def _prune(folder: str) -> None:
    files = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("resolve-")]
    dated: list[tuple[float, str]] = []
    for path in files:
        try:
            dated.append((os.stat(path).st_mtime, path))
        except FileNotFoundError:
            continue
    for _when, path in sorted(dated)[:-KEEP]:
        remove(path)


def _finding(error: t.Mapping[str, str], identity: Identity) -> Finding:
    message = show(error["message"])
    where = variable("args")
    if error["stage"] == "import":
        where = variable("python")
        message = "%s cannot load its SGLang %s: %s" % (identity.python, identity.version, message)
    else:
        message = "SGLang %s refuses the command line: %s" % (identity.version, message)
        if "speculative" in message:
            where = variable("speculative")
        elif "--attention-backend" in message or "attention_backend" in message:
            where = variable("attention_backend")
        elif "model_path" in message or "Repo id" in message:
            where = variable("model_path")
        for old, new in sorted(RENAMED.items()):
            if "--" + old.replace("_", "-") in message.replace(",", " ").split():
                message += " It was renamed: write %s." % new
                break
    return Finding("sglang", "%s: %s" % (where, message), where)
