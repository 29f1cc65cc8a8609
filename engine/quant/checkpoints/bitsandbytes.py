"""bitsandbytes' checkpoints: int8 with `SCB` (LLM.int8), NF4 and FP4 with block-wise scales, quantized ones too.

Blocks run through the weight row by row, so a row must hold a whole number of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from manta.engine.errors import CheckpointError
from manta.engine.quant.grouped import GroupedWeight, pack_nibbles
from manta.engine.quant.int8 import INT8_MAX, Int8Weight
from manta.engine.quant.weight import QuantizedWeight
from manta.engine.weights.safetensors_files import FolderTensors

from .settings import Settings, is_listed


@dataclass(frozen=True)
class Bitsandbytes:
    """What a bitsandbytes checkpoint says of all its products."""

    bits: int
    threshold: float
    kind: str
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Bitsandbytes:
        in_8, in_4 = settings.flag("load_in_8bit", False), settings.flag("load_in_4bit", False)
        settings.ignore("_load_in_8bit", "_load_in_4bit", "quant_method", "bnb_4bit_compute_dtype")
        settings.ignore("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight")
        if in_8 == in_4:
            raise settings.error("load_in_8bit", in_8, f"contradicts load_in_4bit = {in_4}: one of them is true")
        settings.only("llm_int8_has_fp16_weight", False)
        settings.only("bnb_4bit_quant_storage", "uint8")
        kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        threshold = settings.get("llm_int8_threshold", 6.0)
        if not isinstance(threshold, (int, float)) or threshold < 0:
            raise settings.error("llm_int8_threshold", threshold, "must be a number that is not negative")
        return cls(8 if in_8 else 4, float(threshold), kind, tuple(settings.names("llm_int8_skip_modules")))

    @property
    def name(self) -> str:
        return f"a bitsandbytes checkpoint ({'int8' if self.bits == 8 else self.kind})"

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> QuantizedWeight | None:
        name = f"{module}.weight"
        if tensors.dtype(name) not in ("I8", "U8"):
            return None
        if is_listed(module, self.left_out):
            raise CheckpointError(f"{tensors.folder}: {module} is in llm_int8_skip_modules, but quantized")
        if self.bits == 8:
            codes = tensors.get(name, shape, torch.int8)
            layout = f"{module}.weight_format"
            if layout in tensors and int(tensors.get(layout)) != 0:
                raise CheckpointError(f"{tensors.folder}: tensor {layout} is not 0 (rows in order)")
            scales = tensors.get(f"{module}.SCB", (shape[0],)).float() / INT8_MAX
            return Int8Weight(codes, scales, self.threshold or None)
        return self._read_4_bits(tensors, name, shape)

    def _read_4_bits(self, tensors: FolderTensors, name: str, shape: tuple[int, int]) -> GroupedWeight:
        num_rows, num_columns = shape
        state_name = f"{name}.quant_state.bitsandbytes__{self.kind}"
        state = _state(tensors, state_name)
        if tuple(state.get("shape", ())) != shape:
            raise CheckpointError(f"{tensors.folder}: {state_name} says shape {state.get('shape')}, the config {shape}")
        size = int(state.get("blocksize", 64))
        if num_columns % size:
            raise CheckpointError(
                f"{tensors.folder}: {name}: blocks of {size} do not divide its {num_columns} columns, which is not read"
            )
        packed = tensors.get(name, (num_rows * num_columns // 2, 1), torch.uint8).view(num_rows, -1)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)  # the even column in the high nibble
        scales = _scales(tensors, name, state, num_rows * num_columns // size)
        return GroupedWeight(
            pack_nibbles(codes),
            scales.view(num_rows, -1),
            4,
            size,
            num_columns,
            codebook=tensors.get(f"{name}.quant_map", (16,)).float(),
        )


def _state(tensors: FolderTensors, name: str) -> dict[str, Any]:
    try:
        return json.loads(bytes(tensors.get(name).tolist()))
    except ValueError:
        raise CheckpointError(f"{tensors.folder}: tensor {name} is no JSON in bytes") from None


def _scales(tensors: FolderTensors, name: str, state: dict[str, Any], count: int) -> torch.Tensor:
    """[blocks] fp32; those that are quantized themselves are entries of a map, by block a scale, and an offset."""
    scales = tensors.get(f"{name}.absmax", (count,))
    if scales.dtype != torch.uint8:
        return scales.float()
    size = int(state.get("nested_blocksize", 256))
    entries = tensors.get(f"{name}.nested_quant_map", (256,)).float()
    outer = tensors.get(f"{name}.nested_absmax", (-(-count // size),)).float()
    return entries[scales.int()] * outer.repeat_interleave(size)[:count] + float(state.get("nested_offset", 0.0))
