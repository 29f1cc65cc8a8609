"""The Python API: a model in this process, without Ray or HTTP.

from manta import LLM, SamplingParams
with LLM("smollm2-135m") as llm:
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from .config import EngineConfig
from .core import EngineCore
from .detokenizer import TextStream
from .errors import ContextLengthExceeded, EngineFailed, InvalidRequest, Overloaded
from .loop_gc import LoopGc
from .model_source import resolve_model
from .request import (
    EngineRequest,
    FinishReason,
    Refusal,
    RefusalReason,
    RequestDelta,
    SamplingParams,
    TokenLogprobs,
)
from .startup import start_engine
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass
class CompletionOutput:
    """One of a request's `n` answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token when asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS and for length."""

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


def refusal_error(refusal: Refusal) -> InvalidRequest | Overloaded:
    """The exception that says what a refusal says."""
    if refusal.reason is RefusalReason.TOO_LONG:
        return ContextLengthExceeded(refusal.message, param="prompt")
    if refusal.reason is RefusalReason.INVALID:
        return InvalidRequest(refusal.message, param="prompt")
    return Overloaded(refusal.message, retry_after_s=refusal.retry_after_s)


class _Answer:
    """One sequence on its way: collects deltas into a CompletionOutput."""

    def __init__(
        self, output: CompletionOutput, parent: RequestOutput, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self.output = output
        self._parent = parent
        self._text = TextStream(tokenizer, params)
        if params.logprobs is not None:
            output.logprobs = []

    def add(self, delta: RequestDelta, eos_token_ids: tuple[int, ...]) -> bool:
        """Take a delta in. True when a stop string ended the answer, so that the engine must be told."""
        output = self.output
        output.token_ids.extend(delta.token_ids)
        if output.logprobs is not None and delta.logprobs:
            output.logprobs.extend(delta.logprobs)
        if output.index == 0:
            self._parent.num_cached_tokens = delta.num_cached_tokens or self._parent.num_cached_tokens
            self._parent.prompt_logprobs = delta.prompt_logprobs or self._parent.prompt_logprobs
        # The token that ends an answer is not part of its text.
        is_end = delta.stop_token_id is not None
        output.text += self._text.push(delta.token_ids[:-1] if is_end else delta.token_ids)
        ended = delta.finish_reason is not None
        if ended and self._text.stopped_by is None:
            output.text += self._text.finish()
        if self._text.stopped_by is not None:
            del output.token_ids[self._text.num_tokens_used :]
            if output.logprobs is not None:
                del output.logprobs[self._text.num_tokens_used :]
            output.finish_reason, output.stop_reason = FinishReason.STOP, self._text.stopped_by
            return not ended
        if ended:
            output.finish_reason = delta.finish_reason
            if is_end and delta.stop_token_id not in eos_token_ids:
                output.stop_reason = delta.stop_token_id
        return False


class LLM:
    """A model and its engine in this process.

    `overrides` are configuration fields by leaf or dotted name: `LLM("smollm2-135m", dtype="float32", block_size=16)`.
    Raises ConfigError or CheckpointError when it cannot start.
    """

    def __init__(self, model: str | EngineConfig, **overrides: Any) -> None:
        config = model if isinstance(model, EngineConfig) else EngineConfig.build(model, **overrides)
        self.config = config
        self.tokenizer = Tokenizer.load(resolve_model(config.model), chat_template=config.model.chat_template)
        self.engine: EngineCore = start_engine(config)
        self._request_ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device. The object cannot be used afterwards."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once; outputs come in the order of the prompts.

        A prompt is text or token ids. `on_progress(finished, total)` is called as answers end. Raises InvalidRequest
        when a request cannot be taken (nothing is generated then).
        """
        listed = _as_list(prompts)
        params = _broadcast(sampling_params, len(listed))
        outputs = [self._prepare(prompt) for prompt in listed]
        answers: dict[str, _Answer] = {}
        try:
            requests = [
                r for output, p in zip(outputs, params, strict=True) for r in self._requests(output, p, answers)
            ]
            with LoopGc(freezes=False) as collector:
                self._run(requests, answers, on_progress, collector)
        except BaseException:
            for request_id in answers:
                self.engine.cancel(request_id)
            raise
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            text = self.tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params)

    def _prepare(self, prompt: Prompt) -> RequestOutput:
        if isinstance(prompt, str):
            return RequestOutput(prompt, self.tokenizer.encode(prompt), [])
        return RequestOutput(None, list(prompt), [])

    def _requests(
        self, output: RequestOutput, params: SamplingParams, answers: dict[str, _Answer]
    ) -> list[EngineRequest]:
        params.check_vocab(self.engine.info.vocab_size)
        requests = []
        for index, own in enumerate(params.for_choices()):
            request_id = f"llm-{next(self._request_ids)}"
            answer = CompletionOutput(index)
            output.outputs.append(answer)
            answers[request_id] = _Answer(answer, output, self.tokenizer, params)
            requests.append(EngineRequest(request_id=request_id, prompt_token_ids=output.prompt_token_ids, params=own))
        return requests

    def _run(
        self,
        requests: list[EngineRequest],
        answers: dict[str, _Answer],
        on_progress: Callable[[int, int], None],
        collector: LoopGc,
    ) -> None:
        total, pending = len(requests), requests[::-1]
        while pending or answers:
            while pending:
                refusal = self.engine.add(pending[-1])
                if refusal is not None and refusal.reason is RefusalReason.OVERLOADED and self.engine.has_work:
                    break  # offline there is no hurry: the rest is queued as room comes
                if refusal is not None:
                    raise refusal_error(refusal)
                pending.pop()
            if not self.engine.has_work:
                raise EngineFailed("The engine has no work although answers are missing.")
            deltas = self.engine.step()
            collector.step_done()
            for delta in deltas:
                answer = answers.get(delta.request_id)
                if answer is None:
                    continue
                if answer.add(delta, self.tokenizer.eos_token_ids):
                    self.engine.cancel(delta.request_id)
                if answer.output.finish_reason is not None:
                    del answers[delta.request_id]
                    on_progress(total - len(answers), total)
        while self.engine.has_work:  # surplus tokens in flight: leave nothing behind
            self.engine.step()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _broadcast(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling parameters were given for {count} prompts.", param="params")
    return list(params)
