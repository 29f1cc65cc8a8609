"""What `manta quantize` is asked to make, and how one layer is made so. Knows tensors by part, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.quant.fp8 import Activations, quantize_fp8
from manta.engine.quant.grouped import quantize_grouped
from manta.engine.quant.int8 import quantize_int8
from manta.engine.quant.weight import QuantizedWeight

from .gptq import quantize_fp8_gptq, quantize_gptq
from .layer_pass import GROUPS, InputStats, LayerTensors
from .scales import awq_scales, clipped, fold, output_error, scaled, smooth_scales

Method = Literal["rtn", "gptq", "awq", "smoothquant", "fp8", "fp8_gptq"]
Target = Literal["compressed-tensors", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant", "fp8", "fp8_gptq")


@dataclass(frozen=True)
class Recipe:
    """A method and its numbers. Raises ConfigError for what does not go together."""

    method: Method
    bits: int = 4
    group_size: int | None = 128
    """Columns that share a scale; None: all of a row."""
    symmetric: bool = True
    act_order: bool = False
    weight_only: bool = False
    """Of FP8: activations stay as they are."""
    target: Target | None = None
    """None: gptq and awq write their own format, the others compressed-tensors."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"scheme {self.method!r} is not known; known are {', '.join(METHODS)}", field="scheme")
        if self.bits not in (4, 8):
            raise ConfigError(f"bits = {self.bits}: 4 and 8 can be written", field="bits")
        if self.group_size is not None and (self.group_size < 16 or self.group_size % 16):
            raise ConfigError(f"group_size = {self.group_size}: must be a multiple of 16, or -1", field="group_size")
        if self.act_order and self.method != "gptq":
            raise ConfigError(f"act_order goes with gptq, not with {self.method}", field="act_order")
        if self.weight_only and self.method not in ("fp8", "fp8_gptq"):
            raise ConfigError(f"weight_only goes with fp8 and fp8_gptq, not with {self.method}", field="weight_only")
        if self.format == "awq" and (self.bits != 4 or self.act_order):
            raise ConfigError("awq holds 4 bits, no act_order; use compressed-tensors", field="format")
        if self.method in ("smoothquant", "fp8", "fp8_gptq") and self.format != "compressed-tensors":
            raise ConfigError(f"{self.method} is written as compressed-tensors, not as {self.format}", field="format")

    @property
    def format(self) -> Target:
        if self.target is not None:
            return self.target
        return self.method if self.method in ("gptq", "awq") else "compressed-tensors"

    @property
    def needs_calibration(self) -> bool:
        return self.method in ("gptq", "awq", "smoothquant", "fp8_gptq")

    def quantize(self, weight: torch.Tensor, stats: InputStats | None) -> QuantizedWeight:
        """One weight [out, in], or several with the same input on top of each other."""
        activations = Activations.PLAIN if self.weight_only else Activations.TOKEN
        if self.method == "fp8":
            return quantize_fp8(weight, block=(1, weight.shape[1]), activations=activations)
        if self.method == "smoothquant":
            return quantize_int8(weight)
        if self.method == "fp8_gptq":
            assert stats is not None, "fp8_gptq is calibrated"
            return quantize_fp8_gptq(weight, stats.second_moments, activations)
        if self.method == "gptq":
            assert stats is not None, "gptq is calibrated"
            return quantize_gptq(
                weight,
                stats.second_moments,
                bits=self.bits,
                group_size=self.group_size,
                symmetric=self.symmetric,
                act_order=self.act_order,
                keeps_groups=self.format == "compressed-tensors",
            )
        return quantize_grouped(weight, bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer's products by part, its other tensors as they have become, and the error of each group of products."""

    products: dict[str, QuantizedWeight]
    others: LayerTensors
    errors: dict[str, float]
    """Relative: of outputs on the calibration texts, or of weights where there are none."""

    def dequantized(self) -> LayerTensors:
        """The layer as it will compute."""
        return {**self.others, **{(part, "weight"): weight.dequantize() for part, weight in self.products.items()}}


def quantize_layer(
    recipe: Recipe, tensors: LayerTensors, stats: Mapping[str, InputStats] | None, shape: ModelShape
) -> QuantizedLayer:
    """`stats` by group. `tensors` are used up."""
    known = dict(stats or {})
    if recipe.method in ("awq", "smoothquant"):
        _scale(recipe, tensors, known, shape)
    products: dict[str, QuantizedWeight] = {}
    errors: dict[str, float] = {}
    for group, parts in GROUPS.items():
        weights = [tensors[part, "weight"] for part in parts]
        stacked = torch.cat(weights)
        source = stacked
        if recipe.method == "awq":
            size = recipe.group_size or stacked.shape[1]
            source = clipped(stacked, known[group], lambda w: recipe.quantize(w, None).dequantize(), size)
        found = recipe.quantize(source, known.get(group))
        errors[group] = _relative_error(found.dequantize() - stacked, stacked, known.get(group))
        first = 0
        for part, weight in zip(parts, weights, strict=True):
            products[part] = found.rows(slice(first, first + weight.shape[0]))
            first += weight.shape[0]
    others = {name: tensor for name, tensor in tensors.items() if name[0] not in products or name[1] == "bias"}
    return QuantizedLayer(products, others, errors)


def _scale(recipe: Recipe, tensors: LayerTensors, stats: dict[str, InputStats], shape: ModelShape) -> None:
    """Fold the method's scales into the layer; `stats` become those of the scaled inputs. From the back, so that rows
    that take a scale have not been rounded with another in mind."""
    groups = ("down", "gate_up", "output", "qkv") if recipe.method == "awq" else ("gate_up", "qkv")
    for group in groups:
        weights = [tensors[part, "weight"] for part in GROUPS[group]]
        if recipe.method == "awq":
            scales = awq_scales(weights, stats[group], lambda weight: recipe.quantize(weight, None).dequantize())
        else:
            scales = smooth_scales(weights, stats[group])
        used = fold(tensors, group, scales, shape)
        stats[group] = scaled(stats[group], used)


def _relative_error(change: torch.Tensor, weight: torch.Tensor, stats: InputStats | None) -> float:
    if stats is None:
        return float(change.norm() / weight.norm())
    return (output_error(change, stats) / max(output_error(weight, stats), 1e-30)) ** 0.5
