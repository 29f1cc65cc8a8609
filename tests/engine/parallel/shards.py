"""Shards of tiny random models, and greedy decoding over all ranks of a gang step by step, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manta.engine.config import EngineConfig
from manta.engine.layers.attention import AttentionBatch, DecodeRows, LayerCache, PrefillRows
from manta.engine.logprobs import logprobs_of
from manta.engine.model_runner import BuiltRunner, build_model_runner
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.decoder import Decoder
from manta.engine.parallel.groups import Groups
from manta.engine.parallel.place import RankPlace
from manta.engine.plan import StepPlan, StepResult
from manta.engine.runner import RunnerOptions
from tests.engine.parallel.ranks import on_ranks

CPU = torch.device("cpu")


class Parts:
    """Stands for a runner: keeps a rank's decoder and caches, and runs no plan."""

    def __init__(
        self, model: Decoder, caches: list[LayerCache], *, device: torch.device, options: RunnerOptions
    ) -> None:
        self.model, self.caches, self.options = model, caches, options

    def launch(self, plan: StepPlan) -> Parts:
        return self

    def result(self) -> StepResult:
        return StepResult([])

    def close(self) -> None:
        self.caches = []


@dataclass(frozen=True)
class Generated:
    """Tokens of each prompt, each with its log-probability and those of the best five."""

    token_ids: list[list[int]]
    logprobs: torch.Tensor  # [prompts, tokens, 1 + 5]


def random_shape(*, q: int, kv: int, **changes: Any) -> ModelShape:
    """A random Llama with so many query and KV heads."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": q,
        "num_kv_heads": kv,
        "head_dim": 16,
        "intermediate_size": 144,
        "vocab_size": 320,
        "max_position_embeddings": 256,
    }
    return ModelShape(**{**sizes, **changes})


def build_shard(
    shape: ModelShape, place: RankPlace, groups: Groups, source: ModelSource | None = None, **overrides: Any
) -> BuiltRunner:
    """A rank's part of `source` (None: random weights), in fp32 with a small cache unless `overrides` say otherwise."""
    defaults = {"device": "cpu", "dtype": "float32", "cpu_cache_gib": 0.02, "max_num_seqs": 8}
    config = EngineConfig.build("random", **{**defaults, **overrides})
    source = source or ModelSource("random", "dummy", Path(), None)
    return build_model_runner(config, source, shape, place=place, groups=groups, make_runner=Parts)


def generate(
    shape: ModelShape,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    source: ModelSource | None = None,
    device: torch.device = CPU,
    **overrides: Any,
) -> Generated:
    """Greedy tokens, the same on every rank of the gang."""

    def work(place: RankPlace, groups: Groups) -> Generated:
        built = build_shard(shape, place, groups, source, **{"device": str(device), **overrides})
        try:
            return _Stepper(built, groups, device).generate(prompts, num_tokens)
        finally:
            built.runner.close()

    first, *others = on_ranks(work, tp_size=tp_size, pp_size=pp_size, device=device)
    for other in others:
        assert other.token_ids == first.token_ids
        assert torch.equal(other.logprobs, first.logprobs)
    return first


class _Stepper:
    """One rank's steps: a stage takes the residual of the one before, the last one's tokens are told to all."""

    def __init__(self, built: BuiltRunner, groups: Groups, device: torch.device) -> None:
        self._model, self._caches = built.runner.model, built.runner.caches
        self._groups, self._place = groups, groups.place
        self._block_size = built.block_size
        self._device = device

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> Generated:
        blocks_each = -(-(max(map(len, prompts)) + num_tokens) // self._block_size)
        table = torch.arange(len(prompts) * blocks_each, dtype=torch.int32).view(len(prompts), blocks_each)
        first, logprobs = zip(
            *(self._prefill(prompt, table[i : i + 1]) for i, prompt in enumerate(prompts)), strict=True
        )
        tokens, entries = [torch.cat(first)], [torch.cat(logprobs)]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        for step in range(num_tokens - 1):
            positions = lengths + step
            rows = torch.arange(len(prompts))
            slots = table[rows, positions // self._block_size].long() * self._block_size + positions % self._block_size
            decode = DecodeRows(
                num_rows=len(prompts),
                block_table=self._put(table),
                table_rows=self._put(rows.int()),
                seq_lens=self._put((positions + 1).int()),
                max_seq_len=int(positions.max()) + 1,
            )
            batch = AttentionBatch(self._put(positions), self._put(slots), decode, None)
            token_ids, logprobs = self._step(tokens[-1], batch, rows)
            tokens.append(token_ids)
            entries.append(logprobs)
        return Generated(torch.stack(tokens, dim=1).tolist(), torch.stack(entries, dim=1))

    def _prefill(self, prompt: list[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(prompt)
        positions = torch.arange(length)
        slots = table[0, positions // self._block_size].long() * self._block_size + positions % self._block_size
        prefill = PrefillRows(
            block_table=self._put(table),
            table_rows=self._put(torch.zeros(1, dtype=torch.int32)),
            seq_lens=self._put(torch.tensor([length], dtype=torch.int32)),
            query_start=self._put(torch.tensor([0, length], dtype=torch.int32)),
            max_query_len=length,
            max_seq_len=length,
        )
        batch = AttentionBatch(self._put(positions), self._put(slots), None, prefill)
        return self._step(torch.tensor(prompt), batch, torch.tensor([length - 1]))

    def _step(
        self, token_ids: torch.Tensor, batch: AttentionBatch, sampling_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, stages, everyone = self._model, self._groups.stages, self._groups.everyone
        inputs = self._put(token_ids)
        if not self._place.is_first_stage:
            assert stages is not None
            hidden_size = model.shape.hidden_size
            inputs = stages.receive(len(token_ids), hidden_size, dtype=model.dtype, device=self._device)
        residual = model.forward(inputs, batch, self._caches)
        found = torch.zeros(len(sampling_rows), 7, dtype=torch.float64)
        if not self._place.is_last_stage:
            assert stages is not None
            stages.send(residual)
        else:
            logits = model.logits(residual[self._put(sampling_rows)])
            if self._place.samples:
                assert logits.shape == (len(sampling_rows), model.shape.vocab_size)
                chosen = logits.argmax(-1)
                best = logprobs_of(logits, chosen, 5)
                found = torch.cat([chosen[:, None].double(), best.chosen[:, None].double(), best.top.double()], 1).cpu()
        if everyone is not None:
            everyone.broadcast_(found, source=self._place.sampling_rank)
        return found[:, 0].long(), found[:, 1:]

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)
