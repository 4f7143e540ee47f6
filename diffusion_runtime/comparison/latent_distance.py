"""Relative L2 distance of latents from the reference's, step by step, in the machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diffusion_runtime.core.step_info import StepInfo

# The reference's latents of all steps and clips are kept as float32 up to here, as float16 above: relative rounding of
# 5e-4 at most, on both sides, which is far below a difference that can be seen.
MAX_FLOAT32_BYTES = 2 * 2**30
# Noise levels that differ by more belong to other schedules.
_SAME_SIGMA = 1e-4


@dataclass
class LatentTrack:
    """The reference's latents of one clip: after every step, with its noise level."""

    steps: list[tuple[float | None, torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class ClipDistance:
    """relative_l2: after each step, None where noise level or shape are not the reference's; empty where the step
    counts differ. final: of the last step's latents; None where the shapes differ."""

    relative_l2: tuple[float | None, ...]
    final: float | None


class LatentComparison:
    """Latents of the reference's clips, and the distance of others from them. num_clips: of the reference."""

    def __init__(self, num_clips: int) -> None:
        self._num_clips = num_clips
        self._tracks: list[LatentTrack] = []
        self.dtype: torch.dtype | None = None

    def keep(self) -> Callable[[StepInfo, torch.Tensor], None]:
        """Return a watcher that keeps the latents of the reference's next clip."""
        track = LatentTrack()
        self._tracks.append(track)

        def watch(step: StepInfo, latents: torch.Tensor) -> None:
            if self.dtype is None:
                size = 4 * latents.numel() * step.num_steps * self._num_clips
                self.dtype = torch.float32 if size <= MAX_FLOAT32_BYTES else torch.float16
            track.steps.append((step.sigma, self._kept(latents)))

        return watch

    def beside(self, clip: int) -> LatentWatcher:
        """Return a watcher that compares a clip with the reference's of its index, and keeps the last latents alone."""
        return LatentWatcher(self._tracks[clip], self._kept)

    def _kept(self, latents: torch.Tensor) -> torch.Tensor:
        # A copy in any case: the sampler may write into its own.
        return latents.detach().to("cpu", self.dtype, copy=True)


class LatentWatcher:
    """Called after each step of a clip; `distance` is the result."""

    def __init__(self, track: LatentTrack, kept: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._track, self._kept = track, kept
        self._distances: list[float | None] = []
        self._last: torch.Tensor | None = None

    def __call__(self, step: StepInfo, latents: torch.Tensor) -> None:
        position = len(self._distances)
        self._last = self._kept(latents)
        found = None
        if position < len(self._track.steps):
            sigma, reference = self._track.steps[position]
            if sigma == step.sigma or (
                sigma is not None and step.sigma is not None and abs(sigma - step.sigma) <= _SAME_SIGMA
            ):
                found = relative_l2(self._last, reference)
        self._distances.append(found)

    @property
    def distance(self) -> ClipDistance | None:
        """None where no step was watched."""
        if not self._track.steps or not self._distances:
            return None
        agree = len(self._distances) == len(self._track.steps)
        final = None if self._last is None else relative_l2(self._last, self._track.steps[-1][1])
        return ClipDistance(tuple(self._distances) if agree else (), final)


def relative_l2(latents: torch.Tensor, reference: torch.Tensor) -> float | None:
    """|latents - reference| / |reference|; None for other shapes."""
    if latents.shape != reference.shape:
        return None
    wide = reference.float()
    return float((latents.float() - wide).norm() / wide.norm().clamp(min=1e-12))
