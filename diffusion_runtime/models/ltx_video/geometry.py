"""LTX-Video's latents, and where their tokens begin in seconds and pixels, from which its rotary positions are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.latent_geometry import LatentGeometry


@dataclass(frozen=True)
class LTXVideoGeometry(LatentGeometry):
    """Geometry of LTX-Video. first_is_one_frame: whether the time of a token counts the first latent frame as the one
    frame that it holds, as the pipeline for conditions has it, or as many as the others."""

    first_is_one_frame: bool = False

    def token_starts(self, grid: tuple[int, int, int], fps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where the tokens along each axis of a grid begin: seconds, and pixels of height and width; float32."""
        frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
        if self.first_is_one_frame:
            seconds = (frames * self.temporal_factor + 1 - self.temporal_factor).clamp(min=0) * (1.0 / fps)
        else:
            seconds = frames * (self.temporal_factor / fps)
        return seconds, rows * self.spatial_factor, columns * self.spatial_factor
