"""Loads a model's weights, whatever their format. Knows the formats' readers, not their bytes."""

from __future__ import annotations

import torch

from manta.engine.model_shape import ModelShape
from manta.engine.model_source import ModelSource
from manta.engine.models.architectures import family_of

from .dummy import fill_randomly
from .gguf_file import read_gguf
from .parameters import Parameters, allocate_parameters, destinations
from .safetensors_files import read_safetensors


def load_weights(
    source: ModelSource, shape: ModelShape, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Parameters:
    """All parameters on `device`, converted to `dtype`; `seed` is for random ones.

    Raises CheckpointError that names the file or tensor that is missing, short or of the wrong shape.
    """
    family = family_of(shape.architecture)
    parameters = allocate_parameters(shape, dtype=dtype, device=device)
    views = destinations(shape, parameters)
    if source.kind == "dummy":
        fill_randomly(views, tied=shape.tie_word_embeddings, seed=seed)
    elif source.kind == "gguf":
        read_gguf(source.path, family, views, head_dim=shape.head_dim)
    else:
        read_safetensors(source.path, family, views)
    return parameters
