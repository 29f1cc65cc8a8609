"""The `manta` command: what a user types wrong leads to one sentence and an exit code, never to a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manta.deploy import checks, cli
from manta.deploy.checks import DiskFull, PortTaken

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def manta(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Runs the command in this process with an empty MANTA_HOME; (exit code, stdout, stderr)."""
    monkeypatch.setenv("MANTA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MANTA_API_KEY", raising=False)
    monkeypatch.delenv("MANTA_URL", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manta", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return int(caught.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--set", "blok_size=32"], "unknown field 'blok_size'; did you mean 'engine.cache.block_size'?"),
        (["serve", "--set", "block_size=33"], "engine.cache.block_size = 33: Input should be 16, 32 or 64"),
        (["serve", "--set", "block_size"], "write name=value"),
        (["serve", "--port", "99999"], "serving.port = 99999"),
        (["serve", "--port", "x"], "Invalid value for '--port'"),
        (["serve", "missing.yaml"], "there is no configuration file 'missing.yaml'"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["serv"], "No such command 'serv'"),
        (["fetch", "gpt-4"], "unknown model 'gpt-4'"),
        (["serve"], "fetch it with `manta fetch smollm2-135m`"),
        (["serve", "no/such/folder/model.gguf"], "model.gguf"),
        (["cluster", "start"], "say --head on the first machine and --address HOST:PORT"),
        (["cluster", "start", "--head", "--address", "h:1"], "say --head on the first machine"),
        (["cluster", "start", "--address", "h:1", "--port", "2"], "--port is the head's"),
        (["cluster", "start", "--head", "--label", "x"], "write NAME=VALUE"),
        (["chat", "--url", "nonsense"], "'nonsense' is not an address"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(manta, arguments: list[str], message: str) -> None:
    code, _, stderr = manta(*arguments)
    assert code == 2
    assert stderr.startswith("manta: ")
    assert stderr.count("\n") == 1
    assert message in stderr


@pytest.mark.parametrize("command", ["chat", "status"])
def test_no_server_is_one_sentence_and_exit_code_1(manta, command: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, _, stderr = manta(command, "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert "start one with `manta serve`" in stderr
    assert stderr.count("\n") == 1


def test_wrong_yaml_names_file_and_line(manta, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("engine:\n  device: [cpu\n")
    code, _, stderr = manta("serve", str(file))
    assert code == 2
    assert "mine.yaml is not valid YAML at line" in stderr


def test_a_taken_port_names_its_owner(taken_port: int) -> None:
    with pytest.raises(PortTaken, match=rf"port {taken_port} on 127\.0\.0\.1 is taken by .*process {os.getpid()}"):
        checks.check_port("127.0.0.1", taken_port)


def test_a_port_in_time_wait_is_free(taken_port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = listener.accept()
        assert checks.established_connections(port) == 1
        server.close()  # the side that closes first waits
        client.close()
    checks.check_port("127.0.0.1", port)


def test_a_foreign_address_is_refused() -> None:
    from manta.engine.errors import ConfigError

    with pytest.raises(ConfigError, match=r"serving.host = '192\.0\.2\.77'"):
        checks.check_port("192.0.2.77", 8000)


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks.check_disk(tmp_path)
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match="set TMPDIR"):
        checks.check_disk(tmp_path)


def test_free_ports_differ() -> None:
    assert len(set(checks.free_ports(5))) == 5


def test_free_ports_are_none_that_linux_gives_to_connections() -> None:
    assert max(checks.free_ports(100)) < 32768


def test_ports_with_a_listener_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = checks.free_ports(1)
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(checks, "PORTS", range(taken, taken + 1))
        with pytest.raises(PortTaken, match="only 0 are free, and 1 are needed"):
            checks.free_ports(1)


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "manta", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("serve", "chat", "status", "fetch", "bench", "eval", "version"):
        assert f"  {name} " in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "ray", "transformers", "pydantic", "fastapi", "httpx", "numpy", "triton", "zmq"}


def test_version_names_what_it_stands_on(manta) -> None:
    code, stdout, _ = manta("version")
    assert code == 0
    for name in ("manta", "torch", "ray", "triton"):
        assert name in stdout


def test_the_key_of_the_environment_guards_the_server_unless_the_configuration_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MANTA_API_KEY", "from-environment")
    assert cli._deploy_config(None, [], {})[0].serving.api_keys == ("from-environment",)
    assert cli._deploy_config(None, ["api_keys=[mine]"], {})[0].serving.api_keys == ("mine",)


def test_what_a_ray_task_raised_is_told_instead_of_where() -> None:
    from ray.exceptions import RayTaskError

    from manta.deploy.ray_local import first_line

    inner = RayTaskError("start", "Traceback (most recent call last):\n ...", RuntimeError("the port is taken\nby 7"))
    assert first_line(RayTaskError("ready", "Traceback (most recent call last):\n ...", inner)) == "the port is taken"
    assert first_line(ValueError("\n  no such name\n")) == "no such name"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
