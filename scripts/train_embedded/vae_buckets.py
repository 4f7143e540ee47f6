"""The shapes of clips on which a VAE is trained, and how its loss weighs them, world by world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """One static shape of training clips."""

    num_frames: int
    size: int
    batch: int
    share: float
    """How often it is drawn, relative to the others."""

    @property
    def name(self) -> str:
        """Frames x size."""
        return f"{self.num_frames}x{self.size}"


@dataclass(frozen=True)
class VaeRecipe:
    """Clips and loss weights that a VAE is trained with."""

    buckets: tuple[Bucket, ...]
    foreground_weight: float
    """How much more a pixel weighs where an object is or was within four frames."""
    edge_weight: float
    """How much more a pixel weighs on an edge of full contrast."""
    object_weight: float = 0.0
    """How much more a pixel weighs where an object is: of a moving one, most pixels are wrong at first."""
    decoder_buckets: tuple[Bucket, ...] = ()
    """Clips that the decoder alone is trained with, from a pool."""


BUCKETS = (
    Bucket(29, 256, 8, 0.34),
    Bucket(17, 192, 24, 0.20),
    Bucket(29, 128, 32, 0.24),
    Bucket(9, 256, 24, 0.12),
    Bucket(1, 256, 128, 0.06),
    Bucket(9, 384, 10, 0.04),
)
EMOJI_BUCKETS = (
    Bucket(29, 256, 4, 0.46),
    Bucket(29, 128, 16, 0.20),
    Bucket(9, 256, 12, 0.20),
    Bucket(1, 256, 96, 0.14),
)
"""Few shapes, since each costs compiling, and half the pixels a step: steps count for more than clips."""
EMOJI_DECODER_BUCKETS = (Bucket(29, 256, 4, 0.8), Bucket(29, 128, 16, 0.1), Bucket(1, 256, 32, 0.1))
"""Of a training of the decoder alone: the size that is judged, and enough of the others that they do not get worse. The
noise of its gradient is that of a batch of 4."""
TOY_BUCKETS = (Bucket(5, 48, 2, 0.5), Bucket(9, 32, 2, 0.5))
SHAPES_VAE = VaeRecipe(BUCKETS, foreground_weight=10.0, edge_weight=6.0)
EMOJI_VAE = VaeRecipe(
    EMOJI_BUCKETS,
    foreground_weight=2.0,
    edge_weight=3.0,
    object_weight=6.0,
    decoder_buckets=EMOJI_DECODER_BUCKETS,
)
