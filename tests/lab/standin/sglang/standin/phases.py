# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The scheduler's way up: the lines of its log in their order, the time between them, and the faults on the way.

Source: logs of SGLang 0.5.17 on H200. Under EAGLE the draft's block follows the target's, so that weights, KV cache and
memory pool are told twice a rank.
"""

from __future__ import annotations

import logging
import os
import signal

from sglang.standin import log, settings
from sglang.standin.pace import for_ever, wait

logger = logging.getLogger(__name__)

GPU_GB = 139.13
BYTES_A_TOKEN = 16384


class StartFailed(Exception):
    """Ends the scheduler the way a real exception does; the text is the traceback's last line."""


def stumble(phase, main_pid):
    """Fail here if STANDIN_FAIL_AT says so."""
    how = settings.fault(phase)
    if how is None:
        return
    if how == "hang":
        for_ever()
    if how == "exit137":
        os.kill(main_pid, signal.SIGKILL)  # as the kernel does when memory runs out; PDEATHSIG does the rest
        for_ever()
    if how == "oom":
        raise StartFailed(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "139.81 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has 138.68 GiB "
            "memory in use."
        )
    if how == "nccl":
        raise StartFailed(
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
        )
    raise StartFailed(f"RuntimeError: told to fail at {phase}")


class Memory:
    """The GPU's memory in GB as the log tells it."""

    def __init__(self, cfg):
        self.free = settings.number("GPU_FREE_GB", GPU_GB)
        self.before = self.free
        self.fraction = cfg["mem_fraction_static"]
        self.kv = 0.0

    def take(self, gb):
        self.free -= gb

    def kv_cache(self):
        """GB for the KV cache: the static fraction of what was free before, less what is taken already."""
        taken = self.before - self.free
        room = self.before * self.fraction - taken
        if room <= 0:
            raise StartFailed(
                "ValueError: Loaded weights leave no GPU memory for the KV cache under "
                f"--mem-fraction-static={self.fraction}. Raise --mem-fraction-static above "
                f"{taken / self.before + 0.001:.3f} (minimum viable = 1 - available/pre = {taken / self.before:.4f}). "
                "If using speculative decoding, draft weights are now counted."
            )
        self.kv = room
        return room


def come_up(cfg, rank, ranks, device, main_pid, rendezvous):
    """Log the whole start of one rank. Returns what it measured: tokens, memory, timings.

    rendezvous() is called where the real one waits for the other ranks.
    """
    memory, times = Memory(cfg), {}
    speculative = cfg["speculative_algorithm"] is not None
    models = ["target", "draft"] if speculative else ["target"]
    for model in models:
        connect(memory, model, rank, ranks, device, main_pid, rendezvous)
        load(memory, model, rank, main_pid, times)
    stumble("kv", main_pid)
    whole = memory.kv_cache()
    tokens = cfg["max_total_tokens"] or int(whole * 2**30 / BYTES_A_TOKEN)
    for model in models:
        share = whole if not speculative else whole * (8 / 9 if model == "target" else 1 / 9)
        logger.info(
            "KV Cache is allocated. dtype: torch.bfloat16, #tokens: %d, K size: %.2f GB, V size: %.2f GB",
            tokens, share / 2, share / 2,
        )  # fmt: skip
        memory.take(share)
        stumble("memory", main_pid)
        logger.info("Memory pool end. avail mem=%.2f GB", memory.free)
    wait(settings.paced(0.1))
    graphs = capture(cfg, memory, rank, main_pid)
    if rank == 0:
        logger.info(
            "max_total_num_tokens=%d, chunked_prefill_size=%s, max_prefill_tokens=%s, max_running_requests=%d, "
            "context_len=%d, available_gpu_mem=%.2f GB",
            tokens, cfg["chunked_prefill_size"], cfg["max_prefill_tokens"], running_limit(cfg),
            cfg["context_length"] or 4096, memory.free,
        )  # fmt: skip
    logger.info(
        "Tree cache initialized: source=default impl=RadixCache hybrid_swa=False hybrid_ssm=False hierarchical=False "
        "streaming_wrapped=False"
    )
    return {
        "tokens": tokens, "kvcache": round(whole, 3), "available": round(memory.free, 3), "graph": graphs,
        "load_weight": times["load"],
    }  # fmt: skip


def running_limit(cfg):
    return max(1, (cfg["max_running_requests"] or 4096) // max(cfg["dp_size"], 1))


def connect(memory, model, rank, ranks, device, main_pid, rendezvous):
    logger.info("Init torch distributed begin.")
    stumble("dist", main_pid)
    if model == "target":
        wait(settings.paced(0.3))
        rendezvous()
        log.nccl(device, rank, ranks)
        memory.take(0.09 if ranks == 1 else 0.91)
    logger.info(
        "Init torch distributed ends. elapsed=%.2f s, mem usage=%.2f GB",
        0.02 if model == "target" else 0.0,
        (0.09 if ranks == 1 else 1.07) if model == "target" else 0.0,
    )


def load(memory, model, rank, main_pid, times):
    seconds = settings.paced(0.5 if model == "target" else 0.15)
    logger.info("Load weight begin. avail mem=%.2f GB", memory.free)
    stumble("weight", main_pid)
    if rank == 0:
        log.shards(10 if model == "target" else 1, seconds)
    else:
        wait(seconds)
    size = 0.32 if model == "target" else 0.13
    memory.take(size)
    times.setdefault("load", seconds)
    logger.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        seconds, "LlamaForCausalLM" if model == "target" else "LlamaForCausalLMEagle3", memory.free, size,
    )  # fmt: skip
    if model == "target":
        wait(settings.paced(0.1))


def capture(cfg, memory, rank, main_pid):
    """CUDA graphs; only rank 0 draws the bars. Returns GB a graph kind."""
    used = dict.fromkeys(("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend"), 0.0)
    plan = cfg["cuda_graph_config"]
    if plan["prefill"]["backend"] == "disabled":
        logger.info(
            "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
            "--cuda-graph-backend-prefill=disabled or auto-disable rules)."
        )
    kinds = [("target decode", "decode", 1)]
    if cfg["speculative_algorithm"] is not None:
        width = cfg["speculative_num_draft_tokens"] or 1
        branches = cfg["speculative_eagle_topk"] or 1
        kinds = [
            ("target verify", "target_verify", width),
            ("draft decode", "draft_decode", branches),
            ("draft extend", "draft_extend", width),
        ]
    if plan["decode"]["backend"] == "disabled":
        stumble("graph", main_pid)
        return used
    sizes = plan["decode"]["bs"]
    for title, key, width in kinds:
        seconds = settings.paced(0.9 / len(kinds))
        logger.info(
            "Capture %s CUDA graph begin. backend=%s, num_tokens_per_req=%d, bs=%s, avail mem=%.2f GB",
            title, plan["decode"]["backend"], width, sizes, memory.free,
        )  # fmt: skip
        stumble("graph", main_pid)
        if rank == 0:
            free = memory.free
            log.bar(
                lambda done, free=free: f"Capturing batches (bs={sizes[-max(done, 1)]} avail_mem={free:.2f} GB): ",
                len(sizes),
                seconds,
            )
        else:
            wait(seconds)
        memory.take(0.08)
        used[key] = 0.08
        logger.info(
            "Capture %s CUDA graph end. elapsed=%.2f s, mem usage=0.08 GB, avail mem=%.2f GB.",
            title,
            seconds,
            memory.free,
        )
    return used
