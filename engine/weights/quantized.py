"""Quantized weights of the layers' products: who reads or makes them, and how parts become a rank's fused products.

Knows no format's bytes (engine/quant/ has them) and no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from manta.engine.checkpoint_config import read_json
from manta.engine.config import QuantizationConfig
from manta.engine.errors import ConfigError
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.architectures import family_of
from manta.engine.models.family import Parameter
from manta.engine.quant.kernel_form import KernelForm, kernel_form, why_not
from manta.engine.quant.schemes import SCHEMES, Scheme
from manta.engine.quant.weight import PlainWeight, QuantizedWeight, stack

from .parameters import Parameters
from .slices import SliceOf, TensorSlice

Fill = Callable[[Mapping[Parameter, torch.Tensor], SliceOf], None]


class LinearReader(Protocol):
    """Where quantized weights come from."""

    name: str
    """What they are, for the operator."""

    def read(self, parameter: Parameter, part: TensorSlice) -> QuantizedWeight:
        """A rank's part of a product's weight. Raises CheckpointError naming what is missing or wrong."""
        ...


class RoundingReader:
    """Plain weights, quantized as they come."""

    def __init__(self, name: str, scheme: Scheme, fill: Fill, *, dtype: torch.dtype, device: torch.device) -> None:
        self.name = f"{name}, rounded to the nearest"
        self._scheme = scheme
        self._fill = fill
        self._dtype = dtype
        self._device = device

    def read(self, parameter: Parameter, part: TensorSlice) -> QuantizedWeight:
        """Scales are those of the whole tensor, so that ranks together have the weights of one rank."""
        reads_part = part.is_whole or (part.dim == 0 and self._scheme.is_rowwise)
        wanted = part if reads_part else TensorSlice(part.full, 0, range(part.full[0]))
        plain = torch.empty(wanted.shape, dtype=self._dtype, device=self._device)
        self._fill({parameter: plain}, lambda _: wanted)
        weight = self._scheme.create(plain)
        return weight if reads_part else cut(weight, part)


def choose_reader(
    source: ModelSource,
    shape: ModelShape,
    config: QuantizationConfig,
    fill: Fill,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearReader | None:
    """None: weights are plain and stay so. Raises ConfigError and CheckpointError, see `load_weights`."""
    field = "quantization.weights"
    described = None
    if source.kind == "safetensors":
        described = read_json(source.config_file).get("quantization_config")
    if described is not None:
        if config.weights not in ("auto", "plain"):
            raise ConfigError(
                f"{field} = {config.weights!r}: {source.name} is quantized already "
                f"({described.get('quant_method')!r}); leave it at auto, or name its plain checkpoint",
                field=field,
            )
        from manta.engine.quant.checkpoints import checkpoint_reader

        return checkpoint_reader(source, family_of(shape.architecture), described)
    if config.weights == "keep":
        if source.kind != "gguf":
            raise ConfigError(f"{field} = 'keep': keeps blocks of GGUF files, and {source.name} is none", field=field)
        from manta.engine.quant.gguf_blocks import GgufReader

        return GgufReader(source.path, family_of(shape.architecture), head_dim=shape.head_dim)
    if config.weights in ("auto", "plain"):
        return None
    scheme = SCHEMES[config.weights](config)
    return RoundingReader(config.weights, scheme, fill, dtype=dtype, device=device)


Filled = torch.Tensor | QuantizedWeight | KernelForm


def fill_quantized(
    parameters: Parameters,
    reader: LinearReader,
    slice_of: SliceOf,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dequantizes: bool = False,
) -> None:
    """Read every product layer by layer. `dequantizes`: into plain weights of `dtype`."""
    without_kernel: Counter[str] = Counter()

    def fused(index: int, *parts: str, interleaved: bool = False) -> Filled:
        listed = [Parameter(part, index, "weight") for part in parts]
        weight = stack([reader.read(parameter, slice_of(parameter)) for parameter in listed]).to(device)
        if interleaved:
            order = torch.arange(weight.shape[0], device=device).view(2, -1).t().reshape(-1)
            weight = weight.rows(order)
        if dequantizes or isinstance(weight, PlainWeight):
            return weight.dequantize().to(dtype)
        if device.type != "cuda":
            return weight
        form = kernel_form(weight)
        if form is None:
            without_kernel[why_not(weight)] += 1
        return weight if form is None else form

    for place, layer in enumerate(parameters.layers):
        index = parameters.first_layer + place
        assert layer is not None, "layers are filled before they are taken"
        parameters.layers[place] = replace(
            layer,
            qkv=fused(index, "q", "k", "v"),
            output=fused(index, "output"),
            gate_up=fused(index, "gate", "up", interleaved=parameters.interleaved),
            down=fused(index, "down"),
        )
    notes = [f"weights are {'dequantized from ' if dequantizes else ''}{reader.name}"]
    notes += [
        f"{count} products have no kernel for {kind}: they are dequantized for each step, which is slow"
        for kind, count in without_kernel.items()
    ]
    parameters.notes = tuple(notes)


def cut(weight: QuantizedWeight, part: TensorSlice) -> QuantizedWeight:
    """A rank's part of a whole weight."""
    if part.is_whole:
        return weight
    if part.dim == 0:
        return weight.rows(slice(part.part.start, part.part.stop))
    return weight.columns(part.part)
