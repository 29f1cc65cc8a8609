"""Random weights from a seed, drawn on the device, scaled so that activations are of order one. Reads no file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manta.engine.models.family import Parameter


def fill_randomly(views: Mapping[Parameter, torch.Tensor], *, tied: bool, seed: int) -> None:
    """Standard deviation 1 / sqrt(fan-in) for matrices, so that a unit input gives a unit output; norms are 1.

    The embedding has deviation 1, or that of a head when it also serves as one (`tied`): the first norm makes up.
    """
    generator = torch.Generator(next(iter(views.values())).device).manual_seed(seed)
    for parameter, view in views.items():
        if parameter.part.endswith("norm"):
            view.fill_(1.0)
        elif parameter.kind == "bias":
            view.normal_(0.0, 0.02, generator=generator)
        elif parameter.part == "embedding" and not tied:
            view.normal_(0.0, 1.0, generator=generator)
        else:
            view.normal_(0.0, view.shape[1] ** -0.5, generator=generator)
