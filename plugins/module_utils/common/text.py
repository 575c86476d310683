# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Text that came from outside: made printable, made safe to show, read as a size."""

from __future__ import annotations

import re
import typing as t

from .errors import CleanslateError

HIDDEN = "********"

# Whole words of an option's or variable's name that say "my value is a secret".
_SECRET_WORDS = frozenset(
    [
        "key",
        "apikey",
        "token",
        "secret",
        "secrets",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "bearer",
    ]
)
# Names that hold such a word and no secret.
_NOT_SECRET = frozenset(
    [
        "speculative-token-map",
        "eos-token-id",
        "bos-token-id",
        "pad-token-id",
        "schedule-key",
        "cache-key",
        "tokenizer-path",
    ]
)
# Values that are secrets whatever they are called: Hugging Face, OpenAI style, GitHub, AWS; user:password in a URL.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,})"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_HEADER = re.compile(r"(?i)(authorization\s*[:=]\s*(?:bearer\s+)?)\S+")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def show(text: str) -> str:
    """Return C(text) with everything unprintable escaped: control bytes, ANSI sequences, newlines,
    direction marks, and bytes that were not UTF-8 (read with surrogateescape).

    Names of processes and files belong to whoever made them; none may reach a terminal raw.
    """
    if text.isprintable():
        return text
    out: list[str] = []
    for char in text:
        code = ord(char)
        if char.isprintable():
            out.append(char)
        elif 0xDC80 <= code <= 0xDCFF:
            out.append("\\x%02x" % (code - 0xDC00))
        elif code < 0x100:
            out.append("\\x%02x" % code)
        elif code < 0x10000:
            out.append("\\u%04x" % code)
        else:
            out.append("\\U%08x" % code)
    return "".join(out)


def is_secret_name(name: str) -> bool:
    """Whether an option (C(--api-key)) or variable (C(HF_TOKEN)) of this name holds a secret."""
    plain = name.lstrip("-").replace("_", "-").lower()
    if plain in _NOT_SECRET:
        return False
    return bool(_SECRET_WORDS.intersection(re.split(r"[-.]", plain)))


def redact_value(text: str, secrets: t.Iterable[str] = ()) -> str:
    """Return C(text) with known secret values, and values that look like one, replaced."""
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    text = _HEADER.sub(r"\1" + HIDDEN, text)
    return _URL_LOGIN.sub(HIDDEN, text)


def redact_argv(argv: t.Sequence[str], secrets: t.Iterable[str] = ()) -> list[str]:
    """Return a command line with the values of secret options hidden (C(--api-key X), C(--api-key=X), C(TOKEN=X))."""
    secrets = list(secrets)
    out: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not word.startswith("--"):
            out.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        name, equals, _value = word.partition("=")
        if is_secret_name(name) and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
            if equals:
                out.append(name + "=" + HIDDEN)
                continue
            hide_next = name.startswith("-")
        out.append(redact_value(word, secrets))
    return out


def command_line(argv: t.Sequence[str], limit: int = 400) -> str:
    """One printable, redacted line out of a command line, cut to C(limit) characters."""
    line = " ".join(show(word) if word else "''" for word in redact_argv(argv))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def parse_size(value: str | int, option: str) -> int:
    """Return bytes out of C(128MiB), C(1.5 GiB), C(64M), C(1000) (bytes). KB and KiB both mean 1024 bytes.

    Raises CleanslateError naming C(option) when it is no size.
    """
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise CleanslateError(
            "%s: %r is not a size. Write a number with a unit, for example 128MiB." % (option, show(str(value)))
        )
    factor = 1024 ** " KMGT".index(match.group(2).upper() or " ")
    return int(float(match.group(1)) * factor)


def format_size(size: int | None) -> str:
    """Bytes as people read them: C(644939776) is C(615 MiB)."""
    if size is None:
        return "unknown"
    if size < 1024 * 1024:
        return "%d B" % size if size < 1024 else "%d KiB" % (size // 1024)
    mib = size / (1024.0 * 1024.0)
    return "%.0f MiB" % mib if mib < 10240 else "%.1f GiB" % (mib / 1024)
