"""AWQ's checkpoints (`version` gemm): `qweight` [in, out / 8], `qzeros`, `scales`; eight rows of a word interleaved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.engine.errors import CheckpointError
from manta.engine.quant.grouped import GroupedWeight, pack_nibbles
from manta.engine.weights.safetensors_files import FolderTensors

from .packed_words import pack_words, unpack_words
from .settings import Settings, is_listed

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word belongs to output feature ORDER[i] of its eight."""


@dataclass(frozen=True)
class Awq:
    """What an AWQ checkpoint says of all its products."""

    group_size: int
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings) -> Awq:
        settings.one_of("bits", (4,))
        settings.one_of("version", ("gemm", "GEMM"), "gemm")
        group_size = settings.number("group_size", 128)
        if group_size != -1 and group_size < 1:
            raise settings.error("group_size", group_size, "must be a positive number, or -1 for one group")
        settings.flag("zero_point", True)  # zeros are there in either case
        settings.only("lm_head", False)
        settings.ignore("quant_method", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
        return cls(group_size, tuple(settings.names("modules_to_not_convert")))

    @property
    def name(self) -> str:
        return f"an AWQ checkpoint (4 bits, group size {self.group_size})"

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> GroupedWeight | None:
        if f"{module}.qweight" not in tensors and f"{module}.weight" in tensors:
            return None
        if is_listed(module, self.left_out):
            raise CheckpointError(
                f"{tensors.folder}: {module} is in modules_to_not_convert, but its tensors are quantized"
            )
        num_rows, num_columns = shape
        group_size = num_columns if self.group_size == -1 else self.group_size
        num_groups = -(-num_columns // group_size)
        packed = tensors.get(f"{module}.qweight", (num_columns, num_rows // 8), torch.int32)
        packed_zeros = tensors.get(f"{module}.qzeros", (num_groups, num_rows // 8), torch.int32)
        scales = tensors.get(f"{module}.scales", (num_groups, num_rows))
        zeros = unpack_interleaved(packed_zeros)
        return GroupedWeight(
            pack_nibbles(unpack_interleaved(packed).t().contiguous()),
            scales.t().contiguous(),
            4,
            group_size,
            num_columns,
            zeros=None if bool((zeros == 8).all()) else zeros.t().contiguous(),
        )


def unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] int32 -> [n, out] uint8."""
    values = unpack_words(words, 4, 1).unflatten(1, (-1, 8))
    return values[:, :, torch.tensor(ORDER).argsort()].flatten(1)


def pack_interleaved(values: torch.Tensor) -> torch.Tensor:
    """The reverse."""
    return pack_words(values.unflatten(1, (-1, 8))[:, :, torch.tensor(ORDER)].flatten(1), 4, 1)
