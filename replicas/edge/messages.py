"""Checks a conversation and brings it into the shape chat templates expect. Knows no template.

Templates want text in every message. Text parts are joined by a newline; an assistant turn without text gets an empty
one. Whatever a template could not see (images, audio, unknown keys) is refused, not dropped.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from manta.engine.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")

_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "annotations",
         "reasoning_content"}  # fmt: skip


def read_messages(given: Any) -> list[dict[str, Any]]:
    """The conversation for the chat template. Raises InvalidRequest naming the place, as in messages.2.content."""
    if not isinstance(given, list):
        _refuse("messages", "must be a list of messages")
    if not given:
        _refuse("messages", "must hold at least one message")
    return [_message(message, f"messages.{index}") for index, message in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        _refuse(place, "must be an object with role and content")
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        _refuse(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {role!r}"[:200])
    for name in message:
        if name not in _KEYS:
            _refuse(place, f"has an unknown key {name!r}"[:200])
    for name in ("refusal", "audio", "function_call"):
        if message.get(name):
            _refuse(f"{place}.{name}", "is not supported by this server")
        message.pop(name, None)
    if message.get("annotations") == []:
        del message["annotations"]
    elif "annotations" in message:
        _refuse(f"{place}.annotations", "is not supported by this server")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(name, ""), str):
            _refuse(f"{place}.{name}", "must be text")
    has_calls = bool(message.get("tool_calls"))
    if has_calls and role != "assistant":
        _refuse(f"{place}.tool_calls", "belongs to assistant messages only")
    if "content" not in message and role != "assistant":
        _refuse(f"{place}.content", "is required")
    message["content"] = _text(message.get("content", ""), f"{place}.content", may_be_empty=role == "assistant")
    if has_calls:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    else:
        message.pop("tool_calls", None)
    return message


def _text(content: Any, place: str, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(place, "must be text or a list of text parts")
    if not content and not may_be_empty:
        _refuse(place, "must hold at least one part")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            _refuse(f"{place}.{index}", f"is of type {kind!r}; this model reads parts of type 'text' only"[:200])
        if not isinstance(part.get("text"), str):
            _refuse(f"{place}.{index}.text", "must be text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(given: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        _refuse(place, "must be a list")
    calls = []
    for index, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{place}.{index}.function", "must be an object with name and arguments")
        if call.get("type", "function") != "function":
            _refuse(f"{place}.{index}.type", "must be 'function'")
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str | dict):
            _refuse(f"{place}.{index}.function.arguments", "must be text")
        parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "type": "function", "function": {**function, "arguments": parsed}})
    return calls


def _parsed(arguments: str) -> Any:
    """Templates expect the object that the text spells. A model's own broken text stays as it was said."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _refuse(place: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{place} {problem}.", param=place, code="invalid_value")
