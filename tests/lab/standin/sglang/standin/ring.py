# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ranks' connections to rank 0: pipes on its own node, TCP from others (in the real server: the torch store, NCCL).

Rank 0 listens also with a single node: on the port of --dist-init-addr, else of --nccl-port, else a random one below
the ephemeral range. The real one listens on all addresses whatever --host says; this one on loopback, unless the nodes
meet elsewhere or STANDIN_STORE_ANY is set: a demo opens nothing to the network.
"""

from __future__ import annotations

import random
import socket
import time
from multiprocessing.connection import Connection

from sglang.standin import settings
from sglang.standin.pace import wait
from sglang.standin.phases import StartFailed


def meet(cfg, place, local):
    """Returns the connections: on rank 0 one to each other rank, elsewhere the one to rank 0.

    `local` are those that the main process made on this node. A socket that must stay open is kept with the function's
    result: (connections, listener or None).
    """
    if place["rank"] == 0:
        return wait_for_others(cfg, listen(cfg), local)
    if place["local_rank"] == place["rank"]:
        return local, None
    return [reach(cfg, place["rank"])], None


def address(cfg):
    host, _, port = (cfg["dist_init_addr"] or "").rpartition(":")
    return host.strip("[]"), int(port)


def listen(cfg):
    host, port = address(cfg) if cfg["dist_init_addr"] else ("127.0.0.1", cfg["nccl_port"])
    everywhere = settings.text("STORE_ANY") or host not in ("127.0.0.1", "localhost")
    dual = bool(everywhere) and socket.has_dualstack_ipv6()
    for candidate in [port] if port else random.sample(range(22000, 30000), 20):
        try:
            return socket.create_server(
                ("" if everywhere else "127.0.0.1", candidate),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
                backlog=128,
            )
        except OSError:
            continue
    raise StartFailed(
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        f"port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )


def wait_for_others(cfg, listener, local):
    """Rank 0: one connection from each rank of another node, in whatever order they come."""
    away = (cfg["tp_size"] * cfg["pp_size"] // cfg["nnodes"]) * (cfg["nnodes"] - 1)
    listener.settimeout(float(cfg["dist_timeout"] or 600))
    remote = {}
    while len(remote) < away:
        try:
            peer, _ = listener.accept()
        except socket.timeout:
            raise StartFailed(
                f"torch.distributed.DistStoreError: Timed out after {cfg['dist_timeout'] or 600} seconds waiting for "
                f"clients. {len(remote) + len(local) + 1}/{away + len(local) + 1} clients joined."
            ) from None
        peer.setblocking(True)
        connection = Connection(peer.detach())
        remote[int(connection.recv_bytes())] = connection
    return local + [remote[rank] for rank in sorted(remote)], listener


def reach(cfg, rank):
    """Another node's rank: keep trying until rank 0 listens."""
    host, port = address(cfg)
    deadline = time.monotonic() + float(cfg["dist_timeout"] or 600)
    while True:
        try:
            peer = socket.create_connection((host, port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartFailed(
                    "torch.distributed.DistNetworkError: The client socket has timed out after "
                    f"{cfg['dist_timeout'] or 600}000ms while trying to connect to ({host}, {port}): {error}"
                ) from None
            wait(0.1)
    peer.settimeout(None)
    connection = Connection(peer.detach())
    connection.send_bytes(str(rank).encode())
    return connection
