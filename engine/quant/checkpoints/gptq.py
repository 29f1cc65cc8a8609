"""GPTQ's checkpoints: `qweight` [in * bits / 32, out], `qzeros` (one less than the zero), `scales`, `g_idx`.

With act-order (`desc_act`) columns were quantized by importance and `g_idx` has the group of each. A group size of -1
is one group for all columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manta.engine.errors import CheckpointError
from manta.engine.quant.grouped import GroupedWeight, pack_nibbles
from manta.engine.weights.safetensors_files import FolderTensors

from .packed_words import unpack_words
from .settings import Settings

_HARMLESS = (
    *("quant_method", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path"),
    *("model_file_base_name", "meta", "dataset", "tokenizer", "batch_size", "cache_block_outputs", "pad_token_id"),
    *("use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length", "disable_exllama", "model_seqlen", "mse"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "quantizer", "is_marlin_format", "backend"),
    *("modules_in_block_to_quantize", "pack_dtype", "desc_act_", "quant_algo"),
)


@dataclass(frozen=True)
class Gptq:
    """What a GPTQ checkpoint says of all its products."""

    bits: int
    group_size: int
    has_order: bool
    zero_shift: int
    """What is added to a stored zero."""

    @classmethod
    def of(cls, settings: Settings) -> Gptq:
        bits = settings.one_of("bits", (4, 8))
        group_size = settings.number("group_size", -1)
        if group_size != -1 and group_size < 1:
            raise settings.error("group_size", group_size, "must be a positive number, or -1 for one group")
        stored = settings.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        settings.only("is_marlin_format", False)
        settings.only("lm_head", False)
        settings.only("dynamic", {}, None)
        settings.flag("sym", True)  # zeros are there in either case
        settings.ignore(*_HARMLESS)
        return cls(bits, group_size, settings.flag("desc_act", False), 1 if stored == "gptq" else 0)

    @property
    def name(self) -> str:
        order = ", act-order" if self.has_order else ""
        return f"a GPTQ checkpoint ({self.bits} bits, group size {self.group_size}{order})"

    def read(self, tensors: FolderTensors, module: str, shape: tuple[int, int]) -> GroupedWeight | None:
        if f"{module}.qweight" not in tensors and f"{module}.weight" in tensors:
            return None
        num_rows, num_columns = shape
        group_size = num_columns if self.group_size == -1 else self.group_size
        num_groups = -(-num_columns // group_size)
        words = num_columns * self.bits // 32, num_rows * self.bits // 32
        packed = tensors.get(f"{module}.qweight", (words[0], num_rows), torch.int32)
        packed_zeros = tensors.get(f"{module}.qzeros", (num_groups, words[1]), torch.int32)
        scales = tensors.get(f"{module}.scales", (num_groups, num_rows))
        codes = unpack_words(packed, self.bits, 0).t().contiguous()
        top = (1 << self.bits) - 1
        zeros = (unpack_words(packed_zeros, self.bits, 1).int() + self.zero_shift & top).to(torch.uint8)
        is_symmetric = bool((zeros == 1 << (self.bits - 1)).all())
        return GroupedWeight(
            codes if self.bits == 8 else pack_nibbles(codes),
            scales.t().contiguous(),
            self.bits,
            group_size,
            num_columns,
            zeros=None if is_symmetric else zeros.t().contiguous(),
            group_ids=self._group_ids(tensors, module, num_columns, group_size),
        )

    def _group_ids(self, tensors: FolderTensors, module: str, num_columns: int, group_size: int) -> torch.Tensor | None:
        """None where columns are in order."""
        name = f"{module}.g_idx"
        if name not in tensors:
            if self.has_order:
                raise CheckpointError(f"{tensors.folder}: tensor {name} is missing, though desc_act is true")
            return None
        found = tensors.get(name, (num_columns,)).to(torch.int32)
        num_groups = -(-num_columns // group_size)
        if int(found.min()) < 0 or int(found.max()) >= num_groups:
            raise CheckpointError(
                f"{tensors.folder}: tensor {name} names groups beyond the {num_groups} that there are"
            )
        in_order = torch.arange(num_columns, dtype=torch.int32) // group_size
        if torch.equal(found, in_order):
            return None
        if not self.has_order:
            raise CheckpointError(f"{tensors.folder}: desc_act is false, but {name} is not in the order of columns")
        return found
