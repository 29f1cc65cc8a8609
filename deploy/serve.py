"""`manta serve`: checks, a Ray of its own (or one to join), the application, READY, and an orderly end.

Knows the public face of the application only: `build_app`, the ingress handle's methods (drain, num_open_requests,
abort_open_requests, engine_info) and the HTTP API. Knows no engine.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from manta.engine.config import EngineConfig
from manta.engine.errors import EngineFailed, MantaError, Unavailable

from . import ray_local, settings
from .checks import (
    check_joinable,
    check_port,
    established_connections,
    locate_all,
    raise_file_limit,
    running_rays,
)
from .config import DeployConfig, pools_of
from .progress import Progress
from .prometheus_local import LocalPrometheus, prometheus_beside, wanted
from .ray_local import LocalRay
from .ray_node import own_labels
from .settings import Settings

APP_NAME = "manta"
POLL_S = 0.1
ROOM_PERIOD_S = 2.0
"""How often it is asked what replicas wait for that have no room."""
MIN_OPEN_FILES = 8192
"""The proxy holds two connections for each of its 4,096 clients at most."""


class StartFailed(MantaError):
    """The application did not become ready; the message names the logs."""


@dataclass
class StopSignals:
    """Ctrl-C and SIGTERM: the first asks for a graceful end, the second for an immediate one."""

    count: int = 0
    last: str = ""
    """Name of the latest."""
    _before: dict[int, Any] = field(default_factory=dict)

    def install(self) -> None:
        """Handle both signals from now on (again after ray.init, which takes SIGTERM for itself)."""
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number).name

    @contextlib.contextmanager
    def left_to_the_system(self) -> Iterator[None]:
        """A signal ends the process at once: for a wait in C++, where no handler of ours can run."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            self.install()

    @property
    def asked(self) -> bool:
        return self.count >= 1

    @property
    def forced(self) -> bool:
        return self.count >= 2


class Stopped(Exception):
    """A signal came while the server was starting."""


def serve(config: DeployConfig, user: Settings, console: Console) -> int:
    """Serve until a signal comes; the exit code. Raises MantaError when it cannot start; nothing is left running."""
    signals = StopSignals()
    signals.install()
    try:
        config = locate_all(config, user)
        wanted(config.observability)  # whether what must be there is there: said before anything starts
        if config.serving.ray_address is None:
            return _serve_alone(config, user, console, signals)
        return _serve_joined(config, console, signals)
    finally:
        signals.restore()


def _serve_alone(config: DeployConfig, user: Settings, console: Console, signals: StopSignals) -> int:
    check_port(config.serving.host, config.serving.port)
    use_haproxy = ray_local.choose_haproxy(config.serving.proxy)
    if (num_files := raise_file_limit()) < MIN_OPEN_FILES:
        console.print(
            f"Only {num_files} files may be open in a process (ulimit -n): about {num_files // 3} streams at once are "
            f"possible here. Allow {MIN_OPEN_FILES} for more.",
            highlight=False,
        )
    if others := running_rays():
        console.print(
            f"A Ray runs here already (process {others[0]}). Manta starts one of its own beside it and leaves the "
            "other alone; to join it instead: --set serving.ray_address=auto",
            highlight=False,
        )
    num_ranks = sum(pool.most_replicas * num_ranks_of(pool.engine) for pool in pools_of(config))
    num_cpus = (os.cpu_count() or 1) + 2 * (num_ranks + config.serving.num_edges)
    local = LocalRay(num_cpus=num_cpus, use_haproxy=use_haproxy, labels=own_labels())
    try:
        with Progress(console) as progress:
            progress.begin("Ray", f"in {local.folder}")
            local.start()
            signals.install()
            _raise_if_stopped(signals)
            server = _start_app(config, signals, progress)
        with server.watched(console):
            server.announce(console, proxy="HAProxy" if use_haproxy else "Ray Serve's proxy", logs=local.logs)
            return server.wait_and_drain(console, signals)
    except (Stopped, SystemExit):  # Ray's own handler turns a SIGTERM during ray.init into a SystemExit
        console.print("Stopped before the server was ready.")
        return 130
    except (MantaError, RuntimeError) as error:
        kept = local.keep_logs(user.logs_dir)
        hint = f" (logs: {kept})" if kept else ""
        raise StartFailed(f"{ray_local.first_line(error)}{hint}") from error
    finally:
        local.remove()


def _serve_joined(config: DeployConfig, console: Console, signals: StopSignals) -> int:
    assert config.serving.ray_address is not None
    check_joinable(config.serving.ray_address)
    with signals.left_to_the_system():  # nothing of ours runs yet
        ray_local.join(config.serving.ray_address)
    import ray
    from ray import serve as ray_serve

    has_deployed = False
    try:
        if APP_NAME in ray_serve.status().applications:
            raise StartFailed("this Ray serves Manta already: stop that one first, or leave serving.ray_address out")
        has_deployed = True
        with Progress(console) as progress:
            server = _start_app(config, signals, progress)
        with server.watched(console):
            server.announce(console, proxy="the proxy of the Ray that was joined", logs=None)
            return server.wait_and_drain(console, signals)
    except Stopped:
        console.print("Stopped before the server was ready.")
        return 130
    finally:
        if has_deployed:
            ray_serve.delete(APP_NAME)
        ray.shutdown()


def _start_app(config: DeployConfig, signals: StopSignals, progress: Progress) -> Server:
    # Only this process: its handle then answers ordinary blocking calls. Workers have their environment already.
    settings.export({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"})
    progress.begin("Ray Serve")
    from ray import serve as ray_serve
    from ray.serve.schema import LoggingConfig

    from .app import build_app, check_room, plan_here, room_question

    if not all(pool.engine.parallel.is_settled for pool in pools_of(config)):
        for pool in plan_here(config):
            progress.say(f"{pool.spec.name}: {pool.reason}")
    if config.serving.ray_address is None:
        check_room(config)
    ray_local.quiet()
    logging_config = LoggingConfig(log_level="WARNING", enable_access_log=False)
    ray_serve.start(
        proxy_location="HeadOnly",
        http_options={"host": config.serving.host, "port": config.serving.port},
        logging_config=logging_config,
    )
    _check_address(config)
    _raise_if_stopped(signals)
    progress.begin("engine and edge processes")
    target = ray_serve.RunTarget(
        build_app(config),
        name=APP_NAME,
        route_prefix="/",
        logging_config=logging_config,
        external_scaler_enabled=config.autoscaling.enabled,
    )
    (handle,) = ray_serve.run_many([target], wait_for_applications_running=False)
    until = time.monotonic() + config.serving.startup_timeout_s
    _wait_running(signals, progress, until, room_question(config, APP_NAME))
    server = Server(config, handle)
    for name, seconds in server.startup_phases().items():
        progress.note(f"  {name}", seconds)
    progress.begin("first answer")
    server.wait_first_answer(signals, until)
    return server


def _check_address(config: DeployConfig) -> None:
    """Raise StartFailed when Serve runs on this Ray already and listens elsewhere: it keeps its first address."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve was started"
    host, port = client.http_config.host, client.http_config.port
    if (host, port) != (config.serving.host, config.serving.port):
        raise StartFailed(
            f"Serve runs on this Ray already and listens at {host}:{port}: use --host {host} --port {port}, or end it "
            "first with `serve shutdown`"
        )


def num_ranks_of(engine: EngineConfig) -> int:
    """Processes of one engine, as far as the configuration alone says."""
    parallel = engine.parallel
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return math.prod(size for size in sizes if isinstance(size, int))


def _wait_running(
    signals: StopSignals, progress: Progress, until: float, what_is_missing: Callable[[], str | None]
) -> None:
    """Until Serve says that every deployment is healthy. Raises EngineFailed with the reason a replica gave."""
    from ray import serve as ray_serve

    missing, ask_at_s = None, time.monotonic() + ROOM_PERIOD_S
    while True:
        _raise_if_stopped(signals)
        application = ray_serve.status().applications[APP_NAME]
        if application.status == "RUNNING":
            return
        problems = [application.message, *(one.message for one in application.deployments.values())]
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY") or any("Traceback" in text for text in problems):
            raise EngineFailed(reason(problems))
        if time.monotonic() > until:
            why = "" if missing is None else f": a replica {missing}"
            raise StartFailed(f"the application did not become ready within serving.startup_timeout_s{why}")
        if time.monotonic() > ask_at_s:
            before, missing = missing, what_is_missing()
            if missing is not None and missing != before:
                progress.say(f"A replica waits for room: it {missing}.")
            ask_at_s = time.monotonic() + ROOM_PERIOD_S
        progress.detail(", ".join(f"{name} {_running(one)}" for name, one in application.deployments.items()))
        time.sleep(POLL_S)


def reason(messages: list[str]) -> str:
    """The sentence of the exception that ended a replica, out of Serve's messages with tracebacks."""
    for message in messages:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        for line in reversed(lines):
            kind, colon, sentence = line.partition(": ")
            if colon and " " not in kind and kind.split(".")[-1][:1].isupper() and sentence:
                return f"the engine did not start: {sentence}"
        if lines and re.fullmatch(r"(\w+\.)*[A-Z]\w*(Error|Exception)", lines[-1]):
            return f"the engine did not start: {lines[-1]} without a sentence, a defect; the log has its place"
    first = next((message.splitlines()[0] for message in messages if message.strip()), "no reason given")
    return f"the application did not start: {first}"


def _running(deployment: Any) -> str:
    """Running and all replicas of a deployment's status, as "1/2"."""
    counts = {str(state): count for state, count in deployment.replica_states.items()}
    return f"{counts.get('RUNNING', 0)}/{sum(counts.values())}"


def _raise_if_stopped(signals: StopSignals) -> None:
    if signals.asked:
        raise Stopped


class Server:
    """The running application, seen through its ingress handle and its public port."""

    def __init__(self, config: DeployConfig, handle: Any) -> None:
        self._config = config
        self._handle = handle
        self._api_keys = config.serving.api_keys
        self.model_name = ""

    @property
    def url(self) -> str:
        host = self._config.serving.host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{host}:{self._config.serving.port}"

    def startup_phases(self) -> dict[str, float]:
        """Seconds that each phase of the engine's start took; empty if it does not say."""
        info = self._engine_info()
        return dict(info.startup_s) if info else {}

    def wait_first_answer(self, signals: StopSignals, until: float) -> None:
        """Until one token came through the public port. Raises StartFailed with the last thing that went wrong."""
        headers = {"Authorization": f"Bearer {self._api_keys[0]}"} if self._api_keys else {}
        problem = "no answer"
        with httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False) as client:
            while time.monotonic() < until:
                _raise_if_stopped(signals)
                try:
                    models = client.get("/v1/models")
                    if models.status_code == 200:
                        self.model_name = models.json()["data"][0]["id"]
                        body = {"model": self.model_name, "prompt": "Hello", "max_tokens": 1}
                        answer = client.post("/v1/completions", json=body)
                        if answer.status_code == 200 and answer.json()["choices"]:
                            return
                        problem = f"{answer.status_code} {answer.text[:300]}"
                    else:
                        problem = f"{models.status_code} {models.text[:300]}"
                except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                    problem = str(error) or type(error).__name__
                time.sleep(POLL_S)
        raise StartFailed(f"the server does not answer at {self.url}: {problem}")

    def watched(self, console: Console) -> contextlib.AbstractContextManager[LocalPrometheus | None]:
        """A Prometheus beside it while this is entered, where one is wanted."""
        return prometheus_beside(
            self._config.observability,
            server_url=self.url,
            server_port=self._config.serving.port,
            say=lambda text: console.print(text, highlight=False, markup=False),
        )

    def announce(self, console: Console, *, proxy: str, logs: Path | None) -> None:
        """Print where it is, what memory it took and how to try it."""
        info = self._engine_info()
        if info:
            console.print(ledger_table(info.memory_ledger_bytes))
            console.print(
                f"{info.model_name} on {info.device}, {info.dtype}: {info.num_blocks} blocks of {info.block_size} "
                f"tokens, context {info.max_model_len}",
                highlight=False,
            )
            for note in info.notes:
                console.print(f"  {note}", markup=False, highlight=False)
        if logs is not None:
            console.print(f"logs: {logs}", highlight=False)
        console.print(f"READY: {self.url}/v1 (model {self.model_name}, through {proxy})", style="bold", highlight=False)
        console.print("Try it:", highlight=False)
        print(curl_line(self.url, self.model_name, has_key=bool(self._api_keys)), flush=True)
        console.print("Ctrl-C stops it.", highlight=False)

    def wait_and_drain(self, console: Console, signals: StopSignals) -> int:
        """Block until a signal, then let the running streams finish; the exit code."""
        while not signals.asked:
            time.sleep(POLL_S)
        timeout_s = self._config.serving.graceful_shutdown_timeout_s
        console.print(
            f"Stopping ({signals.last}): running streams have {timeout_s:g} s to finish (Ctrl-C again: at once)."
        )
        try:
            self._drain(console, signals, timeout_s)
        except Unavailable as error:
            console.print(f"Nothing to wait for: {error}", highlight=False)
        # What the edge has handed over still travels through the proxy: wait for the clients to have it.
        until = time.monotonic() + 1.0
        while established_connections(self._config.serving.port) and time.monotonic() < until and not signals.forced:
            time.sleep(0.02)
        console.print("Stopped.")
        return 0

    def _drain(self, console: Console, signals: StopSignals, timeout_s: float) -> None:
        self._call_all("drain")
        until = time.monotonic() + timeout_s
        while (num_open := self._num_open()) and time.monotonic() < until and not signals.forced:
            time.sleep(POLL_S)
        if num_open:
            console.print(f"Ending {num_open} open requests with an error.")
            self._call_all("abort_open_requests")

    def _num_open(self) -> int:
        return sum(self._call_all("num_open_requests"))

    def _engine_info(self) -> Any:
        return next((info for info in self._call_all("engine_info") if info is not None), None)

    def _call_all(self, method: str) -> list[Any]:
        """The method's result from every edge. Raises Unavailable when they do not answer."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            return self._handle.broadcast(method).results(timeout_s=10.0)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unavailable(f"the edges do not answer ({ray_local.first_line(error)})", retry_after_s=1.0) from error


def ledger_table(ledger_bytes: dict[str, int]) -> Table:
    """The engine's memory, one row a use."""
    table = Table(title="memory", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("use")
    table.add_column("MiB", justify="right")
    for name, size in ledger_bytes.items():
        table.add_row(name.replace("_", " "), f"{size / 2**20:,.1f}")
    return table


def curl_line(url: str, model: str, *, has_key: bool) -> str:
    """One command that asks the server something, ready to paste."""
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if has_key else ""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    # A bound: the simulated device never ends an answer by itself. Greedy: a small model wanders off otherwise.
    body = f'{{"model": "{model}", "messages": {question}, "max_tokens": 32, "temperature": 0}}'
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
