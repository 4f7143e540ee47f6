"""Linear layers with 8-bit weights and a scale per output row: products in 8 bits where the device has them, weights
dequantised per call elsewhere. Inputs are quantised per token when a layer runs (row-wise dynamic quantisation)."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows
from diffusion_runtime.layers.linear import Linear, LinearInput, QuantizedTokens


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


@dataclass(frozen=True)
class EightBits:
    """Kind of 8-bit layers. group_size: numbers of a row that are rotated together (ConvRot), 0 for none."""

    layer: type[EightBitLinear]
    group_size: int = 0

    def replace(self, root: nn.Module, name: str, counter: ProductCounter, storage_only: str | None = None) -> None:
        """Put an 8-bit layer of the same size in the place of a Linear, without values. name: of it within root."""
        make = functools.partial(self.layer, counter=counter, storage_only=storage_only, group_size=self.group_size)
        replace_layer(root, name, make)


class EightBitLinear(Linear):
    """x @ (weight * weight_scale).T + bias. weight: 8-bit [out_features, in_features]; weight_scale: float32
    [out_features, 1]; bias: in the model's dtype. storage_only: why its products are in the model's dtype on every
    device, None for a layer that multiplies in 8 bits. group_size: as in EightBits."""

    # Of weights that are quantised here; what these are called in reports, and a product in 8 bits.
    weight_dtype: ClassVar[torch.dtype]
    described: ClassVar[str]
    product_name: ClassVar[str]
    weight_scale: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        counter: ProductCounter,
        storage_only: str | None = None,
        group_size: int = 0,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        device = self.weight.device
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=self.weight_dtype, device=device), requires_grad=False
        )
        self.weight_scale = nn.Parameter(
            torch.ones(out_features, 1, dtype=torch.float32, device=device), requires_grad=False
        )
        self.group_size = group_size
        self._counter = counter
        self._storage_only = storage_only
        self._refusals: dict[tuple[torch.device, torch.dtype, torch.dtype], str | None] = {}

    @abstractmethod
    def quantize_weight(self, weight: torch.Tensor) -> QuantizedRows:
        """Quantise rows of the weight, float32 [rows, in_features]."""

    @abstractmethod
    def quantize_input(
        self,
        x: torch.Tensor,
        gelu_from: int | None = None,
        features: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> QuantizedRows:
        """Quantise first and x side by side. gelu_from: the features from there on pass the tanh GELU; features: for
        silu(x) * features in place of x."""

    @abstractmethod
    def multiply(self, rows: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        """Return the product of quantised inputs, [rows, out_features] in the model's dtype."""

    @abstractmethod
    def refusal_of(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why a device cannot multiply in 8 bits, or None."""

    @abstractmethod
    def product_dequantized(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in x's dtype, with the numbers that the weight stands for."""

    @property
    def kind(self) -> EightBits:
        return EightBits(type(self), self.group_size)

    def product(self, x: LinearInput) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        if isinstance(x, QuantizedTokens):
            return self._multiply(x.rows, x)
        refusal = self._refusal(x)
        if refusal is None:
            return self._multiply(self.quantize_input(x), x)
        self._counter.count(f"weights dequantised per call: {refusal}")
        return self.product_dequantized(x)

    def forward_gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.product(x), approximate="tanh")

    def product_after_gelu(self, up: Linear, x: LinearInput) -> torch.Tensor:
        """Compute the GELU while its result is quantised, which saves a pass over the widest tensor of a block."""
        if self._refusal(x) is not None:
            return super().product_after_gelu(up, x)
        return self._multiply(self.quantize_input(up(x), gelu_from=0), x)

    def product_after_silu(self, gate: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Quantise in the pass of the activation."""
        if self._refusal(gate) is not None:
            return super().product_after_silu(gate, features)
        return self._multiply(self.quantize_input(gate, features=features), gate)

    def product_joined(
        self, first: torch.Tensor, second: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Quantise in the pass of the activation, without a copy of either part."""
        if self._refusal(first) is not None:
            return super().product_joined(first, second, features)
        gelu_from = first.shape[-1] if features is None else None
        return self._multiply(self.quantize_input(second, gelu_from, features, first), first)

    def product_gelu_of_last(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Compute Linear.product_gelu_of_last without overwriting x."""
        if self._refusal(x) is not None:
            return super().product_gelu_of_last(x, start)
        return self._multiply(self.quantize_input(x, gelu_from=start), x)

    def _multiply(self, rows: QuantizedRows, x: LinearInput) -> torch.Tensor:
        """rows: made of tokens like x, which gives shape and dtype of the result."""
        self._counter.count(self.product_name)
        return self.multiply(rows, x.dtype).view(*x.shape[:-1], self.out_features)

    def _refusal(self, x: LinearInput) -> str | None:
        if self._storage_only is not None:
            return self._storage_only
        # A switched LoRA may give the weight of a file another dtype.
        key = (x.device, x.dtype, self.weight.dtype)
        if key not in self._refusals:
            self._refusals[key] = self.refusal_of(x.device, x.dtype)
        return self._refusals[key]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {dtype_name(self.weight.dtype)} by row"


def input_of(layers: Sequence[Linear], x: torch.Tensor) -> LinearInput:
    """Return x as the input of several layers: quantised once where all of them multiply in 8 bits alike."""
    first = layers[0]
    if not isinstance(first, EightBitLinear) or not all(type(each) is type(first) for each in layers):
        return x
    return QuantizedTokens(first.quantize_input(x), x.shape) if all(each.takes_quantized(x) for each in layers) else x


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    prefixes = [f"{name}." if name else "" for name in eight_bit_layers(module)]
    return {f"{prefix}weight": f"{prefix}weight_scale" for prefix in prefixes}


def eight_bit_layers(module: nn.Module) -> dict[str, EightBitLinear]:
    """Return the 8-bit layers of a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, EightBitLinear)}
