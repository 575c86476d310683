# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A server asked over HTTP on its own node: no proxy, a deadline for the whole answer, no key in any message."""

from __future__ import annotations

import http.client
import json
import ssl
import typing as t
import urllib.error
import urllib.request

from ..common.clock import Clock, Deadline
from ..common.text import redact_value, show

MAX_ANSWER = 16 * 1024 * 1024
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}


class Reply(t.NamedTuple):
    """C(status) 0: no answer at all, C(error) says why (C(refused), C(timeout) or text)."""

    status: int
    body: t.Any
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


class Client:
    """One server. C(host) is the declared one; a server that listens everywhere is asked on the loopback."""

    def __init__(
        self, host: str, port: int, key: str | None = None, tls: bool = False, clock: Clock | None = None
    ) -> None:
        host = _ANY.get(host, host)
        self.base = "%s://%s:%d" % ("https" if tls else "http", "[%s]" % host if ":" in host else host, port)
        self._key = key
        self._clock = clock or Clock()
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if tls:
            # The certificate names the service, not the loopback.
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str, timeout: float) -> Reply:
        return self._ask(urllib.request.Request(self.base + path), timeout)

    def post(self, path: str, body: t.Any, timeout: float) -> Reply:
        data = json.dumps(body).encode("utf-8")
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.base + path, data, headers), timeout)

    def first(self, names: t.Sequence[str], timeout: float) -> Reply:
        """Ask the newest of several names of the same thing first; an older one where that is not found."""
        reply = Reply(404, None)
        for name in names:
            reply = self.get(name, timeout)
            if reply.status != 404:
                return reply
        return reply

    def _ask(self, request: urllib.request.Request, timeout: float) -> Reply:
        if self._key:
            request.add_header("Authorization", "Bearer " + self._key)
        deadline = Deadline(self._clock, timeout)
        try:
            with self._opener.open(request, timeout=max(0.05, timeout)) as response:
                return Reply(response.status, _body(_read(response, deadline)))
        except urllib.error.HTTPError as error:
            with error:
                try:
                    return Reply(error.code, _body(_read(error, deadline)))
                except (OSError, http.client.HTTPException):
                    return Reply(error.code, None)
        except urllib.error.URLError as error:
            return Reply(0, None, self._why(error.reason))
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, None, self._why(error))

    def _why(self, reason: t.Any) -> str:
        if isinstance(reason, ConnectionRefusedError):
            return "refused"
        if isinstance(reason, TimeoutError) or "timed out" in str(reason):
            return "timeout"
        return show(redact_value(str(reason) or type(reason).__name__, [self._key or ""]))


def _read(response: t.Any, deadline: Deadline) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        part = response.read1(65536) if hasattr(response, "read1") else response.read(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise http.client.HTTPException("the answer is longer than %d bytes" % MAX_ANSWER)
        if deadline.over:
            raise TimeoutError("timed out")


def _body(raw: bytes) -> t.Any:
    text = raw.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


class Question(t.NamedTuple):
    """The smallest real work that a server can do: path and body."""

    path: str
    body: dict[str, t.Any]

    @classmethod
    def of(cls, skips_tokenizer: bool, embeds: bool) -> Question:
        prompt: dict[str, t.Any] = {"input_ids": [101, 102, 103]} if skips_tokenizer else {"text": "Hello"}
        if embeds:
            return cls("/encode", prompt)
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        return cls("/generate", dict(prompt, sampling_params=sampling))


def answered(reply: Reply) -> bool:
    """Whether a real generation came back: tokens, not only a status (an idle loop can answer 200)."""
    body = reply.body
    if isinstance(body, list) and body:
        body = body[0]
    if not reply.ok or not isinstance(body, dict):
        return False
    if body.get("embedding"):
        return True
    meta = body.get("meta_info")
    made = meta.get("completion_tokens", 0) if isinstance(meta, dict) else 0
    return bool(body.get("output_ids")) or bool(body.get("text")) or (isinstance(made, int) and made > 0)
