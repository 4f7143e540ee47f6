"""ChosenRequest: the facts that pairs of features are found by."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.progressive_options import ProgressiveSettings
from diffusion_runtime.request.step_cache_options import StepCacheSettings
from diffusion_runtime.rules.batch_settings import BatchSettings


@dataclass(frozen=True)
class ChosenRequest:
    """A resolved request and the facts about its model that pairs ask for. edits_images: the model takes images to
    edit. replays_passes: --cuda-graphs on. has_two_experts: one for high and one for low noise."""

    settings: BatchSettings
    edits_images: bool = False
    replays_passes: bool = False
    has_two_experts: bool = False

    @property
    def request(self) -> GenerationRequest:
        return self.settings.shared

    @property
    def step_cache(self) -> StepCacheSettings | None:
        """The step cache; None where every step is computed."""
        text = self.request.step_cache
        return None if text is None else StepCacheSettings.parse(text)

    @property
    def is_progressive(self) -> bool:
        """True where early steps are on smaller latents."""
        text = self.request.progressive_resolution
        return text is not None and ProgressiveSettings.parse(text) is not None

    @property
    def has_weak_image(self) -> bool:
        """True where an image at a frame of its own does not count in full."""
        return any(strength != 1 for _, _, strength in self.request.frame_conditions or ())

    @property
    def has_history(self) -> bool:
        """True where the model keeps older frames in larger patches."""
        return self.settings.sampling.history is not None
