"""Runs plans on a real device, in order: builds the step, runs the model, draws tokens. Knows slots, not requests.

On CPU one worker thread runs steps, on CUDA a stream does; `launch` returns at once on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from .batch import BatchBuilder, BatchLayout, StepTensors, step_tensors
from .layers.attention import LayerCache
from .logprobs import Logprobs, logprobs_in_chunks
from .models.decoder import Decoder
from .plan import StepHandle, StepPlan, StepResult
from .sampler import Sampled, Sampler, SamplingLayout, SlotSampling
from .upload import upload


@dataclass(frozen=True)
class _Step:
    """A step as the host laid it out."""

    batch: BatchLayout
    sampling: SamplingLayout
    arrays: dict[str, np.ndarray]
    num_top: tuple[int, ...]
    """Alternatives that each of the batch's prompt rows wants."""


@dataclass(frozen=True)
class _Outcome:
    """What a step left on the device, or on its way to the host."""

    sampled: Sampled | None
    prompts: tuple[Logprobs, ...]

    def to_host(self) -> _Outcome:
        sampled = None if self.sampled is None else self.sampled.to_host()
        return _Outcome(sampled, tuple(logprobs.to_host() for logprobs in self.prompts))


class ModelRunner:
    """Implements plan.Runner. `launch` and `close` are called by one thread."""

    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        *,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        vocab_size = model.shape.vocab_size
        self._model = model
        self._caches = caches
        self._device = device
        self._builder = BatchBuilder(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
        self._slot_sampling = SlotSampling(max_num_seqs=max_num_seqs, vocab_size=vocab_size)
        self._num_prompt_top = [0] * max_num_seqs
        self._sampler = Sampler(vocab_size=vocab_size, device=device)
        self._last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights and caches were written on another stream
            self._lane: _Worker | _Stream = _Stream(device)
        else:
            self._lane = _Worker()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once. An error inside the step comes out of the handle."""
        arrays: dict[str, np.ndarray] = {}
        for new in plan.new:
            self._num_prompt_top[new.slot] = new.params.prompt_logprobs or 0
        batch = self._builder.lay_out(plan, arrays)
        sampling = self._slot_sampling.lay_out(plan, batch, arrays)
        num_top = tuple(self._num_prompt_top[plan.rows[prompt.row].slot] for prompt in batch.prompt_rows)
        if batch.prompt_rows:
            arrays["prompt_targets"] = np.concatenate([prompt.targets for prompt in batch.prompt_rows])
        return self._lane.start(self, _Step(batch, sampling, arrays, num_top))

    def prepare_more(self) -> bool:
        return False

    def close(self) -> None:
        """Wait for what is in flight and release the device's memory."""
        self._lane.close()
        self._caches = []

    @torch.inference_mode()
    def run(self, step: _Step) -> _Outcome:
        """Run a step on this thread (and its current stream). For lanes only, in launch order."""
        tensors = upload(step.arrays, self._device)
        self._sampler.enter(step.sampling, tensors)
        if not step.batch.num_rows:
            return _Outcome(None, ())
        inputs = step_tensors(step.batch, tensors)
        hidden = self._model.forward(self._token_ids(inputs), inputs.attention, self._caches)
        prompts = self._prompt_logprobs(hidden, step, tensors)
        if inputs.sample_slots is None:
            return _Outcome(None, prompts)
        if inputs.sample_places is not None:
            hidden = hidden.index_select(0, inputs.sample_places)
        sampled = self._sampler.run(self._model.logits(hidden), step.sampling, tensors)
        self._last_token_ids.index_copy_(0, inputs.sample_slots, sampled.token_ids)
        return _Outcome(sampled, prompts)

    def _token_ids(self, inputs: StepTensors) -> torch.Tensor:
        """The step's tokens, those that were sampled here filled in on the device."""
        if inputs.feedback_slots is None:
            return inputs.token_ids
        fed_back = self._last_token_ids.index_select(0, inputs.feedback_slots)
        if inputs.feedback_places is None:
            return fed_back
        return inputs.token_ids.index_copy_(0, inputs.feedback_places, fed_back)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: _Step, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Logprobs, ...]:
        found, first = [], 0
        for prompt, num_top in zip(step.batch.prompt_rows, step.num_top, strict=True):
            count = len(prompt.targets)
            targets = tensors["prompt_targets"][first : first + count]
            rows = hidden[prompt.first_token : prompt.first_token + count]
            found.append(
                logprobs_in_chunks(
                    rows, targets, num_top, head=self._model.logits, vocab_size=self._model.shape.vocab_size
                )
            )
            first += count
        return tuple(found)


class _Worker:
    """The CPU's lane: one thread that runs steps in order."""

    def __init__(self) -> None:
        # Threads inside an operation are counted per calling thread: the worker takes over this thread's number.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="manta-step", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    def start(self, runner: ModelRunner, step: _Step) -> StepHandle:
        return _FutureHandle(self._pool.submit(lambda: _result(step, runner.run(step))))

    def close(self) -> None:
        self._pool.shutdown()


class _Stream:
    """CUDA's lane: a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, runner: ModelRunner, step: _Step) -> StepHandle:
        with torch.cuda.stream(self._stream):
            outcome = runner.run(step).to_host()
            done = torch.cuda.Event()
            done.record()
        return _EventHandle(step, outcome, done)

    def close(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True)
class _FutureHandle:
    future: Future[StepResult]

    def result(self) -> StepResult:
        return self.future.result()


@dataclass(frozen=True)
class _EventHandle:
    """The outcome lies in pinned memory once the event has happened."""

    step: _Step
    outcome: _Outcome
    done: torch.cuda.Event

    def result(self) -> StepResult:
        self.done.synchronize()
        return _result(self.step, self.outcome)


def _result(step: _Step, outcome: _Outcome) -> StepResult:
    """From tensors on the host."""
    result = StepResult([])
    if outcome.sampled is not None:
        result.token_ids = outcome.sampled.token_ids.tolist()
        if outcome.sampled.logprobs is not None:
            entries = outcome.sampled.logprobs.entries(list(step.sampling.num_top))
            rows = step.batch.sampling_rows[list(step.sampling.logprob_rows)].tolist()
            result.logprobs = dict(zip(rows, entries, strict=True))
    for prompt, num_top, logprobs in zip(step.batch.prompt_rows, step.num_top, outcome.prompts, strict=True):
        result.prompt_logprobs[prompt.row] = logprobs.entries([num_top] * len(prompt.targets))
    return result
