"""What a replica does in its pool. Knows nothing else."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """MIXED takes whole requests; PREFILL computes prompts and hands their KV to DECODE, which takes whole requests,
    too, where that is quicker."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def can_decode(self) -> bool:
        """Whether a request may run on the replica to its end."""
        return self is not Role.PREFILL
