"""Random weights from a seed, drawn on the device, scaled so that activations are of order one. Reads no file.

Each tensor has draws of its own and is drawn whole, so that a rank's slices are those of the model on one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from manta.engine.models.family import Parameter

from .slices import SliceOf


def fill_randomly(views: Mapping[Parameter, torch.Tensor], slice_of: SliceOf, *, tied: bool, seed: int) -> None:
    """Standard deviation 1 / sqrt(fan-in) for matrices, so that a unit input gives a unit output; norms are 1.

    The embedding has deviation 1, or that of a head when it also serves as one (`tied`): the first norm makes up.
    """
    generator = torch.Generator(next(iter(views.values())).device)
    for parameter, view in views.items():
        if parameter.part.endswith("norm"):
            view.fill_(1.0)
            continue
        part = slice_of(parameter)
        # The order of the draws depends on how a tensor lies in memory.
        in_place = part.is_whole and view.is_contiguous()
        whole = view if in_place else torch.empty(part.full, dtype=view.dtype, device=view.device)
        whole.normal_(0.0, _deviation(parameter, part.full, tied=tied), generator=_seeded(generator, parameter, seed))
        if not in_place:
            view.copy_(whole[part.index])


def _deviation(parameter: Parameter, full: tuple[int, ...], *, tied: bool) -> float:
    if parameter.kind == "bias":
        return 0.02
    if parameter.part == "embedding" and not tied:
        return 1.0
    return full[1] ** -0.5


def _seeded(generator: torch.Generator, parameter: Parameter, seed: int) -> torch.Generator:
    name = f"{seed}/{parameter.part}/{parameter.layer}/{parameter.kind}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(digest, "little") >> 1)
