"""An engine's endpoint in a process of its own, which can be killed and frozen: orders on stdin, events on stdout."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

from manta.engine.kv_transfer.messages import KvEvent, KvOrder, KvPeer
from tests.engine.kv_transfer.kv_gangs import QUICK, WAIT_S, KvGang, model_shape, random_blocks, shards_of

ROOT = Path(__file__).parents[3]
SHAPE = model_shape(num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64)
NUM_BLOCKS = 64
BLOCK_SIZE = 16


class KvProcess:
    """The parent's end."""

    def __init__(self, device: str = "cpu") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.kv_transfer.kv_process", device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        self.peer = msgspec.json.decode(self._lines.get(timeout=60), type=KvPeer)

    def __enter__(self) -> KvProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def obey(self, order: KvOrder) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self.process.stdin.flush()

    def event(self) -> KvEvent:
        return msgspec.json.decode(self._lines.get(timeout=WAIT_S), type=KvEvent)

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.put(line)


def main() -> None:
    blocks = random_blocks(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with KvGang(shards_of(SHAPE), blocks, limits=QUICK, device=sys.argv[1]) as gang:
        print(msgspec.json.encode(gang.peer).decode(), flush=True)

        def tell() -> None:
            while True:
                print(msgspec.json.encode(gang.endless_event()).decode(), flush=True)

        threading.Thread(target=tell, daemon=True).start()
        for line in sys.stdin:
            gang.obey(msgspec.json.decode(line, type=KvOrder))


if __name__ == "__main__":
    main()
