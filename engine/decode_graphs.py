"""Keeps the padded decode steps by size and kind, captured as CUDA graphs when first needed or when there is time."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch

from .batch import SlotState
from .cuda_graphs import GraphCapture
from .decode_step import DecodeBuffers, DecodeOutputs, DecodeStep, Draw, StepKind, StepShare, padded_sizes
from .layers.attention import LayerCache
from .models.decoder import Decoder


class DecodeGraphs:
    """Called by the runner's one thread, `step_for` and `preparations` on the lane's stream or thread."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache],
        state: SlotState,
        *,
        max_num_seqs: int,
        block_size: int,
        decodes_as_prefills: bool,
        capture: GraphCapture | None,
        device: torch.device,
        share: StepShare | None = None,
    ) -> None:
        """Without `capture` steps run kernel by kernel, padded all the same (on CPU: tests). `share`: this rank's of a
        step's end, where there are others; all of them capture the same steps in the same order."""
        self._share = share
        self._model = model
        self._caches = caches
        self._state = state
        self._block_size = block_size
        self._decodes_as_prefills = decodes_as_prefills
        self._device = device
        self._sizes = padded_sizes(max_num_seqs)
        self._buffers: dict[int, DecodeBuffers] = {}
        self._steps: dict[tuple[int, StepKind], Callable[[], DecodeOutputs]] = {}
        self._capture = capture
        self._logits: torch.Tensor | None = None

    def buffers_for(self, num_rows: int) -> DecodeBuffers:
        """Those of the smallest size that holds so many rows."""
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        if size not in self._buffers:
            no_slot = self._state.last_token_ids.shape[0] - 1
            self._buffers[size] = DecodeBuffers(size, no_slot=no_slot, device=self._device)
            if self._device.type == "cuda":  # they were filled on this thread's stream, steps run on the lane's
                torch.cuda.current_stream(self._device).synchronize()
        return self._buffers[size]

    def step_for(self, buffers: DecodeBuffers, kind: StepKind) -> Callable[[], DecodeOutputs]:
        """What runs the step that `buffers` hold. Captures it at its first use, without touching any sequence."""
        key = buffers.num_rows, kind
        if key not in self._steps:
            step = DecodeStep(
                kind,
                buffers,
                model=self._model,
                caches=self._caches,
                state=self._state,
                block_size=self._block_size,
                decodes_as_prefills=self._decodes_as_prefills,
                logits=self._logits_place() if kind.draw is Draw.LOGITS else None,
                share=self._share,
            )
            self._steps[key] = step.run if self._capture is None else self._captured(self._capture, step, buffers)
        return self._steps[key]

    def preparations(self, *draws: Draw) -> Iterator[None]:
        """Captures one more graph each time it is asked, the largest first: the others fit into its memory."""
        for draw, size in itertools.product(draws, reversed(self._sizes)):
            if (size, StepKind(draw)) not in self._steps:
                self.step_for(self.buffers_for(size), StepKind(draw))
                yield

    def _logits_place(self) -> torch.Tensor:
        """Of all steps that leave logits; few deployments have any."""
        if self._logits is None:
            size = (self._sizes[-1], self._model.shape.vocab_size)
            self._logits = torch.empty(size, dtype=self._model.dtype, device=self._device)
        return self._logits

    def _captured(self, capture: GraphCapture, step: DecodeStep, buffers: DecodeBuffers) -> Callable[[], DecodeOutputs]:
        buffers.clear()
        return capture.capture(step.run).replay
