"""Activations in Triton: one read of every input, one write."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from diffusion_runtime.kernels.implementation import refusal_of
from diffusion_runtime.kernels.launches import Launch, LaunchCache, is_expecting, kind_of

# Columns of a row that one program computes: 16 numbers per thread.
BLOCK = 2048
NUM_WARPS = 4
# Numbers of a feed-forward network's hidden layer per number of its layer's width: that of the embedded model has 4.
_PER_WIDTH = 4
_launches = LaunchCache()


def refusal(gate: torch.Tensor, features: torch.Tensor) -> str | None:
    """Return why this implementation cannot compute with such tensors, or None."""
    reason = refusal_of(gate, features)
    if reason is None and (_row_stride(gate) is None or _row_stride(features) is None):
        return "takes rows that lie evenly apart"
    return reason


def gated(gate: torch.Tensor, features: torch.Tensor, activation: str, in_place: bool) -> torch.Tensor:
    """Implement api.silu_mul and api.sigmoid_mul, by that name, in one launch."""
    out = gate if in_place else torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch(gate, features, out, activation)
    return out


def layer_width(x: torch.Tensor, activation: str, num_shares: int) -> int:
    """Return the numbers of a token in the layer of a call like x: a gate of attention has as many, an activation is
    within the feed-forward network. num_shares: processes that share the layer."""
    whole = x.shape[-1] * num_shares
    return whole if activation == "sigmoid_mul" else whole // _PER_WIDTH


def expect(
    gate: torch.Tensor, features: torch.Tensor, out: torch.Tensor, activation: str, num_shares: int
) -> torch.Tensor:
    """Return `out`; add the launch of a call on the meta device to those that are expected."""
    if (
        is_expecting(gate, layer_width(gate, activation, num_shares))
        and _row_stride(gate) is not None
        and _row_stride(features) is not None
    ):
        _launch(gate, features, out, activation)
    return out


def gelu_(x: torch.Tensor) -> torch.Tensor:
    """Implement api.gelu_ in one launch."""
    _launch(x, x, x, "gelu")
    return x


def repeat(gate: torch.Tensor, features: torch.Tensor, activation: str, in_place: bool) -> torch.Tensor | None:
    """Return the result of a call like an earlier one, without its checks, or None for the first of its kind."""
    found = _launches.repeat(gate.device, _key, gate, features, in_place, activation)
    if found is None:
        return None
    out = gate if in_place else torch.empty_like(gate, memory_format=torch.contiguous_format)
    found.run((gate, features, out))
    return out


def _key(gate: torch.Tensor, features: torch.Tensor, in_place: bool, activation: str) -> Hashable:
    """Return all that checks and launch depend on."""
    return activation, in_place, kind_of(gate), kind_of(features)


def _launch(gate: torch.Tensor, features: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    if gate.numel() == 0:
        return

    def prepare() -> Launch:
        from diffusion_runtime.kernels.activations import triton_kernels as kernels

        dim = gate.shape[-1]
        strides = [stride for each in pointers if (stride := _row_stride(each)) is not None]
        grid = (gate.numel() // dim, -(-dim // BLOCK), 1)
        return Launch(kernels.activate, grid, (dim, *strides), {"ACTIVATION": activation, "BLOCK": BLOCK}, NUM_WARPS)

    pointers = (gate, features, out)
    _launches.run(_key(gate, features, out is gate, activation), pointers, prepare)


def _row_stride(x: torch.Tensor) -> int | None:
    """Return the stride from row to row of x [..., dim], or None if rows are not evenly spaced."""
    stride, extent = 0, 1
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if extent == 1:
            stride = step
        elif step != stride * extent:
            return None
        extent *= size
    return stride
