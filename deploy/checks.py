"""What `manta serve` looks at before it starts anything: the port, the disk, other Rays, the model. Starts nothing."""

from __future__ import annotations

import contextlib
import errno
import random
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from manta.engine.config import with_overrides
from manta.engine.errors import CheckpointError, ConfigError, MantaError
from manta.engine.model_source import load_shape, resolve_model

from . import demo_model
from .config import DeployConfig
from .processes import is_marked, open_files
from .settings import Settings

MIN_FREE_BYTES = 1_000_000_000
"""Ray logs and spills into its folder, and refuses to work on a full disk."""
PORTS = range(20_000, 30_000)
"""Where free ports are looked for. Linux gives a connection, or a process of Ray that asks for any port, one from 32768
on: what it would give us may be given to another before we listen. Ray and Serve choose below and above these."""


class PortTaken(MantaError):
    """Something else listens on the port."""


class DiskFull(MantaError):
    """Too little room for Ray's folder."""


def check_port(host: str, port: int) -> None:
    """Raise PortTaken or ConfigError unless this process could listen on (host, port)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                owner = _listener(port)
                raise PortTaken(
                    f"port {port} on {host} is taken{f' by {owner}' if owner else ''}: stop it, or take another port "
                    f"with --port {port + 1 if port < 65535 else port - 1}"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"serving.port = {port}: ports below 1024 need root; take another one with --port 8000",
                    field="serving.port",
                ) from None
            raise ConfigError(
                f"serving.host = {host!r}: not an address of this machine ({error.strerror or error})",
                field="serving.host",
            ) from None


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now, for whoever listens in some seconds. Raises PortTaken."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise PortTaken(f"of the ports {PORTS[0]} to {PORTS[-1]} only {len(found)} are free, and {count} are needed")


def check_disk(folder: Path) -> None:
    """Raise DiskFull unless Ray can work in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise DiskFull(
            f"{folder} has {free / 1e6:.0f} MB free and Ray needs at least {MIN_FREE_BYTES / 1e6:.0f} MB there: free "
            "some space, or set TMPDIR to a folder on another disk"
        )


def locate_model(config: DeployConfig, models_dir: Path) -> DeployConfig:
    """The same deployment with the demo model's name replaced by its file, after a look at the model's files.

    Engine processes, on whatever machine, then need no environment to find it. Raises CheckpointError or ConfigError,
    with advice, when the model cannot be found or its configuration cannot be read.
    """
    model = config.engine.model
    changes: dict[str, str] = {}
    if model.model == demo_model.NAME:
        changes["engine.model.model"] = str(_demo_file(models_dir))
        changes["engine.model.served_model_name"] = model.served_model_name or demo_model.NAME
    if model.tokenizer == demo_model.NAME:
        changes["engine.model.tokenizer"] = str(_demo_file(models_dir))
    config = with_overrides(config, changes)
    load_shape(resolve_model(config.engine.model))
    return config


def locate_profiles(config: DeployConfig, profiles_dir: Path) -> DeployConfig:
    """The same deployment, told where step-time profiles of this machine lie, if there are any."""
    if config.engine.scheduler.step_profiles is not None or not profiles_dir.is_dir():
        return config
    return with_overrides(config, {"engine.scheduler.step_profiles": str(profiles_dir)})


def locate_all(config: DeployConfig, user: Settings) -> DeployConfig:
    """The same deployment with paths for what has a name on this machine: the model, its tokenizer, its profiles."""
    return locate_profiles(locate_model(config, user.models_dir), user.profiles_dir)


def running_rays() -> list[int]:
    """Process ids of the Ray head processes (gcs_server) on this machine, less those of other `manta serve`."""
    return [pid for pid, name in _processes() if name == "gcs_server" and not is_marked(pid)]


def check_joinable(address: str) -> None:
    """Raise ConfigError when `auto` finds no Ray node here but those of other `manta serve`, which take nobody in."""
    if address == "auto" and not [pid for pid, name in _processes() if name == "raylet" and not is_marked(pid)]:
        raise ConfigError(
            "serving.ray_address = 'auto': no Ray runs on this machine that could be joined (that of another "
            "`manta serve` cannot be); leave it out to start one",
            field="serving.ray_address",
        )


def established_connections(port: int) -> int:
    """Number of open TCP connections on a listening port of this machine."""
    return sum(1 for local, state, _ in _tcp_table() if local == port and state == "01")


def _demo_file(models_dir: Path) -> Path:
    file = models_dir / demo_model.NAME / demo_model.FILE
    if not file.is_file():
        raise CheckpointError(
            f"the demo model is not on this machine ({file} is missing): fetch it with `manta fetch {demo_model.NAME}`"
        )
    return file


def _processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "comm").read_text().strip()
            except OSError:
                continue  # it ended meanwhile


def _tcp_table() -> Iterator[tuple[int, str, str]]:
    """(local port, state, inode) of every TCP socket."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            yield int(fields[1].rpartition(":")[2], 16), fields[3], fields[9]


def _listener(port: int) -> str | None:
    """Name and id of the process that listens on `port`, if this user may know."""
    sockets = {f"socket:[{inode}]" for local, state, inode in _tcp_table() if local == port and state == "0A"}
    for pid, name in _processes():
        with contextlib.suppress(OSError):  # another user's
            if sockets & set(open_files(Path(f"/proc/{pid}"))):
                return f"{name} (process {pid})"
    return None
