"""Keeps the forward pass of small steps with prefills as CUDA graphs, padded to a few numbers of tokens.

A short prompt computes for less time than the host takes to launch its kernels one by one. One graph of a size serves
any mix of decodes and prefills that fits: decodes come first, as in a plan, and lie in a sequence without keys for the
prefill kernel, which skips it, while rows behind them have no keys for the decode kernel. Another one serves steps
without decodes: that kernel takes time even where it finds nothing. A graph ends with the last layer's
queries: what follows concerns only the rows that sample, and runs after it like the draw. Knows slots and sizes, no
requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .batch import BatchLayout, SlotState
from .cuda_graphs import GraphCapture
from .layers.attention import AttentionBatch, DecodeRows, LastRows, LayerCache, PrefillRows
from .models.decoder import Decoder
from .upload import FixedUpload

MAX_TOKENS = 2048
"""Larger steps compute for longer than they take to launch."""
MAX_PREFILLS = 32
"""Sequences with more than one token; steps with more of them are rare where tokens are so few."""

_MOVED = ("token_ids", "positions", "slot_mapping", "table_rows", "decode_lens", "prefill_lens", "query_start")


def padded_tokens(max_num_tokens: int) -> list[int]:
    """Numbers of tokens that steps are padded to: close together where tokens cost compute."""
    sizes = [16, 32, *range(64, 1024, 64), *range(1024, MAX_TOKENS + 1, 128)]
    most = min(max_num_tokens, MAX_TOKENS)
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class PaddedStep:
    """A step whose arrays wait on the host. `send` and `run` belong to the thread and stream that run steps."""

    token_ids: torch.Tensor  # [padded tokens] int64, once sent
    num_tokens: int
    send: Callable[[], None]
    begin: Callable[[], None]
    finish: Callable[[LastRows | None], torch.Tensor]

    def run(self, last: LastRows | None) -> torch.Tensor:
        """The residual stream behind the last layer, until the next step runs: of the `last` rows [rows, hidden], or of
        all [tokens, hidden]."""
        self.begin()
        return self.finish(last)[: self.num_tokens]


class PrefillGraphs:
    """`take` is called by the runner's one thread, what `preparations` does runs on the lane's stream."""

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[LayerCache],
        state: SlotState,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        block_size: int,
        capture: GraphCapture | None,
        device: torch.device,
        decodes_as_prefills: bool = False,
    ) -> None:
        """Without `capture` steps run kernel by kernel, padded all the same (on CPU: tests). `decodes_as_prefills`: as
        plans are laid out, so that no step has decodes."""
        self._model = model
        self._caches = caches
        self._table = state.block_table
        self._longest = state.block_table.shape[1] * block_size
        self._capture = capture
        self._sizes = padded_tokens(max_num_tokens)
        self._num_decodes = min(self._sizes[-1], max_num_seqs)
        most = self._sizes[-1]
        layout: dict[str, tuple[type[np.generic], int]] = dict.fromkeys(
            ("token_ids", "positions", "slot_mapping"), (np.int64, most)
        )
        layout |= dict.fromkeys(("decode_lens", "decode_rows"), (np.int32, self._num_decodes))
        layout |= dict.fromkeys(("prefill_lens", "prefill_rows"), (np.int32, MAX_PREFILLS + 1))
        layout |= {"query_start": (np.int32, MAX_PREFILLS + 2)}
        self._upload = FixedUpload(layout, device)
        # One place for all graphs: what each returned would stay alive with it.
        self._residual = torch.empty((most, model.shape.hidden_size), dtype=model.dtype, device=device)
        heads = len(model.layout.heads), model.shape.head_dim
        self._queries = torch.empty((most, *heads), dtype=model.dtype, device=device)
        if device.type == "cuda":  # they were filled on this thread's stream, steps run on the lane's
            torch.cuda.current_stream(device).synchronize()
        self._kinds = (False,) if decodes_as_prefills else (False, True)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        """By padded size, and whether there are decodes."""

    def take(self, batch: BatchLayout, arrays: dict[str, np.ndarray]) -> PaddedStep | None:
        """Move what the model reads from a step's `arrays` to where a graph finds it. None: no graph takes the step,
        either for its size or because it is not captured yet."""
        num_prefills = batch.num_rows - batch.num_decodes
        if not 0 < num_prefills <= MAX_PREFILLS or batch.num_tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, batch.num_tokens)]
        has_decodes = batch.num_decodes > 0
        begin = self._graphs.get((size, has_decodes))
        if self._capture is None:
            begin = self._begin_of(size, has_decodes)
        if begin is None:
            return None
        places = self._upload.next_arrays()
        stage = self._upload.stage
        _fill(places, batch, {name: arrays.pop(name) for name in _MOVED})
        token_ids = self._upload.tensors["token_ids"][:size]
        return PaddedStep(
            token_ids,
            batch.num_tokens,
            lambda: self._upload.send(stage),
            begin,
            lambda last: self._finish(size, has_decodes, last),
        )

    def preparations(self) -> Iterator[None]:
        """Captures one more graph each time it is asked, the largest first: the others fit into its memory."""
        assert self._capture is not None
        for has_decodes in self._kinds:
            for size in reversed(self._sizes):
                self._clear()
                self._graphs[size, has_decodes] = self._capture.capture(self._begin_of(size, has_decodes)).replay
                yield

    def run_largest(self) -> None:
        """The largest step with nothing but padding, kernel by kernel: what memory that takes can be measured."""
        self._clear()
        for has_decodes in self._kinds:
            self._begin_of(self._sizes[-1], has_decodes)()
            self._finish(self._sizes[-1], has_decodes, None)

    def _begin_of(self, size: int, has_decodes: bool) -> Callable[[], None]:
        batch, token_ids = self._batch_of(size, has_decodes), self._upload.tensors["token_ids"][:size]

        def begin() -> None:
            residual, q = self._model.begin(token_ids, batch, self._caches)
            self._residual[:size].copy_(residual)
            self._queries[:size].copy_(q)

        return begin

    def _finish(self, size: int, has_decodes: bool, last: LastRows | None) -> torch.Tensor:
        residual, q = self._residual[:size], self._queries[:size]
        return self._model.finish(residual, q, self._batch_of(size, has_decodes), self._caches[-1], last=last)

    def _batch_of(self, size: int, has_decodes: bool) -> AttentionBatch:
        tensors = self._upload.tensors
        table, longest = self._table, self._longest
        decode = None
        if has_decodes:
            count = min(size, self._num_decodes)
            decode = DecodeRows(count, table, tensors["decode_rows"][:count], tensors["decode_lens"][:count], longest)
        return AttentionBatch(
            tensors["positions"][:size],
            tensors["slot_mapping"][:size],
            decode,
            PrefillRows(
                table,
                tensors["prefill_rows"],
                tensors["prefill_lens"],
                tensors["query_start"],
                max_query_len=min(size, longest),
                max_seq_len=longest,
                first_token=0,
            ),
        )

    def _clear(self) -> None:
        """Nothing but padding on the device, for a run that only compiles and allocates."""
        for tensor in self._upload.tensors.values():
            tensor.zero_()
        self._upload.tensors["slot_mapping"].fill_(-1)


def _fill(places: dict[str, np.ndarray], batch: BatchLayout, arrays: dict[str, np.ndarray]) -> None:
    num_tokens, num_decodes, num_rows = batch.num_tokens, batch.num_decodes, batch.num_rows
    for name, padding in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
        places[name][:num_tokens] = arrays[name]
        places[name][num_tokens:] = padding
    places["decode_lens"].fill(0)
    places["decode_lens"][:num_decodes] = arrays["decode_lens"]
    places["decode_rows"][:num_decodes] = arrays["table_rows"][:num_decodes]
    # Sequence 0 has the decodes' tokens and no keys; behind the last one there are more without tokens.
    last = num_rows - num_decodes + 1
    places["prefill_lens"].fill(0)
    places["prefill_lens"][1:last] = arrays["prefill_lens"]
    places["prefill_rows"].fill(0)
    places["prefill_rows"][1:last] = arrays["table_rows"][num_decodes:]
    places["query_start"].fill(num_tokens)
    places["query_start"][0] = 0
    places["query_start"][1 : last + 1] = num_decodes + arrays["query_start"]
