# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A server's own output: read on from where the last look ended, turned into progress, into activity, into a diagnosis.

The literal texts are those of sglang 0.5.17 on H200s and of 0.5.23 on a CPU. Progress bars redraw themselves with
carriage returns, and other lines can be glued to a bar's end, so lines end at either, and patterns are searched, not
anchored.
"""

from __future__ import annotations

import json
import os
import re
import typing as t

from ..common.errors import CleanslateError
from ..common.text import redact_value, show
from .systemd_backend import Systemd

#: Bytes read at one look: a server that logs faster than this is read on at the next look.
CHUNK = 1024 * 1024
#: Characters of one line that are kept.
LINE = 400


class LogSource:
    """Where the output is. C(cursor) is opaque to callers and survives JSON."""

    def read(self, cursor: dict[str, t.Any]) -> tuple[list[str], dict[str, t.Any]]:
        """Lines since C(cursor) (empty: since the start of this launch) and the next cursor."""
        raise NotImplementedError

    def tail(self, size: int = 65536) -> list[str]:
        """The last lines."""
        raise NotImplementedError

    def end(self) -> dict[str, t.Any]:
        """The cursor of now: what comes after it is new."""
        raise NotImplementedError


def split_lines(raw: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", raw) if line.strip()]


class FileLog(LogSource):
    """The log file of back end C(process)."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self, cursor: dict[str, t.Any]) -> tuple[list[str], dict[str, t.Any]]:
        rest = str(cursor.get("rest", ""))
        try:
            with open(self.path, "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                offset = int(cursor.get("offset", 0))
                if offset > size:
                    # It was rotated: what follows is new.
                    offset, rest = 0, ""
                handle.seek(offset)
                raw = handle.read(CHUNK)
        except FileNotFoundError:
            return [], dict(cursor)
        whole = rest + raw.decode("utf-8", "replace")
        cut = max(whole.rfind("\n"), whole.rfind("\r")) + 1
        return split_lines(whole[:cut]), {"offset": offset + len(raw), "rest": whole[cut:][-4096:]}

    def tail(self, size: int = 65536) -> list[str]:
        try:
            with open(self.path, "rb") as handle:
                end = os.fstat(handle.fileno()).st_size
                handle.seek(max(0, end - size))
                return split_lines(handle.read(size).decode("utf-8", "replace"))
        except FileNotFoundError:
            return []

    def end(self) -> dict[str, t.Any]:
        try:
            return {"offset": os.path.getsize(self.path)}
        except FileNotFoundError:
            return {"offset": 0}


class JournalLog(LogSource):
    """The journal of one start of a unit. Progress bars make the journal keep messages as bytes, not as text."""

    def __init__(self, unit: str, invocation: str = "", systemd: Systemd | None = None) -> None:
        self.unit = unit
        self.invocation = invocation
        self.systemd = systemd or Systemd()

    def _entries(self, *words: str) -> list[dict[str, t.Any]]:
        match = ["_SYSTEMD_INVOCATION_ID=" + self.invocation] if self.invocation else ["--unit", self.unit]
        out = self.systemd.run("journalctl", "--no-pager", "--quiet", "--all", "--output=json", *words, *match)
        entries: list[dict[str, t.Any]] = []
        for line in out.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                entries.append(entry)
        return entries

    def read(self, cursor: dict[str, t.Any]) -> tuple[list[str], dict[str, t.Any]]:
        try:
            words = ["--after-cursor=" + str(cursor["journal"])] if cursor.get("journal") else []
            entries = self._entries(*words)
        except CleanslateError:
            if not words:
                raise
            # The entry is vacuumed away, and with it what was read: what is left is read from its beginning.
            entries = self._entries()
        lines = [line for entry in entries for line in split_lines(message_text(entry.get("MESSAGE")))]
        last = entries[-1].get("__CURSOR") if entries else cursor.get("journal")
        return lines, {"journal": last} if last else {}

    def tail(self, size: int = 65536) -> list[str]:
        entries = self._entries("--lines=%d" % max(10, size // 200))
        return [line for entry in entries for line in split_lines(message_text(entry.get("MESSAGE")))]

    def end(self) -> dict[str, t.Any]:
        entries = self._entries("--lines=1")
        return {"journal": entries[-1]["__CURSOR"]} if entries else {}


def message_text(message: t.Any) -> str:
    """A journal entry's message: text, or a list of byte values where it is not printable, or nothing."""
    if isinstance(message, list):
        return bytes(value for value in message if isinstance(value, int) and 0 <= value < 256).decode(
            "utf-8", "replace"
        )
    return message if isinstance(message, str) else ""


_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def clean(line: str, secrets: t.Iterable[str] = ()) -> str:
    """One line fit to be shown: no secrets, no control bytes, not endless."""
    plain = show(redact_value(_CONTROL.sub("", line).strip(), secrets))
    # The startup line repeats every argument, keys included (sglang issue 30166).
    plain = re.sub(r"((?:admin_)?api_key|ssl_keyfile_password)=('[^']*'|\"[^\"]*\"|[^,)\s]+)", r"\1=********", plain)
    return plain if len(plain) <= LINE else plain[: LINE - 1] + "…"


# --- progress ---------------------------------------------------------------------------------------------------------

#: Phase, what begins it in the log, what people read. In the order in which they come.
PHASES: tuple[tuple[str, str, str], ...] = (
    ("arguments", r"server_args=(?:ServerArgs\(|\{)", "SGLang has read its arguments; the workers start"),
    ("connect", r"Init (?:torch distributed|parallel) begin", "the workers connect to each other"),
    ("weights", r"Load weight begin", "weights are being loaded"),
    ("memory", r"KV Cache is allocated", "memory for the KV cache is allocated"),
    ("graphs", r"Capture .*CUDA graph begin", "CUDA graphs are being captured"),
    ("listen", r"Uvicorn running on", "the HTTP server listens; it warms up"),
    ("fired_up", r"The server is fired up and ready to roll", "SGLang says that it is ready"),
)
_PHASES = tuple((name, re.compile(pattern), text) for name, pattern, text in PHASES)
_DETAILS = (
    re.compile(r"Load weight begin\. avail mem=(?P<memory>[\d.]+ GB)"),
    re.compile(r"Load weight end\. elapsed=(?P<seconds>[\d.]+) s, type=(?P<type>\w+)"),
    re.compile(r"#tokens: (?P<tokens>\d+)"),
    re.compile(r"Capture (?P<what>.*?) ?CUDA graph (?P<edge>begin|end)\.(?: elapsed=(?P<seconds>[\d.]+) s)?"),
)
_BARS = (
    (
        "weights",
        re.compile(r"(?:loading shards|Loading \w+ checkpoint shards)[^|]*?(\d+)%[^|]*\|[^|]*?\|?\s*(\d+)/(\d+)"),
    ),
    ("graphs", re.compile(r"Capturing batches[^|]*?(\d+)%\|[^|]*\|\s*(\d+)/(\d+)")),
)
#: A bar is shown when it has grown by so many percent.
STEP = 25


def draw_bar(percent: int, width: int = 20) -> str:
    full = max(0, min(width, percent * width // 100))
    return "[" + "#" * full + "-" * (width - full) + "]"


def progress(lines: t.Iterable[str], state: dict[str, t.Any]) -> list[str]:
    """What is worth telling about new lines, once. C(state) (kept by the caller, JSON) remembers what was told."""
    out: list[str] = []
    #: Where each bar stands in C(out): one that moves on within the same look is told once, as far as it came.
    drawn: dict[str, int] = {}
    told: list[str] = state.setdefault("told", [])

    def tell(key: str, text: str) -> None:
        if key not in told:
            told.append(key)
            out.append(text)

    for line in lines:
        for name, pattern, text in _PHASES:
            if pattern.search(line):
                state["phase"] = name
                memory = _DETAILS[0].search(line)
                tokens = _DETAILS[2].search(line) if name == "memory" else None
                extra = " (%s free on the GPU)" % memory.group("memory") if memory else ""
                extra = (
                    " for %s tokens" % format(int(tokens.group("tokens")), ",").replace(",", " ") if tokens else extra
                )
                tell(name, text + extra)
        loaded = _DETAILS[1].search(line)
        if loaded:
            tell("loaded " + loaded.group("type"), "weights of %(type)s loaded in %(seconds)s s" % loaded.groupdict())
        graph = _DETAILS[3].search(line)
        if graph and graph.group("edge") == "end":
            what = graph.group("what").strip()
            tell("graph " + what, ("%s CUDA graphs captured in %s s" % (what, graph.group("seconds") or "?")).strip())
        for name, pattern in _BARS:
            match = pattern.search(line)
            if not match:
                continue
            percent, done, total = (int(group) for group in match.groups())
            key = "bar %s %d" % (name, total)
            last = int(state.get(key, 0))
            if percent < last:
                # The draft model's bar comes after the target's and begins again.
                last = 0
                drawn.pop(key, None)
            if percent // STEP > last // STEP:
                text = "%-7s %s %3d%% %d/%d" % (name, draw_bar(percent), percent, done, total)
                if key in drawn:
                    out[drawn[key]] = text
                else:
                    drawn[key] = len(out)
                    out.append(text)
            state[key] = percent
    return out


# --- activity ---------------------------------------------------------------------------------------------------------

_BATCH = re.compile(r"(Prefill|Decode) batch\b.*?#running-req: (\d+)")
#: What a server does on purpose while it answers nobody.
_OCCUPIED = re.compile(
    r"Load(?:ing)? weight|Capture .*CUDA graph begin|Capturing batches|pause_generation|Pause generation|update_weights"
    r"|Compil|autotun|release_memory_occupation"
)


class Activity(t.NamedTuple):
    """What new lines say of the scheduler."""

    batches: int
    running: int
    occupied: str


def activity(lines: t.Iterable[str]) -> Activity:
    batches, running, occupied = 0, 0, ""
    for line in lines:
        match = _BATCH.search(line)
        if match:
            batches += 1
            running = int(match.group(2))
        elif _OCCUPIED.search(line):
            occupied = line
    return Activity(batches, running, occupied)


def tells_of_decoding(lines: t.Iterable[str]) -> bool:
    """Whether the server writes a line about batches that decode, so that the lack of one means something."""
    return any(match.group(1) == "Decode" for match in map(_BATCH.search, lines) if match)


# --- diagnosis --------------------------------------------------------------------------------------------------------


class Diagnosis(t.NamedTuple):
    cause: str
    msg: str
    #: The lines that show it, redacted.
    lines: list[str]


#: Cause, pattern, what it means and what to change. The first that matches wins: the more telling ones come first.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "port",
        r"\[Errno 98\]|address already in use|EADDRINUSE",
        "The port is taken. Choose another sglang_server_port.",
    ),
    (
        "memory",
        r"leave no GPU memory for the KV cache|Not enough memory|mem-fraction-static",
        "The model leaves no memory for the KV cache. Raise sglang_server_mem_fraction_static, or use more GPUs.",
    ),
    (
        "out_of_memory",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|cudaErrorMemoryAllocation",
        "The GPU ran out of memory. Lower sglang_server_mem_fraction_static or max_running_requests in "
        "sglang_server_args, or use more GPUs.",
    ),
    (
        "nccl",
        r"ncclInvalidUsage|NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError|NCCL WARN"
        r"|ProcessGroupNCCL|No algorithm/protocol available",
        "NCCL failed. Look at sglang_server_nccl; NCCL_DEBUG=INFO there says more.",
    ),
    (
        "shared_memory",
        r"No space left on device|Bus error|ENOSPC",
        "A file system is full, probably /dev/shm or that of the log. Make room, then launch again.",
    ),
    (
        "missing_file",
        r"Repo id must be in the form|No such file or directory|FileNotFoundError|does not appear to have a file named"
        r"|LocalEntryNotFoundError|is not a local folder",
        "A file is missing. Look at sglang_server_model_path and draft_model_path in sglang_server_speculative.",
    ),
    (
        "arguments",
        r": error: (?:argument|unrecognized|ambiguous|the following)",
        "SGLang does not take the command line. Look at sglang_server_args.",
    ),
    (
        "unbalanced_memory",
        r"memory capacity is unbalanced",
        "The GPUs have different amounts of free memory: something else uses one of them.",
    ),
    (
        "graphs",
        r"Capture cuda graph failed",
        "Capturing CUDA graphs failed. Lower cuda_graph_max_bs_decode in sglang_server_args, or switch graphs off.",
    ),
    ("import", r"ModuleNotFoundError|ImportError", "SGLang is not installed completely in sglang_server_python."),
    ("driver", r"CUDA driver version is insufficient|No CUDA GPUs are available|CUDA error", "The GPU driver refused."),
)
_CAUSES = tuple((cause, re.compile(pattern), text) for cause, pattern, text in CAUSES)
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception)\b[:(]?|\bERROR\b|: error: |\[Errno \d+\]|Bus error|Killed")
#: A failed server that does not end: it loads fully, cannot listen, and stays (measured).
FATAL_WHILE_ALIVE = re.compile(r"\[Errno 98\]|Received sigquit from a child process")


def exit_text(code: int | None) -> str:
    """An exit code in words: negative is a signal, above 128 a shell's way to say one."""
    if code is None:
        return ""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number == 9:
        return "exit 137: killed (SIGKILL). SGLang kills itself when a worker fails, the kernel when memory runs out."
    if number:
        return "exit %d: ended by signal %d" % (128 + number, number)
    if code == 2:
        return "exit 2: the command line was refused"
    return "exit %d" % code


def diagnose(
    lines: t.Sequence[str], code: int | None = None, secrets: t.Iterable[str] = (), keep: int = 8
) -> Diagnosis:
    """Why a server failed, from its last lines and its exit code (negative: a signal)."""
    secrets = list(secrets)
    ending = exit_text(code)
    errors = [line for line in lines if _ERROR.search(line)]
    for cause, pattern, text in _CAUSES:
        hits = [line for line in errors if pattern.search(line)] or [line for line in lines if pattern.search(line)]
        if hits:
            shown = [clean(line, secrets) for line in (hits[-1:] + [e for e in errors[-3:] if e != hits[-1]])]
            return Diagnosis(cause, text + (" (%s)" % ending if ending else ""), shown[:keep])
    if errors:
        last = clean(errors[-1], secrets)
        return Diagnosis("error", "Its last error: %s%s" % (last, " (%s)" % ending if ending else ""), [last])
    shown = [clean(line, secrets) for line in lines[-keep:]]
    said = " Its last line: %s" % shown[-1] if shown else " It wrote nothing."
    return Diagnosis(
        "killed" if code == -9 else "unknown", (ending or "It ended without an error in its log.") + said, shown
    )
