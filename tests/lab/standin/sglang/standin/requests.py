# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests in the main process: who waits for what, and the answers out of the scheduler's messages."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import uuid

from sglang.standin.bus import Inbox, Outbox


class Tokenizer:
    """SGLang's TokenizerManager, as far as there is something to imitate."""

    def __init__(self, paths, cfg):
        self.cfg = cfg
        self.inbox = Inbox(paths["tokenizer"])
        self.paths = paths
        self.waiting, self.answers = {}, {}
        self.ids = itertools.count(1)
        self.lock = threading.Lock()
        self.heard = 0.0
        self.prompt_tokens = self.generated = self.finished = 0

    def attach(self, loads):
        """The scheduler is up: its address exists now."""
        self.loads = loads
        self.scheduler = Outbox(self.paths["scheduler"])
        threading.Thread(target=self.listen, name="tokenizer", daemon=True).start()

    def listen(self):
        while True:
            message = self.inbox.take()
            self.heard = time.monotonic()
            with self.lock:
                waiter = self.waiting.get(message["rid"]) if "rid" in message else self.answers.pop(message["id"], None)
            if waiter is not None:
                waiter.put(message)

    def ask(self, kind, timeout=None):
        """A question to the scheduler; None when it did not answer in time."""
        number, answer = next(self.ids), queue.Queue()
        with self.lock:
            self.answers[number] = answer
        self.scheduler.put(kind=kind, id=number)
        try:
            return answer.get(timeout=timeout)
        except queue.Empty:
            return None

    def running(self):
        with self.lock:
            return list(self.waiting)

    def end(self):
        self.scheduler.put(kind="end")

    def generate(self, prompt, new, stream=False, gone=lambda: False, timeout=None, counted=True):
        """Yield meta_info dictionaries: each step when streaming, else the last one only.

        Ends early when gone() says that the client has left, or after `timeout` seconds.
        """
        rid, answer, began = uuid.uuid4().hex, queue.Queue(), time.monotonic()
        with self.lock:
            self.waiting[rid] = answer
        try:
            self.scheduler.put(kind="generate", rid=rid, prompt=prompt, new=new, stream=stream)
            over = False
            while not over:
                try:
                    message = answer.get(timeout=0.1)
                except queue.Empty:
                    late = timeout is not None and time.monotonic() - began > timeout
                    if late or gone():
                        self.scheduler.put(kind="abort", rid=rid)
                        return
                    continue
                over = message["over"]
                if over and counted:
                    with self.lock:
                        self.prompt_tokens += prompt
                        self.generated += message["done"]
                        self.finished += 1
                yield self.meta(rid, prompt, message, began)
        finally:
            with self.lock:
                self.waiting.pop(rid, None)

    def meta(self, rid, prompt, message, began):
        done, verified = message["done"], message["verified"]
        meta = {
            "id": rid, "finish_reason": {"type": "length", "length": done} if message["over"] else None,
            "prompt_tokens": prompt, "weight_version": self.cfg["weight_version"], "num_retractions": 0,
            "reasoning_tokens": 0, "completion_tokens": done, "cached_tokens": 0,
            "e2e_latency": time.monotonic() - began,
        }  # fmt: skip
        if self.cfg["speculative_algorithm"] is not None and verified:
            drafts = max((self.cfg["speculative_num_draft_tokens"] or 1) - 1, 1)
            meta.update(
                spec_accept_rate=(done - verified) / (verified * drafts), spec_accept_length=done / verified,
                spec_num_correct_drafts=max(done - verified, 0), spec_num_proposed_drafts=verified * drafts,
                spec_verify_ct=verified,
            )  # fmt: skip
        return meta
