"""Linear layers with weights in 8-bit floats of 3 bits of mantissa (kernels/fp8_rows): W8A8 products from Ada on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.kernels.fp8_rows.api import (
    QuantizedRows,
    multiply_rows,
    product_refusal,
    quantize_gated_rows,
    quantize_joined_rows,
    quantize_rows,
)
from diffusion_runtime.kernels.fp8_rows.reference import dequantize
from diffusion_runtime.layers.eight_bit_linear import EightBitLinear, EightBits, ProductCounter, dtype_name
from diffusion_runtime.layers.linear import Linear

WEIGHT_DTYPE = torch.float8_e4m3fn
# How a product was computed, for reports.
SCALED_PRODUCT = "fp8 products"


class Fp8Linear(EightBitLinear):
    """EightBitLinear of float8_e4m3fn, or float8_e5m2 of a file, whose products are in the model's dtype."""

    weight_dtype = WEIGHT_DTYPE
    described = "8-bit weights"
    product_name = SCALED_PRODUCT

    def quantize_weight(self, weight: torch.Tensor) -> QuantizedRows:
        return quantize_rows(weight)

    def quantize_input(
        self,
        x: torch.Tensor,
        gelu_from: int | None = None,
        features: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> QuantizedRows:
        if first is not None:
            return quantize_joined_rows(first, x, features)
        return quantize_rows(x, gelu_from=gelu_from) if features is None else quantize_gated_rows(x, features)

    def multiply(self, rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002 - it has one
        return multiply_rows(rows, QuantizedRows(self.weight, self.weight_scale), self.bias)

    def product_dequantized(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, dequantize(QuantizedRows(self.weight, self.weight_scale), x.dtype), self.bias)

    def takes_quantized(self, x: torch.Tensor) -> bool:
        """Return False under torch.compile, which traces the norm and records this layer as one operator."""
        return not torch.compiler.is_dynamo_compiling() and self._refusal(x) is None

    def refusal_of(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if self.weight.dtype != WEIGHT_DTYPE:
            return f"products need {dtype_name(WEIGHT_DTYPE)} weights, and the file has {dtype_name(self.weight.dtype)}"
        return product_refusal(device, dtype, self.in_features, self.out_features)


@torch.no_grad()
def multiply_in_fp8(module: nn.Module, counter: ProductCounter) -> None:
    """Quantise the weights of a loaded module's linear layers in place, one after the other; those that a file has
    quantised stay. counter: of the products."""
    layers = [(name, layer) for name, layer in module.named_modules() if type(layer) is Linear]
    for name, layer in layers:
        EightBits(Fp8Linear).replace(module, name, counter)
        made = module.get_submodule(name)
        assert isinstance(made, Fp8Linear)
        rows = made.quantize_weight(layer.weight.float())
        made.weight.data, made.weight_scale.data, made.bias = rows.values, rows.scales, layer.bias
        # Its memory, for the next.
        layer.weight.untyped_storage().resize_(0)
