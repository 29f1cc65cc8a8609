"""Steps of decodes alone, padded to a few sizes so that each can be captured as one CUDA graph, draw included.

Everything a step reads lies at a fixed place: records of the rows and what their draws need arrive in one copy, the
block table and the last tokens stay on the device. Knows slots and sizes, no requests; runs on CPU as well (tests).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manta.kernels import runtime
from manta.kernels.attention_shared_prefix import SharedPrefix
from manta.kernels.sampling import BySlot, argmax, sample
from manta.kernels.step_inputs import DecodeInputs, DecodeRecords, prepare_decode

from .batch import SharedBlocks, SlotState
from .layers.attention import AttentionBatch, DecodeRows, LayerCache, PrefillRows
from .models.decoder import Decoder
from .sampler import SamplingLayout
from .upload import FixedUpload


class Draw(enum.Enum):
    """What stands at the end of a step, each a graph of its own."""

    LOGITS = "logits"
    """Nothing: penalties, biases or log-probabilities are wanted, which run after the graph."""
    GREEDY = "greedy"
    PLAIN = "plain"
    FILTERED = "filtered"

    @staticmethod
    def of(sampling: SamplingLayout) -> Draw:
        if sampling.adjusts or sampling.logprob_rows:
            return Draw.LOGITS
        if sampling.all_greedy:
            return Draw.GREEDY
        return Draw.FILTERED if sampling.need_filter else Draw.PLAIN


@dataclass(frozen=True)
class StepKind:
    """What distinguishes graphs of one size."""

    draw: Draw
    shares_prefix: bool = False


@dataclass(frozen=True)
class DecodeOutputs:
    """At a fixed place on the device: the next step of any size may overwrite them."""

    logits: torch.Tensor | None = None  # [padded rows, vocab], with Draw.LOGITS; [padded rows, 0] where others draw
    token_ids: torch.Tensor | None = None  # [padded rows] int64, with the others


@dataclass(frozen=True)
class StepShare:
    """What a rank does of a step's end where several ranks hold the layers."""

    draws: bool
    """Whether tokens are drawn here."""
    tell: Callable[[torch.Tensor], None]
    """Replaces token ids [rows] by those of the rank that draws; called by all."""


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that steps are padded to: close together where rows cost compute, up to `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeBuffers:
    """What steps of one padded size read."""

    def __init__(self, num_rows: int, *, no_slot: int, device: torch.device) -> None:
        """`no_slot` is the slot of padding rows."""
        self.num_rows = num_rows
        self._no_slot = no_slot
        layout: dict[str, tuple[type[np.generic], int]] = dict.fromkeys(
            ("slots", "positions", "known_ids", "new_blocks", "top_k", "members"), (np.int32, num_rows)
        )
        layout |= dict.fromkeys(("temperature", "top_p", "min_p"), (np.float32, num_rows))
        layout |= {"seeds": (np.int64, num_rows), "num_shared_tokens": (np.int32, 1), "shared_row": (np.int32, 1)}
        self.upload = FixedUpload(layout, device)
        self.inputs = DecodeInputs.allocate(num_rows, device)
        self.query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def fill_draws(self, arrays: dict[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
        """What the rows' draws need; padding rows take the largest logit."""
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            values = wanted[name]
            arrays[name][: len(values)] = values
            arrays[name][len(values) :] = 0

    def fill_shared(self, arrays: dict[str, np.ndarray], shared: SharedBlocks, *, block_size: int) -> None:
        """Which rows share their first blocks."""
        arrays["members"].fill(0)
        arrays["members"][: len(shared.members)] = shared.members
        arrays["num_shared_tokens"][0] = shared.num_blocks * block_size
        arrays["shared_row"][0] = shared.slot

    def clear(self) -> None:
        """Nothing but padding on the device, for a run that only compiles and allocates."""
        for tensor in self.upload.tensors.values():
            tensor.zero_()
        self.upload.tensors["slots"].fill_(self._no_slot)
        for name in ("positions", "known_ids", "new_blocks"):
            self.upload.tensors[name].fill_(-1)


class DecodeStep:
    """The computation of one padded size and kind: `run` reads its buffers and leaves its outputs in place."""

    def __init__(
        self,
        kind: StepKind,
        buffers: DecodeBuffers,
        *,
        model: Decoder,
        caches: Sequence[LayerCache],
        state: SlotState,
        block_size: int,
        decodes_as_prefills: bool,
        logits: torch.Tensor | None = None,
        share: StepShare | None = None,
    ) -> None:
        """`logits` [at least the padded rows, vocab]: where Draw.LOGITS leaves them, one place for graphs of all sizes.
        What a graph returned would stay alive with it. `share`: this rank's of the end (None: all)."""
        self._logits = logits
        self._share = share
        self._kind = kind
        self._buffers = buffers
        self._model = model
        self._caches = caches
        self._state = state
        self._block_size = block_size
        # A query without keys is no prefill: padding rows attend to whatever stands first in their slot's block.
        self._prefill_lens = torch.ones_like(buffers.inputs.seq_lens) if decodes_as_prefills else None
        self._batch = self._attention_batch()

    def run(self) -> DecodeOutputs:
        """Only work on the device: no copy to the host, no wait, the same kernels whatever the buffers hold."""
        tensors, inputs = self._buffers.upload.tensors, self._buffers.inputs
        records = DecodeRecords(*(tensors[name] for name in ("slots", "positions", "known_ids", "new_blocks")))
        state = self._state
        prepare_decode(records, state.last_token_ids, state.block_table, inputs, block_size=self._block_size)
        if self._prefill_lens is not None:
            torch.clamp_min(inputs.seq_lens, 1, out=self._prefill_lens)
        hidden = self._model.forward(inputs.token_ids, self._batch, self._caches)
        logits = self._model.logits(hidden)
        draws = self._share is None or self._share.draws
        if self._kind.draw is Draw.LOGITS:
            if not draws:
                return DecodeOutputs(logits=logits.new_empty(len(logits), 0))
            assert self._logits is not None
            return DecodeOutputs(logits=self._logits[: len(logits)].copy_(logits))
        if self._kind.draw is Draw.GREEDY and self._share is None:
            return DecodeOutputs(token_ids=argmax(logits, BySlot(inputs.slots, state.last_token_ids)))
        token_ids = self._draw(logits) if draws else torch.empty_like(inputs.token_ids)
        if self._share is not None:
            self._share.tell(token_ids)
        state.last_token_ids.index_copy_(0, inputs.slots, token_ids)
        return DecodeOutputs(token_ids=token_ids)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """[padded rows] int64."""
        if self._kind.draw is Draw.GREEDY:
            return argmax(logits)
        tensors = self._buffers.upload.tensors
        return sample(
            logits,
            tensors["temperature"],
            tensors["top_k"],
            tensors["top_p"],
            tensors["min_p"],
            tensors["seeds"],
            self._buffers.inputs.positions + 1,
            all_greedy=False,
            need_filter=self._kind.draw is Draw.FILTERED,
        )

    def _attention_batch(self) -> AttentionBatch:
        buffers, inputs = self._buffers, self._buffers.inputs
        tensors, table = buffers.upload.tensors, self._state.block_table
        longest = table.shape[1] * self._block_size
        decode = prefill = None
        if self._prefill_lens is not None:
            prefill = PrefillRows(table, tensors["slots"], self._prefill_lens, buffers.query_start, 1, longest)
        else:
            prefix = None
            if self._kind.shares_prefix:
                prefix = SharedPrefix(tensors["num_shared_tokens"], tensors["shared_row"], tensors["members"])
            cache = self._caches[0]
            turns = prefix is None and cache.scales is None and runtime.use_triton(cache.keys)
            slots = tensors["slots"]
            decode = DecodeRows(buffers.num_rows, table, slots, inputs.seq_lens, longest, prefix, turns)
        return AttentionBatch(inputs.positions, inputs.slot_mapping, decode, prefill)
