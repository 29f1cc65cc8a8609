"""Loads a model's weights, whatever their format. Knows the formats' readers, not their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from manta.engine.config import QuantizationConfig
from manta.engine.gguf_file import read_gguf_header
from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.architectures import family_of
from manta.engine.models.family import Parameter
from manta.engine.parallel.layout import ShardLayout

from .dummy import fill_randomly
from .gguf_file import read_gguf
from .parameters import Parameters, allocate_parameters, destinations
from .quantized import choose_reader, fill_quantized
from .safetensors_files import read_safetensors
from .slices import SliceOf, slices

Fill = Callable[[Mapping[Parameter, torch.Tensor], SliceOf], None]
"""Fills every view with its slice of a plain tensor."""


def load_weights(
    source: ModelSource,
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: ShardLayout | None = None,
    seed: int = 0,
    quantization: QuantizationConfig | None = None,
) -> Parameters:
    """The parameters of a rank (None: the only one) on `device`, converted to `dtype`; `seed` is for random ones.

    Only the rank's slices are read, and whole tensors only where scales depend on all of them. Random ones are the
    slices of the model that one rank would have. Weights of the layers' products are quantized where the checkpoint or
    `quantization` says so; embedding, head and norms never are.

    Raises CheckpointError that names the file or tensor that is missing, short or of the wrong shape, and ConfigError
    where `quantization` contradicts the checkpoint.
    """
    quantization = quantization or QuantizationConfig()
    layout = ShardLayout.whole(shape) if layout is None else layout
    fill = plain_fill(source, shape, seed)
    reader = choose_reader(source, shape, quantization, fill, dtype=dtype, device=device)
    parameters = allocate_parameters(shape, dtype=dtype, device=device, layout=layout, has_plain_linears=reader is None)
    slice_of = slices(shape, layout)
    views = destinations(shape, parameters)
    fill({parameter: view for parameter, view in views.items() if not view.is_meta}, slice_of)
    if reader is not None:
        fill_quantized(
            parameters, reader, slice_of, device=device, dequantizes=quantization.weights == "plain", dtype=dtype
        )
    return parameters


def plain_fill(source: ModelSource, shape: ModelShape, seed: int) -> Fill:
    """What reads (or draws) plain tensors of a source."""
    family = family_of(shape.architecture)
    if source.kind == "dummy":
        return lambda views, slice_of: fill_randomly(views, slice_of, tied=shape.tie_word_embeddings, seed=seed)
    if source.kind == "gguf":
        header = read_gguf_header(source.path)
        return lambda views, slice_of: read_gguf(header, family, views, slice_of, head_dim=shape.head_dim)
    return lambda views, slice_of: read_safetensors(source.path, family, views, slice_of)
