"""The reverse of the readers: a product's tensors as GPTQ, AWQ or compressed-tensors name them, and what config.json
says of them."""

from __future__ import annotations

from typing import Any

import torch

from manta.engine.quant.calibrated.recipe import Recipe
from manta.engine.quant.fp8 import Fp8Weight
from manta.engine.quant.grouped import GroupedWeight
from manta.engine.quant.int8 import Int8Weight
from manta.engine.quant.weight import QuantizedWeight

from .awq import pack_interleaved
from .packed_words import pack_words


def tensors_of(weight: QuantizedWeight, recipe: Recipe) -> dict[str, torch.Tensor]:
    """By suffix of the module's name. Raises ValueError for a shape that the format cannot hold."""
    if isinstance(weight, GroupedWeight):
        if recipe.format == "compressed-tensors":
            return _packed(weight)
        return _gptq(weight) if recipe.format == "gptq" else _awq(weight)
    if isinstance(weight, Int8Weight):
        return {"weight": weight.codes, "weight_scale": weight.scales[:, None]}
    assert isinstance(weight, Fp8Weight), f"nothing writes {type(weight).__name__}"
    return {"weight": weight.codes, "weight_scale": weight.scales}


def config_of(recipe: Recipe) -> dict[str, Any]:
    """`quantization_config`."""
    size = -1 if recipe.group_size is None else recipe.group_size
    if recipe.format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": size,
            "desc_act": recipe.act_order,
            "sym": recipe.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
    if recipe.format == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": size,
            "zero_point": not recipe.symmetric,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    weights: dict[str, Any] = {"num_bits": recipe.bits, "type": "int", "symmetric": recipe.symmetric, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if recipe.method in ("fp8", "fp8_gptq", "smoothquant"):
        kind = "int" if recipe.method == "smoothquant" else "float"
        weights |= {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
        if not recipe.weight_only:
            inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    elif recipe.group_size is None:
        weights["strategy"] = "channel"
    else:
        order = "weight" if recipe.act_order else None
        weights |= {"strategy": "group", "group_size": recipe.group_size, "actorder": order}
    formats = {"fp8": "float-quantized", "fp8_gptq": "float-quantized", "smoothquant": "int-quantized"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.get(recipe.method, "pack-quantized"),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _zeros(weight: GroupedWeight) -> torch.Tensor:
    """[out, groups]."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 1 << (weight.bits - 1), dtype=torch.uint8)


def _packed(weight: GroupedWeight) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": pack_words(weight.unpacked(), weight.bits, 1),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_words(weight.zeros, weight.bits, 0)
    assert weight.group_ids is None, "compressed-tensors keeps neighbouring columns together"
    return tensors


def _gptq(weight: GroupedWeight) -> dict[str, torch.Tensor]:
    num_rows, num_columns = weight.shape
    _check_words(num_rows, num_columns)
    ids = weight.group_ids
    if ids is None:
        ids = (torch.arange(num_columns) // weight.group_size).to(torch.int32)
    top = (1 << weight.bits) - 1
    stored = (_zeros(weight).int() - 1) & top
    return {
        "qweight": pack_words(weight.unpacked().t(), weight.bits, 0),
        "qzeros": pack_words(stored.t(), weight.bits, 1),
        "scales": weight.scales.t().half().contiguous(),
        "g_idx": ids,
    }


def _awq(weight: GroupedWeight) -> dict[str, torch.Tensor]:
    _check_words(*weight.shape)
    return {
        "qweight": pack_interleaved(weight.unpacked().t()),
        "qzeros": pack_interleaved(_zeros(weight).t()),
        "scales": weight.scales.t().half().contiguous(),
    }


def _check_words(num_rows: int, num_columns: int) -> None:
    if num_rows % 8 or num_columns % 8:
        raise ValueError(f"a weight of {num_rows} x {num_columns} does not fill words of 8: use compressed-tensors")
