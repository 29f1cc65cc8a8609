"""What any deployment of the API must do, whatever the model: black-box cases over HTTP.

A test class inherits from ApiCases; its module has a fixture `server` (scope "module") that yields a `Server`.
Numbers in the names (P01 ...) are those of the collection of field reports that the cases answer.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import struct
import time
from typing import Any, ClassVar

import openai
import pytest

from tests.replicas.edge.server import CHAT, COMPLETIONS, Server, at_once, eventually

USER = [{"role": "user", "content": "Say something."}]

PROMPTS = ["Repeat: 👩🏽‍🚀🇳🇴 聪明 ďábelské שלום\n", "中文，日本語，한국어：", "Emoji only: "]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class ApiCases:
    """Cases that hold for every model and every way of serving."""

    num_dropped: ClassVar[int] = 48
    """Connections that P04 abandons."""
    num_neighbours: ClassVar[int] = 12
    """Requests that P01 sends at once."""
    stop_distance: ClassVar[int] = 11
    """Characters between the places where P02 cuts its stop strings."""
    num_tokens: ClassVar[int] = 48
    """Of P01's answers."""

    # ---- streams

    def test_p01_joined_deltas_are_the_text(self, server: Server) -> None:
        def check(prompt: str) -> None:
            whole = server.text(prompt, max_tokens=self.num_tokens, temperature=0)
            parts, _ = server.streamed(prompt, max_tokens=self.num_tokens, temperature=0)
            assert "".join(parts) == whole
            assert sum(part.count("�") for part in parts) == whole.count("�")
            assert all(parts[:-1]), "an event without text before the last one"

        for prompt in PROMPTS:
            check(prompt)
        at_once([lambda prompt=prompt: check(prompt) for prompt in PROMPTS * (self.num_neighbours // 3)])

    def test_p02_stop_strings_never_leak(self, server: Server) -> None:
        prompt, greedy = "Count upward in words: one, two, three,", {"max_tokens": 40, "temperature": 0}
        reference = server.text(prompt, **greedy)

        def check(start: int, length: int) -> None:
            stop = reference[start : start + length]
            wanted = reference[: reference.index(stop)]
            whole = server.complete(prompt, stop=[stop, "\u0007never"], **greedy)
            assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (wanted, "stop")
            assert whole["choices"][0]["stop_reason"] == stop
            seen = ""
            parts, reason = server.streamed(prompt, stop=stop, **greedy)
            for part in parts:
                seen += part
                assert wanted.startswith(seen), (stop, seen)
            assert (seen, reason) == (wanted, "stop")
            including = server.text(prompt, stop=[stop], include_stop_str_in_output=True, **greedy)
            assert including == wanted + stop
            tokens = server.ok("/tokenize", prompt=wanted + stop, add_special_tokens=False)["count"]
            assert 1 <= whole["usage"]["completion_tokens"] <= max(40, tokens)

        spots = [
            (start, length) for start in range(4, len(reference) - 20, self.stop_distance) for length in (2, 7, 16)
        ]
        for first in range(0, len(spots), 8):
            at_once([lambda spot=spot: check(*spot) for spot in spots[first : first + 8]])

    def test_p02_the_earliest_of_several_stops_wins(self, server: Server) -> None:
        prompt, greedy = "Count upward in words: one, two, three,", {"max_tokens": 40, "temperature": 0}
        reference = server.text(prompt, **greedy)
        late, early = reference[15:20], reference[6:9]
        answer = server.complete(prompt, stop=[late, early], **greedy)["choices"][0]
        cut = min(reference.index(late), reference.index(early))
        assert answer["text"] == reference[:cut]

    def test_p02_tokens_after_a_match_are_not_counted(self, server: Server) -> None:
        prompt, greedy = "Count upward in words: one, two, three,", {"max_tokens": 40, "temperature": 0}
        full = server.complete(prompt, logprobs=1, return_token_ids=True, **greedy)["choices"][0]
        pairs = [full["text"][at : at + 2] for at in range(5, len(full["text"]) - 1)]
        stop = next(pair for pair in pairs if "�" not in pair)
        answer = server.complete(prompt, stop=[stop], logprobs=1, return_token_ids=True, **greedy)
        num_tokens = answer["usage"]["completion_tokens"]
        choice = answer["choices"][0]
        assert choice["token_ids"] == full["token_ids"][:num_tokens]
        assert len(choice["logprobs"]["tokens"]) == num_tokens
        upto = server.ok("/detokenize", tokens=full["token_ids"][:num_tokens])["prompt"]
        before = server.ok("/detokenize", tokens=full["token_ids"][: num_tokens - 1])["prompt"]
        assert stop in upto
        assert stop not in before
        fields = {"stop": stop, "logprobs": 1, "return_token_ids": True, **greedy}
        streamed = list(server.events(COMPLETIONS, prompt=prompt, stream_options={"include_usage": True}, **fields))[
            :-1
        ]
        assert streamed[-1]["usage"] == answer["usage"] | {
            "prompt_tokens_details": streamed[-1]["usage"]["prompt_tokens_details"]
        }
        ids = [token for event in streamed for c in event["choices"] for token in c["token_ids"]]
        tokens = [token for event in streamed for c in event["choices"] for token in c["logprobs"]["tokens"]]
        assert (ids, tokens) == (choice["token_ids"], choice["logprobs"]["tokens"])

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_p03_shape_of_a_stream_with_choices(self, server: Server, path: str) -> None:
        ask: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "Say something."}
        ask |= {"n": 3, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
        *events, usage, done = server.events(path, **ask, stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 24
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 24
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
        assert all(event["usage"] is None for event in events)
        assert len({event["id"] for event in (*events, usage)}) == 1
        of_index: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
        for event in events:
            for choice in event["choices"]:
                of_index[choice["index"]].append(choice)
        for choices in of_index.values():
            assert [choice["finish_reason"] for choice in choices][:-1] == [None] * (len(choices) - 1)
            assert choices[-1]["finish_reason"] == "length"
            if path == CHAT:
                assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
            for event in server.events(path, **ask, **options):
                assert event == "[DONE]" or ("usage" not in event and event["choices"])

    def test_p03_stream_options_need_a_stream(self, server: Server) -> None:
        reply = server.chat(USER, max_tokens=1, stream_options={"include_usage": True})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "stream_options"

    def test_p04_abandoned_requests_free_everything(self, server: Server) -> None:
        rng = random.Random(4)

        def drop(stream: bool, wait_s: float, num_prompt_tokens: int) -> None:
            ask = {"model": server.model, "prompt": [9] * num_prompt_tokens, "max_tokens": server.max_model_len // 3}
            body = json.dumps({**ask, "ignore_eos": True, "stream": stream}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                time.sleep(wait_s)

        for _ in range(self.num_dropped // 16):
            kinds = [
                (rng.random() < 0.5, rng.choice([0, 0.02, 0.2, 0.5]), rng.choice([3, server.max_model_len // 2]))
                for _ in range(16)
            ]
            at_once([lambda kind=kind: drop(*kind) for kind in kinds])
        server.assert_idle(within_s=5)
        server.assert_alive()

    @pytest.mark.parametrize("stream", [False, True])
    def test_p04_one_long_request_ends_within_a_second(self, server: Server, stream: bool) -> None:
        server.assert_idle(within_s=10)
        ask = {"model": server.model, "prompt": [9] * 3, "max_tokens": server.max_model_len - 3, "ignore_eos": True}
        with server.http.__class__(base_url=server.base_url, trust_env=False) as client:
            request = client.build_request("POST", COMPLETIONS, json={**ask, "stream": stream})
            connection = socket.create_connection(("127.0.0.1", server.port))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            body = request.read()
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            assert eventually(lambda: server.metric("manta_requests_running") == 1, within_s=10)
        finally:
            connection.close()
        server.assert_idle(within_s=1.5)

    # ---- validation

    def test_p05_a_bias_on_an_unknown_token_hurts_nobody(self, server: Server) -> None:
        bad: list[Any] = [{str(server.vocab_size + 100000): 5}, {str(server.vocab_size): 5}, {str(2**31): 1}]
        bad += [{"-1": 1}, {"abc": 1}, {"1.5": 1}, {"5": 101}, {"5": -101}, {"5": "x"}, {"5": True}, [1, 2]]

        def victim() -> None:
            _, reason = server.streamed("Tell a long story.", max_tokens=100, temperature=0)
            assert reason in ("length", "stop")

        def attacker() -> None:
            for bias in bad:
                for reply in (
                    server.chat(USER, max_tokens=4, logit_bias=bias),
                    server.post(COMPLETIONS, prompt="hi", max_tokens=4, logit_bias=bias),
                ):
                    assert reply.status_code == 400, (bias, reply.text)
                    assert reply.json()["error"]["param"] == "logit_bias"

        at_once([victim, attacker])
        texts = {server.text("hi", max_tokens=3, temperature=0, logit_bias={"7": 100}) for _ in range(2)}
        assert len(texts) == 1
        assert server.chat(USER, max_tokens=2, logit_bias={"7": 100}).status_code == 200
        server.assert_alive()

    REFUSED: ClassVar[dict[str, list[str]]] = {
        "temperature": ["NaN", "Infinity", "-Infinity", "1e999", "-0.1", '"hot"', "true"],
        "top_p": ["NaN", "-0.1", "1.1"],
        "top_k": ["-2", "1.5"],
        "min_p": ["NaN", "-0.1", "1.1"],
        "repetition_penalty": ["NaN", "0", "-1"],
        "presence_penalty": ["NaN", "2.1"],
        "frequency_penalty": ["-2.1", "Infinity"],
        "max_tokens": ["-1", "1.5", "1e99"],
        "n": ["0", "-1", "129"],
        "seed": ["1.5", '"1"'],
        "stop": ["[1]", '[""]', '""', "7", json.dumps(["x"] * 17)],
        "stop_token_ids": ["[-1]", "[99999999]", '["a"]'],
        "min_tokens": ["-1", "3"],
        "cache_salt": ['""', "5"],
        "priority": ["1.5", "99999999999999999999"],
    }
    ACCEPTED: ClassVar[dict[str, list[str]]] = {
        "temperature": ["0", "2", "1e-6"],
        "top_p": ["1", "1e-6", "0"],
        "top_k": ["-1", "0", "1", "999999999", "99999999999999999999999"],
        "min_p": ["0", "1"],
        "seed": ["0", "9007199254740993", "-1"],
        "max_tokens": ["0", "null"],
        "stop": ["null", '"x"', json.dumps(["x"] * 16)],
    }

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_p06_numbers_at_and_past_their_limits(self, server: Server, path: str) -> None:
        start = '"messages":[{"role":"user","content":"hi"}]' if path == CHAT else '"prompt":"hi"'

        def send(field: str, literal: str) -> Any:
            others = {"temperature": "1", "max_tokens": "2"}
            if field == "max_tokens" and literal == "null" and path == CHAT:
                others["max_completion_tokens"] = "2"  # chat's default limit is all that fits
            fields = {**others, field: literal}
            rest = ",".join(f'"{name}":{value}' for name, value in fields.items())
            body = f'{{"model":{json.dumps(server.model)},{start},{rest}}}'
            return server.http.post(path, content=body.encode(), headers={"Content-Type": "application/json"})

        refused = {**self.REFUSED, **({"logprobs": ["-1", "100000", "true"]} if path == COMPLETIONS else {})}
        for field, literals in refused.items():
            for literal in literals:
                reply = send(field, literal)
                assert reply.status_code == 400, (field, literal, reply.text)
                assert reply.json()["error"]["param"].split(".")[0] == field, (field, literal, reply.text)
        for field, literals in self.ACCEPTED.items():
            for literal in literals:
                reply = send(field, literal)
                assert reply.status_code == 200, (field, literal, reply.text)
        server.assert_alive()

    def test_p06_limits_that_mean_off_or_greedy(self, server: Server) -> None:
        greedy = server.text("A", temperature=0, max_tokens=6)
        assert server.text("A", temperature=3.0, top_k=1, max_tokens=6) == greedy
        assert server.text("A", temperature=3.0, top_p=0, max_tokens=6) == greedy
        for off in (0, -1, 10**9):
            assert len({server.text("A", temperature=3.0, top_k=off, seed=i, max_tokens=6) for i in range(4)}) > 1
        mixed = [{"temperature": 0}, {"top_k": 5}, {"top_k": -1}, {"temperature": 0}, {"top_k": 10**9}]
        texts = at_once([lambda extra=extra: server.text("A", max_tokens=6, **extra) for extra in mixed])
        assert texts[0] == texts[3] == greedy

    @pytest.mark.parametrize("stream", [False, True])
    def test_p07_too_long_prompts_get_a_real_status(self, server: Server, stream: bool) -> None:
        limit = server.max_model_len

        def send(num_prompt_tokens: int, max_tokens: int) -> Any:
            return server.post(COMPLETIONS, prompt=[11] * num_prompt_tokens, max_tokens=max_tokens, stream=stream)

        assert send(limit - 1, 1).status_code == 200
        assert send(limit - 5, 5).status_code == 200
        for num_prompt_tokens, max_tokens in ((limit + 1, 1), (4 * limit, 1), (limit, 1), (limit - 5, limit)):
            reply = send(num_prompt_tokens, max_tokens)
            assert reply.status_code == 400
            assert reply.headers["content-type"] == "application/json"
            error = reply.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(limit) in error["message"]
            assert str(num_prompt_tokens) in error["message"]
        long = server.chat([{"role": "user", "content": "word " * 4 * limit}], stream=stream)
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"
        server.assert_alive()

    # ---- chat

    def test_p08_chat_and_raw_prompts_agree_on_special_tokens(self, server: Server) -> None:
        chat = server.ok("/tokenize", messages=USER)
        answer = server.ok(CHAT, messages=USER, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"] == chat["tokens"]
        assert answer["usage"]["prompt_tokens"] == chat["count"]
        assert server.complete(chat["tokens"], max_tokens=1)["usage"]["prompt_tokens"] == chat["count"]
        rendered = server.ok("/detokenize", tokens=chat["tokens"])["prompt"]
        again = server.complete(rendered, max_tokens=1, add_special_tokens=False, return_token_ids=True)
        assert again["choices"][0]["prompt_token_ids"] == chat["tokens"]

    def test_p09_assistant_turns_without_text(self, server: Server) -> None:
        def history(extra: dict[str, Any], arguments: str = '{"a": 1}') -> list[dict[str, Any]]:
            call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
            return [
                {"role": "user", "content": "add"},
                {"role": "assistant", "tool_calls": [call], **extra},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
                {"role": "user", "content": "thanks"},
            ]

        def num_tokens(messages: Any) -> int:
            reply = server.chat(messages, tools=TOOLS, max_tokens=2)
            assert reply.status_code == 200, (messages, reply.text)
            return reply.json()["usage"]["prompt_tokens"]

        spellings: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
        assert len({num_tokens(history(extra)) for extra in spellings}) == 1
        without = [message for message in history({}) if message["role"] != "assistant"]
        without_call = [*without[:1], {"role": "assistant", "content": ""}, *without[1:]]
        assert num_tokens(without_call) < num_tokens(history({})), "the call is not in the prompt"
        assert num_tokens(history({}, arguments="{")) > num_tokens(without_call)
        turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": ""}, *USER]
        assert server.chat(turns, max_tokens=2).status_code == 200
        parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
        assert server.chat([{"role": "user", "content": parts}], max_tokens=2).status_code == 200

    def test_p10_continuing_an_answer(self, server: Server) -> None:
        ask = [{"role": "user", "content": "Name two rivers."}]
        head = server.ok("/tokenize", messages=ask)
        text = server.ok("/detokenize", tokens=head["tokens"])["prompt"]
        flags: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        starts = ["Rivers:", "Rivers: ", "Rivers:\n", "Rivers:\n\n\t", "   1.", '{\n  "r": [', "è", "a" * 100 + " "]

        def check(start: str) -> None:
            answer = server.ok(
                CHAT, messages=[*ask, {"role": "assistant", "content": start}], temperature=0, max_tokens=6, **flags
            )
            wanted = server.complete(text + start, add_special_tokens=False, temperature=0, max_tokens=6)
            assert answer["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"], start
            assert answer["choices"][0]["message"]["content"] == wanted["choices"][0]["text"], start

        at_once([lambda start=start: check(start) for start in starts])
        both = server.chat([*ask, {"role": "assistant", "content": "x"}], max_tokens=1, continue_final_message=True)
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "add_generation_prompt"
        assert server.chat(ask, max_tokens=1, **flags).status_code == 400

    # ---- sampling

    def test_p11_a_seed_fixes_the_answer_whatever_the_neighbours(self, server: Server) -> None:
        fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 16}

        def seeded(seed: int) -> str:
            return server.text("Invent a word:", seed=seed, **fields)

        def noise() -> str:
            return server.text("Another topic entirely", temperature=1.3, max_tokens=24)

        alone = seeded(42)
        for _ in range(2):
            texts = at_once([lambda: seeded(42), noise, noise, lambda: seeded(7), lambda: seeded(42), noise])
            assert (texts[0], texts[4]) == (alone, alone)
        assert len(set(at_once([lambda seed=seed: seeded(seed) for seed in range(8)]))) > 4
        choices = [
            [choice["text"] for choice in server.complete("Invent a word:", seed=42, n=4, **fields)["choices"]]
            for _ in range(2)
        ]
        assert choices[0] == choices[1]
        assert choices[0][0] == alone
        assert len(set(choices[0])) > 1
        assert len({server.text("Invent a word:", **fields) for _ in range(4)}) > 1

    def test_p14_prompt_logprobs_do_not_depend_on_the_cache(self, server: Server) -> None:
        size = server.block_size
        ids = [(37 * i) % 211 + 20 for i in range(4 * size)]
        prompts = [ids[:n] for n in (2, size - 1, size, size + 1, 2 * size, 2 * size + 1, 4 * size)]

        def score(prompt: list[int]) -> list[float]:
            answer = server.complete(prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)["choices"][0]
            first, *values = answer["logprobs"]["token_logprobs"]
            assert first is None
            assert len(values) == len(prompt)
            assert all(value <= 1e-4 for value in values)
            return values[: len(prompt) - 1]

        cold = [score(prompt) for prompt in prompts]
        warm = [score(prompt) for prompt in reversed(prompts)][::-1]
        for first, second in [*zip(cold, warm, strict=True), *itertools.pairwise(cold)]:
            assert max(abs(a - b) for a, b in zip(first, second, strict=False)) < 0.02
        nothing = server.complete(ids, max_tokens=0, echo=True, logprobs=1)
        assert nothing["usage"]["completion_tokens"] == 0
        assert len(nothing["choices"][0]["logprobs"]["token_logprobs"]) == len(ids)
        assert nothing["choices"][0]["finish_reason"] == "length"
        server.assert_alive()

    # ---- metrics and errors

    def test_p25_gauges_settle_and_first_tokens_are_counted(self, server: Server) -> None:
        def leave_after_one_event() -> None:
            events = server.events(COMPLETIONS, prompt="x " * 40, max_tokens=server.max_model_len // 2, ignore_eos=True)
            next(events)
            events.close()  # type: ignore[attr-defined]

        at_once([leave_after_one_event] * 12)
        server.assert_idle(within_s=3)
        name = "manta_time_to_first_token_seconds"
        count, total = server.metric(f"{name}_count"), server.metric(f"{name}_sum")
        start_s = time.monotonic()
        for _ in range(3):
            server.text("y " * 40, max_tokens=4)
        wall_s = time.monotonic() - start_s
        assert eventually(lambda: server.metric(f"{name}_count") - count == 3, within_s=3)
        assert 0 < server.metric(f"{name}_sum") - total <= wall_s
        page = server.http.get("/metrics").text
        for line in page.splitlines():
            if line and line[0] != "#":
                float(line.rsplit(" ", 1)[1])
        assert not re.search(r"(cmpl-|chatcmpl-)[0-9a-f]{8}", page)

    def test_p26_errors_have_one_envelope(self, server: Server) -> None:
        model = server.model
        ok = [{"role": "user", "content": "x"}]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]}]
        cases: list[tuple[str, Any, int]] = [
            (CHAT, {"model": "no-such-model", "messages": ok}, 404),
            (COMPLETIONS, {"model": "no-such-model", "prompt": "x"}, 404),
            (CHAT, {"model": model, "messages": []}, 400),
            (CHAT, {"model": model}, 400),
            (CHAT, {"messages": ok}, 400),
            (CHAT, {"model": model, "messages": {"role": "user"}}, 400),
            (CHAT, {"model": model, "messages": image}, 400),
            (CHAT, {"messages": ok, "model": 5}, 400),
            (CHAT, {"model": model, "messages": [{"role": "wizard", "content": "x"}]}, 400),
            (CHAT, {"model": model, "messages": [{"content": "x"}]}, 400),
            (CHAT, {"model": model, "messages": [{"role": "user"}]}, 400),
            (CHAT, {"model": model, "messages": ["x"]}, 400),
            (COMPLETIONS, {"model": model, "prompt": None}, 400),
            (COMPLETIONS, {"model": model, "prompt": ""}, 400),
            (COMPLETIONS, {"model": model, "prompt": [server.vocab_size + 5]}, 400),
            (COMPLETIONS, {"model": model, "prompt": [-1]}, 400),
            (COMPLETIONS, {"model": model, "prompt": []}, 400),
            (COMPLETIONS, {"model": model, "prompt": [[]]}, 400),
            (COMPLETIONS, {"model": model, "prompt": [1, "x"]}, 400),
            (COMPLETIONS, {"model": model, "prompt": [True]}, 400),
            (CHAT, {"model": model, "messages": ok, "top_logprobs": 3}, 400),
            (CHAT, {"model": model, "messages": ok, "logprobs": True, "top_logprobs": 999}, 400),
            ("/v1/nope", {}, 404),
            (CHAT, b"{not json", 400),
            (CHAT, b"[1]", 400),
            (CHAT, b"\xff\xfe", 400),
            (CHAT, b'{"model":"m","messages":' + b"[" * 100_000, 400),
            (COMPLETIONS, b'{"model":' + json.dumps(model).encode() + b',"prompt":"\\ud800"}', 400),
            (
                COMPLETIONS,
                b'{"model":' + json.dumps(model).encode() + b',"prompt":"x","seed":' + b"9" * 5000 + b"}",
                400,
            ),
        ]
        for path, body, status in cases:
            for stream in (False, True):
                content = body if isinstance(body, bytes) else json.dumps({**body, "stream": stream}).encode()
                reply = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
                assert reply.status_code == status, (path, body, reply.text)
                assert_envelope(reply)
        assert_envelope(server.http.get(CHAT), 405)
        assert_envelope(server.http.get("/v1/models/other"), 404)
        assert_envelope(server.http.get("/v1/models/"), 404)
        listed = server.http.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [(model, server.max_model_len)]
        assert server.http.get(f"/v1/models/{model}").json()["id"] == model
        server.assert_alive()

    @pytest.mark.parametrize(
        ("path", "fields", "param"),
        [
            (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
            (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
            (CHAT, {"functions": [{"name": "f"}]}, "functions"),
            (CHAT, {"audio": {"voice": "x"}}, "audio"),
            (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
            (CHAT, {"best_of": 2}, "best_of"),
            (CHAT, {"temprature": 0.1}, "temprature"),
            (COMPLETIONS, {"suffix": "x"}, "suffix"),
            (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
            (COMPLETIONS, {"messages": []}, "messages"),
            (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ],
    )
    def test_what_is_not_supported_is_refused_by_name(
        self, server: Server, path: str, fields: dict[str, Any], param: str
    ) -> None:
        ask: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "x"}
        reply = server.post(path, **{**ask, **fields})
        assert_envelope(reply, 400)
        assert reply.json()["error"]["param"] == param
        assert param in reply.json()["error"]["message"]

    def test_harmless_fields_are_accepted(self, server: Server) -> None:
        harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": 1}
        assert server.chat(USER, max_tokens=1, response_format={"type": "text"}, **harmless).status_code == 200
        assert server.chat(USER, max_tokens=1, tools=TOOLS, tool_choice="auto").status_code == 200
        assert server.post(COMPLETIONS, prompt="x", max_tokens=1, suffix=None, **harmless).status_code == 200

    # ---- completions and chat in general

    def test_prompts_come_as_text_ids_or_lists_of_either(self, server: Server) -> None:
        greedy: dict[str, Any] = {"max_tokens": 3, "temperature": 0}
        ids = server.ok("/tokenize", prompt="Hello there")["tokens"]
        other = server.ok("/tokenize", prompt="Another one")["tokens"]
        one, two = server.text("Hello there", **greedy), server.text("Another one", **greedy)
        assert server.text(ids, **greedy) == one
        for prompt in (["Hello there", "Another one"], [ids, other]):
            answer = server.complete(prompt, n=2, **greedy)
            assert [choice["text"] for choice in answer["choices"]] == [one, one, two, two]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == len(ids) + len(other)

    def test_stop_token_ids_end_the_answer_after_min_tokens(self, server: Server) -> None:
        fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        ids = server.complete("Tell me", **fields)["choices"][0]["token_ids"]
        stop_id = ids[7]
        first = ids.index(stop_id)
        answer = server.complete("Tell me", stop_token_ids=[stop_id], **fields)
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)
        assert choice["token_ids"] == ids[: first + 1]
        assert answer["usage"]["completion_tokens"] == first + 1
        assert choice["text"] == server.ok("/detokenize", tokens=ids[:first], skip_special_tokens=True)["prompt"]
        later = server.complete("Tell me", stop_token_ids=[stop_id], min_tokens=first + 2, **fields)
        assert later["usage"]["completion_tokens"] >= first + 2

    def test_defaults_of_max_tokens(self, server: Server) -> None:
        assert server.complete([5] * 4, ignore_eos=True)["usage"]["completion_tokens"] == 16
        nearly_full = server.complete([5] * (server.max_model_len - 3), ignore_eos=True)
        assert nearly_full["usage"]["completion_tokens"] == 3
        assert server.chat([{"role": "user", "content": "hi"}], max_tokens=0).json()["usage"]["completion_tokens"] == 0

    def test_cached_tokens_are_reported(self, server: Server) -> None:
        prompt = [(13 * i) % 200 + 7 for i in range(2 * server.block_size + 1)]
        salts = [f"tenant-{time.monotonic_ns()}", f"other-{time.monotonic_ns()}"]

        def num_cached(salt: str) -> int:
            usage = server.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert num_cached(salts[0]) == 0
        assert num_cached(salts[0]) == 2 * server.block_size
        assert num_cached(salts[1]) == 0

    def test_echo_comes_first_also_in_a_stream(self, server: Server) -> None:
        fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
        whole = server.complete("Hello there", **fields)["choices"][0]
        events = [e for e in server.events(COMPLETIONS, prompt="Hello there", **fields) if e != "[DONE]"]
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert whole["text"].startswith("Hello there")
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [value for choice in choices for value in choice["logprobs"][name]]
            assert joined == whole["logprobs"][name] or name == "token_logprobs"
        assert server.text("Hello there", echo=True, max_tokens=0) == "Hello there"

    def test_tokenize_and_detokenize(self, server: Server) -> None:
        text = "Grüße, 世界! 🐋"
        answer = server.ok("/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == server.max_model_len
        assert server.ok("/detokenize", tokens=answer["tokens"])["prompt"] == text
        assert_envelope(server.post("/detokenize", tokens=[server.vocab_size + 100_000]), 400)
        assert_envelope(server.post("/tokenize"), 400)

    # ---- the official client

    def test_the_official_client_is_content(self, server: Server) -> None:
        with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "Say something."}]
            answer = client.chat.completions.create(
                model=server.model, messages=messages, max_completion_tokens=5, temperature=0, logprobs=True,
                top_logprobs=2, seed=1, user="someone", extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5
            assert answer.choices[0].logprobs is not None
            tokens = answer.choices[0].logprobs.content
            assert tokens is not None
            assert len(tokens) == 5
            spelled = b"".join(bytes(token.bytes or []) for token in tokens)
            assert spelled.decode(errors="replace").startswith((answer.choices[0].message.content or "")[:1])
            chunks = list(
                client.chat.completions.create(
                    model=server.model, messages=messages, max_tokens=5, temperature=0, stream=True,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                )
            )  # fmt: skip
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == answer.choices[0].message.content
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 5
            completion = client.completions.create(model=server.model, prompt=["a", "b"], max_tokens=2, logprobs=1)
            assert len(completion.choices) == 2
            assert [model.id for model in client.models.list()] == [server.model]
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="other", messages=messages)
            with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
                client.completions.create(model=server.model, prompt=[[5] * server.max_model_len], stream=True)
            assert refused.value.code == "context_length_exceeded"


def assert_envelope(reply: Any, status: int | None = None) -> None:
    """The reply is an error in OpenAI's envelope, and shows nothing of the inside."""
    assert status is None or reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert {"param", "code"} <= set(error)
    assert "Traceback" not in reply.text
    assert "/site-packages/" not in reply.text
