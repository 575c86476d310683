# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Secrets in what is shown: found by the name before them, by their looks, or because they are known."""

from __future__ import annotations

import re
import typing as t

HIDDEN = "********"

# Whole words of an option's or variable's name that say "my value is a secret".
_SECRET = frozenset(
    (
        *("secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"),
        *("auth", "authorization", "bearer", "cookie", "jwt", "pat"),
    )
)
# The same, written without a break: PGPASSWORD, clientsecret, apikey.
_SECRET_ENDS = (
    *("password", "passwd", "passphrase", "secret", "apikey", "apikeys", "accesskey", "secretkey", "privatekey"),
    *("apitoken", "authtoken", "accesstoken"),
)
# A language model's tokens and a program's keys are no secrets: words before them, words after them, that say so.
_TOKEN_AFTER = frozenset(
    (
        *("per", "new", "next", "draft", "cached", "prompt", "prefill", "decode", "stop", "max", "min", "num"),
        *("eos", "bos", "pad", "unk", "sep", "mask", "image", "audio", "video", "special"),
    )
)
_TOKEN_BEFORE = frozenset(
    (
        *("id", "ids", "map", "ratio", "usage", "budget", "oracle", "assert", "prob", "swap", "block", "activation"),
        *("level", "wise", "limit", "count", "step", "steps"),
    )
)
_KEY_AFTER = frozenset(["graph", "cache", "schedule", "sort", "hash", "primary", "foreign", "public", "partition"])
_KEY_BEFORE = frozenset(["id", "ids"])
# PWD is a folder, DB_PWD is not; a forward pass is work of a model, DB_PASS is not.
_PASS_AFTER = frozenset(["", "forward", "backward", "single", "two", "multi", "per"])
# A name that ends so holds a path or a manner, never the secret itself.
_HARMLESS_LAST = frozenset(
    ["file", "path", "dir", "sock", "socket", "type", "mode", "method", "timeout", "ttl", "size", "length"]
)
# Options that argparse lets people shorten: the shortest form that counts, and the whole.
_SHORTENED = (
    ("ap", "api-key"),
    ("ad", "admin-api-key"),
    ("control-plane-a", "control-plane-api-keys"),
    ("ssl-keyfile-", "ssl-keyfile-password"),
)

# Values that are secrets whatever they are called: Hugging Face, OpenAI style, GitHub, GitLab, NVIDIA, Slack, AWS; JWT.
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-(?=[A-Za-z_-]{0,40}[0-9])[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"
)
# user:password of a URL; the password may hold colons and at signs, the user may be empty.
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]*(?=@)")
_HEADER = re.compile(r"(?i)(\b(?:authorization|cookie)[\\\"']{0,4}\s*[:=]\s*[\\\"']{0,4})[^\"'\\\r\n]+")
_BEARER = re.compile(r"(?i)(\bbearer\s+)[^\s\"'\\]+")
# A name and what leads from it to its value, somewhere in a text: --name VALUE, NAME=VALUE, "name": "VALUE".
# SGLang's log lines count tokens as "#token: 33".
_NAMED = re.compile(
    r"(?<![\w.#-])(?:(?P<option>--[A-Za-z][\w.-]{0,200})\s+|(?P<name>-{0,2}[A-Za-z_][\w.-]{0,200})[\\\"']{0,4}\s*[:=]\s*)"
)
_VALUE = re.compile(r"(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\\+\".*?\\+\")[^\s&,;}\])]*|[^\s&]+", re.DOTALL)
_NOTHING = re.compile(r"(?:None|null|True|False|true|false|\"\"|'')(?=[\s,})\]]|$)")
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)
_NAME = re.compile(r"-{0,2}[A-Za-z_][\w.-]*")


def is_secret_name(name: str) -> bool:
    """Whether an option (C(--api-key)) or variable (C(HF_TOKEN)) of this name holds a secret."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()
    words = [word for word in re.split(r"[-_.]+", plain) if word]
    if not words or words[-1] in _HARMLESS_LAST:
        return False
    return any(map(_says_secret, ["", *words[:-1]], words, [*words[1:], ""]))


def _says_secret(before: str, word: str, after: str) -> bool:
    if word in ("token", "key", "keys") and before in ("api", "access"):
        return True
    if word == "token":
        return before not in _TOKEN_AFTER and after not in _TOKEN_BEFORE
    if word in ("key", "keys"):
        return before not in _KEY_AFTER and after not in _KEY_BEFORE
    if word in ("pass", "pwd"):
        return not after and before not in _PASS_AFTER
    return word in _SECRET or word.endswith(_SECRET_ENDS)


def _is_secret_option(name: str) -> bool:
    plain = name.lstrip("-").replace("_", "-")
    return is_secret_name(name) or (
        name.startswith("--")
        and any(plain.startswith(short) and whole.startswith(plain) for short, whole in _SHORTENED)
    )


def _hide_named(text: str) -> str:
    """Hide what follows the name of a secret inside a longer text: a title, a shell's command, JSON, a URL, a log."""
    out: list[str] = []
    done = 0
    for found in _NAMED.finditer(text):
        if found.start() < done or not _is_secret_option(found.group("option") or found.group("name")):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or _NOTHING.match(text, found.end()):
            continue
        if found.group("option") and _OPTION.fullmatch(value.group()):
            continue
        out += (text[done : found.end()], HIDDEN)
        done = value.end()
    return "".join(out) + text[done:]


def redact_value(text: str, secrets: t.Iterable[str] = ()) -> str:
    """Return C(text) with known secret values, values that look like one, and values that are called one, replaced."""
    known = sorted({s for s in secrets if s}, key=len, reverse=True)
    if known:
        text = re.sub("|".join(map(re.escape, known)), HIDDEN, text)
    text = _HEADER.sub(r"\1" + HIDDEN, text)
    text = _BEARER.sub(r"\1" + HIDDEN, text)
    text = _SECRET_VALUE.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(HIDDEN, text)
    return _hide_named(text)


def redact_argv(argv: t.Sequence[str], secrets: t.Iterable[str] = ()) -> list[str]:
    """Return a command line with the values of secret options hidden: C(--api-key X), C(--api-key=X), C(TOKEN=X), also
    inside a word, as in C(sh -c '… --api-key X') or in a title that holds a whole command line."""
    secrets = list(secrets)
    out: list[str] = []
    hide_next = False
    for word in argv:
        if hide_next and not _OPTION.fullmatch(word):
            out.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        name, equals, _value = word.partition("=")
        if _NAME.fullmatch(name) and _is_secret_option(name):
            if equals:
                out.append(redact_value(name, secrets) + "=" + HIDDEN)
                continue
            hide_next = name.startswith("-")
        out.append(redact_value(word, secrets))
    return out
