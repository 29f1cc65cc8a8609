"""Run as a process: one simulated engine behind a channel. Arguments: model folder, client key. Prints its address."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from manta.engine.startup import start_engine
from manta.replicas.channel_server import ChannelServer
from manta.replicas.engine_loop import EngineLoop
from tests.replicas.edge.local_server import sim_config


def main() -> None:
    core = start_engine(sim_config(Path(sys.argv[1]), device="sim:5ms"))
    server = ChannelServer("process", core.info, client_key=sys.argv[2].encode())
    heavy = [name for name in ("torch", "triton", "transformers") if name in sys.modules]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    rss_mb = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    print(server.address.url, server.address.server_key.decode(), f"{rss_mb:.0f}", ",".join(heavy) or "-", flush=True)
    EngineLoop(core, server).run()


if __name__ == "__main__":
    main()
