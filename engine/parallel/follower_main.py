"""The process of a follower that local_gang.py started: reads its task from standard input and follows."""

from __future__ import annotations

import logging
import os
import sys
import threading

import msgspec

from manta.engine.config import EngineConfig
from manta.engine.errors import MantaError

from .follower import Follower
from .local_gang import FollowerTask


def main() -> None:
    """Until rank 0 ends the gang, or ends."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=FollowerTask)
    logging.basicConfig(format=f"%(levelname)s rank {task.member.place.rank}: %(message)s", level=logging.WARNING)
    threading.Thread(target=_end_with_parent, name="manta-parent", daemon=True).start()
    try:
        # Rank 0 explains to the user; whatever it cannot learn from this rank is seen here.
        config = EngineConfig.model_validate_json(task.config)
        # A user may suspend a script; that it has ended is seen at the pipe.
        Follower(config, task.member, on_broken=_end, minds_silence=False).run()
        os._exit(0)  # threads of the exchange need not be unwound
    except MantaError:
        os._exit(1)
    except Exception:
        logging.exception("the rank failed")
        os._exit(1)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


def _end(reason: str) -> None:
    os._exit(1)
