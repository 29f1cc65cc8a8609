"""A replica's load in seconds, and how it is packed into numbers that are computed with in columns. Only data."""

from __future__ import annotations

import struct
from typing import NamedTuple


class Pace(NamedTuple):
    """What a replica's load means in seconds, corrected by what was observed: derived from load and costs."""

    queue_s: float
    """From a request's arrival until the replica turns to its prompt, as far as other prompts delay it."""
    slot_s: float
    """Until the request gets a slot; 0 while one is free."""
    has_prompts_waiting: bool
    """Whether more prompt tokens are ahead than the next step takes."""
    chunk: int
    """Prompt tokens that a step takes beside the decodes."""
    chunk_s: float
    """A step with so many, without the attention of their prompt."""
    step_s: float
    """A step of the decodes that run now, or of one."""
    fixed_s: float
    """Of a step with the decodes that run now, before its tokens are counted."""
    decode_step_s: float
    """A step of the replica's requests once all of them decode, and of one more."""
    num_decodes: int
    """That run now."""
    free_blocks: int
    """What is left once all known requests have theirs; below 0 when they do not fit at once."""
    block_s: float
    """Seconds until one block more is released."""
    weights_s: float
    token_s: float
    pair_s: float
    context_token_s: float


MORE_COLUMNS = (
    *("block_size", "num_requests", "num_own", "num_begun", "max_num_seqs", "ready_at_s", "learned_at_s"),
    *("kv_bytes_per_token", "transfer_bytes_s", "knows_costs", "is_prefill"),
    "max_requests",
)
"""What is packed beside a pace. `transfer_bytes_s` is 0 where none is known."""
NUM_COLUMNS = len(Pace._fields) + len(MORE_COLUMNS)
pack_columns = struct.Struct(f"{NUM_COLUMNS}d").pack
