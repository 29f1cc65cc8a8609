"""A replica's load in seconds, and how it is packed into numbers that are computed with in columns. Only data."""

from __future__ import annotations

import struct
from typing import NamedTuple


class Pace(NamedTuple):
    """What a replica's load means in seconds, corrected by what was observed: derived from load and costs."""

    queue_s: float
    """From a request's arrival until the replica turns to its prompt, as far as other prompts delay it."""
    noise_s: float
    """Standard error of that, as far as nobody but the replica knows how much of its step is over."""
    slot_s: float
    """Until the request gets a slot; 0 while one is free."""
    doubt_s: float
    """How much later its turn may come for that, with few exceptions."""
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


GREATEST_COLUMNS = ("is_prefill", "waits", "num_too_many", "ready_at_s", "minus_learned_at_s", "minus_chunk")
"""What a decision asks of all replicas at once, the greatest of each: whether one only computes prompts, whether it has
prompts waiting, by how many requests it would have too many with one more, when it became ready; and with turned signs
when it was heard last and the prompt tokens of its steps."""
WEIGHED_COLUMNS = ("decode_step_s", "context_token_s", "context_decodes_s", "decodes_step_s")
"""What counts in proportion to the numbers of a request: see CostTable."""
SHOWN_COLUMNS = (*WEIGHED_COLUMNS, "num_decodes", "num_requests", "noise_s")
"""What explanations need of each replica when a decision is over."""
COLUMNS = (
    *GREATEST_COLUMNS,
    *("slot_s", "doubt_s", "chunk", "chunk_s", "step_s", "token_s", "wait_s", "spare_tokens", "token_room_s"),
    *("least_step_s", "full_step_s", "half_pair_s", "kv_bytes_per_token", "transfer_bytes_s"),
    *SHOWN_COLUMNS,
)
"""What is packed: of a pace, and what follows from it. Seconds until a prompt's turn; tokens that find room at once and
seconds until one more does; a step's seconds at least, and those that its prompt tokens come on top of; what all
decodes lose to a context token, and their own steps' seconds, decode by decode; half a pair's seconds.
`transfer_bytes_s` is 0 where none is known."""
pack_columns = struct.Struct(f"{len(COLUMNS)}d").pack
