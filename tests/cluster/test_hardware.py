"""GPUs and the CPUs beside them, read from a made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from manta.cluster.hardware import (
    GPU_LABEL,
    MEMORY_LABEL,
    SOCKETS_LABEL,
    Gpu,
    cpus_beside,
    find_gpus,
    node_labels,
    parse_cpu_list,
    sockets_from_label,
)

EIGHT = frozenset(range(8))


def machine(root: Path, *gpus: tuple[str, str, str]) -> Path:
    """Files of a machine whose GPUs have these PCI addresses, NUMA nodes and CPU lists."""
    for address, socket, cpus in gpus:
        information = root / "proc/driver/nvidia/gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 66\n")
        device = root / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{socket}\n")
        (device / "local_cpulist").write_text(f"{cpus}\n")
    return root


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_cpu_lists_of_the_kernel_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_what_is_no_cpu_list_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list("0-x")


def test_gpus_are_numbered_by_pci_address_with_the_cpus_of_their_socket(tmp_path: Path) -> None:
    gpus = find_gpus(machine(tmp_path, ("0000:C3:00.0", "1", "4-7"), ("0000:1a:00.0", "0", "0-3")))
    assert [(gpu.pci_address, gpu.socket) for gpu in gpus] == [("0000:1a:00.0", 0), ("0000:c3:00.0", 1)]
    assert gpus[1] == Gpu("0000:c3:00.0", "NVIDIA H200", 1, frozenset({4, 5, 6, 7}))


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == []
    assert node_labels([]) == {}


def test_a_rank_keeps_to_the_socket_of_its_gpu(tmp_path: Path) -> None:
    gpus = find_gpus(machine(tmp_path, ("0000:1a:00.0", "0", "0-3"), ("0000:c3:00.0", "1", "4-7")))
    assert cpus_beside([1], gpus, EIGHT) == {4, 5, 6, 7}
    assert cpus_beside([1], gpus, frozenset({0, 5})) == {5}


def test_a_rank_is_free_where_there_is_nothing_to_choose(tmp_path: Path) -> None:
    one_socket = find_gpus(machine(tmp_path, ("0000:1a:00.0", "-1", "0-7")))
    two_sockets = [Gpu("a", "x", 0, frozenset({0, 1})), Gpu("b", "x", 1, frozenset({2, 3}))]
    assert cpus_beside([0], one_socket, EIGHT) is None
    assert cpus_beside([], two_sockets, EIGHT) is None
    assert cpus_beside([2], two_sockets, EIGHT) is None
    assert cpus_beside([0], two_sockets, frozenset({2, 3})) is None  # all CPUs that are allowed are elsewhere


def test_labels_carry_type_and_sockets_and_can_be_read_back(tmp_path: Path) -> None:
    labels = node_labels(find_gpus(machine(tmp_path, ("0000:1a:00.0", "0", "0-3"), ("0000:c3:00.0", "1", "4-7"))))
    assert labels == {GPU_LABEL: "NVIDIA-H200", SOCKETS_LABEL: "0.1"}
    assert node_labels(find_gpus(tmp_path), memory_mib=143771)[MEMORY_LABEL] == "143771"
    assert sockets_from_label(labels[SOCKETS_LABEL]) == (0, 1)
    assert sockets_from_label("left") == ()
