"""The context is begun for CUDA devices only, and what fails stays quiet: torch says it later."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from manta.engine.cuda_context import begin_cuda_context


class Driver:
    """Stands for libcuda; `fails` names the call that returns an error."""

    def __init__(self, fails: str | None = None) -> None:
        self.calls: list[str] = []
        self.index: int | None = None
        self._fails = fails

    def _answer(self, name: str) -> int:
        self.calls.append(name)
        return 100 if name == self._fails else 0

    def __getattr__(self, name: str) -> Any:
        if name == "cuDeviceGet":

            def device_get(_: object, index: int) -> int:
                self.index = index
                return self._answer(name)

            return device_get
        return lambda *arguments: self._answer(name)


def begin(monkeypatch: pytest.MonkeyPatch, device: str, driver: Driver) -> Driver:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begin_cuda_context(device)()
    return driver


@pytest.mark.parametrize(("device", "index"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_device_s_primary_context_is_retained(monkeypatch: pytest.MonkeyPatch, device: str, index: int):
    driver = begin(monkeypatch, device, Driver())
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert driver.index == index


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert begin(monkeypatch, "cpu", Driver()).calls == []


def test_a_driver_that_refuses_is_asked_no_further(monkeypatch: pytest.MonkeyPatch):
    assert begin(monkeypatch, "cuda", Driver(fails="cuInit")).calls == ["cuInit"]
    assert begin(monkeypatch, "cuda", Driver(fails="cuDeviceGet")).calls == ["cuInit", "cuDeviceGet"]


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    begin_cuda_context("cuda")()


@pytest.mark.gpu
def test_torch_works_in_the_context_that_was_begun():
    import torch

    begin_cuda_context("cuda")()
    assert torch.ones(3, device="cuda").sum().item() == 3
