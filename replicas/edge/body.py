"""Reads a request's body: bounded, strict JSON, an object. Knows no endpoint and no field.

What json.loads would let through and no sampler should see is refused here: NaN, Infinity, numbers that overflow to
infinity, and text that is not valid Unicode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from manta.engine.errors import InvalidRequest

from .errors import ClientGone, RequestTooLarge

MAX_DEPTH = 64
"""Most lists and objects inside one another; deeper ones would only exhaust a recursion somewhere behind."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, *, max_bytes: int) -> bytes:
    """The whole body. Raises RequestTooLarge as soon as the bound is passed, ClientGone when the client leaves."""
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise RequestTooLarge(f"The request body is larger than {max_bytes} bytes.")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest; a number that is not finite is named by its field."""
    has_non_finite = False

    def constant(literal: str) -> float:
        nonlocal has_non_finite
        has_non_finite = True
        return float(literal)

    def number(literal: str) -> float:
        nonlocal has_non_finite
        value = float(literal)
        has_non_finite |= math.isinf(value)
        return value

    try:
        tree = json.loads(body.decode(), parse_constant=constant, parse_float=number)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} ({where}).", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    except ValueError:
        raise InvalidRequest("The body holds an integer with too many digits.", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(tree, MAX_DEPTH):
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json")
    if has_non_finite:
        path = _non_finite(tree, ())
        assert path is not None
        name = ".".join(path)
        raise InvalidRequest(f"{name} must be a finite number.", param=name, code="invalid_value")
    if b"\\ud" in body or b"\\uD" in body:  # the only way to spell half a surrogate pair
        _check_unicode(tree, ())
    return tree


def _is_deeper(node: dict[str, Any] | list[Any], depth: int) -> bool:
    children = node.values() if isinstance(node, dict) else node
    return depth == 0 or any(_is_deeper(child, depth - 1) for child in children if isinstance(child, dict | list))


def _non_finite(node: Any, path: tuple[str, ...]) -> tuple[str, ...] | None:
    if isinstance(node, float):
        return None if math.isfinite(node) else path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        found = _non_finite(value, (*path, str(name)))
        if found is not None:
            return found
    return None


def _check_unicode(node: Any, path: tuple[str, ...]) -> None:
    if isinstance(node, str):
        if any(0xD800 <= ord(character) <= 0xDFFF for character in node):
            name = ".".join(path) or "body"
            raise InvalidRequest(f"{name} holds an unpaired surrogate.", param=name, code="invalid_value")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _check_unicode(value, (*path, str(index)))
    elif isinstance(node, dict):
        for name, value in node.items():
            _check_unicode(name, path)
            _check_unicode(value, (*path, name if name.isprintable() else "?"))
