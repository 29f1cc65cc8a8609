"""One rank of a gang as a Ray actor: start-up, control calls, the end of the process. Knows Ray, not Serve.

Rank 0 runs the engine core's step loop and the channel to the edges; the others follow its plans.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import ray

from manta.cluster.hardware import cpus_beside, find_gpus
from manta.cluster.routing.roles import Role
from manta.engine.config import EngineConfig
from manta.engine.parallel.follower import Follower
from manta.engine.parallel.member import GangMember, listen_for_store
from manta.engine.startup import start_engine
from manta.engine.stats import EngineInfo

from .channel import Address, EngineKeys
from .channel_server import ChannelServer
from .engine_loop import EngineLoop

logger = logging.getLogger(__name__)

NAMESPACE = "manta"
"""Of Ray, in which every rank has a name."""


def rank_name(replica_id: str, rank: int) -> str:
    """The name by which any process of the cluster finds a rank."""
    return f"{replica_id}:rank{rank}"


class RankHost(msgspec.Struct, kw_only=True, frozen=True):
    """Where a rank's process is; known before its engine starts."""

    host: str
    node_id: str
    pid: int
    gpu_ids: list[str]
    log_files: list[str]
    """Names in the folder of logs of Ray's session on that node."""
    store_port: int | None
    """Where rank 0 hosts the gang's store; None for the others."""


class Progress(msgspec.Struct, kw_only=True):
    """What a rank can say about itself at any time."""

    rank: int
    where: RankHost
    phases_s: dict[str, float]
    """Phases of start-up that are over, seconds."""
    is_up: bool
    """Whether start-up is over."""
    info: EngineInfo | None
    """Of rank 0 once the engine runs."""
    address: Address | None
    turn_age_s: float
    """Since the loop's last turn began; 0 before it runs, and on other ranks than 0."""


class EngineShard:
    """A Ray actor. `locate` first on every rank, then `run`, which ends when it is stopped; the other methods answer
    meanwhile."""

    def __init__(
        self, replica_id: str, rank: int, config: EngineConfig, keys: EngineKeys, role: Role = Role.MIXED
    ) -> None:
        self._replica_id = replica_id
        self._rank = rank
        self._config = config
        self._keys = keys
        self._role = role
        self._phases_s: dict[str, float] = {}
        self._info: EngineInfo | None = None
        self._address: Address | None = None
        self._loop: EngineLoop | None = None
        self._follower: Follower | None = None
        self._store: socket.socket | None = None
        self._is_up = threading.Event()
        _log_to_stderr()
        self._gpu_ids = [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
        _pin(self._gpu_ids)
        self._where = self._find_out(store_port=None)

    @ray.method(concurrency_group="control")
    def locate(self, hosts_store: bool) -> RankHost:
        """Where this rank is. `hosts_store`: it also listens for the ranks of its gang."""
        if hosts_store:
            self._store = listen_for_store(self._where.host)
            self._where = self._find_out(store_port=self._store.getsockname()[1])
        return self._where

    def run(self, member: GangMember | None) -> None:
        """Serve until stopped. `member` is None for a gang of one.

        Raises ConfigError or CheckpointError when the engine cannot start. A failure later ends the process.
        """
        logger.info("rank %d of replica %s starts in process %d", self._rank, self._replica_id, os.getpid())
        if member is not None and not member.place.is_driver:
            self._follow(member)
        else:
            self._drive(member)

    def _drive(self, member: GangMember | None) -> None:
        core = start_engine(
            self._config,
            self._report,
            member,
            store_socket=self._store,
            on_broken=self._exit,
            hash_key=self._keys.block_hashes,
            host=self._where.host,
        )
        server = ChannelServer(
            self._replica_id,
            core.info,
            client_key=self._keys.client,
            host=self._where.host,
            step=core.step_clock.waiting,
        )
        self._loop = EngineLoop(core, server, role=self._role)
        self._info, self._address = core.info, server.address
        self._is_up.set()
        try:
            self._loop.run()
        except Exception:
            logger.exception("rank %d of replica %s failed", self._rank, self._replica_id)
            _exit_now()
        server.close()
        core.close()

    def _follow(self, member: GangMember) -> None:
        self._follower = Follower(self._config, member, self._report, on_broken=self._exit)
        self._follower.run()

    def _exit(self, reason: str) -> None:
        logger.error("rank %d of replica %s ends: %s", self._rank, self._replica_id, reason)
        _exit_now()

    @ray.method(concurrency_group="control")
    def wait_address(self, timeout_s: float) -> Address | None:
        """Where the engine listens, as soon as it does; None when the time is over before. Of rank 0."""
        self._is_up.wait(timeout_s)
        return self._address

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Start-up and the loop's last turn."""
        return Progress(
            rank=self._rank,
            where=self._where,
            phases_s=dict(self._phases_s),
            is_up=self._is_up.is_set() if self._follower is None else self._follower.progress.is_ready,
            info=None if self._info is None else msgspec.structs.replace(self._info, kv=None),  # which holds a secret
            address=self._address,
            turn_age_s=0.0 if self._loop is None else time.monotonic() - self._loop.last_turn_at_s,
        )

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the loop, and `run` with it."""
        if self._loop is not None:
            self._loop.stop()
        if self._follower is not None:
            self._follower.stop()

    def _report(self, phase: str, seconds: float) -> None:
        self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds
        logger.info("rank %d of replica %s: %s took %.2f s", self._rank, self._replica_id, phase, seconds)

    def _find_out(self, *, store_port: int | None) -> RankHost:
        context, worker = ray.get_runtime_context(), ray._private.worker.global_worker  # type: ignore[attr-defined]
        return RankHost(
            host=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            pid=os.getpid(),
            gpu_ids=self._gpu_ids,
            log_files=[os.path.basename(path) for path in (worker.get_out_file_path(), worker.get_err_file_path())],
            store_port=store_port,
        )


def shard_actor_class() -> Any:
    """EngineShard as a Ray actor class. With a second concurrency group Ray calls are answered while `run` runs."""
    remote: Any = ray.remote
    return remote(concurrency_groups={"control": 2})(EngineShard)


def _pin(gpu_ids: list[str]) -> None:
    """Keep this process, threads that run already included, to the socket of its GPUs; as it is where that is unclear.

    Memory is then allocated there too, and copies to the GPU cross no link between sockets.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    numbers = [int(one) for one in gpu_ids if one.isdigit()]
    cpus = cpus_beside(numbers, find_gpus(), allowed) if len(numbers) == len(gpu_ids) else None
    if cpus is None:
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)
    logger.info("kept to %d of %d CPUs, beside GPU %s", len(cpus), len(allowed), ", ".join(gpu_ids))


def _log_to_stderr() -> None:
    """What Manta does goes to the rank's log, which `manta logs` shows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("manta").addHandler(handler)
    logging.getLogger("manta").setLevel(logging.INFO)
    logging.getLogger("manta").propagate = False


def _exit_now() -> None:
    logging.shutdown()
    os._exit(1)
