"""Reading of requests without a server: bodies, fields, messages."""

from __future__ import annotations

from typing import Any

import pytest

from manta.engine.errors import InvalidRequest
from manta.replicas.edge.body import parse_object
from manta.replicas.edge.messages import read_messages
from manta.replicas.edge.schema import ChatFields, CompletionFields, read_fields

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"a": {"b": [1, 2, -Infinity]}}', "a.b.2"),
        (b'{"logit_bias": {"5": 1e400}}', "logit_bias.5"),
        (b'{"prompt": "\\ud83d"}', "prompt"),
        (b'{"messages": [{"content": "\\udc00"}]}', "messages.0.content"),
        (b'{"\\ud800": 1}', "body"),
        (b"[]", None),
        (b"", None),
        (b'"x"', None),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", None),
        ('{"a": "é"}'.encode("latin-1"), None),
        (b'{"a": "\xed\xa0\x80"}', None),
        (b'{"a": ' + b"1" * 10_000 + b"}", None),
    ],
)
def test_bodies_that_are_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_object(body)
    assert refused.value.param == param
    str(refused.value).encode()


def test_ordinary_bodies_pass() -> None:
    assert parse_object(b'{"a": [1.5, 1e3, "\\ud83d\\udc0b"], "b": null}') == {"a": [1.5, 1000.0, "🐋"], "b": None}
    deep = b'{"a": ' + b"[" * 60 + b"]" * 60 + b', "b": ' + b"[" * 60 + b"]" * 60 + b"}"
    assert set(parse_object(deep)) == {"a", "b"}


def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidRequest, match="'temperature'"):
        read_fields(CompletionFields, {"model": "m", "prompt": "x", "temprature": 1})


def test_null_means_absent() -> None:
    fields = read_fields(ChatFields, {"model": "m", "messages": [], "stop": None, "audio": None, "nonsense": None})
    assert fields.stop_strings == ()


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("x", "messages.0"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": ["user"], "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "user", "content": ["x"]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": "x"}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages.0.tool_calls.0.function"),
        ({"role": "assistant", "audio": {"id": "x"}}, "messages.0.audio"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages.0"),
    ],
)
def test_messages_that_are_refused(message: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_messages([message])
    assert refused.value.param == place


def test_arguments_become_objects_and_broken_ones_stay() -> None:
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [CALL, broken]}])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": 1}, "{"]
    assert message["content"] == ""
