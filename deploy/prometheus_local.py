"""A Prometheus beside `manta serve`: started with it, watching it, ending with it. Knows no engine and no Ray.

It listens on this machine alone, keeps its data in a folder of its own, and asks the server's public port where the
edges are. When `manta serve` is killed, a janitor process ends it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import yaml

from manta.engine.errors import ConfigError, MantaError

from . import processes, settings
from .checks import PortTaken, check_port, free_ports
from .observability.files import CONFIG_FILE, RULES_FILE, prometheus_config
from .observability.rules import prometheus_rules
from .observability_config import ObservabilityConfig

BINARY = "prometheus"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


class PrometheusFailed(MantaError):
    """It did not start; the message has its last words."""


def wanted(config: ObservabilityConfig) -> bool:
    """Whether one is to be started. Raises ConfigError where it must be and is not installed."""
    if config.prometheus == "never":
        return False
    if shutil.which(BINARY) is not None:
        return True
    if config.prometheus == "always":
        raise ConfigError(
            "observability.prometheus = 'always', but `prometheus` is not installed: apt install prometheus on Debian, "
            "or leave the field at auto",
            field="observability.prometheus",
        )
    return False


class LocalPrometheus:
    """`start` once, `stop` at the end."""

    def __init__(self, config: ObservabilityConfig, *, server_url: str, server_port: int) -> None:
        """Watch the server at `server_url`, whose port is `server_port`. Raises ConfigError for a taken port."""
        self._config = config
        self._server_url = server_url
        self.port = self._choose_port(config.prometheus_port, server_port)
        self.url = f"http://127.0.0.1:{self.port}"
        self._instance = f"prometheus-{secrets.token_hex(6)}"
        self.folder = Path(tempfile.mkdtemp(prefix="manta-prometheus-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._janitor: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "prometheus.log"

    @property
    def data_dir(self) -> Path:
        kept = self._config.prometheus_dir
        return self.folder / "data" if kept is None else Path(kept).expanduser().absolute()

    def start(self) -> None:
        """Until it answers. Raises PrometheusFailed, and nothing is left."""
        tree = prometheus_config(
            self._server_url,
            scrape_interval_s=self._config.scrape_interval_s,
            own_address=f"127.0.0.1:{self.port}",
        )
        (self.folder / CONFIG_FILE).write_text(yaml.safe_dump(tree, sort_keys=False))
        (self.folder / RULES_FILE).write_text(yaml.safe_dump(prometheus_rules(), sort_keys=False))
        self._janitor = processes.start_janitor(self._instance, self.folder)
        command = [
            BINARY,
            f"--config.file={self.folder / CONFIG_FILE}",
            f"--storage.tsdb.path={self.data_dir}",
            f"--storage.tsdb.retention.time={self._config.prometheus_retention}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings.inherited({processes.MARK: self._instance}),
                start_new_session=True,  # Ctrl-C ends the server first, which is watched to its end
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and remove its folder. May be called again."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._janitor is not None:
            processes.dismiss_janitor(self._janitor)
            self._janitor = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url, timeout=2.0, trust_env=False) as client:
            while True:
                if self._process.poll() is not None:
                    raise PrometheusFailed(f"Prometheus did not start: {self._last_words()}")
                try:
                    if client.get("/-/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                if time.monotonic() > until:
                    raise PrometheusFailed(
                        f"Prometheus was not ready within {START_TIMEOUT_S:g} s: {self._last_words()}"
                    )
                time.sleep(0.05)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote nothing"

    def _choose_port(self, asked: int | None, server_port: int) -> int:
        if asked is not None:
            if not _is_free(asked):
                raise ConfigError(
                    f"observability.prometheus_port = {asked}: the port is taken; choose another one, or leave the "
                    "field out",
                    field="observability.prometheus_port",
                )
            return asked
        usual = server_port + 1000
        return usual if usual <= 65535 and _is_free(usual) else free_ports(1)[0]


@contextlib.contextmanager
def prometheus_beside(
    config: ObservabilityConfig, *, server_url: str, server_port: int, say: Callable[[str], None]
) -> Iterator[LocalPrometheus | None]:
    """One that runs while this is entered; None where none is wanted, and, with prometheus: auto, where it does not
    start, which is said then. Raises ConfigError and PrometheusFailed where it must run."""
    one = None
    if wanted(config):
        try:
            one = LocalPrometheus(config, server_url=server_url, server_port=server_port)
            one.start()
        except PrometheusFailed as error:
            if config.prometheus == "always":
                raise
            say(f"{error} (serving without it; observability.prometheus=never leaves it out)")
            one = None
    if one is not None:
        say(f"Prometheus: {one.url}")
    try:
        yield one
    finally:
        if one is not None:
            one.stop()


def _is_free(port: int) -> bool:
    try:
        check_port("127.0.0.1", port)
    except (PortTaken, ConfigError):
        return False
    return True
