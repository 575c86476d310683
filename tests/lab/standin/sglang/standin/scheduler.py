# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler process, one a rank: comes up, then generates what rank 0 is asked for.

All ranks take part in each step, as they do in an all-reduce: one that is stopped or gone makes generation hang.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback

from sglang.standin import files, gpus, inductor, log, phases, processes, ring, settings
from sglang.standin.bus import Inbox, Outbox
from sglang.standin.pace import for_ever, wait

logger = logging.getLogger(__name__)

DECODE_LOG_INTERVAL = 40


def title_suffix(cfg, place):
    """ " DP0 TP1": the ranks that there is more than one of."""
    parts = [f"DP{place['dp']}"] if cfg["dp_size"] > 1 else []
    parts += [f"PP{place['pp']}"] if cfg["pp_size"] > 1 else []
    parts += [f"TP{place['tp']}"] if cfg["tp_size"] > 1 else []
    parts += [f"EP{place['tp'] * cfg['ep_size'] // cfg['tp_size']}"] if cfg["ep_size"] > 1 else []
    return "".join(f" {part}" for part in parts)


def run(cfg, place, paths, main_pid, ready, links):
    """Body of the process. `links`: rank 0's connections to the ranks of its node; elsewhere the one to rank 0."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    suffix = title_suffix(cfg, place)
    processes.set_title("sglang::scheduler" + suffix.replace(" ", "_"))
    log.configure(suffix, cfg["log_level"])
    try:
        Scheduler(cfg, place, paths, main_pid, ready, links).serve()
    except phases.StartFailed as error:
        fail(f"Traceback (most recent call last):\n{error}\n", main_pid)
    except (OSError, ValueError, KeyError, TypeError):
        fail(traceback.format_exc(), main_pid)


def fail(text, main_pid):
    """Tell the log, and the main process by SIGQUIT; that one ends us."""
    logger.error("Scheduler hit an exception: %s", text)
    os.kill(main_pid, signal.SIGQUIT)
    for_ever()


class Scheduler:
    def __init__(self, cfg, place, paths, main_pid, ready, links):
        self.cfg, self.place, self.ring, self.main_pid = cfg, place, links, main_pid
        self.rank = place["rank"]
        self.speculative = cfg["speculative_algorithm"] is not None
        nodes = gpus.Nodes()
        used = self.take_gpu(nodes)
        if used is not None:
            nodes.note(True, 500, used)  # a context before there is anything in it
            nodes.hold(used)
        world = cfg["tp_size"] * cfg["pp_size"]
        pool = inductor.Pool() if self.speculative else None
        measured = phases.come_up(cfg, self.rank, world, place["gpu"], main_pid, self.meet)
        if used is not None:
            taken = settings.number("GPU_FREE_GB", phases.GPU_GB) - measured["available"]
            nodes.note(True, os.environ.get("FAKE_GPU_MIB") or taken * 1024, used)
        self.nodes = nodes
        self.measured = measured
        self.kept = [files.shared("loky", 32)]
        if pool is not None:
            files.inductor_folder()
            pool.wait_until_up()
        self.pool = pool
        if self.rank == 0:
            if world > 1:
                self.kept.append(files.shared("mq", files.MQ_SIZE))
            self.inbox, self.detokenizer, self.tokenizer = (
                Inbox(paths["scheduler"]),
                Outbox(paths["detokenizer"]),
                Outbox(paths["tokenizer"]),
            )
            self.loads = files.Loads(paths["loads"])
        self.waiting, self.running = [], []
        self.prompt_tokens = self.decoded = self.steps = self.verified = 0
        self.throughput = 0.0
        self.interval = (0, time.monotonic())
        self.limit = phases.running_limit(cfg)
        if self.rank == 0:
            self.publish()
        ready.send(measured)

    def meet(self):
        self.ring, self.listener = ring.meet(self.cfg, self.place, self.ring)

    def take_gpu(self, nodes):
        """The minor that this rank runs on, or None on a CPU."""
        if self.cfg["device"] == "cpu":
            return None
        visible, wanted = nodes.visible(), self.place["gpu"]
        if not visible:
            raise phases.StartFailed("RuntimeError: No CUDA GPUs are available")
        if wanted >= len(visible):
            raise phases.StartFailed(
                "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do you "
                "have enough GPUs?"
            )
        return visible[wanted]

    # -- serving -------------------------------------------------------------------------------------------------------

    def serve(self):
        if self.rank:
            self.follow()
        while True:
            busy = self.waiting or self.running
            message = self.inbox.take(0 if busy else None)
            if message is not None:
                if self.handle(message):
                    return
                continue
            self.step()

    def follow(self):
        """A rank that is not 0: answer each step. When rank 0 is gone it hangs, as in NCCL.

        STANDIN_PEER_LOSS=die: it fails instead, as with gloo.
        """
        while True:
            try:
                word = self.ring[0].recv_bytes()
                if word == b"end":
                    self.leave()
                self.ring[0].send_bytes(word)
            except (EOFError, OSError) as error:
                self.peer_lost(error)

    def together(self, word):
        try:
            for peer in self.ring:
                peer.send_bytes(word)
            if word != b"end":
                for peer in self.ring:
                    peer.recv_bytes()
        except (EOFError, OSError) as error:
            self.peer_lost(error)

    def peer_lost(self, error):
        if settings.text("PEER_LOSS", "hang") == "hang":
            for_ever()
        raise phases.StartFailed(f"RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer ({error})")

    def leave(self):
        for path, _, _ in self.kept:
            if os.path.basename(path).startswith("sem."):
                os.unlink(path)
        os._exit(0)

    def handle(self, message):
        """One message; true at the end."""
        if settings.wedged():
            self.hang()
        kind = message["kind"]
        if kind == "generate":
            message.update(done=0, verified=0, told=0)
            self.waiting.append(message)
            self.publish()
        elif kind == "abort":
            self.waiting = [r for r in self.waiting if r["rid"] != message["rid"]]
            self.running = [r for r in self.running if r["rid"] != message["rid"]]
            self.publish()
        elif kind == "state":
            self.tokenizer.put(kind="state", id=message["id"], state=self.state())
        elif kind == "flush":
            free = not (self.waiting or self.running)
            if free:
                self.steps = self.verified = 0
                logger.info("Cache flushed successfully!")
            self.tokenizer.put(kind="flushed", id=message["id"], ok=free)
        elif kind == "end":
            self.together(b"end")
            wait(settings.paced(0.2))
            self.leave()
        return False

    def hang(self):
        """Wedged: the GPU does not answer, so neither does this process."""
        while settings.wedged():
            wait(0.05)

    def step(self):
        while self.waiting and len(self.running) < self.limit:
            request = self.waiting.pop(0)
            self.running.append(request)
            self.prompt_tokens += request["prompt"]
            logger.info(
                "Prefill batch, #new-seq: 1, #new-token: %d, #cached-token: 0, token usage: 0.00, #running-req: %d, "
                "#queue-req: %d, #pending-token: 0, cuda graph: False, input throughput (token/s): %.2f",
                request["prompt"], len(self.running) - 1, len(self.waiting), request["prompt"] / 0.01,
            )  # fmt: skip
        if settings.wedged():
            self.publish()
            self.hang()
        wait(settings.number("STEP_MS", 2) / 1000 / settings.number("SPEED", 1))
        self.together(b"step")
        self.steps += 1
        self.verified += len(self.running)
        gain = self.accept_length()
        for request in self.running:
            request["done"] = min(request["new"], request["done"] + gain)
            request["verified"] += 1
            self.decoded += gain
            over = request["done"] >= request["new"]
            if over or request.get("stream"):
                self.detokenizer.put(
                    kind="tokens", rid=request["rid"], done=request["done"], verified=request["verified"], over=over
                )
        self.running = [request for request in self.running if request["done"] < request["new"]]
        if self.steps % DECODE_LOG_INTERVAL == 0:
            self.report(gain)
        self.publish()

    def accept_length(self):
        """Tokens a step: the first draft is right and the second wrong, as with the toy draft on H200."""
        if not self.speculative or not self.cfg["speculative_num_steps"]:
            return 1
        return 2

    def report(self, gain):
        before, since = self.interval
        now = time.monotonic()
        self.throughput = (self.decoded - before) / max(now - since, 1e-6)
        self.interval = (self.decoded, now)
        accepted = ""
        if self.speculative:
            accepted = f"accept len: {gain:.2f}, accept rate: {(gain - 1) / max(self.drafts(), 1):.2f}, "
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: 0.00, %scuda graph: True, gen throughput "
            "(token/s): %.2f, #queue-req: %d",
            len(self.running), self.held(), accepted, self.throughput, len(self.waiting),
        )  # fmt: skip

    def drafts(self):
        return (self.cfg["speculative_num_draft_tokens"] or 1) - 1

    def held(self):
        return sum(request["prompt"] + request["done"] for request in self.running)

    # -- what others may know ------------------------------------------------------------------------------------------

    def publish(self):
        self.loads.publish({
            "timestamp": time.time(), "dp_rank": 0, "num_running_reqs": len(self.running),
            "num_waiting_reqs": len(self.waiting), "num_used_tokens": self.held(), "num_total_tokens": self.held(),
            "max_total_num_tokens": self.measured["tokens"], "max_running_requests": self.limit,
            "token_usage": round(self.held() / self.measured["tokens"], 4), "gen_throughput": round(self.throughput, 2),
            "cache_hit_rate": 0.0, "utilization": round(len(self.running) / self.limit, 4),
            "total_prefill_uncached_tokens": self.prompt_tokens, "total_prefill_busy_us": self.prompt_tokens * 10,
            "decode_moments": [float(self.steps), self.steps * 0.002, self.steps * 4e-6] if self.steps else None,
            "decoded": self.decoded, "verified": self.verified,
            "accept_length": self.average_accept_length(),
        })  # fmt: skip

    def average_accept_length(self):
        """Known from the first report on only."""
        return float(self.accept_length()) if self.speculative and self.steps >= DECODE_LOG_INTERVAL else None

    def state(self):
        """internal_states[0] of /server_info, without the arguments."""
        state = {
            "world_size": self.cfg["tp_size"] * self.cfg["pp_size"] * self.cfg["dp_size"],
            "last_gen_throughput": self.throughput,
            "memory_usage": {
                "weight": 0.32, "kvcache": self.measured["kvcache"], "startup_available": self.measured["available"],
                "token_capacity": self.measured["tokens"], "token_capacity_swa": None, "graph": self.measured["graph"],
            },
            "effective_max_running_requests_per_dp": self.limit,
        }  # fmt: skip
        if self.average_accept_length() is not None:
            state["avg_spec_accept_length"] = self.average_accept_length()
        return state
