"""Starts this machine's part of a Ray cluster: the arguments and environment of `ray start`. Knows no engine.

Ray's token authentication is on: the head's token is made here when there is none, and every other node, and every
machine that is to join, needs a copy of it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manta.cluster.hardware import find_gpus, node_labels
from manta.engine.errors import ConfigError, MantaError

from . import ray_local, settings

DEFAULT_PORT = 6379
HEALTH = {
    # A node is taken for dead that leaves three questions in a row unanswered for two seconds each, half a second
    # apart: 7.0 to 7.5 s after it fell silent, and never when it was silent for less than 7 s. With Ray's own
    # defaults it takes a minute.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class NodeFailed(MantaError):
    """`ray start` did not work; its own output says why."""


@dataclass(frozen=True)
class NodeOptions:
    """One node. Either the head (`address` is None) or one that joins the head at `address`."""

    address: str | None = None
    port: int = DEFAULT_PORT
    """Of the head."""
    node_ip: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    block: bool = False
    """Stay in the foreground; the node ends with this process."""
    temp_dir: str | None = None
    more: tuple[str, ...] = ()
    """Further arguments of `ray start`, as they are."""


def ray_start_arguments(options: NodeOptions) -> list[str]:
    """What follows `ray`."""
    arguments = ["start", "--disable-usage-stats"]
    if options.address is None:
        # The dashboard serves `manta logs` and `serve deploy`; it listens on this machine only.
        arguments += ["--head", f"--port={options.port}", "--dashboard-host=127.0.0.1"]
    else:
        arguments.append(f"--address={options.address}")
    for name, value in (
        ("node-ip-address", options.node_ip),
        ("num-cpus", options.num_cpus),
        ("num-gpus", options.num_gpus),
        ("temp-dir", options.temp_dir),
    ):
        if value is not None:
            arguments.append(f"--{name}={value}")
    if options.labels:
        arguments.append("--labels=" + ",".join(f"{name}={value}" for name, value in options.labels.items()))
    if options.block:
        arguments.append("--block")
    return [*arguments, *options.more]


def node_environment(*, use_haproxy: bool, num_cpus: int) -> dict[str, str]:
    """Variables for the node's processes and all that they start, Serve's among them."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        **HEALTH,
        **ray_local.SERVE_HEALTH,
    }
    return {**variables, **ray_local.haproxy_variables(num_cpus)} if use_haproxy else variables


def own_labels() -> dict[str, str]:
    """What this machine's node is labelled with: type, memory and sockets of its GPUs."""
    return node_labels(find_gpus(), memory_mib=_gpu_memory_mib())


def _gpu_memory_mib() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest_number(done.stdout)


def smallest_number(text: str) -> int | None:
    """The smallest of the numbers that stand alone in their lines; None without any."""
    return min((int(line) for line in text.split("\n") if line.strip().isdigit()), default=None)


def make_token(file: Path) -> bool:
    """Write a new token that only this user can read, unless there is one. Whether it was written."""
    if file.exists():
        return False
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(secrets.token_hex(32))
    return True


def check_token(*, is_head: bool) -> str | None:
    """Make the token on a head that has none; what to tell the user. Raises ConfigError on another node without one."""
    if settings.has_ray_token():
        return None
    file = settings.ray_token_file()
    if not is_head:
        raise ConfigError(
            f"this machine has no Ray token: copy {file} from the head (readable by you alone), or "
            "name its file in RAY_AUTH_TOKEN_PATH"
        )
    make_token(file)
    return f"made a token in {file}: copy it to every machine that is to join"


def start(options: NodeOptions) -> None:
    """Run `ray start`. With `block` this process becomes it, and does not return. Raises NodeFailed.

    What the user has set for Ray in the environment stays, but for token authentication, which is on.
    """
    use_haproxy = ray_local.haproxy_runs()
    defaults = node_environment(use_haproxy=use_haproxy, num_cpus=options.num_cpus or os.cpu_count() or 1)
    environment = {**settings.with_defaults(defaults), "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "ray.scripts.scripts", *ray_start_arguments(options)]
    if options.block:
        os.execve(sys.executable, command, environment)
    code = subprocess.call(command, env=environment)
    if code:
        raise NodeFailed(f"`ray {' '.join(command[3:])}` ended with code {code}")
