"""Activations of feed-forward networks: the choice between Triton and torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.activations import triton
from diffusion_runtime.kernels.implementation import has_shape_alone, leaves_eager, runs_in_triton


def silu_mul(
    gate: torch.Tensor,
    features: torch.Tensor,
    *,
    in_place: bool = False,
    num_shares: int = 1,
    implementation: str = "auto",
) -> torch.Tensor:
    """silu(gate) * features (Shazeer, arXiv:2002.05202); in a new contiguous tensor, or in the place of `gate`.

    gate, features: [..., dim], such as the halves of one product. num_shares: how many processes share the layer's
    features, these being one's. Triton rounds once, the reference after each of the two. Raises ConfigError for shapes
    that differ, and when the implementation that was asked for cannot run.
    """
    implementation = _narrowed(implementation, gate, "silu_mul", num_shares)
    if implementation == "auto":
        made = triton.repeat(gate, features, "silu_mul", in_place)
        if made is not None:
            return made
    _check_alike("SiLU", gate, features)
    if has_shape_alone(gate):
        out = gate if in_place else torch.empty_like(gate, memory_format=torch.contiguous_format)
        return triton.expect(gate, features, out, "silu_mul", num_shares)
    if runs_in_triton(implementation, triton.refusal(gate, features)):
        return triton.gated(gate, features, "silu_mul", in_place)
    return F.silu(gate, inplace=in_place).mul_(features)


def sigmoid_mul(
    gate: torch.Tensor, features: torch.Tensor, *, num_shares: int = 1, implementation: str = "auto"
) -> torch.Tensor:
    """sigmoid(gate) * features (gated attention: Qiu et al., arXiv:2505.06708), in a new contiguous tensor. The
    arguments, and what is raised, are those of silu_mul."""
    implementation = _narrowed(implementation, gate, "sigmoid_mul", num_shares)
    if implementation == "auto":
        made = triton.repeat(gate, features, "sigmoid_mul", False)
        if made is not None:
            return made
    _check_alike("sigmoid", gate, features)
    if has_shape_alone(gate):
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        return triton.expect(gate, features, out, "sigmoid_mul", num_shares)
    if runs_in_triton(implementation, triton.refusal(gate, features)):
        return triton.gated(gate, features, "sigmoid_mul", False)
    return torch.sigmoid(gate).mul_(features)


def gelu_(x: torch.Tensor, *, num_shares: int = 1, implementation: str = "auto") -> torch.Tensor:
    """Apply the tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415) in place. x: [..., dim], such as a part of a
    product. num_shares: as of silu_mul. Raises ConfigError when the implementation that was asked for cannot run."""
    implementation = _narrowed(implementation, x, "gelu", num_shares)
    if implementation == "auto" and triton.repeat(x, x, "gelu", True) is not None:
        return x
    if has_shape_alone(x):
        return triton.expect(x, x, x, "gelu", num_shares)
    if runs_in_triton(implementation, triton.refusal(x, x)):
        return triton.gelu_(x)
    result: torch.Tensor = torch.ops.aten.gelu_(x, approximate="tanh")
    return result


def _narrowed(implementation: str, x: torch.Tensor, activation: str, num_shares: int) -> str:
    """Return the implementation of a call, in which `auto` is the reference for a narrow layer."""
    is_left = implementation == "auto" and leaves_eager(x, triton.layer_width(x, activation, num_shares))
    return "reference" if is_left else implementation


def _check_alike(name: str, gate: torch.Tensor, features: torch.Tensor) -> None:
    if gate.shape != features.shape:
        raise ConfigError(f"{name}: expected gate and features alike, got {tuple(gate.shape)}, {tuple(features.shape)}")
