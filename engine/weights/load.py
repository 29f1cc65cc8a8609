"""Loads a model's weights, whatever their format. Knows the formats' readers, not their bytes."""

from __future__ import annotations

import torch

from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.architectures import family_of
from manta.engine.parallel.layout import ShardLayout

from .dummy import fill_randomly
from .gguf_file import read_gguf
from .parameters import Parameters, allocate_parameters, destinations
from .safetensors_files import read_safetensors
from .slices import slices


def load_weights(
    source: ModelSource,
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: ShardLayout | None = None,
    seed: int = 0,
) -> Parameters:
    """The parameters of a rank (None: the only one) on `device`, converted to `dtype`; `seed` is for random ones.

    Only the rank's slices are read. Random ones are the slices of the model that one rank would have.

    Raises CheckpointError that names the file or tensor that is missing, short or of the wrong shape.
    """
    family = family_of(shape.architecture)
    layout = ShardLayout.whole(shape) if layout is None else layout
    parameters = allocate_parameters(shape, dtype=dtype, device=device, layout=layout)
    slice_of = slices(shape, layout)
    views = destinations(shape, parameters)
    if source.kind == "dummy":
        fill_randomly(views, slice_of, tied=shape.tie_word_embeddings, seed=seed)
    elif source.kind == "gguf":
        read_gguf(source.path, family, views, slice_of, head_dim=shape.head_dim)
    else:
        read_safetensors(source.path, family, views, slice_of)
    return parameters
