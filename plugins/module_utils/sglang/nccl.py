# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""NCCL's variables: put together from their three sources, and checked against NCCL's own grammar.

Facts (github.com/NVIDIA/nccl 2.30.7: src/misc/param.cc, src/graph/tuning.cc, src/graph/paths.cc; NCCL user guide,
"Environment Variables"): integers are read by strtoll with base 0 and trailing text is ignored, so that C(4M) is 4;
an unknown token in NCCL_ALGO or NCCL_PROTO makes initialisation fail; a set that leaves no algorithm for some
collective fails at its first use; an unknown NCCL_P2P_LEVEL is ignored without a word; so is an unknown name.
"""

from __future__ import annotations

import difflib
import re
import typing as t

from .findings import Finding, variable
from .nccl_names import INTEGERS, TEXTS, VERSION

PREFIX = "NCCL_"
#: Names that NCCL once read and reads no more.
DEAD = frozenset(["CHECKS_DISABLE", "TREE_THRESHOLD", "LL_THRESHOLD", "SINGLE_RING_THRESHOLD"])
#: Names read elsewhere than in NCCL's own list: still known.
ALSO_KNOWN = frozenset(["MIN_NRINGS", "MAX_NRINGS", "MULTI_RANK_GPU_ENABLE", "IB_SL", "IB_TC", "NVLS_ENABLE"])

ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
#: Which algorithms can do a collective at all (src/graph/tuning.cc); what SGLang calls is among these functions.
CAN_DO = {
    "broadcast": {"ring"},
    "reduce": {"ring"},
    "allgather": {"ring", "collnetdirect", "nvls", "pat"},
    "reducescatter": {"ring", "collnetdirect", "nvls", "pat"},
    "allreduce": {"tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree"},
}
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
#: Integer ranges: smallest, largest.
RANGES = {
    "MIN_NCHANNELS": (1, 64),
    "MAX_NCHANNELS": (1, 64),
    "MIN_CTAS": (1, 64),
    "MAX_CTAS": (1, 64),
    "NTHREADS": (64, 512),
    "CROSS_NIC": (0, 2),
    "IB_DISABLE": (0, 1),
    "SHM_DISABLE": (0, 1),
    "CUMEM_ENABLE": (-2, 1),
    "CUMEM_HOST_ENABLE": (-1, 1),
    "NVLS_ENABLE": (0, 2),
    "IB_TIMEOUT": (1, 31),
    "IB_RETRY_CNT": (0, 7),
    "SOCKET_NTHREADS": (1, 16),
    "NSOCKS_PERTHREAD": (1, 16),
}


class Effective(t.NamedTuple):
    """The variables that a server will get, why, and what is wrong with them."""

    #: Full name to text.
    values: dict[str, str]
    #: Full name to the role variable that set it.
    sources: dict[str, str]
    errors: list[Finding]
    warnings: list[str]


def full_name(name: str) -> str:
    """C(algo), C(ALGO) and C(NCCL_ALGO) are the same variable."""
    upper = name.strip().upper()
    return upper if upper.startswith(PREFIX) else PREFIX + upper


def text(value: t.Any) -> str | None:
    """A YAML value as NCCL wants it; None when it is no value for an environment variable."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (list, tuple)):
        parts = [text(item) for item in value]
        return None if not parts or None in parts else ",".join(t.cast("list[str]", parts))
    return None


def _read(source: t.Mapping[str, t.Any], where: str, errors: list[Finding]) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    written: dict[str, str] = {}
    for key, value in source.items():
        name = full_name(str(key))
        if name in out:
            errors.append(
                Finding("duplicate", "%s holds %s twice: as %s and as %s." % (where, name, written[name], key), where)
            )
            continue
        written[name] = str(key)
        if value is None:
            out[name] = None
            continue
        plain = text(value)
        if plain is None or "\n" in plain or "\0" in plain:
            errors.append(
                Finding("nccl_value", "%s: %s wants a number, a text, a list or a truth value." % (where, name), where)
            )
            continue
        out[name] = plain
    return out


def merge(nccl: t.Mapping[str, t.Any], host: t.Mapping[str, t.Any], environment: t.Mapping[str, t.Any]) -> Effective:
    """Put the three sources together.

    C(host) adds to and overrules C(nccl) (null there takes a variable away); the same name in C(environment) is an
    error that names both places.
    """
    errors: list[Finding] = []
    in_nccl, in_host, in_environment = variable("nccl"), variable("nccl_host"), variable("environment")
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for where, found in ((in_nccl, _read(nccl, in_nccl, errors)), (in_host, _read(host, in_host, errors))):
        for name, value in found.items():
            if value is None:
                values.pop(name, None)
                sources.pop(name, None)
            else:
                values[name], sources[name] = value, where
    for key, value in environment.items():
        name = str(key)
        if not name.startswith(PREFIX):
            continue
        if name in values:
            errors.append(
                Finding(
                    "duplicate",
                    "%s is set in %s and in %s. Keep one of them." % (name, sources[name], in_environment),
                    in_environment,
                )
            )
            continue
        plain = text(value)
        if plain is not None:
            values[name], sources[name] = plain, in_environment
    warnings: list[str] = []
    for name in sorted(values):
        problems, notes = check_one(name, values[name])
        errors.extend(Finding("nccl_value", "%s: %s" % (sources[name], msg), sources[name]) for msg in problems)
        warnings.extend("%s: %s" % (sources[name], msg) for msg in notes)
    errors.extend(_check_together(values, sources))
    return Effective(values, sources, errors, warnings)


def check_one(name: str, value: str) -> tuple[list[str], list[str]]:
    """What is wrong (errors, warnings) with one variable on its own."""
    short = name[len(PREFIX) :]
    if short in DEAD:
        return [], ["%s is not read by NCCL any more." % name]
    if short not in INTEGERS and short not in TEXTS and short not in ALSO_KNOWN:
        near = difflib.get_close_matches(short, sorted(INTEGERS | TEXTS | ALSO_KNOWN), 1, 0.6)
        hint = " Did you mean %s%s?" % (PREFIX, near[0]) if near else ""
        return [], ["NCCL %s does not know %s and ignores it without a word.%s" % (VERSION, name, hint)]
    if value == "":
        return ["%s is empty. Take it away, or give it a value." % name], []
    check = _CHECKS.get(short)
    if check is not None:
        return check(name, value)
    if short in INTEGERS or short in RANGES:
        return _integer(name, value)
    return [], []


def _integer(name: str, value: str) -> tuple[list[str], list[str]]:
    if re.fullmatch(r"[+-]?0[0-7]+", value):
        return ["%s=%s is octal to NCCL (%d). Write it without the leading 0." % (name, value, int(value, 8))], []
    if re.fullmatch(r"[+-]?(?:\d+|0[xX][0-9a-fA-F]+)", value) is None:
        digits = re.match(r"[+-]?\d+", value)
        read = digits.group() if digits else "0"
        return ["%s=%s is read by NCCL as %s: it wants a whole number without a unit." % (name, value, read)], []
    number = int(value, 0)
    low, high = RANGES.get(name[len(PREFIX) :], (None, None))
    if low is not None and high is not None and not low <= number <= high:
        return ["%s=%s is outside %d to %d." % (name, value, low, high)], []
    return [], []


def _buffsize(name: str, value: str) -> tuple[list[str], list[str]]:
    errors, warnings = _integer(name, value)
    if errors:
        match = re.fullmatch(r"(\d+)\s*([KkMm])i?[Bb]?", value)
        if match:
            size = int(match.group(1)) * (1024 if match.group(2) in "Kk" else 1024 * 1024)
            errors = ["%s=%s is %s bytes to NCCL. Write %d." % (name, value, match.group(1), size)]
        return errors, warnings
    number = int(value, 0)
    if number < 65536 or number & (number - 1):
        errors.append("%s=%s: bytes, a power of two, at least 65536 (NCCL's own is 4194304)." % (name, value))
    return errors, warnings


def _threads(name: str, value: str) -> tuple[list[str], list[str]]:
    errors, warnings = _integer(name, value)
    if not errors and int(value, 0) % 32:
        errors.append("%s=%s is no multiple of 32: NCCL would take 512 instead." % (name, value))
    return errors, warnings


def _selection(value: str, names: tuple[str, ...]) -> tuple[dict[str, set[str]], list[str]]:
    """Read C([^]a,b) or C(func:list;func:list). Returns what is left for each function, and unknown words."""
    left = {function: set(names) for function in FUNCTIONS}
    unknown: list[str] = []
    for index, entry in enumerate(part for part in value.split(";") if part.strip()):
        function, colon, listed = entry.rpartition(":")
        function = function.strip().lower()
        if colon and function not in FUNCTIONS:
            unknown.append(function or entry)
            continue
        if not colon and index:
            unknown.append(entry.strip() + " (only the first list may go without a function)")
            continue
        listed = listed.strip()
        exclude = listed.startswith("^")
        words = [word.strip().lower() for word in listed.lstrip("^").split(",") if word.strip()]
        unknown.extend(word for word in words if word not in names)
        chosen = set(names) - set(words) if exclude else set(words) & set(names)
        for name in (function,) if colon else FUNCTIONS:
            left[name] = chosen
    return left, unknown


def _algo(name: str, value: str) -> tuple[list[str], list[str]]:
    left, unknown = _selection(value, ALGORITHMS)
    if unknown:
        return [
            "%s=%s: NCCL knows no %s; it would refuse to start. It knows %s."
            % (name, value, ", ".join(unknown), ", ".join(ALGORITHMS))
        ], []
    broken = [f for f in ("allreduce", "allgather", "reducescatter", "broadcast") if not left[f] & CAN_DO[f]]
    if broken:
        only = sorted(left["allreduce"])
        return [
            "%s=%s leaves no algorithm for %s, and the server dies at the first one. To steer AllReduce alone write "
            "allreduce:%s." % (name, value, ", ".join(broken), ",".join(only) or "tree")
        ], []
    return [], []


def _proto(name: str, value: str) -> tuple[list[str], list[str]]:
    left, unknown = _selection(value, PROTOCOLS)
    if unknown:
        return ["%s=%s: NCCL knows no %s. It knows LL, LL128, Simple." % (name, value, ", ".join(unknown))], []
    if any(not left[f] for f in FUNCTIONS):
        return ["%s=%s leaves no protocol for some collective." % (name, value)], []
    # "^LL" leaves LL128 among others, by NCCL's own choice; a list that names it forces it.
    forced = [f for f in FUNCTIONS if "ll128" in left[f] and left[f] != set(PROTOCOLS) and "^" not in value]
    if forced:
        return [
            "%s=%s forces LL128, which corrupts data where NCCL has switched it off (NCCL 2.18.1 release notes). "
            "Leave the choice to NCCL, or name LL and Simple only." % (name, value)
        ], []
    return [], []


def _level(name: str, value: str) -> tuple[list[str], list[str]]:
    if value in LEVELS or re.fullmatch(r"[0-5]", value):
        return [], []
    hint = " Write %s." % value.upper() if value.upper() in LEVELS else ""
    return ["%s=%s is ignored by NCCL: it knows %s.%s" % (name, value, ", ".join(LEVELS), hint)], []


def _debug(name: str, value: str) -> tuple[list[str], list[str]]:
    if value.upper() in DEBUG_LEVELS:
        return [], []
    return ["%s=%s: NCCL knows %s." % (name, value, ", ".join(DEBUG_LEVELS))], []


def _p2p_disable(name: str, value: str) -> tuple[list[str], list[str]]:
    if value not in ("0", "1"):
        return ["%s=%s: only exactly 1 switches peer access off." % (name, value)], []
    return [], []


def _interfaces(name: str, value: str) -> tuple[list[str], list[str]]:
    words = value.lstrip("^=").split(",")
    if all(re.fullmatch(r"[^\s,/]{1,15}(?::\S*)?", word) for word in words):
        return [], []
    return ["%s=%s is no list of interface names ([^][=]name,…)." % (name, value)], []


_CHECKS: dict[str, t.Callable[[str, str], tuple[list[str], list[str]]]] = {
    "ALGO": _algo,
    "PROTO": _proto,
    "BUFFSIZE": _buffsize,
    "LL_BUFFSIZE": _buffsize,
    "LL128_BUFFSIZE": _buffsize,
    "NTHREADS": _threads,
    "P2P_LEVEL": _level,
    "NET_GDR_LEVEL": _level,
    "P2P_DISABLE": _p2p_disable,
    "DEBUG": _debug,
    "SOCKET_IFNAME": _interfaces,
}


def _check_together(values: t.Mapping[str, str], sources: t.Mapping[str, str]) -> list[Finding]:
    out: list[Finding] = []
    for low, high in (("MIN_NCHANNELS", "MAX_NCHANNELS"), ("MIN_CTAS", "MAX_CTAS")):
        first, second = values.get(PREFIX + low), values.get(PREFIX + high)
        if first and second and first.isdigit() and second.isdigit() and int(first) > int(second):
            out.append(
                Finding(
                    "nccl_value",
                    "%s%s=%s is above %s%s=%s (NCCL would take the first)."
                    % (PREFIX, low, first, PREFIX, high, second),
                    sources[PREFIX + low],
                )
            )
    if values.get("NCCL_P2P_DISABLE") == "1" and "NCCL_P2P_LEVEL" in values:
        out.append(
            Finding(
                "nccl_value",
                "NCCL_P2P_DISABLE=1 makes NCCL_P2P_LEVEL=%s idle. Keep one of them." % values["NCCL_P2P_LEVEL"],
                sources["NCCL_P2P_LEVEL"],
            )
        )
    return out


def gloo_interface(values: t.Mapping[str, str]) -> str | None:
    """The interface that Gloo must use when NCCL is told one (sglang issue 3514): Gloo wants exact names.

    None when NCCL's choice cannot be said in Gloo's words (an exclusion).
    """
    value = values.get("NCCL_SOCKET_IFNAME", "")
    if not value or value.startswith("^"):
        return None
    return value.lstrip("=")
