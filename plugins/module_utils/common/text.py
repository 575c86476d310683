# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Text that came from outside: made printable, read as a size."""

from __future__ import annotations

import re
import typing as t
from fractions import Fraction

from .errors import CleanslateError
from .redact import HIDDEN as HIDDEN  # pylint: disable=useless-import-alias,unused-import
from .redact import is_secret_name as is_secret_name  # pylint: disable=useless-import-alias,unused-import
from .redact import redact_argv as redact_argv  # pylint: disable=useless-import-alias
from .redact import redact_value as redact_value  # pylint: disable=useless-import-alias,unused-import

# ASCII: else Unicode's other digits count, and the Kelvin sign matches K.
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE | re.ASCII)


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


def command_line(argv: t.Sequence[str], limit: int = 400) -> str:
    """One printable, redacted line out of a command line, cut to C(limit) characters."""
    # A command line may be megabytes long, and only its beginning is shown.
    words = [word[: 4 * limit] for word in argv[:limit]]
    line = " ".join(show(word) if word else "''" for word in redact_argv(words))
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
    factor = 1024 ** " KMGT".index((match.group(2) or " ").upper())
    return int(Fraction(match.group(1)) * factor)


def format_size(size: int | None) -> str:
    """Bytes as people read them: C(644939776) is C(615 MiB)."""
    if size is None:
        return "unknown"
    if size < 1024 * 1024:
        return "%d B" % size if size < 1024 else "%d KiB" % (size // 1024)
    mib = size / (1024.0 * 1024.0)
    return "%.0f MiB" % mib if mib < 10240 else "%.1f GiB" % (mib / 1024)
