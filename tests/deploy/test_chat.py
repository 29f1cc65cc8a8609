"""The terminal chat, against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from manta.deploy.chat import Chat, ServerClient, ServerError
from manta.engine.errors import Unavailable

Handler = Callable[[httpx.Request], httpx.Response]


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


def answering(*texts: str, end: str = "data: [DONE]\n\n") -> Handler:
    return lambda request: httpx.Response(200, text=": comment\n\n" + "".join(map(chunk, texts)) + end)


def client(handler: Handler, api_key: str | None = None) -> ServerClient:
    return ServerClient("http://server.test", api_key, transport=httpx.MockTransport(handler))


def talk(handler: Handler, *lines: str) -> tuple[str, Chat]:
    """Type the lines and then end the input; what was printed, and the chat."""
    output: list[str] = []
    typed = iter(lines)

    def read() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    chat = Chat(client(handler), "m", read, output.append, options={"temperature": 0})
    chat.run()
    return "".join(output), chat


def test_answers_are_streamed_and_remembered() -> None:
    bodies: list[dict] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answering("Hel", "lo")(request)

    output, chat = talk(handler, "one", "", "two")
    assert output.count("Hello\n") == 2
    assert not chat.has_failed
    assert bodies[0]["stream"] is True
    assert bodies[0]["temperature"] == 0
    assert [m["content"] for m in bodies[1]["messages"]] == ["one", "Hello", "two"]


def test_reset_forgets_and_exit_leaves() -> None:
    output, chat = talk(answering("x"), "one", "/reset", "/nonsense", "/exit", "never sent")
    assert chat.messages == []
    assert "forgotten" in output
    assert "unknown command /nonsense" in output


def test_an_error_status_is_said_and_the_chat_goes_on() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": {"message": "The queue is full."}})

    output, chat = talk(handler, "one", "two")
    assert output.count("the server answered 429: The queue is full.") == 2
    assert chat.messages == []
    assert chat.has_failed


def test_an_error_event_and_a_cut_stream_are_said() -> None:
    error = 'data: {"error": {"message": "The engine died."}}\n\n'
    assert "The engine died." in talk(answering("x", end=error), "one")[0]
    assert "in the middle of the answer" in talk(answering("x", end=""), "one")[0]


def test_ctrl_c_keeps_what_came() -> None:
    class Interrupted(ServerClient):
        def stream_chat(self, model: str, messages: list, options: dict) -> Iterator[str]:
            yield "half"
            raise KeyboardInterrupt

    output: list[str] = []
    chat = Chat(Interrupted("http://server.test"), "m", lambda: "", output.append)
    chat.say("hello")
    assert "".join(output) == "half (stopped)\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "half"}


def test_the_key_is_sent_and_a_wrong_one_explained() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer right":
            return httpx.Response(401, json={"error": {"message": "Wrong key."}})
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    assert client(handler, "right").models() == ["m"]
    with pytest.raises(ServerError, match=r"401: Wrong key. .*MANTA_API_KEY"):
        client(handler).models()


def test_no_server_is_one_sentence() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match=r"no server answers at http://server\.test: start one"):
        client(handler).models()


def test_another_kind_of_server_is_recognised() -> None:
    with pytest.raises(ServerError, match="is the address right"):
        client(lambda request: httpx.Response(200, text="<html>")).models()
