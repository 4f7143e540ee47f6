"""Linear layers with weights in 8-bit integers, rotated in groups (int8 ConvRot, kernels/int8_rows): products in 8 bits
on NVIDIA's GPUs from Ampere on, and on CPUs with VNNI."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.kernels.int8_rows.api import multiply_rows, product_refusal, quantize_rows
from diffusion_runtime.kernels.int8_rows.reference import rotate
from diffusion_runtime.layers.eight_bit_linear import EightBitLinear


class Int8Linear(EightBitLinear):
    """EightBitLinear of rotated rows: the weight is rotated(values * weight_scale). Inputs are rotated as they are
    quantised."""

    weight_dtype = torch.int8
    described = "int8 weights"
    product_name = "int8 products"

    def quantize_weight(self, weight: torch.Tensor) -> QuantizedRows:
        return quantize_rows(weight, self.group_size)

    def quantize_input(
        self,
        x: torch.Tensor,
        gelu_from: int | None = None,
        features: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> QuantizedRows:
        return quantize_rows(x, self.group_size, gelu_from=gelu_from, features=features, first=first)

    def multiply(self, rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        return multiply_rows(rows, QuantizedRows(self.weight, self.weight_scale), self.bias, dtype)

    def product_dequantized(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the input in place of the weight, which has as many rows or more where this is used."""
        weight = (self.weight.float() * self.weight_scale).to(x.dtype)
        return F.linear(rotate(x.float(), self.group_size).to(x.dtype), weight, self.bias)

    def refusal_of(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return product_refusal(device, dtype, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rotated by {self.group_size}"
