"""Simulated requests: lengths, arrival and block hashes instead of texts; what became of each. Knows no trace files.

Token ids are all 0, since only their number counts; which prompts share a prefix is said by the hashes of their blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from typing import Any

from manta.engine.prefix_cache import HASH_SIZE, BlockHasher
from manta.engine.request import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a simulation. Lengths in tokens."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Exactly so many are generated, at least one."""
    block_hashes: tuple[bytes, ...] = ()
    """Of the prompt's full blocks, each of which stands for all that comes before it too."""
    expected_output_tokens: int | None = None
    """What a router may know about the answer's length; None: nothing."""
    deadline_s: float | None = None
    """Seconds from its arrival in which its first token must come, else it is refused; None: it waits for room."""

    def engine_request(self, *, max_tokens: int | None = None, num_known_tokens: int = 0) -> EngineRequest:
        """As an engine gets it; `max_tokens` instead of the whole answer, where only its beginning is wanted, and after
        the `num_known_tokens` first ones, which another engine has generated."""
        num_tokens = self.num_output_tokens if max_tokens is None else max_tokens
        return EngineRequest(
            request_id=self.request_id,
            prompt_token_ids=Zeros(self.num_prompt_tokens),
            output_token_ids=[0] * num_known_tokens,
            params=sampling(num_tokens),
            block_hashes=list(self.block_hashes),
        )


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times in seconds on the simulation's clock; None: that did not happen."""

    request: SimRequest
    replica_id: str | None = None
    """Where it decodes, or decoded."""
    prefill_replica_id: str | None = None
    """Where its prompt was computed, when that was another replica."""
    routed_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    estimated_ttft_s: float | None = None
    """What the router expected, from its decision on."""
    refused: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for answers of one token and unfinished ones."""
        if self.finished_s is None or self.first_token_s is None or self.request.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.request.num_output_tokens - 1)


class Zeros(list[int]):
    """A list of so many zeros, of which only the length takes room: what a scheduler does with token ids, it can."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0, self._length)

    def __getitem__(self, index: Any) -> Any:
        within = range(self._length)[index]
        return Zeros(len(within)) if isinstance(within, range) else 0

    def __add__(self, more: Any) -> Zeros:
        return Zeros(self._length + len(more))

    def append(self, token_id: int) -> None:
        self._length += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        self._length += len(token_ids) if isinstance(token_ids, Sized) else sum(1 for _ in token_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Zeros) and other._length == self._length

    __hash__ = None  # type: ignore[assignment]


class KnownHashes(BlockHasher):
    """Takes the prompts' hashes as they come with the requests. Blocks that answers fill are nobody else's."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, domain="simulation")
        self.known: dict[str, tuple[bytes, ...]] = {}
        """Hashes by salt, for who hashes a prompt without its request."""
        self._num_own = 0

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], *, salt: str | None) -> None:
        num_blocks = len(token_ids) // self.block_size
        if salt is not None and not hashes:
            hashes.extend(self.known.get(salt, ())[:num_blocks])
        for _ in range(num_blocks - len(hashes)):
            self._num_own += 1
            hashes.append(own_hash(self._num_own))

    def begins_as(self, hashes: Sequence[bytes], token_ids: Sequence[int], *, salt: str | None) -> bool:
        return True


def shared_hash(number: int) -> bytes:
    """The hash of a block that traces know by a number: the same for all requests that name it."""
    return (number << 1).to_bytes(HASH_SIZE, "big")


def own_hash(number: int) -> bytes:
    """A hash that no `shared_hash` equals."""
    return ((number << 1) | 1).to_bytes(HASH_SIZE, "big")


@cache
def sampling(num_tokens: int) -> SamplingParams:
    """Greedy parameters for so many tokens; frozen, so that requests share them."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
