"""Grouped-query attention over the paged cache, decode rows before prefills. Knows one step's tensors, no requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from manta.kernels.attention_decode import DecodeWorkspace, NewTokens, attention_decode
from manta.kernels.attention_prefill import attention_prefill
from manta.kernels.attention_shared_prefix import SharedPrefix, attention_shared_prefix
from manta.kernels.quantized.kv_cache import CacheScales
from manta.kernels.rope import rope_and_store

from .linear import Linear
from .norm import RmsNorm


class LayerCache(NamedTuple):
    """Of one layer. Keys and values [num_blocks, block_size, kv_heads, head_dim]; `scales` with 8 bits an element."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: CacheScales | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return self.keys, self.values, *(self.scales or ())


@dataclass(frozen=True)
class DecodeRows:
    """The sequences with one query, which are the step's first tokens."""

    num_rows: int
    block_table: torch.Tensor  # [slots, max_blocks] int32
    table_rows: torch.Tensor  # [rows] int32
    seq_lens: torch.Tensor  # [rows] int32
    max_seq_len: int
    prefix: SharedPrefix | None = None
    turns: bool = False
    """Whether the kernel that attends turns queries and keys and writes the cache: where the step has no other rows and
    shares no prefix, and the cache has no scales."""


@dataclass(frozen=True)
class PrefillRows:
    """The other sequences; `query_start` counts from the step's token `first_token`, by default the one behind the
    decodes. A sequence of length 0 has tokens that are not its own, and stays out."""

    block_table: torch.Tensor  # [slots, max_blocks] int32
    table_rows: torch.Tensor  # [rows] int32
    seq_lens: torch.Tensor  # [rows] int32
    query_start: torch.Tensor  # [rows + 1] int32
    max_query_len: int
    max_seq_len: int
    first_token: int | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """What every layer's attention needs to know about a step."""

    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64, block * block_size + offset
    decode: DecodeRows | None
    prefill: PrefillRows | None


@dataclass(frozen=True)
class LastRows:
    """The tokens of a step that are wanted behind the last layer, each the last of its sequence: one query a sequence,
    as decode rows or as prefills of one token. Of the others nothing is read but that layer's keys and values."""

    places: torch.Tensor  # [rows] int64, which of the step's tokens
    decode: DecodeRows | None
    prefill: PrefillRows | None


class HeadNorms:
    """Norms of each query and key head, with weights [head_dim] that all heads share, so that ranks need no others."""

    def __init__(self, q_norm: RmsNorm, k_norm: RmsNorm) -> None:
        self.q_norm = q_norm
        self.k_norm = k_norm

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Normalize `q` [tokens, heads, head_dim] and `k` [tokens, kv_heads, head_dim] in place."""
        for x, norm in ((q, self.q_norm), (k, self.k_norm)):
            x.copy_(norm(x.reshape(-1, x.shape[-1])).view(x.shape))


class Attention:
    """`qkv` [(heads + 2 * kv_heads) * head_dim, hidden] holds q's rows, then k's, then v's."""

    def __init__(
        self,
        norm: RmsNorm,
        qkv: Linear,
        output: Linear,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_norms: HeadNorms | None = None,
        workspace: DecodeWorkspace | None = None,
        deterministic: bool = False,
    ) -> None:
        self.norm = norm
        self.head_norms = head_norms
        self.qkv = qkv
        self.output = output
        self._heads = (num_heads, num_kv_heads, num_kv_heads)
        self._shape = (-1, num_heads + 2 * num_kv_heads, head_dim)
        self._width = num_heads * head_dim
        self._scale = head_dim**-0.5
        self._workspace = workspace
        self._deterministic = deterministic

    def queries(
        self, residual: torch.Tensor, batch: AttentionBatch, cache: LayerCache, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """What the normalized `residual` [tokens, hidden] asks: [tokens, heads, head_dim], a view of a fresh tensor.

        Writes the tokens' keys and values to the cache. Where the rows' kernel `turns`, that is left to it, and keys
        and values stand behind the queries: [tokens, heads + 2 kv_heads, head_dim].
        """
        qkv = self.qkv.after_norm(residual, self.norm).view(self._shape)
        q, k, v = qkv.split(self._heads, dim=1)
        if self.head_norms is not None:
            self.head_norms(q, k)
        if batch.decode is not None and batch.decode.turns:
            return qkv
        places = cache.keys, cache.values, batch.slot_mapping, cache.scales
        rope_and_store(q, k, v, batch.positions, cos_sin, *places)
        return q

    def add_to(
        self,
        residual: torch.Tensor,
        q: torch.Tensor,
        rows: AttentionBatch | LastRows,
        cache: LayerCache,
        cos_sin: torch.Tensor,
    ) -> None:
        """Add what `queries` returned finds in the cache to `residual` [tokens, hidden]."""
        decode, prefill = rows.decode, rows.prefill
        if prefill is None:
            assert decode is not None, "a step has at least one row"
            new = None
            if decode.turns:
                q, k, v = q.split(self._heads, dim=1)
                new = NewTokens(k, v, cos_sin)
            attended = self._decode(q, decode, cache, None, new)
        elif decode is None:
            attended = self._prefill(q, prefill, cache, None)
        else:
            attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            first = decode.num_rows if prefill.first_token is None else prefill.first_token
            self._decode(q[: decode.num_rows], decode, cache, attended[: decode.num_rows])
            self._prefill(q[first:], prefill, cache, attended[first:])
        self.output.add_to(residual, attended.view(-1, self._width))

    def _decode(
        self,
        q: torch.Tensor,
        rows: DecodeRows,
        cache: LayerCache,
        out: torch.Tensor | None,
        new: NewTokens | None = None,
    ) -> torch.Tensor:
        places = cache.keys, cache.values, rows.block_table, rows.seq_lens, self._scale, out
        if rows.prefix is None:
            return attention_decode(
                q,
                *places,
                workspace=self._workspace,
                max_seq_len=rows.max_seq_len,
                table_rows=rows.table_rows,
                scales=cache.scales,
                new=new,
            )
        return attention_shared_prefix(
            q,
            *places,
            workspace=self._workspace,
            max_seq_len=rows.max_seq_len,
            table_rows=rows.table_rows,
            prefix=rows.prefix,
            scales=cache.scales,
        )

    def _prefill(self, q: torch.Tensor, rows: PrefillRows, cache: LayerCache, out: torch.Tensor | None) -> torch.Tensor:
        return attention_prefill(
            q,
            cache.keys,
            cache.values,
            rows.block_table,
            rows.query_start,
            rows.seq_lens,
            self._scale,
            out,
            max_query_len=rows.max_query_len,
            max_seq_len=rows.max_seq_len,
            table_rows=rows.table_rows,
            deterministic=self._deterministic,
            scales=cache.scales,
        )
