"""Numbers about an engine's load and progress, small enough to send with every frame. Torch-free."""

from __future__ import annotations

import msgspec

from .kv_transfer.messages import KvPeer
from .step_costs import StepCosts


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
    """Load and progress of one engine at one moment. Counters only rise."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that a request holds; cached blocks that nobody holds count as free."""
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of all requests that were admitted (recomputation after preemption not counted again)."""
    num_cached_tokens: int = 0
    """Of those, tokens found in the prefix cache."""
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    last_step_s: float = 0.0
    """Duration of the last step, launch to result, seconds."""
    num_prefill_tokens: int = 0
    """Prompt tokens that running requests still have to compute, and all tokens of those that wait."""
    num_context_tokens: int = 0
    """KV-cache tokens that the running decodes read in a step."""
    num_kv_leases: int = 0
    """Sets of blocks that are reserved for KV from another replica, or held until it was sent to one."""
    num_kv_sent: int = 0
    """Requests whose KV was sent to another replica."""
    num_kv_received: int = 0
    """Requests whose KV came from another replica and was used."""
    num_kv_recomputed: int = 0
    """Requests whose KV should have come and did not, or too late, and was computed here."""
    num_kv_bytes: int = 0
    """Bytes of KV that came from other replicas."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    def to_numbers(self) -> dict[str, float]:
        """Plain numbers, for carriers that take nothing else."""
        return {name: float(getattr(self, name)) for name in self.__struct_fields__}

    @classmethod
    def from_numbers(cls, numbers: dict[str, float]) -> Snapshot:
        """Inverse of `to_numbers`; unknown names are ignored."""
        return msgspec.convert(numbers, cls, strict=False)


class StepStats(msgspec.Struct, kw_only=True, frozen=True):
    """One step, for logs, metrics and benches. Times in seconds."""

    step_id: int
    num_prefill_tokens: int
    num_decode_seqs: int
    num_context_tokens: int
    """KV-cache tokens that attention reads."""
    num_prefill_pairs: int = 0
    """Query-key pairs of the prefills' attention."""
    schedule_s: float
    launch_s: float
    wait_s: float
    """Time the host waited for the device: 0 means that the host is the bottleneck."""
    update_s: float
    device_s: float = 0.0
    """The step's time on the device; 0 where that is not measured."""
    device_idle_s: float = 0.0
    """Time the device had nothing to do before the step: host time that nothing hid."""


class EngineInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What an edge must know about a replica's engine before it sends work."""

    model_name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_waiting: int
    device: str
    dtype: str
    max_num_batched_tokens: int = 512
    """Tokens that a step computes at most."""
    max_mixed_prefill_tokens: int | None = None
    """Of a step with decodes, at most so many are prompt tokens; None: as many as fit."""
    tpot_target_s: float | None = None
    """What steps with decodes are held under, seconds; None: they take as many prompt tokens as fit."""
    step_costs: StepCosts | None = None
    """How long steps take; None where that must be learned from them first."""
    memory_ledger_bytes: dict[str, int] = {}
    """Start-up's memory ledger: weights, kv_cache, workspace and so on."""
    startup_s: dict[str, float] = {}
    """Seconds each phase of start-up took, in order."""
    hash_domain: str | None = None
    """Domain of the block hashes by which it finds cached prefixes; None: it caches none."""
    notes: list[str] = []
    """Sentences for the operator: why there are that many blocks, and what start-up changed of the configuration."""
    kv: KvPeer | None = None
    """Where KV of requests that were prefilled elsewhere is taken; None: it neither comes nor goes."""
