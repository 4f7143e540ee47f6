"""adaLN (adaptive layer norm): shift, scale and gate from the timestep (Peebles and Xie, arXiv:2212.09748)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm, modulated_norm_fp8
from diffusion_runtime.layers.linear import Linear, LinearInput, QuantizedTokens


class Modulation(nn.Module):
    """Rows of shift, scale or gate from a conditioning vector, in the model's own order. in_dim: of the vector, None is
    dim."""

    def __init__(self, dim: int, num_rows: int, *, bias: bool = True, in_dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.num_rows = num_rows
        self.projection = Linear(dim if in_dim is None else in_dim, num_rows * dim, bias=bias)

    def forward(self, conditioning: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[batch, in_dim], after its activation, to num_rows times [batch, dim] of its dtype. What reads them computes
        in float32: a copy of each would be a launch per block, 76 of a FLUX.1 forward's 930."""
        rows: torch.Tensor = self.projection(conditioning)
        return rows.chunk(self.num_rows, dim=-1)

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        """Return the same rows as one tensor, [num_rows, batch, dim]."""
        rows: torch.Tensor = self.projection(conditioning)
        return torch.unflatten(rows, -1, (self.num_rows, -1)).transpose(0, 1)


class BlockModulation(Modulation):
    """Modulation of a block that is given its rows (layers/modulation_rows.py)."""

    # By the code that computes the rows, and not by the block's forward.
    read_once: tuple[str, ...] = ("projection",)


@dataclass(frozen=True)
class ApartTokens:
    """Tokens at one end of a stream, the last ones or with is_first the first, which have a timestep of their own.
    rows: of their modulation in one block, [rows, batch, dim]."""

    num_tokens: int
    rows: torch.Tensor
    is_first: bool = False

    def split(self, num_tokens: int) -> tuple[tuple[slice, bool], ...]:
        """Split a stream of num_tokens, in order, into (tokens, whether they are these), without empty parts."""
        middle = self.num_tokens if self.is_first else num_tokens - self.num_tokens
        halves = (slice(0, middle), self.is_first), (slice(middle, num_tokens), not self.is_first)
        return tuple((tokens, are_apart) for tokens, are_apart in halves if tokens.start < tokens.stop)


class ModulatedBlock(nn.Module):
    """A block that is called with its streams, the rows of each of `modulations` and further inputs. modulation: of the
    grid's tokens."""

    modulation: BlockModulation

    @property
    def modulations(self) -> tuple[BlockModulation, ...]:
        """In the order in which forward takes their rows, [num_rows, batch, dim] each."""
        return (self.modulation,)


def modulated_layer_norm(
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    *,
    branch: Branch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """layer_norm(x) * (1 + scale) + shift, in float32; of x's dtype.

    x: [batch, seq, dim]; shift, scale: [batch, dim], float32 or of x's dtype. branch: added to x first, in place. out:
    written and returned; None is a new tensor.
    """
    return modulated_norm(x, Norm("layer", eps), shift=shift, scale=scale, branch=branch, out=out)


def modulated_rms_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float, *, branch: Branch | None = None
) -> torch.Tensor:
    """rms_norm(x) * (1 + scale) + shift; a new tensor of x's dtype. Shapes and branch as in modulated_layer_norm."""
    return modulated_norm(x, Norm("rms", eps), shift=shift, scale=scale, branch=branch)


def norm_for(
    layers: Sequence[Linear],
    x: torch.Tensor,
    norm: Norm,
    *,
    shift: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    branch: Branch | None = None,
) -> LinearInput:
    """modulated_norm as the input of `layers`: quantised in the same pass where all of them multiply in 8 bits, which
    changes no bit of their products.

    Where some of several layers do not, x's dtype serves all: two results of a pass would cost the others' gain.
    """
    for layer in layers:
        if not layer.takes_quantized(x):
            return modulated_norm(x, norm, shift=shift, scale=scale, branch=branch)
    return QuantizedTokens(modulated_norm_fp8(x, norm, shift=shift, scale=scale, branch=branch), x.shape)


def add_gated_(x: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + branch * gate, written into x.

    x, branch: [batch, seq, dim] of one dtype; gate: [batch, dim], float32 or of that. Summed in float32, rounded once.
    """
    return add_branch_(x, Branch(branch, gate))
