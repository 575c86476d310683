# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server asked: real sockets on the loopback."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import http as asked


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            self.server.let_go.wait(5)
        if self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            while not self.server.let_go.wait(0.05):
                self.wfile.write(b" ")
            return
        status = {"/secret": 200 if self.headers.get("Authorization") == "Bearer key1" else 401, "/new": 404}.get(
            self.path, 200
        )
        body = json.dumps({"path": self.path, "to": self.headers["Host"]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.let_go = threading.Event()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.let_go.set()
    made.shutdown()
    thread.join()
    made.server_close()


def client(server, host="127.0.0.1", key=None):
    return asked.Client(host, server.server_port, key)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_server_that_listens_everywhere_is_asked_on_the_loopback(server, host):
    assert client(server, host).get("/x", 2).body["path"] == "/x"


def test_no_proxy_is_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert client(server).get("/x", 2).ok


def test_the_key_goes_along(server):
    assert client(server, key="key1").get("/secret", 2).ok
    assert client(server, key="other").get("/secret", 2).status == 401


def test_newest_name_first(server):
    assert client(server).first(["/new", "/old"], 2).body["path"] == "/old"


def test_post(server):
    assert client(server).post("/generate", {"a": 1}, 2).body == {"a": 1}


@pytest.mark.parametrize("path", ["/slow", "/drip"])
def test_a_server_that_takes_too_long(server, path):
    started = time.monotonic()
    reply = client(server).get(path, 0.3)
    assert (reply.status, reply.error) == (0, "timeout")
    assert time.monotonic() - started < 3


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert asked.Client("127.0.0.1", port).get("/", 2).error == "refused"


def test_somebody_who_speaks_no_http():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(b"\x00\xff garbage\r\n\r\n"))
        thread.start()
        reply = asked.Client("127.0.0.1", other.getsockname()[1], "key-of-the-test").get("/", 1)
        thread.join()
    assert reply.status == 0
    assert "key-of-the-test" not in reply.error


@pytest.mark.parametrize(
    ("status", "body", "real"),
    [
        (200, {"text": " world", "meta_info": {"completion_tokens": 4}}, True),
        (200, {"output_ids": [5, 6], "meta_info": {}}, True),
        (200, [{"output_ids": [5]}], True),
        (200, {"embedding": [0.1]}, True),
        (200, {"text": "", "meta_info": {"completion_tokens": 0}}, False),
        (200, "ok", False),
        (200, {}, False),
        (503, {"text": "x"}, False),
    ],
)
def test_a_generation_is_tokens_not_a_status(status, body, real):
    assert asked.answered(asked.Reply(status, body)) is real


@pytest.mark.parametrize(
    ("skips", "embeds", "path", "key"),
    [(False, False, "/generate", "text"), (True, False, "/generate", "input_ids"), (False, True, "/encode", "text")],
)
def test_the_question(skips, embeds, path, key):
    question = asked.Question.of(skips, embeds)
    assert question.path == path
    assert key in question.body
