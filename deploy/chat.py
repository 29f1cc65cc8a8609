"""A chat in the terminal with a running server, over its public HTTP API. Knows no engine and no Ray."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from manta.engine.errors import ConfigError, MantaError, Unavailable

HELP = "Type a message. /reset forgets the conversation, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer."


class ServerError(MantaError):
    """The server answered with an error, or in a way that is not understood."""


@dataclass
class ServerClient:
    """Calls of one server. `base_url` has no /v1 at its end."""

    base_url: str
    api_key: str | None = None
    timeout_s: float = 300.0
    """Longest silence between two pieces of an answer."""
    transport: httpx.BaseTransport | None = None

    def models(self) -> list[str]:
        """Names of the served models."""
        return [model["id"] for model in self._get("/v1/models").get("data", [])]

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /ready."""
        with self._client() as client, self._plain_errors():
            response = client.get("/ready")
        try:
            body = response.json()
        except ValueError:
            body = {}
        return response.status_code, body if isinstance(body, dict) else {}

    def cluster(self) -> dict[str, Any] | None:
        """Body of /cluster; None from a server that stands in no cluster."""
        with self._client() as client, self._plain_errors():
            response = client.get("/cluster")
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise ServerError(_error_sentence(response))
        return response.json()

    def autoscaling(self) -> dict[str, Any] | None:
        """Body of /autoscaling; None from a server whose number of replicas is fixed."""
        with self._client() as client, self._plain_errors():
            response = client.get("/autoscaling")
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise ServerError(_error_sentence(response))
        return response.json()

    def metrics(self) -> str:
        """Body of /metrics, as Prometheus text."""
        with self._client() as client, self._plain_errors():
            response = client.get("/metrics")
        if response.status_code != 200:
            raise ServerError(_error_sentence(response))
        return response.text

    def set_role(self, replica_id: str, role: str) -> None:
        """Ask for another role of a replica. Raises ServerError with what the server says against it."""
        with self._client() as client, self._plain_errors():
            response = client.post("/cluster/role", json={"replica": replica_id, "role": role})
        if response.status_code != 202:
            raise ServerError(_error_sentence(response))

    def explain(self, request_id: str) -> dict[str, Any]:
        """Body of /explain. Raises ServerError for a request that no edge remembers."""
        with self._client() as client, self._plain_errors():
            response = client.get(f"/explain/{quote(request_id, safe='')}")
        if response.status_code != 200:
            raise ServerError(_error_sentence(response))
        return response.json()

    def stream_chat(self, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> Iterator[str]:
        """Pieces of the answer's text, as they come."""
        body = {"model": model, "messages": messages, "stream": True, **options}
        with (
            self._plain_errors(),
            self._client() as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise ServerError(_error_sentence(response))
            for event in _events(response.iter_lines()):
                if "error" in event:
                    raise ServerError(f"the server ended the answer: {event['error'].get('message', event['error'])}")
                for choice in event.get("choices", []):
                    if text := choice.get("delta", {}).get("content"):
                        yield text

    def _get(self, path: str) -> dict[str, Any]:
        with self._plain_errors(), self._client() as client:
            response = client.get(path)
        if response.status_code != 200:
            raise ServerError(_error_sentence(response))
        try:
            return response.json()
        except ValueError:
            raise ServerError(f"{self.base_url} does not answer like Manta's API; is the address right?") from None

    def _client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(self.timeout_s, connect=5.0)
        return httpx.Client(
            base_url=self.base_url, headers=headers, timeout=timeout, transport=self.transport, trust_env=False
        )

    def _plain_errors(self) -> _PlainErrors:
        return _PlainErrors(self.base_url)


@dataclass
class _PlainErrors:
    """Turns httpx's exceptions into a sentence."""

    base_url: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            raise Unavailable(
                f"no server answers at {self.base_url}: start one with `manta serve`, or name its address with --url",
                retry_after_s=1.0,
            ) from None
        if isinstance(error, (httpx.InvalidURL, httpx.UnsupportedProtocol)):
            raise ConfigError(f"{self.base_url!r} is not an address like http://127.0.0.1:8000") from None
        if isinstance(error, httpx.TimeoutException):
            raise ServerError(f"{self.base_url} was silent for too long; look at the server's terminal") from None
        if isinstance(error, httpx.HTTPError):
            raise ServerError(f"the connection to {self.base_url} broke: {error or type(error).__name__}") from None


@dataclass
class Chat:
    """One conversation. `read` gives the next line or raises EOFError; `write` prints text as it is."""

    client: ServerClient
    model: str
    read: Callable[[], str]
    write: Callable[[str], None]
    options: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    has_failed: bool = False
    """Whether the last message got no whole answer."""

    def run(self) -> None:
        """Talk until /exit, the end of input, or Ctrl-C at the prompt."""
        self.reset()
        while True:
            try:
                line = self.read().strip()
            except (EOFError, KeyboardInterrupt):
                self.write("\n")
                return
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.reset()
                self.write("(conversation forgotten)\n")
            elif line in ("/help", "/?"):
                self.write(HELP + "\n")
            elif line.startswith("/"):
                self.write(f"unknown command {line.split()[0]}; there are /reset, /exit and /help\n")
            elif line:
                self.say(line)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> None:
        """Send one message and print the answer as it streams; Ctrl-C keeps what came so far."""
        self.messages.append({"role": "user", "content": text})
        self.has_failed = False
        answer = ""
        try:
            for piece in self.client.stream_chat(self.model, self.messages, self.options):
                answer += piece
                self.write(piece)
        except KeyboardInterrupt:
            self.write(" (stopped)")
        except ServerError as error:
            self.messages.pop()
            self.has_failed = True
            self.write(f"\n{error}\n")
            return
        self.messages.append({"role": "assistant", "content": answer})
        self.write("\n")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events whose data is JSON, up to [DONE]; a stream that ends without it was cut."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise ServerError("the server closed the connection in the middle of the answer")


def _error_sentence(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    advice = " (set MANTA_API_KEY, or give --api-key)" if response.status_code == 401 else ""
    return f"the server answered {response.status_code}: {message}{advice}"
