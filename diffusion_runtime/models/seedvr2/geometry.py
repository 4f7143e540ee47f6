"""SeedVR2's latents: of clips of any size, which are filled up to whole tokens and latent frames."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.seedvr2.config import PATCH, read_transformer_config

SPATIAL_FACTOR, TEMPORAL_FACTOR = 8, 4


@dataclass(frozen=True)
class SeedVR2Geometry(LatentGeometry):
    """A LatentGeometry of clips of any size: what is missing to whole tokens and latent frames is added before the
    model sees it, and left out of what is made."""

    @property
    def frame_rule(self) -> tuple[int, int]:
        return 1, 0

    def check(self, height: int, width: int, num_frames: int) -> None:
        """Check that nothing is empty or too small. Raises RequestError."""
        least = self.spatial_factor * self.patch[1]
        for name, value, minimum in (("height", height, least), ("width", width, least), ("num_frames", num_frames, 1)):
            if value < minimum:
                raise RequestError(f"{name}: expected {minimum} or more, got {value}")

    def padded(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """Return height, width and frames that are whole tokens and latent frames."""
        rows, columns = (self.spatial_factor * patch for patch in self.patch[1:])
        frames = math.ceil((num_frames - 1) / self.temporal_factor) * self.temporal_factor + 1
        return math.ceil(height / rows) * rows, math.ceil(width / columns) * columns, frames

    def latent_shape(self, height: int, width: int, num_frames: int) -> tuple[int, int, int, int]:
        self.check(height, width, num_frames)
        return super().latent_shape(*self.padded(height, width, num_frames))

    def tokens_of_frame(self, height: int, width: int) -> int:
        rows, columns, _ = self.padded(height, width, 1)
        return super().tokens_of_frame(rows, columns)


def read_geometry(folder: AnyFolder) -> SeedVR2Geometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, COMPONENT)
    source = "the transformer's vid_out_channels"
    num_channels = read_num_channels(file, "latent_channels", transformer.num_channels, source, 16)
    return SeedVR2Geometry(num_channels, SPATIAL_FACTOR, TEMPORAL_FACTOR, PATCH)
