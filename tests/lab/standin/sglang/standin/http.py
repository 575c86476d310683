# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The HTTP side: refused until everything is loaded, 503 until warmed up, then 200. Keys as in the real server."""

from __future__ import annotations

import datetime
import errno
import hmac
import http.client
import json
import logging
import os
import select
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from sglang.standin import phases, processes, settings
from sglang.standin.pace import wait
from sglang.version import __version__

logger = logging.getLogger("sglang")

OPEN = ("/health", "/ready", "/metrics")
ADMIN = ("/flush_cache", "/clear_hicache_storage_backend", "/set_internal_state")
RENAMED = {"/get_server_info": "/server_info", "/get_model_info": "/model_info"}


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048

    def server_bind(self):
        """Without HTTPServer's look-up of the host's name, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


class Server:
    """The listener, and the warm-up that speaks to it from outside, as the real one does."""

    def __init__(self, engine, dummy=False):
        self.engine, self.cfg, self.dummy = engine, engine.cfg, dummy
        self.address = (self.cfg["host"], self.cfg["port"])
        self.listener = None

    def bind(self):
        """False when somebody else has the port: told in the log, and the process stays."""
        server = self

        class Bound(Handler):
            engine = server.engine
            routes = DUMMY if server.dummy else ROUTES

        Listener.address_family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        try:
            self.listener = Listener(self.address, Bound)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
            logger.error(
                "ERROR:    [Errno %d] error while attempting to bind on address ('%s', %d): %s",
                error.errno, *self.address, os.strerror(error.errno).lower(),
            )  # fmt: skip
            logger.info("INFO:     Waiting for application shutdown.")
            return False
        return True

    def start(self):
        if not self.dummy:
            logger.info("INFO:     Uvicorn running on http://%s:%d (Press CTRL+C to quit)", *self.address)
        threading.Thread(target=self.listener.serve_forever, name="http", daemon=True).start()

    # -- warm-up -------------------------------------------------------------------------------------------------------

    def call(self, method, path, body=None):
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address[0], self.address[0])
        connection = http.client.HTTPConnection(host, self.address[1], timeout=600)
        headers = {"Content-Type": "application/json"}
        if self.cfg["api_key"]:
            headers["Authorization"] = f"Bearer {self.cfg['api_key']}"
        try:
            connection.request(method, path, body and json.dumps(body), headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def warm_up(self):
        """Generate once over HTTP. Whoever has the port answers: with two servers, perhaps the other one."""
        if not self.cfg["skip_server_warmup"]:
            for _ in range(120):
                wait(settings.paced(0.3))
                try:
                    if self.call("GET", "/model_info") == 200:
                        break
                except OSError:
                    continue
            else:
                logger.error("Initialization failed. warmup error: no answer from /model_info")
                processes.kill_tree(logger, include_self=True)
            phases.stumble("warmup", os.getpid())
            prompt = (
                {"input_ids": [10, 11, 12]}
                if self.cfg["skip_tokenizer_init"]
                else {"text": "The capital city of France is"}
            )
            try:
                status = self.call(
                    "POST", "/generate", {**prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
                )
            except OSError as error:
                status = error
            if status != 200:
                logger.error("Initialization failed. warmup error: %s", status)
                processes.kill_tree(logger, include_self=True)
        self.engine.status = "Up"
        logger.info("The server is fired up and ready to roll!")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    sys_version = ""
    engine = None
    routes = None

    def log_message(self, form, *arguments):
        """Requests are told when they are answered: see answer()."""

    def do_GET(self):
        self.route("GET")

    def do_POST(self):
        self.route("POST")

    def route(self, method):
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        path = url.path.rstrip("/") or "/"
        if self.routes is ROUTES and not self.allowed(path):
            self.answer(401, {"error": "Unauthorized"})
            return
        if path in RENAMED:
            logger.warning(
                "Endpoint '%s' is deprecated and will be removed in a future version. Please use '%s' instead.",
                path, RENAMED[path],
            )  # fmt: skip
            path = RENAMED[path]
        page = self.routes.get((method, path))
        if page is None:
            known = any(path == other for _, other in self.routes)
            self.answer(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            return
        page(self)

    def allowed(self, path):
        cfg = self.engine.cfg
        if path.startswith(OPEN):
            return True
        key = (cfg["admin_api_key"] or cfg["api_key"]) if path in ADMIN else cfg["api_key"]
        if not key:
            return True
        kind, _, given = (self.headers.get("Authorization") or "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode())

    def answer(self, status, content=b"", kind="application/json"):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.tell(status)  # before the client can act on it, so that the log tells things in their order
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def tell(self, status):
        logger.info(
            'INFO:     %s:%d - "%s %s HTTP/1.1" %d %s',
            *self.client_address[:2], self.command, self.path, status, http.client.responses[status],
        )  # fmt: skip

    def client_left(self):
        """Whether the other side has closed the connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | select.POLLHUP)
        if not poll.poll(0):
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    # -- pages ---------------------------------------------------------------------------------------------------------

    def nothing(self):
        self.answer(200)

    def health(self):
        engine = self.engine
        if engine.stopping.is_set():
            logger.info("Health check request received during shutdown. Returning 503.")
            self.answer(503)
            return
        if engine.status == "Starting":
            self.answer(503)
            return
        patience = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
        asked = time.monotonic()
        request = engine.tokenizer.generate(1, 1, timeout=patience, counted=False)
        threading.Thread(target=lambda: list(request), daemon=True).start()
        # The real one looks once a second whether anything came back from the scheduler, for whomever.
        while time.monotonic() < asked + patience:
            wait(min(settings.paced(1.0), patience))
            if engine.tokenizer.heard > asked:
                engine.status = "Up"
                self.answer(200)
                return
        logger.error(
            "Health check failed. Server couldn't get a response from detokenizer for last %d seconds.", patience
        )
        engine.status = "UnHealthy"
        self.answer(503)

    def ready(self):
        self.answer(200 if self.engine.status == "Up" and not self.engine.stopping.is_set() else 503)

    def ping(self):
        self.answer(200 if self.engine.status == "Up" else 503)

    def model_info(self):
        cfg = self.engine.cfg
        self.answer(200, {
            "model_path": cfg["model_path"], "served_model_name": cfg["served_model_name"],
            "tokenizer_path": cfg["tokenizer_path"], "is_generation": not cfg["is_embedding"],
            "preferred_sampling_params": cfg["preferred_sampling_params"], "weight_version": cfg["weight_version"],
            "load_format": cfg["load_format"], "reasoning_parser": cfg["reasoning_parser"],
            "tool_call_parser": cfg["tool_call_parser"], "disaggregation_mode": cfg["disaggregation_mode"],
            "has_image_understanding": False, "has_audio_understanding": False, "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        })  # fmt: skip

    def server_info(self):
        """The real one asks the scheduler, and waits for its answer as long as it takes."""
        engine = self.engine
        answer = None
        while answer is None:
            answer = engine.tokenizer.ask("state", timeout=1)
            if answer is None and self.client_left():
                return
        state = {key: value for key, value in engine.cfg.items() if key != "custom_sigquit_handler"}
        state.update(answer["state"], startup_time=engine.startup_time)
        self.answer(200, {
            **engine.cfg, "launch_command": engine.server_args.launch_command, "status": "ready",
            "max_total_num_tokens": engine.measured["tokens"],
            "max_req_input_len": (engine.cfg["context_length"] or 4096) - 6, "kv_events": None,
            "startup_time": engine.startup_time, "internal_states": [state], "version": __version__,
            "frontend": "python",
        })  # fmt: skip

    def models(self):
        cfg = self.engine.cfg
        card = {
            "id": cfg["served_model_name"], "object": "model", "created": int(time.time()), "owned_by": "sglang",
            "root": cfg["served_model_name"], "parent": None, "max_model_len": cfg["context_length"] or 4096,
        }  # fmt: skip
        self.answer(200, {"object": "list", "data": [card]})

    def loads(self):
        figures = self.engine.tokenizer.loads.read()
        core = {key: value for key, value in figures.items() if key not in ("decoded", "verified", "accept_length")}
        self.answer(200, {
            "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(), "version": __version__,
            "accelerator": "NVIDIA H200", "num_accelerators": self.engine.cfg["tp_size"], "loads": [core],
        })  # fmt: skip

    def flush_cache(self):
        answer = self.engine.tokenizer.ask("flush", timeout=20)
        if answer and answer["ok"]:
            text = (
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
        else:
            text = "Flush cache failed.\n"
        self.answer(200 if answer and answer["ok"] else 400, text.encode(), "text/plain; charset=utf-8")

    def metrics(self):
        engine = self.engine
        if not engine.cfg["enable_metrics"]:
            self.answer(404, {"detail": "Not Found"})
            return
        tokenizer, figures = engine.tokenizer, engine.tokenizer.loads.read()
        labels = f'model_name="{engine.cfg["served_model_name"]}"'
        ranked = labels + ',engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"'
        rows = [
            ("gauge", "num_running_reqs", ranked, figures.get("num_running_reqs", 0)),
            ("gauge", "num_queue_reqs", ranked, figures.get("num_waiting_reqs", 0)),
            ("gauge", "num_used_tokens", ranked, figures.get("num_used_tokens", 0)),
            ("gauge", "token_usage", ranked, figures.get("token_usage", 0)),
            ("gauge", "gen_throughput", ranked, figures.get("gen_throughput", 0)),
            ("counter", "realtime_tokens_total", ranked + ',mode="decode"', figures.get("decoded", 0)),
            (
                "counter",
                "realtime_tokens_total",
                ranked + ',mode="prefill_compute"',
                figures.get("total_prefill_uncached_tokens", 0),
            ),
            ("counter", "prompt_tokens_total", labels, tokenizer.prompt_tokens),
            ("counter", "generation_tokens_total", labels, tokenizer.generated),
            ("counter", "num_requests_total", labels, tokenizer.finished),
        ]
        if engine.cfg["speculative_algorithm"] is not None:
            length = figures.get("accept_length") or 0
            drafts = max((engine.cfg["speculative_num_draft_tokens"] or 1) - 1, 1)
            rows += [
                ("gauge", "spec_accept_length", ranked, length),
                ("gauge", "spec_accept_rate", ranked, max(length - 1, 0) / drafts),
                ("counter", "spec_verify_calls_total", labels, figures.get("verified", 0)),
            ]
        lines, told = [], set()
        for kind, name, tags, value in rows:
            if name not in told:
                lines.append(f"# TYPE sglang:{name} {kind}")
                told.add(name)
            lines.append(f"sglang:{name}{{{tags}}} {float(value)}")
        self.answer(200, ("\n".join(lines) + "\n").encode(), "text/plain; version=0.0.4; charset=utf-8")

    def generate(self):
        try:
            wanted = json.loads(self.body)
            prompts, many = self.prompts(wanted)
            sampling = wanted.get("sampling_params") or {}
            new = 128 if sampling.get("max_new_tokens") is None else int(sampling["max_new_tokens"])
        except (ValueError, TypeError, AttributeError) as error:
            self.answer(400, {"error": {"message": str(error)}})
            return
        if wanted.get("stream"):
            self.stream(prompts[0], new)
            return
        answers = [None] * len(prompts)

        def one(i):
            for meta in self.engine.tokenizer.generate(prompts[i], new, gone=self.client_left):
                answers[i] = self.shape(meta)

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None not in answers:
            self.answer(200, answers if many else answers[0])

    def prompts(self, wanted):
        """Lengths of the prompts, and whether it was a list of them."""
        ids, words = wanted.get("input_ids"), wanted.get("text")
        if (ids is None) == (words is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if words is not None:
            if self.engine.cfg["skip_tokenizer_init"]:
                raise ValueError(
                    "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
                    "Please provide input_ids or re-initialize the engine with skip_tokenizer_init=False."
                )
            many = isinstance(words, list)
            return [max(1, len(word.split())) for word in (words if many else [words])], many
        many = bool(ids) and isinstance(ids[0], list)
        return [len(row) for row in (ids if many else [ids])], many

    def shape(self, meta):
        count = meta["completion_tokens"]
        answer = {"output_ids": [100 + i % 900 for i in range(count)], "meta_info": meta}
        if not self.engine.cfg["skip_tokenizer_init"]:
            answer["text"] = " ".join(f"word{i % 900}" for i in range(count))
        return answer

    def stream(self, prompt, new):
        self.tell(200)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for meta in self.engine.tokenizer.generate(prompt, new, stream=True, gone=self.client_left):
            self.wfile.write(b"data: " + json.dumps(self.shape(meta)).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


ROUTES = {
    ("GET", "/health"): Handler.health,
    ("GET", "/health_generate"): Handler.health,
    ("GET", "/ready"): Handler.ready,
    ("GET", "/ping"): Handler.ping,
    ("GET", "/model_info"): Handler.model_info,
    ("GET", "/server_info"): Handler.server_info,
    ("GET", "/v1/models"): Handler.models,
    ("GET", "/v1/loads"): Handler.loads,
    ("GET", "/metrics"): Handler.metrics,
    ("GET", "/flush_cache"): Handler.flush_cache,
    ("POST", "/flush_cache"): Handler.flush_cache,
    ("POST", "/generate"): Handler.generate,
}

#: A follower's: no tokenizer, no key, no truth.
DUMMY = {("GET", path): Handler.nothing for path in ("/health", "/health_generate", "/ping")}
