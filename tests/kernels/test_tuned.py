"""Tables of measured configurations: which file a device takes, and that the shipped files can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from manta.kernels import runtime


def test_a_device_takes_the_longest_file_name_that_its_own_contains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem in ("nvidia_h200", "nvidia_h200_nvl", "nvidia_h100"):
        (tmp_path / f"{stem}.json").write_text(json.dumps({"op": {"file": stem}}))
    monkeypatch.setattr(runtime, "TUNED_FOLDER", tmp_path)
    read = runtime.tuned_tables.__wrapped__
    assert read("NVIDIA H200 NVL")["op"]["file"] == "nvidia_h200_nvl"
    assert read("NVIDIA H200")["op"]["file"] == "nvidia_h200"
    assert read("NVIDIA H200 144G")["op"]["file"] == "nvidia_h200"
    assert read("AMD Instinct MI300X") == {}


def test_other_devices_have_empty_tables() -> None:
    assert runtime.tuned_table("linear", torch.device("cpu")) == {}


def test_shipped_tables_are_read() -> None:
    assert runtime.tuned_tables("NVIDIA H200")["linear"]
