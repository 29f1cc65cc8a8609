"""Runs plans on a real device, in order: builds the step, runs the model, draws tokens. Knows slots, not requests.

On CPU one worker thread runs steps, on CUDA a stream does; `launch` returns at once on both. Steps of decodes alone
take the padded path of decode_step.py where that is switched on, as CUDA graphs on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from manta.kernels.attention_shared_prefix import pays

from .batch import (
    BatchBuilder,
    BatchLayout,
    SharedBlocks,
    SlotState,
    StepPlaces,
    attention_batch,
    last_rows,
    step_places,
)
from .cuda_graphs import GraphCapture
from .decode_graphs import DecodeGraphs
from .decode_step import Draw, StepKind, StepShare
from .kv_transfer.messages import KvOrder, KvRange
from .lanes import StreamLane, WorkerLane
from .layers.attention import LastRows, LayerCache
from .logprobs import Logprobs, logprobs_in_chunks
from .models.decoder import Decoder
from .plan import StepHandle, StepPlan, StepResult
from .prefill_graphs import PaddedStep, PrefillGraphs
from .sampler import Sampled, Sampler, SamplingLayout, SlotSampling
from .upload import upload

if TYPE_CHECKING:
    from .kv_transfer.endpoint import KvEndpoint


@dataclass(frozen=True)
class RunnerOptions:
    """How steps run. Sizes in tokens unless named otherwise."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    pads_decodes: bool = False
    """Steps of decodes alone take the padded path; on CUDA as graphs."""
    max_padded_tokens: int = 0
    """With `pads_decodes`: steps with prefills of up to so many tokens do, too. 0: none."""
    deterministic: bool = False
    """All queries take the prefill kernel, whose results depend on nothing but the sequence."""


@dataclass(frozen=True)
class Outcome:
    """What a step left on the device, or on its way to the host."""

    sampled: Sampled | None
    prompts: tuple[Logprobs, ...] = ()

    def to_host(self) -> Outcome:
        sampled = None if self.sampled is None else self.sampled.to_host()
        return Outcome(sampled, tuple(logprobs.to_host() for logprobs in self.prompts))


class ModelRunner:
    """Implements plan.Runner. `launch`, `prepare_more` and `close` are called by one thread."""

    def __init__(
        self, model: Decoder, caches: list[LayerCache], *, device: torch.device, options: RunnerOptions
    ) -> None:
        vocab_size = model.shape.vocab_size
        self._model = model
        self._caches = caches
        self._device = device
        self._block_size = options.block_size
        sizes = {"max_num_seqs": options.max_num_seqs, "max_model_len": options.max_model_len}
        self._builder = BatchBuilder(**sizes, block_size=options.block_size, decodes_as_prefills=options.deterministic)
        self._state = SlotState.allocate(**sizes, block_size=options.block_size, device=device)
        self._slot_sampling = SlotSampling(max_num_seqs=options.max_num_seqs, vocab_size=vocab_size)
        self._num_prompt_top = [0] * options.max_num_seqs
        self._sampler = Sampler(vocab_size=vocab_size, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights and caches were written on another stream
        self._lane = StreamLane(device) if device.type == "cuda" else WorkerLane()
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._preparations: Iterator[None] = iter(())
        if options.pads_decodes:
            self._pad(model, options)
        self._shares_prefixes = not options.deterministic
        self._shared_of: tuple[np.ndarray, SharedBlocks | None] | None = None
        self._endpoint: KvEndpoint | None = None

    @property
    def caches(self) -> list[LayerCache]:
        """Keys and values of each layer."""
        return self._caches

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    def attach(self, endpoint: KvEndpoint) -> None:
        """KV comes and goes by this endpoint of the caches. It is closed with the runner."""
        self._endpoint = endpoint

    def obey(self, order: KvOrder) -> None:
        """Pass an order on to the endpoint, behind the steps that were launched."""
        endpoint = self._endpoint
        assert endpoint is not None, "only an engine that takes part in transfers is given orders"
        self._lane.follow(lambda: endpoint.obey(order))

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once. An error inside the step comes out of the handle."""
        # Decodes come first in a plan: when the last row is one, all are.
        if self._graphs is not None and plan.rows and plan.rows[-1].is_decode:
            return self._launch_decodes(self._graphs, plan)
        arrays: dict[str, np.ndarray] = {}
        for new in plan.new:
            self._num_prompt_top[new.slot] = new.params.prompt_logprobs or 0
        self._shared_of = None
        batch = self._builder.lay_out(plan, arrays)
        sampling = self._slot_sampling.lay_out(plan, batch.sampling_slots, batch.sampling_positions, arrays)
        num_top = tuple(self._num_prompt_top[plan.rows[prompt.row].slot] for prompt in batch.prompt_rows)
        if batch.prompt_rows:
            arrays["prompt_targets"] = np.concatenate([prompt.targets for prompt in batch.prompt_rows])
        padded = None if self._prefill_graphs is None else self._prefill_graphs.take(batch, arrays)
        # Layers are sent while later ones are computed where the host runs ahead and each layer is launched by itself.
        layers = _LayerEvents() if plan.sends and padded is None and self._device.type == "cuda" else None

        def run() -> Outcome:
            return self._run(batch, padded, sampling, arrays, num_top, layers)

        def finish(outcome: Outcome) -> StepResult:
            return self._result(outcome, batch, sampling, num_top)

        handle = self._lane.start(run, Outcome.to_host, finish)
        if plan.sends:
            self._send(plan.sends, layers)
        return handle

    def _send(self, ranges: Sequence[KvRange], layers: _LayerEvents | None) -> None:
        """Give the endpoint what the step that was just launched leaves to send."""
        endpoint = self._endpoint
        assert endpoint is not None, "only an engine that takes part in transfers sends"

        def send() -> None:
            for one in ranges:
                endpoint.obey(one, layers_ready=None if layers is None else layers.events)

        self._lane.follow(send)

    def _result(
        self, outcome: Outcome, batch: BatchLayout, sampling: SamplingLayout, num_top: tuple[int, ...]
    ) -> StepResult:
        result = _sampled_result(outcome.sampled, batch.sampling_rows, sampling)
        for prompt, wanted, logprobs in zip(batch.prompt_rows, num_top, outcome.prompts, strict=True):
            result.prompt_logprobs[prompt.row] = logprobs.entries([wanted] * len(prompt.targets))
        return result

    def prepare_more(self) -> bool:
        """Capture the next graph that steps may need."""
        return self._lane.do(self._prepare_next)

    def abort(self) -> None:
        """Let go what waits for other ranks, which are gone; called by another thread. A lone runner waits for none."""

    def leave(self) -> None:
        """After `close`: end the connections to other ranks. A lone runner has none."""

    def close(self) -> None:
        """Wait for what is in flight and release the device's memory."""
        self._lane.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        self._drop_graphs()
        self._caches = []

    def _drop_graphs(self) -> None:
        self._graphs = self._prefill_graphs = None
        self._preparations = iter(())

    @property
    def _share(self) -> StepShare | None:
        """What this rank does of the end of padded steps; None: all of it."""
        return None

    def _pad(self, model: Decoder, options: RunnerOptions) -> None:
        capture = GraphCapture() if self._device.type == "cuda" else None
        common: dict[str, Any] = {
            "max_num_seqs": options.max_num_seqs,
            "block_size": options.block_size,
            "capture": capture,
            "device": self._device,
        }
        self._graphs = graphs = DecodeGraphs(
            model,
            self._caches,
            self._state,
            decodes_as_prefills=options.deterministic,
            share=self._share,
            **common,
        )
        prefills: Iterator[None] = iter(())
        if options.max_padded_tokens:
            self._prefill_graphs = PrefillGraphs(
                model,
                self._caches,
                self._state,
                max_num_tokens=options.max_padded_tokens,
                decodes_as_prefills=options.deterministic,
                **common,
            )
            prefills = self._prefill_graphs.preparations()
        if capture is not None:
            self._preparations = itertools.chain(
                graphs.preparations(Draw.GREEDY), prefills, graphs.preparations(Draw.PLAIN, Draw.FILTERED)
            )

    @torch.inference_mode()
    def _prepare_next(self) -> bool:
        return next(self._preparations, self) is None

    def _launch_decodes(self, graphs: DecodeGraphs, plan: StepPlan) -> StepHandle:
        num_rows = len(plan.rows)
        buffers = graphs.buffers_for(num_rows)
        arrays = buffers.upload.next_arrays()
        stage = buffers.upload.stage
        slots, sampling_positions = self._builder.lay_out_decodes(plan, arrays)
        wanted: dict[str, np.ndarray] = {}
        sampling = self._slot_sampling.lay_out(plan, slots, sampling_positions, wanted)
        draw = Draw.of(sampling)
        if draw in (Draw.PLAIN, Draw.FILTERED):
            buffers.fill_draws(arrays, wanted)
        shared = self._shared_prefix(slots, plan)
        if shared is not None:
            buffers.fill_shared(arrays, shared, block_size=self._block_size)
        kind = StepKind(draw, shares_prefix=shared is not None)

        @torch.inference_mode()
        def run() -> Outcome:
            step = graphs.step_for(buffers, kind)
            buffers.upload.send(stage)
            outputs = step()
            if outputs.token_ids is not None:
                return Outcome(Sampled(outputs.token_ids[:num_rows], None))
            tensors = upload(wanted | {"sample_slots": slots}, self._device)
            assert outputs.logits is not None
            return Outcome(self._sample(outputs.logits[:num_rows], sampling, tensors))

        def finish(outcome: Outcome) -> StepResult:
            return _sampled_result(outcome.sampled, np.arange(num_rows), sampling)

        return self._lane.start(run, Outcome.to_host, finish)

    def _shared_prefix(self, slots: np.ndarray, plan: StepPlan) -> SharedBlocks | None:
        """The rows' common prefix where attending to it once pays. The same rows share the same blocks for ever."""
        if not self._shares_prefixes:
            return None
        if self._shared_of is None or plan.freed_slots or not np.array_equal(self._shared_of[0], slots):
            shared = self._builder.shared_blocks(slots)
            if shared is not None:
                num_tokens = shared.num_blocks * self._block_size
                if not pays(int(shared.members.sum()), num_tokens, len(slots)):
                    shared = None
            self._shared_of = slots, shared
        return self._shared_of[1]

    @torch.inference_mode()
    def _run(
        self,
        batch: BatchLayout,
        padded: PaddedStep | None,
        sampling: SamplingLayout,
        arrays: Mapping[str, np.ndarray],
        num_top: tuple[int, ...],
        layers: _LayerEvents | None = None,
    ) -> Outcome:
        """A step of any kind, on the lane's thread and stream. What the graph of `padded` reads is not in `arrays`."""
        tensors = upload(arrays, self._device)
        self._enter(sampling, tensors)
        if not batch.num_rows:
            return Outcome(None)
        if batch.changes_table:
            self._state.enter_blocks(tensors["table_places"], tensors["table_block_ids"])
        places, last = step_places(batch, tensors), self._last_rows(batch, tensors)
        if padded is None:
            hidden = self._model.forward(
                self._inputs(batch, tensors, places),
                attention_batch(batch, tensors, self._state),
                self._caches,
                last=last,
                on_layer=None if layers is None else layers.record,
            )
        else:
            padded.send()
            self._fed_back(padded.token_ids, places)
            hidden = padded.run(last)
        return self._read_out(hidden, batch, places, sampling, num_top, tensors)

    def _last_rows(self, batch: BatchLayout, tensors: Mapping[str, torch.Tensor]) -> LastRows | None:
        """Which rows the model has to bring behind its last layer; None: all."""
        return last_rows(batch, tensors, self._state)

    def _inputs(self, batch: BatchLayout, tensors: Mapping[str, torch.Tensor], places: StepPlaces) -> torch.Tensor:
        """What the model reads: the step's token ids."""
        return self._fed_back(tensors["token_ids"], places)

    def _read_out(
        self,
        hidden: torch.Tensor,
        batch: BatchLayout,
        places: StepPlaces,
        sampling: SamplingLayout,
        num_top: tuple[int, ...],
        tensors: Mapping[str, torch.Tensor],
    ) -> Outcome:
        """From what the model made of the step's tokens, or of its last rows alone, to new tokens."""
        prompts = self._prompt_logprobs(hidden, batch, num_top, tensors)
        if places.sample_slots is None:
            return Outcome(None, prompts)
        if batch.prompt_rows and places.sample_places is not None:  # else they alone are there
            hidden = hidden.index_select(0, places.sample_places)
        return Outcome(self._sample(self._model.logits(hidden), sampling, tensors), prompts)

    def _sample(self, logits: torch.Tensor, sampling: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> Sampled:
        sampled = self._draw(logits, sampling, tensors)
        self._state.last_token_ids.index_copy_(0, tensors["sample_slots"], sampled.token_ids)
        return sampled

    def _enter(self, sampling: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> None:
        self._sampler.enter(sampling, tensors)

    def _draw(self, logits: torch.Tensor, sampling: SamplingLayout, tensors: Mapping[str, torch.Tensor]) -> Sampled:
        return self._sampler.run(logits, sampling, tensors)

    def _fed_back(self, token_ids: torch.Tensor, places: StepPlaces) -> torch.Tensor:
        """The step's tokens with those that were sampled here filled in, in place."""
        if places.feedback_slots is None:
            return token_ids
        assert places.feedback_places is not None
        fed_back = self._state.last_token_ids.index_select(0, places.feedback_slots)
        return token_ids.index_copy_(0, places.feedback_places, fed_back)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: BatchLayout, num_top: tuple[int, ...], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Logprobs, ...]:
        found, first = [], 0
        for prompt, wanted in zip(batch.prompt_rows, num_top, strict=True):
            count = len(prompt.targets)
            targets = tensors["prompt_targets"][first : first + count]
            rows = hidden[prompt.first_token : prompt.first_token + count]
            found.append(
                logprobs_in_chunks(
                    rows, targets, wanted, head=self._model.logits, vocab_size=self._model.shape.vocab_size
                )
            )
            first += count
        return tuple(found)


class _LayerEvents:
    """An event for each layer of a step, recorded when its cache has been written."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def record(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self.events.append(event)


def _sampled_result(sampled: Sampled | None, rows: np.ndarray, sampling: SamplingLayout) -> StepResult:
    """From tensors on the host; `rows` are the plan's rows that sample."""
    result = StepResult([])
    if sampled is not None:
        result.token_ids = sampled.token_ids.tolist()
        if sampled.logprobs is not None:
            entries = sampled.logprobs.entries(list(sampling.num_top))
            result.logprobs = dict(zip(rows[list(sampling.logprob_rows)].tolist(), entries, strict=True))
    return result
