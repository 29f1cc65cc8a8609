"""From a step's plan to arrays and back to the tensors of a forward pass. Knows slots, tokens and blocks, no sampling.

State of a slot lasts over steps: on the host the token ids that the plan's sender gave and a copy of the block table;
on the device the block table and the token that was sampled last. Steps send only what changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .layers.attention import AttentionBatch, DecodeRows, LastRows, PrefillRows
from .plan import NewSequence, Row, StepPlan

NOTHING = -1
"""In arrays of int32: padding, no block, a token that the host does not know."""

_TABLE_MULTIPLE = 16
"""Columns of block tables come in multiples of this, so that kernels see strides of one kind."""


@dataclass(frozen=True)
class SlotState:
    """What the device keeps for each slot. The last slot is nobody's: padding rows use it."""

    block_table: torch.Tensor  # [max_num_seqs + 1, max_blocks] int32
    last_token_ids: torch.Tensor  # [max_num_seqs + 1] int64

    @staticmethod
    def allocate(*, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> SlotState:
        size = (max_num_seqs + 1, max_blocks_of(max_model_len, block_size))
        return SlotState(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device),
        )

    def enter_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Write `block_ids` [changes] int32 to `places` [changes] int64 of the flattened table."""
        self.block_table.view(-1).index_copy_(0, places, block_ids)


@dataclass(frozen=True)
class PromptRow:
    """Tokens of a prompt whose log-probabilities a row reports."""

    row: int
    """Index into the plan's rows."""
    first_token: int
    """Place in the step of the token that predicts the first of them."""
    targets: np.ndarray  # [targets] int64, token ids


@dataclass(frozen=True)
class BatchLayout:
    """A step as the host knows it. Sizes and places count the step's tokens; arrays have one entry a sampling row."""

    num_tokens: int
    num_decodes: int
    num_rows: int
    max_decode_len: int
    max_prefill_len: int
    max_query_len: int
    changes_table: bool
    feeds_back: bool
    """Whether some token is the one that its slot sampled last."""
    sampling_rows: np.ndarray  # int64, indices into the plan's rows
    sampling_slots: np.ndarray  # int64
    sampling_positions: np.ndarray  # int64, of the token that is sampled
    samples_all: bool
    """Whether a token is sampled after each of the step's tokens, in order."""
    prompt_rows: Sequence[PromptRow]


@dataclass(frozen=True)
class SharedBlocks:
    """Rows that start with the same blocks."""

    members: np.ndarray  # [rows] bool
    slot: int
    """One of theirs."""
    num_blocks: int


@dataclass(frozen=True)
class StepPlaces:
    """Where a step's tokens come from and where tokens are sampled, on the device."""

    feedback_places: torch.Tensor | None  # int64, places of the tokens that are fed back; None when none is
    feedback_slots: torch.Tensor | None  # int64
    sample_places: torch.Tensor | None  # int64; None when all tokens sample or none does
    sample_slots: torch.Tensor | None  # int64; None when none does


class BatchBuilder:
    """Keeps what slots hold and lays out steps. One call of `lay_out` or `lay_out_decodes` a plan, in order."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, decodes_as_prefills: bool = False
    ) -> None:
        """`decodes_as_prefills`: single queries are laid out as prefills, so that one kernel attends for all."""
        self._block_size = block_size
        self._decodes_as_prefills = decodes_as_prefills
        self._block_table = np.zeros((max_num_seqs, max_blocks_of(max_model_len, block_size)), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._token_ids: list[np.ndarray | None] = [None] * max_num_seqs
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)

    def lay_out(self, plan: StepPlan, arrays: dict[str, np.ndarray]) -> BatchLayout:
        """Bring in the plan's changes and add the step's arrays to `arrays`."""
        changes = self._update(plan)
        rows = plan.rows
        num_rows = len(rows)
        slots = np.fromiter((row.slot for row in rows), np.int64, num_rows)
        starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
        counts = np.fromiter((row.num_tokens for row in rows), np.int64, num_rows)
        is_decode = np.fromiter((row.is_decode for row in rows), np.bool_, num_rows)
        samples = np.fromiter((row.samples for row in rows), np.bool_, num_rows)
        num_decodes = int(is_decode.sum())
        assert is_decode[:num_decodes].all(), "decodes come first"
        assert (counts[:num_decodes] == 1).all(), "a decode has one token"
        if self._decodes_as_prefills:
            num_decodes = 0
        ends = starts + counts
        firsts = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=firsts[1:])
        num_tokens = int(firsts[-1])

        row_of_token = np.repeat(np.arange(num_rows), counts)
        positions = np.arange(num_tokens) - (firsts[:-1] - starts)[row_of_token]
        block_index, offset = np.divmod(positions, self._block_size)
        blocks = self._block_table[slots[row_of_token], block_index]
        arrays["table_places"], arrays["table_block_ids"] = self._table_changes(changes)
        arrays["positions"] = positions
        arrays["slot_mapping"] = blocks.astype(np.int64) * self._block_size + offset
        arrays["table_rows"] = slots.astype(np.int32)
        arrays["decode_lens"], arrays["prefill_lens"] = np.split(ends.astype(np.int32), [num_decodes])
        arrays["query_start"] = (firsts[num_decodes:] - firsts[num_decodes]).astype(np.int32)

        fed_back = self._add_tokens(plan, firsts, arrays)
        arrays["feedback_places"], arrays["feedback_slots"] = firsts[:-1][fed_back], slots[fed_back]
        sampling = samples.nonzero()[0]
        samples_all = len(sampling) == num_tokens
        arrays["sample_places"], arrays["sample_slots"] = firsts[1:][sampling] - 1, slots[sampling]
        arrays["last_rows"], arrays["last_lens"] = slots[sampling].astype(np.int32), ends[sampling].astype(np.int32)
        if self._decodes_as_prefills:
            arrays["last_start"] = np.arange(len(sampling) + 1, dtype=np.int32)
        return BatchLayout(
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            num_rows=num_rows,
            max_decode_len=int(ends[:num_decodes].max(initial=0)),
            max_prefill_len=int(ends[num_decodes:].max(initial=0)),
            max_query_len=int(counts[num_decodes:].max(initial=0)),
            changes_table=bool(changes),
            feeds_back=bool(len(fed_back)),
            sampling_rows=sampling,
            sampling_slots=slots[sampling],
            sampling_positions=ends[sampling],
            samples_all=samples_all,
            prompt_rows=self._prompt_rows(rows, firsts),
        )

    def lay_out_decodes(self, plan: StepPlan, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Lay out a plan of decodes in place, as records of kernels/step_inputs.py.

        `arrays` holds slots, positions, known_ids and new_blocks, [padded rows] int32 each. Returns the rows' slots and
        the positions of the tokens that are sampled, [rows] int64.
        """
        rows, num_rows = plan.rows, len(plan.rows)
        slots = np.fromiter((row.slot for row in rows), np.int64, num_rows)
        starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
        arrays["slots"][:num_rows], arrays["slots"][num_rows:] = slots, len(self._block_table)
        arrays["positions"][:num_rows], arrays["positions"][num_rows:] = starts, NOTHING
        known_ids, new_blocks = arrays["known_ids"], arrays["new_blocks"]
        known_ids.fill(NOTHING)
        new_blocks.fill(NOTHING)
        assert not plan.new, "sequences enter with a prefill"
        self._free(plan)
        for index, row in enumerate(rows):
            if row.new_block_ids:
                (new_blocks[index],) = row.new_block_ids
                self._append_blocks(row.slot, row.new_block_ids)
        for index in (starts < self._num_known[slots]).nonzero()[0].tolist():
            token_ids = self._token_ids[rows[index].slot]
            assert token_ids is not None, f"slot {rows[index].slot} is free"
            known_ids[index] = token_ids[rows[index].start]
        return slots, starts + 1

    def shared_blocks(self, slots: np.ndarray) -> SharedBlocks | None:
        """The largest group of `slots` that start with the same block, and how many blocks all of it shares."""
        firsts, counts = np.unique(self._block_table[slots, 0], return_counts=True)
        if counts.max() < 2:
            return None
        members = self._block_table[slots, 0] == firsts[counts.argmax()]
        shortest = int(self._num_blocks[slots[members]].min())
        tables = self._block_table[slots[members], :shortest]
        is_same = (tables == tables[0]).all(axis=0)
        num_blocks = shortest if is_same.all() else int(is_same.argmin())
        return SharedBlocks(members, int(slots[members][0]), num_blocks)

    def _free(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self._token_ids[slot] = None

    def _update(self, plan: StepPlan) -> list[tuple[int, int, list[int]]]:
        """Bring in the plan's changes. Returns what changes in the table: slot, first index, block ids."""
        self._free(plan)
        changes = [self._enter(new) for new in plan.new]
        changes += [self._append_blocks(row.slot, row.new_block_ids) for row in plan.rows if row.new_block_ids]
        return changes

    def _enter(self, new: NewSequence) -> tuple[int, int, list[int]]:
        assert self._token_ids[new.slot] is None, f"slot {new.slot} is taken"
        self._token_ids[new.slot] = np.asarray(new.token_ids, dtype=np.int64)
        self._num_known[new.slot] = len(new.token_ids)
        self._num_prompt_tokens[new.slot] = new.num_prompt_tokens
        self._num_blocks[new.slot] = 0
        return self._append_blocks(new.slot, new.block_ids)

    def _append_blocks(self, slot: int, block_ids: list[int]) -> tuple[int, int, list[int]]:
        first = int(self._num_blocks[slot])
        self._block_table[slot, first : first + len(block_ids)] = block_ids
        self._num_blocks[slot] = first + len(block_ids)
        return slot, first, block_ids

    def _table_changes(self, changes: list[tuple[int, int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        """Places in the flattened table, int64, and the block ids that go there, int32."""
        width = self._block_table.shape[1]
        places = [np.arange(slot * width + first, slot * width + first + len(ids)) for slot, first, ids in changes]
        block_ids = [block_id for _, _, ids in changes for block_id in ids]
        return np.concatenate([np.zeros(0, np.int64), *places]), np.asarray(block_ids, dtype=np.int32)

    def _add_tokens(self, plan: StepPlan, firsts: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The known token ids, and the indices of rows whose only token was sampled here."""
        token_ids = np.zeros(firsts[-1], dtype=np.int64)
        fed_back = []
        decode_token_ids = plan.decode_token_ids
        for index, row in enumerate(plan.rows):
            known = self._token_ids[row.slot]
            assert known is not None, f"slot {row.slot} is free"
            if row.start >= len(known):
                assert row.num_tokens == 1, "at most one token is not known here"
                if decode_token_ids:  # decodes come first
                    token_ids[firsts[index]] = decode_token_ids[index]
                else:
                    fed_back.append(index)
            else:
                token_ids[firsts[index] : firsts[index + 1]] = known[row.start : row.start + row.num_tokens]
        arrays["token_ids"] = token_ids
        return np.asarray(fed_back, dtype=np.int64)

    def _prompt_rows(self, rows: list[Row], firsts: np.ndarray) -> list[PromptRow]:
        found = []
        for index, row in enumerate(rows):
            known = self._token_ids[row.slot]
            if row.prompt_logprobs_start is None or known is None:
                continue
            end = min(row.start + row.num_tokens + 1, int(self._num_prompt_tokens[row.slot]))
            if end > row.start + 1:
                found.append(PromptRow(index, int(firsts[index]), known[row.start + 1 : end]))
        return found


def attention_batch(layout: BatchLayout, tensors: Mapping[str, torch.Tensor], state: SlotState) -> AttentionBatch:
    """The tensors of the arrays that `BatchBuilder.lay_out` added, put together for the model."""
    n, table, table_rows = layout.num_decodes, state.block_table, tensors["table_rows"]
    decode = DecodeRows(n, table, table_rows[:n], tensors["decode_lens"], layout.max_decode_len) if n else None
    prefill = None
    if n < layout.num_rows:
        prefill = PrefillRows(
            table,
            table_rows[n:],
            tensors["prefill_lens"],
            tensors["query_start"],
            layout.max_query_len,
            layout.max_prefill_len,
        )
    return AttentionBatch(tensors["positions"], tensors["slot_mapping"], decode, prefill)


def last_rows(layout: BatchLayout, tensors: Mapping[str, torch.Tensor], state: SlotState) -> LastRows | None:
    """The same for the rows that sample, where no other is read behind the last layer; None: all of them are."""
    if layout.samples_all or layout.prompt_rows:
        return None
    rows, lens, longest = tensors["last_rows"], tensors["last_lens"], int(layout.sampling_positions.max(initial=0))
    decode = prefill = None
    if "last_start" in tensors:
        prefill = PrefillRows(state.block_table, rows, lens, tensors["last_start"], 1, longest)
    else:
        decode = DecodeRows(len(rows), state.block_table, rows, lens, longest)
    return LastRows(tensors["sample_places"], decode, prefill)


def step_places(layout: BatchLayout, tensors: Mapping[str, torch.Tensor]) -> StepPlaces:
    """The same for what stands before and behind the model."""
    samples = len(layout.sampling_rows) > 0
    return StepPlaces(
        feedback_places=tensors["feedback_places"] if layout.feeds_back else None,
        feedback_slots=tensors["feedback_slots"] if layout.feeds_back else None,
        sample_places=tensors["sample_places"] if samples and not layout.samples_all else None,
        sample_slots=tensors["sample_slots"] if samples else None,
    )


def max_blocks_of(max_model_len: int, block_size: int) -> int:
    """Columns of the block table. The step that runs ahead may touch one block more than the longest sequence has."""
    return _round_up(-(-max_model_len // block_size) + 1, _TABLE_MULTIPLE)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
