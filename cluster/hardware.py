"""GPUs of this machine and the CPUs beside each, from /proc and /sys alone. Knows no Ray, no CUDA; changes nothing.

GPUs are numbered by PCI address, as Ray and `nvidia-smi` number them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GPU_LABEL = "manta/gpu"
"""Node label: the type of the node's GPUs."""
SOCKETS_LABEL = "manta/gpu-sockets"
"""Node label: the socket of each GPU, as `0.0.1.1`."""

MEMORY_LABEL = "manta/gpu-memory-mib"
"""Node label: memory of each GPU, MiB; the smallest where they differ."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    pci_address: str
    model: str
    socket: int | None
    """NUMA node; None where the machine has one only, or does not say."""
    cpus: frozenset[int]
    """CPUs of that socket; empty when unknown."""


def find_gpus(root: Path = Path("/")) -> list[Gpu]:
    """In the order of their numbers; empty where there is no NVIDIA driver."""
    folder = root / "proc/driver/nvidia/gpus"
    if not folder.is_dir():
        return []
    return [_read_gpu(entry, root) for entry in sorted(folder.iterdir(), key=lambda entry: entry.name.lower())]


def cpus_beside(gpu_ids: Sequence[int], gpus: Sequence[Gpu], allowed: frozenset[int]) -> frozenset[int] | None:
    """CPUs to which a process that uses these GPUs should keep, out of those that it may use.

    None when there is nothing to choose: no GPU, sockets unknown, a number beyond the GPUs that can be seen, or no
    allowed CPU on those sockets.
    """
    if not gpu_ids or any(gpu_id >= len(gpus) for gpu_id in gpu_ids):
        return None
    chosen = [gpus[gpu_id] for gpu_id in gpu_ids]
    if any(gpu.socket is None or not gpu.cpus for gpu in chosen):
        return None
    cpus = frozenset().union(*(gpu.cpus for gpu in chosen)) & allowed
    return cpus if cpus and cpus != allowed else None


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as {0, 1, 2, 3, 8}. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if part:
            cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def node_labels(gpus: Sequence[Gpu], *, memory_mib: int | None = None) -> dict[str, str]:
    """What the node of these GPUs is labelled with. Values have letters, digits, `-`, `_` and `.` only."""
    if not gpus:
        return {}
    models = sorted({gpu.model for gpu in gpus})
    labels = {GPU_LABEL: re.sub(r"[^A-Za-z0-9._-]+", "-", ".".join(models)).strip("-._")[:63]}
    if memory_mib is not None:
        labels[MEMORY_LABEL] = str(memory_mib)
    if all(gpu.socket is not None for gpu in gpus):
        labels[SOCKETS_LABEL] = ".".join(str(gpu.socket) for gpu in gpus)[:63]
    return labels


def sockets_from_label(value: str) -> tuple[int, ...]:
    """Inverse of the sockets' label; empty when it is not one."""
    return tuple(int(part) for part in value.split(".")) if re.fullmatch(r"\d+(\.\d+)*", value) else ()


def _read_gpu(entry: Path, root: Path) -> Gpu:
    found = re.search(r"^Model:\s*(.+?)\s*$", _read(entry / "information"), re.MULTILINE)
    device = root / "sys/bus/pci/devices" / entry.name.lower()
    socket = _read(device / "numa_node").strip()
    cpus = _read(device / "local_cpulist")
    return Gpu(
        pci_address=entry.name.lower(),
        model=found[1] if found else "unknown",
        socket=int(socket) if socket.isdigit() else None,  # -1 where the machine does not say
        cpus=parse_cpu_list(cpus) if re.fullmatch(r"[\d,\-\s]*", cpus) else frozenset(),
    )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
