"""The schemes that `manta eval quantization` knows by name, and how each is had. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manta.engine.config import QuantizationConfig
from manta.engine.quant.calibrated.recipe import Recipe


@dataclass(frozen=True)
class Variant:
    """How a scheme's name is had: by settings, from a checkpoint that is made for it, or both."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    formula: QuantizationConfig | None = None
    """Whose bytes are expected; None: those of plain weights."""

    @classmethod
    def rounded(cls, weights: str, **numbers: Any) -> Variant:
        config = QuantizationConfig(weights=weights, **numbers)  # type: ignore[arg-type]
        named = {f"quantization.{name}": value for name, value in {"weights": weights, **numbers}.items()}
        return cls(named, formula=config)

    @classmethod
    def made(cls, recipe: Recipe, weights: str, **numbers: Any) -> Variant:
        return cls(recipe=recipe, formula=QuantizationConfig(weights=weights, **numbers))  # type: ignore[arg-type]


VARIANTS: dict[str, Variant] = {
    "int8": Variant.rounded("int8"),
    "int8_asym": Variant.rounded("int8", symmetric=False),
    "fp8": Variant.rounded("fp8"),
    "fp8_gptq": Variant.made(Recipe("fp8_gptq"), "fp8"),
    "fp8_weight_only": Variant.rounded("fp8_weight_only"),
    "fp8_gptq_weight_only": Variant.made(Recipe("fp8_gptq", weight_only=True), "fp8_weight_only"),
    "fp8_tensor": Variant.rounded("fp8_tensor"),
    "fp8_block": Variant.rounded("fp8_block"),
    "w8a8": Variant.rounded("w8a8"),
    "w8a8_smooth": Variant.made(Recipe("smoothquant"), "w8a8"),
    "llm_int8": Variant.rounded("llm_int8"),
    "int4_rtn": Variant.rounded("int4"),
    "int4_rtn_g32": Variant.rounded("int4", group_size=32),
    "int4_rtn_g64": Variant.rounded("int4", group_size=64),
    "int4_rtn_row": Variant.rounded("int4", group_size="row"),
    "int4_rtn_asym": Variant.rounded("int4", symmetric=False),
    "int4_gptq": Variant.made(Recipe("gptq"), "int4"),
    "int4_gptq_order": Variant.made(Recipe("gptq", act_order=True), "int4"),
    "int4_awq": Variant.made(Recipe("awq"), "int4"),
    "nf4": Variant.rounded("nf4"),
    "mxfp4": Variant.rounded("mxfp4"),
    "nvfp4": Variant.rounded("nvfp4"),
    "kv_fp8": Variant({"quantization.kv_cache": "fp8"}),
    "kv_int8": Variant({"quantization.kv_cache": "int8"}),
    "gguf": Variant({"quantization.weights": "keep"}),
}
"""int4 is symmetric with groups of 128 unless the name says otherwise."""
