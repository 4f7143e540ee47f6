"""Context windows: a clip longer than a model was trained on, predicted in overlapping windows of latent frames at each
step (temporal co-denoising: Gen-L-Video, arXiv:2305.18264, after MultiDiffusion, arXiv:2302.08113).

    prediction(x) = sum_i w_i * model(x[window i]) / sum_i w_i      frame by frame

The weight of a window rises over the frames that it shares with the one before, and falls over those that it shares
with the one after. The windows are the same at every step: solvers of several steps and clusterings of sparse attention
go on from the step before. Positions are those of a clip of the window's length, from 0, as in FreeNoise
(arXiv:2310.15169): positions of the whole clip are what the model was not trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.request.generation_request import GenerationRequest

# Share of a window that it has in common with the next one, where a request does not say.
DEFAULT_OVERLAP = 0.5


@dataclass(frozen=True)
class WindowPlan:
    """Windows of a clip, in latent frames. num_frames: of the clip; length: of a window, less; overlap: that neighbours
    share at least, less than length."""

    num_frames: int
    length: int
    overlap: int

    def __len__(self) -> int:
        return -(-(self.num_frames - self.overlap) // (self.length - self.overlap))

    def __iter__(self) -> Iterator[range]:
        """Yield the frames of each window, at even distances: the first and the last touch the ends of the clip."""
        count, room = len(self), self.num_frames - self.length
        for index in range(count):
            # Half up, in whole numbers.
            start = (2 * index * room + count - 1) // (2 * (count - 1))
            yield range(start, start + self.length)

    @property
    def stride(self) -> int:
        """Frames from one window to the next, at most."""
        return self.length - self.overlap

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the weight of every frame of each window, float32 [length]; those of a frame of the clip sum to 1."""
        windows, total = list(self), torch.zeros(self.num_frames, dtype=torch.float64)
        raw = []
        for index, window in enumerate(windows):
            before = windows[index - 1].stop - window.start if index else 0
            after = window.stop - windows[index + 1].start if index + 1 < len(windows) else 0
            place = torch.arange(1, self.length + 1, dtype=torch.float64)
            rising, falling = place / (before + 1), (self.length + 1 - place) / (after + 1)
            raw.append(torch.minimum(rising, falling).clamp(max=1.0))
            total[window.start : window.stop] += raw[-1]
        return tuple(
            (own / total[window.start : window.stop]).float() for own, window in zip(raw, windows, strict=True)
        )


def window_middle(window: range, temporal_factor: int) -> float:
    """Return the frame of the video, in pixels, at the middle of a window of latent frames."""
    return temporal_factor * (window.start + window.stop - 1) / 2


def windows_of(request: GenerationRequest, geometry: LatentGeometry) -> WindowPlan | None:
    """Return the windows of a resolved request; None for a clip that is predicted at once."""
    length, num_frames = request.context_frames, request.num_frames
    if length is None or num_frames is None or length >= num_frames:
        return None
    of_window, of_clip = ((frames - 1) // geometry.temporal_factor + 1 for frames in (length, num_frames))
    return WindowPlan(of_clip, of_window, (request.context_overlap or 0) // geometry.temporal_factor)


def over_windows(predicts: Sequence[Predict], plan: WindowPlan, device: torch.device) -> Predict:
    """Return the weighted mean of predictions of the windows, float32. predicts: of each window, whose latents are
    [batch, channels, plan.length, height, width]; they tell the windows apart by `step.window`. device: of the
    latents."""
    weights = [each.to(device)[:, None, None] for each in plan.weights()]

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        velocity = torch.zeros_like(latents, dtype=torch.float32)
        for index, (window, weight, of_window) in enumerate(zip(plan, weights, predicts, strict=True)):
            frames = slice(window.start, window.stop)
            made = of_window(latents[:, :, frames], dataclasses.replace(step, window=index))
            velocity[:, :, frames] += made.float() * weight
        return velocity

    return predict
