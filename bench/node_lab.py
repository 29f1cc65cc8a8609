"""Several nodes on one machine: network namespaces with addresses of their own, a Ray node in each. Needs root.

Nodes are started by `manta cluster start`, as machines are. A node can be killed, frozen and cut off. The process that
uses the lab enters the head's namespace, so that it is a program on the head's machine. Knows no engine and no load.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manta.deploy import processes, settings
from manta.engine.errors import MantaError

PORT = 6379
DISCARD_PORT = 9
"""Nothing listens there: a kernel that is reached refuses."""
OBJECT_STORE_BYTES = 100_000_000
START_TIMEOUT_S = 90.0
CLONE_NEWNET = 0x40000000


class LabFailed(MantaError):
    """The lab cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class LabNode:
    """One node: its namespace and its address."""

    name: str
    address: str
    index: int

    @property
    def outer_link(self) -> str:
        """The end of its cable that lies outside of it."""
        return f"{self.name}o"

    def pids(self) -> list[int]:
        """Processes in it, without this one."""
        found = []
        namespace = os.stat(f"/run/netns/{self.name}").st_ino
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):  # it ended
                    if os.stat(entry / "ns" / "net").st_ino == namespace:
                        found.append(int(entry.name))
        return found

    def signal_all(self, number: signal.Signals) -> list[int]:
        """Send a signal to all processes of the node, those that start meanwhile included. Returns their ids."""
        sent: set[int] = set()
        while fresh := set(self.pids()) - sent:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent |= fresh
        return sorted(sent)


class NodeLab:
    """`start`, then faults; `remove` at the end, whatever happened. One process has at most one lab."""

    def __init__(self, num_nodes: int, *, cpus_per_node: int = 1) -> None:
        """`num_nodes` nodes with the label role=engine, and the head, which has the resource `edge`."""
        tag = secrets.token_hex(2)
        subnet = f"10.{64 + secrets.randbelow(60)}.{secrets.randbelow(250)}"
        self.instance = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="manta-", dir="/tmp"))
        self.nodes = [LabNode(f"mn{tag}{index}", f"{subnet}.{index + 1}", index) for index in range(num_nodes + 1)]
        self._bridge = f"mb{tag}"
        self._cpus_per_node = cpus_per_node
        self._outside = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._has_entered = False
        self._janitor: subprocess.Popen[bytes] | None = None

    @property
    def head(self) -> LabNode:
        return self.nodes[0]

    @property
    def workers(self) -> list[LabNode]:
        return self.nodes[1:]

    @property
    def address(self) -> str:
        """Where the head answers."""
        return f"{self.head.address}:{PORT}"

    @property
    def logs(self) -> Path:
        return self.folder / "session_latest" / "logs"

    def start(self) -> None:
        """Build the network, start Ray on every node, enter the head's. Raises LabFailed."""
        if os.geteuid() != 0:
            raise LabFailed("nodes in network namespaces need root: run it as root, or leave node faults out")
        if shutil.which("ip") is None or shutil.which("nsenter") is None:
            raise LabFailed("nodes in network namespaces need the commands ip and nsenter (iproute2, util-linux)")
        self._janitor = processes.start_janitor(self.instance, self.folder)
        settings.export(
            {
                processes.MARK: self.instance,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_ENABLE_AUTO_CONNECT": "0",
                "RAY_DEDUP_LOGS": "0",
            }
        )
        self._outer("ip", "link", "add", self._bridge, "type", "bridge")
        self._outer("ip", "link", "set", self._bridge, "up")
        for node in self.nodes:
            self._wire(node)
        self._start_node(self.head)
        for node in self.workers:
            self._start_node(node)
        self.enter()

    def enter(self) -> None:
        """From now on this thread, and those that it starts, are on the head's machine."""
        with open(f"/run/netns/{self.head.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise LabFailed(f"the head's network cannot be entered: {os.strerror(ctypes.get_errno())}")
        self._has_entered = True

    def cut(self, node: LabNode) -> None:
        """Pull the node's cable."""
        self._outer("ip", "link", "set", node.outer_link, "down")

    def is_reachable(self, node: LabNode) -> bool:
        """Whether the node's kernel answers the head's machine, once that was entered."""
        try:
            socket.create_connection((node.address, DISCARD_PORT), timeout=1.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def repair(self, node: LabNode) -> None:
        """Whatever was done to the node: end what is left there, plug the cable in, start its Ray again."""
        node.signal_all(signal.SIGKILL)
        self._outer("ip", "link", "set", node.outer_link, "up")
        until_s = time.monotonic() + 10.0
        while node.pids() and time.monotonic() < until_s:
            time.sleep(0.05)
        self._start_node(node)

    def remove(self) -> None:
        """End every process of the lab and take the network down."""
        for node in self.nodes:
            with contextlib.suppress(FileNotFoundError):  # it was not built
                node.signal_all(signal.SIGKILL)
        processes.remove_instance(self.instance, self.folder)
        if self._has_entered:
            ctypes.CDLL(None).setns(self._outside, CLONE_NEWNET)
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        os.close(self._outside)
        if self._janitor is not None:
            processes.dismiss_janitor(self._janitor)

    def _wire(self, node: LabNode) -> None:
        inner = f"{node.name}i"
        self._outer("ip", "netns", "add", node.name)
        self._outer("ip", "link", "add", node.outer_link, "type", "veth", "peer", "name", inner, "netns", node.name)
        self._outer("ip", "link", "set", node.outer_link, "master", self._bridge, "up")
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "addr", "add", f"{node.address}/24", "dev", inner],
            ["ip", "link", "set", inner, "up"],
            ["ip", "route", "add", "default", "dev", inner],
        ):
            self._inside(node, command)

    def _start_node(self, node: LabNode) -> None:
        options = [f"--node-ip={node.address}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        if node is self.head:
            options += ["--head", f"--port={PORT}", f"--temp-dir={self.folder}", "--label=role=head", "--num-cpus=4"]
            options += ['--resources={"edge": 1}', "--include-dashboard=false"]
        else:
            options += [f"--address={self.address}", "--label=role=engine", f"--num-cpus={self._cpus_per_node}"]
        log = self.folder / f"{node.name}.log"
        with log.open("ab") as output:
            command = [sys.executable, "-m", "manta", "cluster", "start", *options]
            self._inside(node, command, output=output.fileno(), what=f"Ray on node {node.index} ({log})")

    def _inside(self, node: LabNode, command: Sequence[str], *, output: int | None = None, what: str = "") -> None:
        self._run(["ip", "netns", "exec", node.name, *command], output=output, what=what)

    def _outer(self, *command: str) -> None:
        path = f"/proc/{os.getpid()}/fd/{self._outside}"
        self._run(["nsenter", f"--net={path}", *command] if self._has_entered else list(command))

    def _run(self, command: Sequence[str], *, output: int | None = None, what: str = "") -> None:
        to = subprocess.PIPE if output is None else output
        try:
            done = subprocess.run(command, stdout=to, stderr=subprocess.STDOUT, timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise LabFailed(f"{what or ' '.join(command)} did not start within {START_TIMEOUT_S:g} s") from None
        if done.returncode:
            said = (done.stdout or b"").decode(errors="replace").strip()
            raise LabFailed(f"{what or ' '.join(command)} failed with code {done.returncode}: {said[-500:]}")
