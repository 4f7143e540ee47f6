"""Image control: the control image of a ControlNet (Zhang et al., arXiv:2302.05543), its scale and the steps in which
it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import check_image
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# The request fields of models with a ControlNet, in addition to the image and conditioning_scale.
FIELDS = ("control_guidance_start", "control_guidance_end")


@dataclass(frozen=True)
class ImageControl:
    """Control of images by a ControlNet. num_blocks: of the ControlNet, each of which may have a conditioning scale of
    its own. most: how many control images a request names."""

    num_blocks: int
    most: int = 1

    takes_scale: ClassVar[bool] = True

    def num_references(self, request: GenerationRequest) -> int:  # noqa: ARG002 - see VideoControl
        """Return 0: the latents hold no reference frames."""
        return 0

    def check(self, request: GenerationRequest, size: ClipSize) -> None:
        """Check that a request's image, scales and steps can control the output. Raises RequestError."""
        scales = request.conditioning_scale
        if isinstance(scales, tuple) and len(scales) != self.num_blocks:
            raise RequestError(
                f"conditioning_scale: expected one number, or {self.num_blocks}, one for each ControlNet block, "
                f"got {len(scales)}"
            )
        start, end = steps_of(request)
        if start >= end:
            raise RequestError(
                f"control_guidance_start: expected less than control_guidance_end, {end:g}, got {start:g}; "
                "--conditioning-scale 0 leaves the ControlNet out"
            )
        for path in image_paths(request, "image_path"):
            check_image(path, size.height, size.width, "image_path")

    def remarks(self, request: GenerationRequest, size: ClipSize) -> Iterator[str]:  # noqa: ARG002 - see VideoControl
        """Yield nothing: remarks on the image's conversion are made for every image."""
        return iter(())


def steps_of(request: GenerationRequest) -> tuple[float, float]:
    """Return the steps in which the ControlNet starts and stops counting, from 0 to 1."""
    start, end = request.control_guidance_start, request.control_guidance_end
    return 0.0 if start is None else start, 1.0 if end is None else end


def counts_at(request: GenerationRequest, step: StepInfo) -> bool:
    """Return whether all of a step lies between control_guidance_start and control_guidance_end, as in diffusers."""
    start, end = steps_of(request)
    return step.index / step.num_steps >= start and (step.index + 1) / step.num_steps <= end


def scales_of(request: GenerationRequest, num_blocks: int) -> Sequence[float]:
    """Return the conditioning scale of each block."""
    given = request.conditioning_scale
    return given if isinstance(given, tuple) else (1.0 if given is None else given,) * num_blocks
