"""One vector a sample that shifts, scales and gates every block: timestep, guidance scale and pooled text, summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.embeddings import TimestepEmbedding, VectorEmbedding
from diffusion_runtime.layers.linear import Linear


class ConditionEmbedding(nn.Module):
    """Each part goes through a two-layer network of its own.

    num_waves: of timestep and guidance. pooled_dim: of the pooled text, None for models that take none. has_guidance:
    whether the scale that a model was distilled at is an input (Meng et al., arXiv:2210.03142). bias: of the networks
    of timestep and guidance.
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

        What this model does not take is ignored.
        """
        embedded: torch.Tensor = self.timestep(timestep)
        if self.guidance is not None:
            assert guidance is not None, "this model takes a guidance scale"
            # On the same footing as timesteps, and multiplied in float32 as in training: at thousands of radians the
            # rounding shows in the quickest waves.
            scales = torch.full_like(timestep, guidance, dtype=torch.float32) * 1000
            embedded = embedded + self.guidance(scales)
        if self.pooled is not None:
            assert pooled is not None, "this model takes a pooled text"
            embedded = embedded + self.pooled(pooled.to(embedded.dtype))
        return embedded


class TimestepModulation(nn.Module):
    """Rows of shift, scale or gate that come from the timestep alone, and to which every block adds its own
    (adaLN-single, Chen et al., arXiv:2310.00426)."""

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
