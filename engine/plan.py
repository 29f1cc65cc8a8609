"""The contract between scheduler and runner: what one step does, as plain numbers and diffs. Torch-free.

A runner keeps per-slot state (token ids, block table, sampling parameters, last sampled token), so a plan carries
only what changed since the last one. The same messages can be sent to other ranks.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from .kv_transfer.messages import KvOrder, KvRange
from .request import SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, array_like=True):
    """A sequence that enters a slot (first time, or again after preemption, with all its tokens known)."""

    slot: int
    token_ids: list[int]
    """Prompt and the outputs generated so far."""
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    """`seed` is always set."""
    eos_token_ids: list[int]
    """Ids that `min_tokens` forbids (with `params.stop_token_ids`) and that end the sequence unless `ignore_eos`."""


class Row(msgspec.Struct, array_like=True):
    """One sequence's share of a step: tokens [start, start + num_tokens) are computed.

    When `start + num_tokens` passes the last token that the plan's sender knows, the input token is the one that the
    previous step sampled for this slot, which never left the device.
    """

    slot: int
    start: int
    """Position of the first token, which is also the number of tokens whose KV is in the cache already."""
    num_tokens: int
    new_block_ids: list[int]
    """Blocks appended to the slot's block table before this step (not those in NewSequence)."""
    samples: bool
    """Whether a token is sampled after the last of these tokens."""
    is_decode: bool
    """One token, sampled by this engine in an earlier step. Decodes come first in a plan."""
    prompt_logprobs_start: int | None = None
    """When set: also report log-probabilities of the prompt tokens that these tokens predict."""


class StepPlan(msgspec.Struct, array_like=True):
    """One step. Order of use: free `freed_slots`, enter `new`, append blocks, compute `rows`."""

    step_id: int
    freed_slots: list[int]
    new: list[NewSequence]
    rows: list[Row]
    decode_token_ids: list[int] = []
    """Input tokens of the decodes, in order, where the sender knows them all; empty: each is what its slot sampled last
    on the device."""
    sends: list[KvRange] = []
    """What of the cache goes to other engines once the step has written it."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class StepResult(msgspec.Struct):
    """What a step produced. `token_ids` has one entry per row with `samples`, in row order; the others are keyed by
    index into `plan.rows`."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """For positions start+1 .. start+num_tokens of the row, as far as they are prompt tokens."""
    device_s: float = 0.0
    """The step's time on the device, seconds; 0 where that is not measured."""
    device_idle_s: float = 0.0
    """Time that the device had nothing to do before the step, since the end of the one before it, seconds."""


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for the step. Called once, in launch order."""
        ...


class Runner(Protocol):
    """Runs plans in order on a device."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once. At most two are in flight, or as many as a pipeline has stages."""
        ...

    def obey(self, order: KvOrder) -> None:
        """Give an order about KV that comes or goes to every rank, behind the steps that were launched.

        Returns at once; what comes of it is told elsewhere. Only where the engine takes part in transfers.
        """
        ...

    def prepare_more(self) -> bool:
        """Do one piece of work that makes later steps faster (for times without work; well under a second).

        False when nothing is left to prepare.
        """
        ...

    def close(self) -> None:
        """Wait for what is in flight and release the device."""
        ...
