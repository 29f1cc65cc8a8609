"""POST /tokenize and /detokenize: what the model's tokenizer and chat template make of a text. Knows no engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from manta.engine.errors import InvalidRequest

from .body import parse_object, read_body
from .chat import chat_prompt
from .client import EdgeContext
from .endpoints import check_model
from .schema import DetokenizeFields, TokenizeFields, read_fields
from .sse import encode_json


class TokenEndpoints:
    """The two endpoints over one tokenizer."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context

    async def tokenize(self, request: Request) -> Response:
        """Token ids of `prompt`, or of `messages` after the chat template."""
        body = await read_body(request.receive, max_bytes=self._context.max_body_bytes)
        fields = read_fields(TokenizeFields, parse_object(body))
        check_model(self._context, fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        tokenizer, info = self._context.tokenizer, self._context.client.info
        if fields.prompt is None:
            token_ids = chat_prompt(self._context, fields)
        else:
            token_ids = tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        answer = {
            "count": len(token_ids),
            "max_model_len": None if info is None else info.max_model_len,
            "tokens": token_ids,
        }
        if fields.return_token_strs:
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return Response(encode_json(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Text of `tokens`."""
        body = await read_body(request.receive, max_bytes=self._context.max_body_bytes)
        fields = read_fields(DetokenizeFields, parse_object(body))
        check_model(self._context, fields.model)
        tokenizer = self._context.tokenizer
        if fields.tokens and not (min(fields.tokens) >= 0 and max(fields.tokens) < tokenizer.vocab_size):
            raise InvalidRequest(
                f"tokens holds ids outside the vocabulary (0 to {tokenizer.vocab_size - 1}).", param="tokens"
            )
        text = tokenizer.decode(fields.tokens, skip_special_tokens=fields.skip_special_tokens)
        return Response(encode_json({"prompt": text}), media_type="application/json")
