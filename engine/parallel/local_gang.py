"""Starts the other ranks of an engine as processes of this machine, and ends them whatever happens. Knows no model.

They are started as commands, not forked or spawned, so that it works from a script without a main guard, from
`python -c` and from a notebook. Each holds a pipe to this process: when it ends, however it ends, they end too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from manta.engine.config import EngineConfig, with_overrides
from manta.engine.errors import EngineFailed

from .member import GangMember, listen_for_store, new_gang_id
from .place import RankPlace

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_END_S = 10.0
"""How long processes may take to end by themselves, and a broken engine to raise its error."""

_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); from manta.engine.parallel.follower_main import main; main()"


class FollowerTask(msgspec.Struct):
    """What a follower's process is told over its standard input, as one line."""

    config: str
    """EngineConfig as JSON."""
    member: GangMember


class LocalGang:
    """All ranks but this process's own, rank 0."""

    def __init__(self, config: EngineConfig, *, tp_size: int, pp_size: int, devices: list[str]) -> None:
        """Starts the processes; they meet when `start_engine` is given `member` and `store_socket`.

        `devices` has the device of each rank, by rank.
        """
        world_size = tp_size * pp_size
        assert len(devices) == world_size, f"{len(devices)} devices for {world_size} ranks"
        self.store_socket = listen_for_store(_HOST)
        store_port = self.store_socket.getsockname()[1]
        gang_id = new_gang_id()

        def member(rank: int) -> GangMember:
            place = RankPlace(rank, tp_size, pp_size)
            return GangMember(place, _HOST, store_port, (_HOST,) * world_size, gang_id)

        self.member = member(0)
        self._is_broken = threading.Event()
        self._is_stuck: Callable[[], bool] = lambda: False
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, world_size):
                own = with_overrides(config, {"device": devices[rank]})
                self._start(FollowerTask(own.model_dump_json(), member(rank)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raises EngineFailed when a process has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise EngineFailed(f"The process of rank {rank} ended with code {process.returncode}.")

    def watch_for(self, is_stuck: Callable[[], bool]) -> None:
        """How to tell whether this process waits for a step."""
        self._is_stuck = is_stuck

    def break_off(self, reason: str) -> None:
        """End the others at once, so that whatever this process waits for fails. If it is stuck all the same, in a
        library that waits for ever, it ends. Returns before."""
        self._is_broken.set()
        for process in self._processes:
            process.kill()

        def end_if_stuck() -> None:
            time.sleep(_END_S)
            if self._is_stuck():
                logger.critical("%s This process is stuck in an exchange with it and ends.", reason)
                os._exit(1)

        threading.Thread(target=end_if_stuck, name="manta-stuck", daemon=True).start()

    def wait(self) -> None:
        """Let the processes end by themselves, as rank 0 has told them, and `close`."""
        self.close(wait_s=0.0 if self._is_broken.is_set() else _END_S)

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the processes that are left after `wait_s`."""
        self.store_socket.close()
        end_s = time.monotonic() + wait_s
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end_s - time.monotonic(), 0.0))
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _start(self, task: FollowerTask) -> None:
        package = Path(sys.modules["manta"].__file__ or "").parent.parent
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(package)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process to deal with
        )
        self._processes.append(process)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
