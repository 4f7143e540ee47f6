"""adaLN conditioning: one vector per sample, from timestep, guidance scale and pooled text, that shifts, scales and
gates every block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.embeddings import TimestepEmbedding, VectorEmbedding
from diffusion_runtime.layers.linear import Linear


class ConditionEmbedding(nn.Module):
    """The sum of its parts, each through a two-layer network of its own.

    num_waves: channels of the sinusoidal timestep and guidance embeddings. pooled_dim: of the pooled text, None for
    models without one. has_guidance: whether the guidance scale is an input (guidance-distilled, Meng et al.,
    arXiv:2210.03142). bias: of the networks of timestep and guidance.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_waves: int,
        pooled_dim: int | None = None,
        has_guidance: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.timestep = TimestepEmbedding(num_waves, dim, bias=bias)
        self.guidance = TimestepEmbedding(num_waves, dim, bias=bias) if has_guidance else None
        self.pooled = VectorEmbedding(pooled_dim, dim) if pooled_dim is not None else None

    def forward(
        self, timestep: torch.Tensor, *, guidance: float | None = None, pooled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[batch, dim]. timestep: [batch], in [0, 1000]. guidance: a scale such as 3.5. pooled: [batch, pooled_dim].

        Arguments that this model has no input for are ignored.
        """
        embedded: torch.Tensor = self.timestep(timestep)
        if self.guidance is not None:
            assert guidance is not None, "this model takes a guidance scale"
            # Scaled like timesteps, and multiplied in float32 as in training: at thousands of radians the rounding
            # shows in the highest frequencies.
            scales = torch.full_like(timestep, guidance, dtype=torch.float32) * 1000
            embedded = embedded + self.guidance(scales)
        if self.pooled is not None:
            assert pooled is not None, "this model takes a pooled text"
            embedded = embedded + self.pooled(pooled.to(embedded.dtype))
        return embedded


class TimestepModulation(nn.Module):
    """adaLN-single (Chen et al., arXiv:2310.00426): rows of shift, scale or gate from the timestep alone, to which
    every block adds its own."""

    def __init__(self, num_waves: int, dim: int, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.embedding = TimestepEmbedding(num_waves, dim)
        self.projection = Linear(dim, num_rows * dim)

    def forward(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows, float32 [batch, num_rows, dim], and the embedding behind them [batch, dim]. timestep: [batch]."""
        embedded: torch.Tensor = self.embedding(timestep)
        rows: torch.Tensor = self.projection(F.silu(embedded)).unflatten(-1, (self.num_rows, -1))
        return rows.float(), embedded
