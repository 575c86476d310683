# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The main process: starts the others, watches them, serves HTTP, and ends as the real one does."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time

from sglang.standin import detokenizer, files, gpus, processes, scheduler, settings
from sglang.standin.http import Server
from sglang.standin.pace import for_ever, wait
from sglang.standin.requests import Tokenizer

logger = logging.getLogger("sglang")


def serve(server_args):
    """Start everything; returns only after a graceful end, and then ends the process."""
    server_args.check_server_args()
    wait(settings.paced(0.2))
    logger.info("server_args=%r", server_args)
    cfg = server_args.resolved_dict()
    engine = Engine(server_args, cfg)
    engine.launch()
    if cfg["node_rank"] == 0:
        engine.run()
    else:
        engine.follow()


def set_environment(cfg):
    """What the real engine writes into the environment that its workers inherit."""
    if "NCCL_CUMEM_ENABLE" not in os.environ or cfg["enable_symm_mem"]:
        os.environ["NCCL_CUMEM_ENABLE"] = str(int(cfg["enable_symm_mem"]))
    if "NCCL_NVLS_ENABLE" not in os.environ or cfg["enable_nccl_nvls"] or cfg["enable_symm_mem"]:
        os.environ["NCCL_NVLS_ENABLE"] = str(int(cfg["enable_nccl_nvls"] or cfg["enable_symm_mem"]))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    if os.environ.get("TRTLLM_ENABLE_PDL", "1") != "0":
        os.environ["TRTLLM_ENABLE_PDL"] = "1"
    os.environ.setdefault("CUTE_DSL_LOG_LEVEL", "30")
    os.environ.setdefault("CUTE_DSL_LOG_TO_CONSOLE", "1")
    os.environ["SGLANG_RUN_ID"] = f"sglang-run-{time.time()}-{random.randint(0, 100000000)}"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Engine:
    def __init__(self, server_args, cfg):
        self.server_args, self.cfg = server_args, cfg
        self.children = {}
        self.stopping = threading.Event()
        self.status = "Starting"
        self.measured = {}
        self.nodes = gpus.Nodes()

    # -- up ------------------------------------------------------------------------------------------------------------

    def launch(self):
        cfg = self.cfg
        set_environment(cfg)
        if cfg["enable_metrics"]:
            files.metrics_folder()
        names = files.port_files()
        paths = dict(zip(("tokenizer", "scheduler", "detokenizer", "rpc", "metrics"), names))
        paths["loads"] = files.loads_path()
        signal.signal(signal.SIGQUIT, self.child_failed)
        if cfg["device"] != "cpu":
            self.nodes.note(listed=False, mib=2)
            self.nodes.hold()
        first = cfg["node_rank"] == 0
        tokenizer = Tokenizer(paths, cfg) if first else None
        context = multiprocessing.get_context("spawn")
        readers = self.start_workers(context, paths)
        logger.info("No HuggingFace chat template found")
        for reader in readers:
            self.measured.update(self.receive(reader) or {})
        if not first:
            return
        tokenizer.attach(files.Loads(paths["loads"]))
        self.tokenizer = tokenizer
        self.startup_time = {
            "load_weight": self.measured["load_weight"], "kv_cache_allocation": 0.1,
            "scheduler_e2e": settings.paced(2.0),
            "cuda_graph": {key: value and settings.paced(0.3) for key, value in self.measured["graph"].items()},
            "tokenizer_e2e": settings.paced(2.4),
        }  # fmt: skip
        graph = ", ".join(f"{key}={value:.2f}" for key, value in self.startup_time["cuda_graph"].items())
        logger.info(
            "Engine startup timings (s): load_weight=%.2f, kv_cache_allocation=0.10, scheduler_e2e=%.2f, "
            "cuda_graph={%s}, tokenizer_e2e=%.2f",
            self.measured["load_weight"], self.startup_time["scheduler_e2e"], graph, self.startup_time["tokenizer_e2e"],
        )  # fmt: skip

    def start_workers(self, context, paths):
        cfg = self.cfg
        first, here = cfg["node_rank"] == 0, cfg["tp_size"] * cfg["pp_size"] // cfg["nnodes"]
        pipes = [context.Pipe() for _ in range(1, here if first else 1)]
        readers, given = [], []
        for local_rank in range(here):
            rank = cfg["node_rank"] * here + local_rank
            place = {
                "rank": rank, "local_rank": local_rank, "tp": rank % cfg["tp_size"], "pp": rank // cfg["tp_size"],
                "dp": 0, "gpu": cfg["base_gpu_id"] + local_rank * cfg["gpu_id_step"],
            }  # fmt: skip
            links = [mine for mine, _ in pipes] if local_rank == 0 else [pipes[local_rank - 1][1]] if first else []
            reader, writer = context.Pipe(duplex=False)
            arguments = (cfg, place, paths, os.getpid(), writer, links)
            name = "scheduler" + scheduler.title_suffix(cfg, place).replace(" ", "_")
            self.spawn(context, name, scheduler.run, arguments)
            readers.append(reader)
            given += [writer, *links]
        if first:
            reader, writer = context.Pipe(duplex=False)
            self.spawn(context, "detokenizer", detokenizer.run, (cfg, paths, writer))
            readers.append(reader)
            given.append(writer)
        # Our own ends would keep a dead worker's pipes open.
        for end in given:
            end.close()
        return readers

    def spawn(self, context, name, body, arguments):
        process = context.Process(target=body, args=arguments, name=name)
        process.start()
        self.children[name] = process

    def receive(self, reader):
        """A worker's message that it is up. One that has gone without a word ends everything."""
        while True:
            ends = [process.sentinel for process in self.children.values()]
            ready = multiprocessing.connection.wait([reader, *ends])
            if reader in ready:
                try:
                    return reader.recv()
                except EOFError:
                    pass
            self.check_children()

    # -- serving -------------------------------------------------------------------------------------------------------

    def run(self):
        server = Server(self)
        threading.Thread(target=server.warm_up, name="warmup", daemon=True).start()
        logger.info("INFO:     Started server process [%d]", os.getpid())
        logger.info("INFO:     Waiting for application startup.")
        logger.info("INFO:     Application startup complete.")
        if not server.bind():
            for_ever()
        # SGLang's handler comes with the tokenizer's loop: until here SIGTERM has just ended the process.
        signal.signal(signal.SIGTERM, self.terminated)
        server.start()
        interval = settings.number("WATCHDOG", 1)
        while not self.stopping.wait(interval):
            self.check_children()
        self.drain()

    def follow(self):
        """A node that is not the first: its schedulers work, its /health always says 200, SIGTERM does nothing."""
        signal.signal(signal.SIGTERM, self.told_to_wait)
        self.status = "Up"
        dummy = Server(self, dummy=True)
        if dummy.bind():
            dummy.start()
        interval = settings.number("WATCHDOG", 1)
        while any(process.exitcode is None for process in self.children.values()):
            wait(min(interval, 0.1))
            self.check_children()
        processes.kill_tree(logger, include_self=False)
        os._exit(0)

    def told_to_wait(self, signum, frame):
        logger.warning(
            "SIGTERM received on node_rank %d; waiting for the rank-0 ShutdownReq broadcast to stop the schedulers.",
            self.cfg["node_rank"],
        )

    def terminated(self, signum, frame):
        logger.warning("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        if not settings.text("IGNORE_TERM"):
            self.stopping.set()

    def child_failed(self, signum=None, frame=None):
        if self.status == "Starting":
            logger.error("Received sigquit from a child process. It usually means the child failed.")
        else:
            logger.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        processes.kill_tree(logger, include_self=True)

    def check_children(self):
        """SGLang's SubprocessWatchdog: a worker that has gone takes the server with it."""
        for name, process in self.children.items():
            if process.exitcode not in (None, 0):
                logger.error(
                    "Subprocess %s (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup...",
                    name, process.pid, process.exitcode,
                )  # fmt: skip
                self.child_failed()

    def drain(self):
        """Wait for the running requests, however long; new ones are taken all the while."""
        while True:
            wait(settings.paced(settings.number("TERM_POLL", 0.5)))
            left = self.tokenizer.running()
            logger.info(
                "Gracefully exiting... Remaining number of requests %d. Remaining requests remaining_rids=%s.",
                len(left), left,
            )  # fmt: skip
            if not left:
                break
            self.check_children()
        self.tokenizer.end()
        deadline = time.monotonic() + settings.paced(15)
        for name, process in self.children.items():
            if name.startswith("scheduler"):
                process.join(max(0.0, deadline - time.monotonic()))
        killed = settings.text("TERM_EXIT", "0") == "137"
        processes.kill_tree(logger, include_self=killed)
        sys.stdout.flush()
        os._exit(0)
