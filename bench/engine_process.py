"""Run as a process: one engine behind a channel, without Ray. Reads an EngineOrder from stdin, prints an EngineReply.

The engine says of itself that KV for it is to be sent to the ports of the order; a proxy there passes it on to the real
ones, which are in the reply. Ends when stdin is closed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

import msgspec

from manta.cluster.routing.roles import Role
from manta.engine.config import EngineConfig
from manta.engine.startup import start_engine
from manta.replicas.channel import Address, EngineKeys
from manta.replicas.channel_server import ChannelServer
from manta.replicas.engine_loop import EngineLoop


class EngineOrder(msgspec.Struct, kw_only=True):
    """What to start."""

    name: str
    role: Role
    config: dict[str, Any]
    """EngineConfig as a tree."""
    keys: EngineKeys
    control_port: int
    rank_ports: list[int]


class EngineReply(msgspec.Struct, kw_only=True):
    """What was started."""

    address: Address
    control_url: str
    rank_urls: list[str]


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOrder)
    config = EngineConfig.model_validate(order.config)
    core = start_engine(config, hash_key=order.keys.block_hashes)
    kv = core.info.kv
    assert kv is not None, "engines of pools hand KV over"
    seen = msgspec.structs.replace(
        kv,
        control_url=f"tcp://127.0.0.1:{order.control_port}",
        rank_urls=[f"tcp://127.0.0.1:{port}" for port in order.rank_ports],
    )
    info = msgspec.structs.replace(core.info, kv=seen)
    server = ChannelServer(order.name, info, client_key=order.keys.client, step=core.step_clock.waiting)
    reply = EngineReply(address=server.address, control_url=kv.control_url, rank_urls=kv.rank_urls)
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    EngineLoop(core, server, role=order.role).run()


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
