"""`manta cluster start`: what it makes of its options for `ray start`, and how it takes care of the token."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from manta.deploy import ray_node, settings
from manta.deploy.ray_node import (
    NodeFailed,
    NodeOptions,
    check_token,
    node_environment,
    ray_start_arguments,
    smallest_number,
)
from manta.engine.errors import ConfigError


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    file = tmp_path / "ray" / "auth_token"
    monkeypatch.setattr(settings, "RAY_TOKEN_FILE", file)
    return file


def test_a_head_keeps_its_dashboard_to_itself() -> None:
    assert ray_start_arguments(NodeOptions()) == [
        "start",
        "--disable-usage-stats",
        "--head",
        "--port=6379",
        "--dashboard-host=127.0.0.1",
    ]


def test_another_node_joins_with_its_labels_and_sizes() -> None:
    options = NodeOptions("10.0.0.1:6379", node_ip="10.0.0.2", num_cpus=4, num_gpus=0, labels={"a": "b", "c/d": "e"})
    assert ray_start_arguments(options) == [
        "start",
        "--disable-usage-stats",
        "--address=10.0.0.1:6379",
        "--node-ip-address=10.0.0.2",
        "--num-cpus=4",
        "--num-gpus=0",
        "--labels=a=b,c/d=e",
    ]


def test_other_options_are_passed_on() -> None:
    arguments = ray_start_arguments(NodeOptions(block=True, more=("--min-worker-port=20000",)))
    assert arguments[-2:] == ["--block", "--min-worker-port=20000"]


def test_token_authentication_is_on_with_and_without_haproxy() -> None:
    with_haproxy = node_environment(use_haproxy=True, num_cpus=8)
    without = node_environment(use_haproxy=False, num_cpus=8)
    assert with_haproxy["RAY_AUTH_MODE"] == without["RAY_AUTH_MODE"] == "token"
    assert with_haproxy["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in without


def test_a_head_makes_a_token_once_that_nobody_else_can_read(token_file: Path) -> None:
    assert "copy it to every machine" in (check_token(is_head=True) or "")
    token = token_file.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert check_token(is_head=True) is None
    assert token_file.read_text() == token


def test_a_node_without_the_head_s_token_is_told_what_to_do(token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"copy .*auth_token from the head"):
        check_token(is_head=False)
    assert not token_file.exists()


def test_a_token_in_the_environment_is_enough(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert check_token(is_head=False) is None


def test_the_memory_of_the_smallest_gpu_counts() -> None:
    assert smallest_number("143771\n81559\n\n") == 81559
    assert smallest_number("NVIDIA-SMI has failed\n") is None


def test_a_ray_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node.ray_local, "haproxy_runs", lambda: False)
    monkeypatch.setattr(subprocess, "call", lambda command, env: 1)
    with pytest.raises(NodeFailed, match=r"`ray start .*--address=h:1` ended with code 1"):
        ray_node.start(NodeOptions("h:1"))


def test_in_the_foreground_the_command_becomes_ray_so_that_signals_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def become(path: str, command: list[str], environment: dict[str, str]) -> None:
        became.append(command)
        assert environment["RAY_AUTH_MODE"] == "token"
        raise SystemExit

    monkeypatch.setattr(ray_node.ray_local, "haproxy_runs", lambda: False)
    monkeypatch.setattr(os, "execve", become)
    with pytest.raises(SystemExit):
        ray_node.start(NodeOptions("h:1", block=True))
    assert became[0][-1] == "--block"
