"""Linear layers with 8-bit weights: W8A8 products where the device has them, weights dequantised per call elsewhere.

Weights are quantised per output row when they are loaded, or were in their file; inputs per token when the layer runs
(row-wise dynamic quantisation); both with 3 bits of mantissa (kernels/fp8_rows).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.handles import HandleTable
from diffusion_runtime.kernels.fp8_rows.api import (
    QuantizedRows,
    multiply_rows,
    product_refusal,
    quantize_gated_rows,
    quantize_joined_rows,
    quantize_rows,
)
from diffusion_runtime.kernels.fp8_rows.reference import dequantize
from diffusion_runtime.layers.linear import Linear, LinearInput, QuantizedTokens

WEIGHT_DTYPE = torch.float8_e4m3fn
# How a product was computed, for reports.
SCALED_PRODUCT = "8-bit products"


# The layers of compiled blocks, which the operator calls.
PRODUCTS: HandleTable[Fp8Linear] = HandleTable()


@torch.library.custom_op("diffusion_runtime::quantized_product", mutates_args=())
def opaque_product(x: torch.Tensor, layer: torch.Tensor, out_features: int, gelu_from: int | None) -> torch.Tensor:
    """Fp8Linear.compute. layer: its handle; out_features: of the layer, for the fake."""
    del out_features
    return PRODUCTS.find(layer).compute(x, gelu_from).contiguous()


@opaque_product.register_fake
def _(
    x: torch.Tensor,
    layer: torch.Tensor,  # noqa: ARG001
    out_features: int,
    gelu_from: int | None,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class ProductCounter:
    """Counter to which the quantised layers of a model report each product: the recorder of the current generation."""

    def __init__(self) -> None:
        self._record: Callable[[str], object] = lambda _: None

    def start(self, record: Callable[[str], object]) -> None:
        """Start calling `record` with how each product is computed."""
        self._record = record

    def stop(self) -> None:
        """Stop counting: products of forward passes outside of a generation do not count."""
        self._record = lambda _: None

    def count(self, implementation: str) -> None:
        self._record(implementation)


class Fp8Linear(Linear):
    """x @ (weight * weight_scale).T + bias. weight: float8_e4m3fn, or float8_e5m2 of a file, [out_features,
    in_features]; weight_scale: float32 [out_features, 1]; bias: in the model's dtype. storage_only: why its products
    are in the model's dtype on every device, None for a layer that multiplies in 8 bits."""

    weight_scale: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        counter: ProductCounter,
        storage_only: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        device = self.weight.device
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=WEIGHT_DTYPE, device=device), requires_grad=False
        )
        self.weight_scale = nn.Parameter(
            torch.ones(out_features, 1, dtype=torch.float32, device=device), requires_grad=False
        )
        self._counter = counter
        self._storage_only = storage_only
        self._handle: torch.Tensor | None = None
        self._refusals: dict[tuple[torch.device, torch.dtype], str | None] = {}

    def product(self, x: LinearInput) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        if isinstance(x, QuantizedTokens):
            return self._multiply(x.rows, x.shape[:-1])
        if self._is_opaque():
            return self._record_operator(x)
        refusal = self._refusal(x)
        if refusal is None:
            return self._multiply(quantize_rows(x), x.shape[:-1])
        self._counter.count(f"weights dequantised per call: {refusal}")
        return F.linear(x, dequantize(QuantizedRows(self.weight, self.weight_scale), x.dtype), self.bias)

    def forward_gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.product(x), approximate="tanh")

    def product_after_gelu(self, up: Linear, x: LinearInput) -> torch.Tensor:
        """Compute the GELU while its result is quantised, which saves a pass over the widest tensor of a block."""
        if self._is_opaque():
            return self._record_operator(up(x), 0)
        if self._refusal(x) is not None:
            return super().product_after_gelu(up, x)
        return self._multiply(quantize_rows(up(x), gelu_from=0), x.shape[:-1])

    def product_after_silu(self, gate: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Quantise in the pass of the activation."""
        if self._is_opaque() or self._refusal(gate) is not None:
            return super().product_after_silu(gate, features)
        return self._multiply(quantize_gated_rows(gate, features), gate.shape[:-1])

    def product_joined(
        self, first: torch.Tensor, second: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Quantise in the pass of the activation, without a copy of either part."""
        if self._is_opaque() or self._refusal(first) is not None:
            return super().product_joined(first, second, features)
        return self._multiply(quantize_joined_rows(first, second, features), first.shape[:-1])

    def product_gelu_of_last(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Compute Linear.product_gelu_of_last without overwriting x."""
        if self._is_opaque():
            return self._record_operator(x, start)
        if self._refusal(x) is not None:
            return super().product_gelu_of_last(x, start)
        return self._multiply(quantize_rows(x, gelu_from=start), x.shape[:-1])

    def takes_quantized(self, x: torch.Tensor) -> bool:
        """Return False under torch.compile, which traces the norm and records this layer as one operator."""
        return not torch.compiler.is_dynamo_compiling() and self._refusal(x) is None

    def make_opaque(self) -> None:
        """Let torch.compile record one operator for a product instead of tracing it, so that it is counted."""
        self._handle = PRODUCTS.handle_of(self)

    def compute(self, x: torch.Tensor, gelu_from: int | None) -> torch.Tensor:
        """Return the product of x, whose features from `gelu_from` on pass the tanh GELU first, without changing x."""
        if self._refusal(x) is None:
            return self._multiply(quantize_rows(x, gelu_from=gelu_from), x.shape[:-1])
        if gelu_from is not None:
            x = torch.cat([x[..., :gelu_from], F.gelu(x[..., gelu_from:], approximate="tanh")], dim=-1)
        return self.product(x)

    def _is_opaque(self) -> bool:
        # False outside of torch.compile, without a look at anything.
        return torch.compiler.is_dynamo_compiling() and self._handle is not None

    def _record_operator(self, x: torch.Tensor, gelu_from: int | None = None) -> torch.Tensor:
        """Return the product as torch.compile records it."""
        assert self._handle is not None
        out: torch.Tensor = opaque_product(x, self._handle, self.out_features, gelu_from)
        return out

    def _multiply(self, rows: QuantizedRows, shape: torch.Size) -> torch.Tensor:
        """rows: the input, of tokens [*shape]."""
        self._counter.count(SCALED_PRODUCT)
        weight = QuantizedRows(self.weight, self.weight_scale)
        return multiply_rows(rows, weight, self.bias).view(*shape, self.out_features)

    def _refusal(self, x: LinearInput) -> str | None:
        if self._storage_only is not None:
            return self._storage_only
        if self.weight.dtype != WEIGHT_DTYPE:
            return f"products need {_name(WEIGHT_DTYPE)} weights, and the file has {_name(self.weight.dtype)}"
        key = (x.device, x.dtype)
        if key not in self._refusals:
            self._refusals[key] = product_refusal(x.device, x.dtype, self.in_features, self.out_features)
        return self._refusals[key]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_name(self.weight.dtype)} by row"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replace_linear(root: nn.Module, name: str, counter: ProductCounter, storage_only: str | None = None) -> None:
    """Put an Fp8Linear of the same size in the place of a Linear, without values. name: of the layer within root."""
    replace_layer(root, name, functools.partial(Fp8Linear, counter=counter, storage_only=storage_only))


class MakeLinear(Protocol):
    """A class of linear layers, but for what all of its layers share."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool) -> Linear: ...


def replace_layer(root: nn.Module, name: str, make: MakeLinear) -> None:
    """Put another layer of the same size in the place of a Linear, without values. name: of it within root."""
    linear = root.get_submodule(name)
    assert isinstance(linear, Linear)
    owner, _, leaf = name.rpartition(".")
    with torch.device(linear.weight.device):
        layer = make(linear.in_features, linear.out_features, bias=linear.bias is not None)
    layer.share = linear.share
    setattr(root.get_submodule(owner), leaf, layer)


def quantized_weights(module: nn.Module) -> dict[str, str]:
    """Return the names of 8-bit weights in a module's state dict, with the names of their scales."""
    prefixes = [f"{name}." if name else "" for name, layer in module.named_modules() if isinstance(layer, Fp8Linear)]
    return {f"{prefix}weight": f"{prefix}weight_scale" for prefix in prefixes}
