"""Chat templates render as transformers renders them, and lose nothing that the sender gave (P08, P09, P10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from manta.engine.chat_template import ChatTemplate
from manta.engine.errors import CheckpointError, InvalidRequest
from tests.engine.tokenizer_files import DATA

SMOLLM2 = (DATA / "smollm2" / "chat_template.jinja").read_text()
QWEN3 = json.loads((DATA / "qwen3" / "tokenizer_config.json").read_text())["chat_template"]
LLAMA3_LIKE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message.role + ']\n' + message.content | trim + '[end]' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {"type": "object", "properties": {}}},
    }
]
USER = {"role": "user", "content": "Name two rivers."}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Rhine <b>&"}, {"role": "user", "content": "è 聪明\n"}],
]


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=template, **options)
    return rendered[0]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("template", [SMOLLM2, QWEN3, LLAMA3_LIKE], ids=["smollm2", "qwen3", "llama3-like"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompts_are_those_of_transformers(template: str, messages: list[dict[str, Any]], add_generation_prompt: bool):
    want = by_transformers(template, messages, add_generation_prompt=add_generation_prompt, bos_token="<s>")
    ours = ChatTemplate(template, {"bos_token": "<s>"})
    assert ours.render(messages, add_generation_prompt=add_generation_prompt) == want


def test_tools_and_arguments_of_the_template_are_those_of_transformers():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é<"}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        USER,
    ]
    want = by_transformers(QWEN3, messages, tools=TOOLS, add_generation_prompt=True, enable_thinking=False)
    ours = ChatTemplate(QWEN3).render(messages, tools=TOOLS, template_kwargs={"enable_thinking": False})
    assert ours == want
    assert "é<" in ours


def test_blocks_loops_and_helpers_that_templates_use():
    source = (
        "{% for m in messages %}\n    {% if loop.index == 2 %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}\n{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ {'b': 1, 'a': '<é'} | tojson(indent=1, sort_keys=true) }}"
    )
    messages = [{"role": "user", "content": text} for text in ("<1>", "2", "3", "4")]
    assert ChatTemplate(source).render(messages) == by_transformers(source, messages)


def history(extra: dict[str, Any], arguments: str = '{"a": 1}') -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "add"},
        {"role": "assistant", "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "thanks"},
    ]


@pytest.mark.parametrize("template", [SMOLLM2, QWEN3], ids=["smollm2", "qwen3"])
def test_spellings_of_no_text_render_the_same_prompt(template: str):
    ours = ChatTemplate(template)
    prompts = {
        ours.render(history(extra), tools=TOOLS) for extra in ({"content": None}, {}, {"content": ""}, {"content": []})
    }
    assert len(prompts) == 1
    (prompt,) = prompts
    assert '"name": "add"' in prompt
    assert '"a": 1' in prompt
    assert "42" in prompt
    assert ours.render([USER, {"role": "assistant", "content": None}, USER])


def test_a_template_without_tools_gets_them_as_json():
    prompt = ChatTemplate(SMOLLM2).render(history({"content": "Let me see."}), tools=TOOLS)
    function = json.dumps(TOOLS[0]["function"], ensure_ascii=False)
    call = '{"name": "add", "arguments": {"a": 1}, "id": "c1"}'
    assert prompt.startswith("<|im_start|>system\nYou may call these tools")
    assert f"{function}<|im_end|>\n<|im_start|>user\nadd<|im_end|>" in prompt
    assert f"<|im_start|>assistant\nLet me see.\n{call}<|im_end|>" in prompt
    assert '<|im_start|>tool\n{"tool_call_id": "c1", "content": "42"}<|im_end|>' in prompt
    with_system = ChatTemplate(SMOLLM2).render([{"role": "system", "content": "Be brief."}, USER], tools=TOOLS)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nYou may call")


@pytest.mark.parametrize("arguments", ["{", "", "[1]", "null", "plain", '{"a": ' * 5000])
def test_broken_arguments_stay_text_or_are_refused(arguments: str):
    prompt = ChatTemplate(SMOLLM2).render(history({}, arguments))
    assert json.dumps(arguments, ensure_ascii=False) in prompt
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ v }}"
    )
    strict += "{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(strict).render(history({}, arguments))


def test_a_template_that_drops_tool_answers_is_no_excuse():
    source = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="no place for messages of the role tool"):
        ChatTemplate(source).render(history({}))


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    ours = ChatTemplate(SMOLLM2)
    assert ours.render([{"role": "user", "content": parts}]) == ours.render([{"role": "user", "content": "x\ny"}])
    for bad in ([{"type": "image_url"}], [7], 7, {"type": "audio"}):
        with pytest.raises(InvalidRequest, match="text parts"):
            ours.render([{"role": "user", "content": bad}])


def test_developer_means_system_where_the_template_does_not_know_better():
    developer, system = ([{"role": role, "content": "Be brief."}, USER] for role in ("developer", "system"))
    assert ChatTemplate(SMOLLM2).render(developer) == ChatTemplate(SMOLLM2).render(system)
    assert ChatTemplate("{{ messages[0].role }} {# developer #}").render(developer) == "developer "


BEGINNINGS = ["Rivers:", "Rivers: ", "Rivers:\n", "Rivers:\n\n\t", "   1.", '{\n  "r": [', "è", "a" * 500 + " ", ""]


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3_LIKE], ids=["smollm2", "trimming"])
def test_a_continued_answer_ends_the_prompt_exactly(template: str, beginning: str):
    ours = ChatTemplate(template, {"bos_token": "<s>"})
    started = [USER, {"role": "assistant", "content": beginning}]
    prompt = ours.render(started, add_generation_prompt=False, continue_final_message=True)
    assert prompt == ours.render([USER]) + beginning


def test_words_like_the_marker_do_not_confuse():
    messages = [{"role": "user", "content": "continued0here continued1here"}, {"role": "assistant", "content": "a "}]
    prompt = ChatTemplate(SMOLLM2).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("continued0here continued1here<|im_end|>\n<|im_start|>assistant\na ")


def test_contradictions_of_continuing_are_named():
    ours, started = ChatTemplate(SMOLLM2), [USER, {"role": "assistant", "content": "x"}]
    with pytest.raises(InvalidRequest, match=r"continue_final_message.*add_generation_prompt") as caught:
        ours.render(started, continue_final_message=True)
    assert caught.value.param == "add_generation_prompt"
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    for messages in ([USER], []):
        with pytest.raises(InvalidRequest, match="assistant message at the end"):
            ours.render(messages, **flags)
    with pytest.raises(InvalidRequest, match="tool_calls"):
        ours.render(history({})[:2], **flags)
    with pytest.raises(InvalidRequest, match="cannot continue"):
        ChatTemplate("{{ messages[0].content }}").render(started, **flags)


def test_errors_of_a_template_are_the_requests_fault_and_its_syntax_the_operators(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([USER])
    for source in (
        "{{ messages[0].missing.part }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.mro() }}",
    ):
        with pytest.raises(InvalidRequest, match="refuses these messages"):
            ChatTemplate(source).render([USER])
    with pytest.raises(CheckpointError, match=r"file x is not a valid Jinja template \(line 2\)"):
        ChatTemplate("\n{% if %}", origin="file x")


def test_template_arguments_reach_the_template_but_cannot_replace_the_messages():
    ours = ChatTemplate("{{ mood }} {{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert ours.render([USER], template_kwargs={"mood": "glad"}) == "glad <s>Name two rivers."
    with pytest.raises(InvalidRequest, match="messages") as caught:
        ours.render([USER], template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"
