"""The shapes of the training steps, and how often each comes."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.train_embedded.architecture import MAX_PROMPT_TOKENS


@dataclass(frozen=True)
class Bucket:
    """One static shape of a training step."""

    num_frames: int
    size: int
    batch: int
    share: float
    """How often a step has this shape, relative to the others."""
    shift: float
    """Timestep shift: latents of flat shapes repeat themselves so much that how many objects there are, and where, is
    decided at noise levels above 0.95; larger pictures repeat themselves more."""
    capacity: int
    """Clips kept in the pool."""
    encode_batch: int
    prompt_tokens: int = MAX_PROMPT_TOKENS
    late_share: float | None = None
    """`share` at the end of the training, where it is another; between them it changes evenly."""

    def share_at(self, progress: float) -> float:
        """How often a step has this shape at a share of the training."""
        late = self.share if self.late_share is None else self.late_share
        return self.share + (late - self.share) * progress

    @property
    def name(self) -> str:
        """Frames x size."""
        return f"{self.num_frames}x{self.size}"


BUCKETS = (
    Bucket(29, 256, 96, 0.70, 12.0, 16384, 64),
    Bucket(29, 256, 96, 0.04, 12.0, 0, 64, prompt_tokens=512),
    Bucket(29, 128, 256, 0.12, 8.0, 16384, 256),
    Bucket(29, 384, 36, 0.07, 15.0, 1536, 24),
    Bucket(1, 256, 384, 0.07, 6.0, 32768, 1024),
)
"""A capacity of 0 shares the pool of the bucket of the same shape."""
TOY_BUCKETS = (Bucket(9, 64, 8, 0.6, 3.0, 64, 16), Bucket(1, 64, 8, 0.4, 3.0, 32, 16))
EMOJI_BUCKETS = (
    Bucket(29, 256, 96, 0.36, 8.0, 16384, 64, late_share=0.70),
    Bucket(29, 128, 256, 0.22, 5.0, 16384, 256, late_share=0.14),
    Bucket(1, 256, 512, 0.42, 4.0, 32768, 512, late_share=0.16),
)
"""Single images teach what things look like at an eighth of a clip's cost, so most steps have them at first. Detailed
pictures repeat themselves less than flat shapes, hence the smaller shifts."""
