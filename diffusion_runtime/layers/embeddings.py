"""Input and output of a transformer: patchify and unpatchify; embeddings of timestep, text, image, guidance scale and
pooled vector."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.layers.linear import FeedForward, Linear
from diffusion_runtime.layers.norm import LayerNorm

MAX_PERIOD = 10000.0


def patchify(latents: torch.Tensor, patch: tuple[int, int, int], *, channels_first: bool = True) -> torch.Tensor:
    """[batch, channels, frames, height, width] to tokens in raster order, [batch, tokens, channels * patch frames *
    patch height * patch width]; within a token the channels come first, or last without channels_first."""
    batch, channels = latents.shape[:2]
    frames, height, width = (size // side for size, side in zip(latents.shape[2:], patch, strict=True))
    blocks = latents.reshape(batch, channels, frames, patch[0], height, patch[1], width, patch[2])
    order = (0, 2, 4, 6, 1, 3, 5, 7) if channels_first else (0, 2, 4, 6, 3, 5, 7, 1)
    return blocks.permute(*order).reshape(batch, frames * height * width, -1)


def unpatchify(
    tokens: torch.Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int], *, channels_first: bool = False
) -> torch.Tensor:
    """Tokens of a grid, in raster order, to [batch, channels, frames, height, width].

    tokens: [batch, tokens, patch frames * patch height * patch width * channels]; with channels_first the channels come
    first in a token, as `patchify` puts them.
    """
    if channels_first:
        blocks = tokens.reshape(tokens.shape[0], *grid, -1, *patch).movedim(4, -1)
    else:
        blocks = tokens.reshape(tokens.shape[0], *grid, *patch, -1)
    return blocks.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class PatchEmbedding(nn.Module):
    """A linear map of every patch of latents: the same as a convolution with stride equal to its kernel."""

    def __init__(self, num_channels: int, dim: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch = patch
        self.projection = Linear(num_channels * math.prod(patch), dim)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, channels, frames, height, width] to [batch, tokens, dim]."""
        tokens: torch.Tensor = self.projection(patchify(latents, self.patch))
        return tokens


def timestep_waves(
    timestep: torch.Tensor, num_channels: int, scale: float = 1.0, *, is_double: bool = False
) -> torch.Tensor:
    """Sinusoidal embedding, [batch] to float32 [batch, channels]: cosines, then sines, of scale times the timestep at
    periods from 2 pi to 2 pi * MAX_PERIOD (Vaswani et al., arXiv:1706.03762).

    scale: for models whose time is in [0, 1]. It is multiplied last: at hundreds of radians the order shows in the
    fifth digit. is_double: whether angles are computed in float64, as such a model was trained; Apple's GPUs have none.
    """
    half = num_channels // 2
    dtype = torch.float64 if is_double and timestep.device.type != "mps" else torch.float32
    exponents = torch.arange(half, dtype=dtype, device=timestep.device) / half
    angles = timestep[:, None].to(dtype) * torch.exp(-math.log(MAX_PERIOD) * exponents) * scale
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


class TimestepEmbedding(nn.Module):
    """The sinusoidal timestep embedding through a two-layer network, in the dtype of its weights. hidden_dim: None is
    dim. scale, is_double: of timestep_waves."""

    def __init__(
        self,
        num_waves: int,
        dim: int,
        hidden_dim: int | None = None,
        *,
        scale: float = 1.0,
        bias: bool = True,
        is_double: bool = False,
    ) -> None:
        super().__init__()
        self.is_double = is_double
        hidden_dim = dim if hidden_dim is None else hidden_dim
        self.num_waves = num_waves
        self.scale = scale
        self.up = Linear(num_waves, hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim, bias=bias)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """[batch] to [batch, dim]."""
        waves = timestep_waves(timestep, self.num_waves, self.scale, is_double=self.is_double)
        waves = waves.to(self.up.weight.dtype)
        embedded: torch.Tensor = self.down(F.silu(self.up(waves)))
        return embedded


class VectorEmbedding(nn.Module):
    """Projects a vector, such as a pooled text, to the transformer's width: two layers with SiLU between."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.up = Linear(in_dim, dim)
        self.down = Linear(dim, dim)

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        """[batch, in_dim] to [batch, dim]."""
        embedded: torch.Tensor = self.down(F.silu(self.up(vector)))
        return embedded


class TextEmbedding(FeedForward):
    """Projects the text encoder's tokens to the transformer's width: two layers."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__(text_dim, dim, dim)


class ImageEmbedding(nn.Module):
    """Projects the tokens of an image encoder to the transformer's width: two layers between norms, with the exact form
    of GELU."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        self.norm_in = LayerNorm(image_dim, 1e-5)
        self.up = Linear(image_dim, image_dim)
        self.down = Linear(image_dim, dim)
        self.norm_out = LayerNorm(dim, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., image_dim] to [..., dim]."""
        out: torch.Tensor = self.norm_out(self.down(F.gelu(self.up(self.norm_in(x)))))
        return out


class ConditionEmbedding(nn.Module):
    """The sum of its parts, each through a two-layer network of its own.

    num_waves: channels of the sinusoidal timestep and guidance embeddings. pooled_dim: of the pooled text, None for
    models without one. has_guidance: whether the guidance scale is an input (guidance-distilled, Meng et al.,
    arXiv:2210.03142). takes_next_timestep: whether the timestep that a step leads to is one (MeanFlow,
    arXiv:2505.13447). bias: of the networks of timestep and guidance.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_waves: int,
        pooled_dim: int | None = None,
        has_guidance: bool = False,
        takes_next_timestep: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.timestep = TimestepEmbedding(num_waves, dim, bias=bias)
        self.guidance = TimestepEmbedding(num_waves, dim, bias=bias) if has_guidance else None
        self.next_timestep = TimestepEmbedding(num_waves, dim, bias=bias) if takes_next_timestep else None
        self.pooled = VectorEmbedding(pooled_dim, dim) if pooled_dim is not None else None

    def forward(
        self,
        timestep: torch.Tensor,
        *,
        guidance: float | None = None,
        next_timestep: torch.Tensor | None = None,
        pooled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[batch, dim]. timestep: [batch], in [0, 1000]. guidance: a scale such as 3.5. next_timestep: [batch], of
        the step that follows, 0 at the end. pooled: [batch, pooled_dim].

        Arguments that this model has no input for are ignored.
        """
        embedded: torch.Tensor = self.timestep(timestep)
        if self.guidance is not None:
            assert guidance is not None, "this model takes a guidance scale"
            # Scaled like timesteps, and multiplied in float32 as in training: at thousands of radians the rounding
            # shows in the highest frequencies.
            scales = torch.full_like(timestep, guidance, dtype=torch.float32) * 1000
            embedded = embedded + self.guidance(scales)
        if self.next_timestep is not None:
            assert next_timestep is not None, "this model takes the timestep that a step leads to"
            embedded = embedded + self.next_timestep(next_timestep)
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
        """Return the rows, float32 [batch, num_rows, dim], and their embedding [batch, dim]. timestep: [batch]."""
        embedded: torch.Tensor = self.embedding(timestep)
        rows: torch.Tensor = self.projection(F.silu(embedded)).unflatten(-1, (self.num_rows, -1))
        return rows.float(), embedded
