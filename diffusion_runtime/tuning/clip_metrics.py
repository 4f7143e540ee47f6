"""Figures of a clip beside the clip that it is to resemble: the metrics of a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import torch

from diffusion_runtime.comparison.frame_metrics import FrameMetrics
from diffusion_runtime.comparison.latent_distance import relative_l2
from diffusion_runtime.quality.clip_score import ClipScore
from diffusion_runtime.quality.worlds import Wanted
from diffusion_runtime.request.generation_request import GenerationRequest

# Metrics that are distances of frames, and their names in FrameMetrics.
_OF_FRAMES = {"psnr": "psnr_db", "ssim": "ssim", "lpips": "lpips"}


@dataclass(frozen=True)
class TunedPrompt:
    """A resolved request, and what a clip of it must show; attributes: None where only distances are measured."""

    request: GenerationRequest
    attributes: Wanted | None = None


@dataclass(frozen=True)
class ReferenceClip:
    """The clip of a prompt that others are compared with. frames: None where no metric needs them."""

    latents: torch.Tensor
    frames: numpy.ndarray | None


@dataclass
class ClipMetrics:
    """The metrics, of budget.METRICS. clip_score: where `clip` is one of them."""

    metrics: Sequence[str]
    clip_score: ClipScore | None = None
    _frames: FrameMetrics = field(default_factory=FrameMetrics)

    @property
    def need_frames(self) -> bool:
        return any(name != "latent" for name in self.metrics)

    @property
    def compare_frames(self) -> bool:
        return any(name in _OF_FRAMES for name in self.metrics)

    def of(
        self, latents: torch.Tensor, frames: numpy.ndarray | None, reference: ReferenceClip, prompt: TunedPrompt
    ) -> dict[str, float]:
        """Return the values by metric. latents: final, on the CPU; frames: of the decoded clip, None for none. Latents
        of another shape have no distance."""
        distance = relative_l2(latents, reference.latents)
        values = {} if distance is None else {"latent": distance}
        if frames is None:
            return values
        if self.compare_frames:
            assert reference.frames is not None
            found = self._frames.of(frames, reference.frames)
            values |= {name: float(found[key] or 0.0) for name, key in _OF_FRAMES.items() if name in self.metrics}
        if "accuracy" in self.metrics:
            assert prompt.attributes is not None
            values["accuracy"] = float(prompt.attributes.judge(torch.from_numpy(frames)).joint)
        if "clip" in self.metrics:
            assert self.clip_score is not None
            values["clip"] = self.clip_score(frames, prompt.request.prompt)
        return values
