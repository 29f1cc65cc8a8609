"""Turns a conversation into prompt text with a model's Jinja template, sandboxed. Knows no tokenizer and no HTTP.

Nothing that the sender gave may vanish. Templates that know no tools get them as JSON text instead:

- tool definitions: one JSON object a line in the system message (one is put in front where there is none);
- the calls of an assistant turn: `{"name": ..., "arguments": ..., "id": ...}`, one a line after its text; arguments
  that are no JSON object stay the text that they were;
- a tool's answer: `{"tool_call_id": ..., "content": ...}` in a turn of the role `tool`.

Where the template still leaves a tool's answer out, the request is refused. The role `developer` is rendered as
`system` by templates that do not name it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import CheckpointError, InvalidRequest

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
_TOOLS_HEADING = "You may call these tools (name, description and parameters, one JSON object a line):"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template. `variables` are what it may read besides the conversation: bos_token, eos_token, ...

    Raises CheckpointError when the template is not valid Jinja.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any] | None = None, *, origin: str = "chat template"
    ) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise CheckpointError(f"{origin} is not a valid Jinja template{where}: {error}") from None
        self._variables = dict(variables or {})
        self._knows_tools = "tools" in used
        self._knows_tool_calls = "tool_calls" in source
        self._knows_developers = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included.

        With `continue_final_message` it ends with exactly the text of the last message, which must be the
        assistant's. Raises InvalidRequest for flags that contradict each other and for what the template refuses.
        """
        _check_kwargs(template_kwargs or {})
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message and add_generation_prompt starts a new one: "
                "set add_generation_prompt to false.",
                param="add_generation_prompt",
            )
        turns = [_normalized(message, self._knows_developers) for message in messages]
        ending = _take_ending(turns) if continue_final_message else None
        answers: list[str] = []
        if not self._knows_tool_calls:
            turns, answers = _without_calls(turns)
        if tools and not self._knows_tools:
            turns = _with_tools_in_system(turns, tools)
        marker = None
        if ending is not None:
            marker = _marker(turns, template_kwargs)
            turns[-1]["content"] = marker
        text = self._run(turns, tools, add_generation_prompt, template_kwargs or {})
        if any(answer not in text for answer in answers):
            raise InvalidRequest(
                "The model's chat template has no place for messages of the role tool.", param="messages"
            )
        if marker is None:
            return text
        if text.count(marker) != 1:
            raise InvalidRequest(
                "The model's chat template cannot continue an assistant message.", param="continue_final_message"
            )
        return text[: text.index(marker)] + (ending or "")

    def _run(
        self, turns: list[dict[str, Any]], tools: Any, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        context = {"documents": None, **self._variables, **kwargs}
        try:
            return self._template.render(
                messages=turns, tools=tools or None, add_generation_prompt=add_generation_prompt, **context
            )
        # The template is a program that came with the model: whatever it raises, this conversation does not suit it.
        except Exception as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error or type(error).__name__}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    extensions: list[Any] = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in _RESERVED:
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {name!r}: it has a field of its own.", param="chat_template_kwargs"
            )


def _normalized(message: Mapping[str, Any], knows_developers: bool) -> dict[str, Any]:
    """Text as content whatever its spelling; no key that says nothing."""
    turn = {name: value for name, value in message.items() if value is not None}
    turn["content"] = _text(turn.get("content"))
    if not turn.get("tool_calls"):
        turn.pop("tool_calls", None)
    if turn.get("role") == "developer" and not knows_developers:
        turn["role"] = "system"
    return turn


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            raise InvalidRequest("Message content must be text or a list of text parts.", param="messages")
    return "\n".join(parts)


def _take_ending(turns: list[dict[str, Any]]) -> str:
    """The started answer. Raises InvalidRequest when the last message is not one."""
    last = turns[-1] if turns else {}
    if last.get("role") != "assistant":
        raise InvalidRequest(
            "continue_final_message needs an assistant message at the end to continue.", param="continue_final_message"
        )
    if last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message cannot continue a message with tool_calls.", param="continue_final_message"
        )
    return last["content"]


def _marker(turns: list[dict[str, Any]], kwargs: Mapping[str, Any] | None) -> str:
    """A word that occurs nowhere else and has nothing that a template would trim; the prompt is cut there."""
    number, given = 0, repr((turns, kwargs))
    while (marker := f"continued{number}here") in given:
        number += 1
    return marker


def _without_calls(turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Calls and their answers as text, and the answers, which must all be found in the prompt."""
    rendered, answers = [], []
    for turn in turns:
        if turn.get("tool_calls"):
            lines = [_call_as_json(call) for call in turn["tool_calls"]]
            text = "\n".join([turn["content"], *lines] if turn["content"] else lines)
            turn = {**turn, "content": text}
            del turn["tool_calls"]
            answers.append(text.strip())
        elif turn.get("role") == "tool":
            answer: dict[str, Any] = {name: turn[name] for name in ("tool_call_id", "name") if name in turn}
            turn = {**turn, "content": _to_json({**answer, "content": turn["content"]})}
            answers.append(turn["content"])
        rendered.append(turn)
    return rendered, answers


def _call_as_json(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    named = {"name": function.get("name"), "arguments": arguments}
    return _to_json({**named, "id": call["id"]} if "id" in call else named)


def _with_tools_in_system(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = [_TOOLS_HEADING, *(_to_json(tool.get("function", tool)) for tool in tools)]
    if turns and turns[0].get("role") == "system":
        text = "\n".join([turns[0]["content"], "", *lines] if turns[0]["content"] else lines)
        return [{**turns[0], "content": text}, *turns[1:]]
    return [{"role": "system", "content": "\n".join(lines)}, *turns]
