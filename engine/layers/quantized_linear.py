"""Linear layers whose weights are quantized: the calls of layers/linear.Linear. Knows no scheme and no model.

A weight in the layout of kernels/quantized goes to its kernels; one in its logical form is multiplied as its kind says
in plain torch, mostly dequantized for each product.
"""

from __future__ import annotations

from typing import Any

import torch

from manta.engine.parallel.groups import TensorGroup
from manta.engine.quant.kernel_form import KernelForm
from manta.engine.quant.weight import QuantizedWeight, RankMaximum
from manta.kernels.activation import silu_and_mul

from .linear import Linear
from .norm import RmsNorm


class QuantizedLinear(Linear):
    """`quantized` [out, in], in its logical form or as kernels read it; `bias` [out] or None."""

    __slots__ = ("_form", "_kernels", "quantized")

    def __init__(
        self, quantized: QuantizedWeight | KernelForm, bias: torch.Tensor | None = None, *, deterministic: bool = False
    ) -> None:
        super().__init__(torch.empty(0), bias, deterministic=deterministic)
        self.quantized = quantized if isinstance(quantized, QuantizedWeight) else None
        self._form = quantized if isinstance(quantized, KernelForm) else None
        self._kernels: Any = None
        if self._form is not None:
            from manta.kernels.quantized import linear

            self._kernels = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        form = self._form
        if form is None:
            return self._dequantized(x)
        return self._kernels.linear(
            x, form.weight, self.bias, activations=form.activations, deterministic=self.deterministic
        )

    def after_norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        form = self._form
        if form is None:
            return self._dequantized(norm(x))
        return self._kernels.norm_linear(
            *(x, norm.weight, norm.eps, form.weight, self.bias),
            activations=form.activations,
            deterministic=self.deterministic,
        )

    def gated_after_norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        form = self._form
        if form is None:
            return silu_and_mul(self._dequantized(norm(x)), interleaved=True)
        return self._kernels.norm_gated_linear(
            *(x, norm.weight, norm.eps, form.weight, self.bias),
            activations=form.activations,
            deterministic=self.deterministic,
        )

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        form = self._form
        if form is None:
            residual.add_(self._dequantized(x))
        else:
            self._kernels.linear_add(
                x, form.weight, residual, self.bias, activations=form.activations, deterministic=self.deterministic
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and whatever else is kept, and of the bias."""
        held = self._form.weight if self._form is not None else self.quantized
        assert held is not None
        return held.num_bytes + (0 if self.bias is None else self.bias.numel() * self.bias.element_size())

    def pack(self) -> None:
        """Quantized weights are packed when they are made."""

    def _dequantized(self, x: torch.Tensor, rank_maximum: RankMaximum | None = None) -> torch.Tensor:
        assert self.quantized is not None
        y = self.quantized.apply(x, rank_maximum)
        return y if self.bias is None else y.add_(self.bias)


class QuantizedRowParallelLinear(QuantizedLinear):
    """Each rank has the columns of its part of x, one of them the bias. Scales of activations are those of all ranks'
    elements where they are computed here."""

    __slots__ = ("_group",)

    def __init__(
        self,
        quantized: QuantizedWeight | KernelForm,
        bias: torch.Tensor | None = None,
        *,
        group: TensorGroup,
        deterministic: bool = False,
    ) -> None:
        super().__init__(quantized, bias, deterministic=deterministic)
        self._group = group

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        part = self(x) if self._form is not None else self._dequantized(x, self._group.maximum_)
        self._group.add_sum_(residual, part)
