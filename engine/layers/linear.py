"""A linear layer y = x W^T + b, alone or with its surroundings: a norm in front, a residual behind. Knows no model.

Ranks that share a layer have its rows (output features) or its columns (input features): Megatron's split (Shoeybi et
al. 2019, https://arxiv.org/abs/1909.08053). Rows need nothing of the others; columns give sums over the ranks.

Small batches read the whole weight for little work. On CPU the plain layout takes a slow path for 1 to 16 rows: packed
weights are read once, in order, by all threads (measured: 1.5 to 3 times the speed at 8 rows, equal at 512).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manta.engine.parallel.groups import TensorGroup
from manta.kernels.linear import linear, linear_add, norm_gated_linear, norm_linear

from .norm import RmsNorm

_mkldnn = torch.ops.mkldnn


class Linear:
    """`weight` [out, in], `bias` [out] or None. Call it with x [rows, in] to get [rows, out], a fresh tensor.

    `deterministic`: a row's result never depends on the other rows, nor on their number (CUDA, 16-bit types).
    """

    __slots__ = ("_is_packed", "bias", "deterministic", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, deterministic: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.deterministic = deterministic
        self._is_packed = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            return _mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias, deterministic=self.deterministic)

    def after_norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """The layer of the normalized `x`."""
        if self._is_packed:
            return self(norm(x))
        return norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, deterministic=self.deterministic)

    def gated_after_norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """silu(gate) * up [rows, out / 2] of the normalized `x`; the weight's rows are gate and up in turns."""
        assert not self._is_packed, "packed weights lie in halves"
        return norm_gated_linear(x, norm.weight, norm.eps, self.weight, self.bias, deterministic=self.deterministic)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual [rows, out] += the layer of `x`, in place."""
        if self._is_packed:
            residual.add_(self(x))
        else:
            linear_add(x, self.weight, residual, self.bias, deterministic=self.deterministic)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias (a packed weight has at least its plain size)."""
        elements = self.weight.numel() + (0 if self.bias is None else self.bias.numel())
        return elements * self.weight.element_size()

    def pack(self) -> None:
        """Replace the weight by its packed form where that exists: fp32 on a CPU with oneDNN."""
        if can_pack(self.weight):
            self.weight = _mkldnn._reorder_linear_weight(self.weight, None)
            self._is_packed = True


class RowParallelLinear(Linear):
    """`weight` [out, part of in]: each rank has the columns of its part of x, one of them the bias."""

    __slots__ = ("_group",)

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: TensorGroup, deterministic: bool = False
    ) -> None:
        super().__init__(weight, bias, deterministic=deterministic)
        self._group = group

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        self._group.add_sum_(residual, self(x))


class VocabParallelHead(Linear):
    """`weight` [part of vocab, in]: the first rank of the group gets the logits of all, in order, without padding."""

    __slots__ = ("_group", "_sizes")

    def __init__(
        self, weight: torch.Tensor, *, group: TensorGroup, sizes: Sequence[int], deterministic: bool = False
    ) -> None:
        """`sizes`: token ids of each rank."""
        super().__init__(weight, deterministic=deterministic)
        self._group = group
        self._sizes = sizes

    def after_norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return self._group.gather_vocab(super().after_norm(x, norm), self._sizes)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `Linear.pack` changes anything for this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(_mkldnn, "_reorder_linear_weight")
    )
