"""Images that a MiniMax-H3 clip starts from and ends with: pixels, and latents with a trace of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.media.images import open_picture, read_image
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

# Noise level of the images at every step: the model was trained with a trace of noise in them. The published pipeline
# takes the step's own below it, which a schedule of less than a thousand steps does not reach.
NOISE_LEVEL = 0.001
_SEED = 42
# Pixels [height, width, 3], uint8 -> normalised latents [1, channels, 1, height, width], float32.
EncodeImage = Callable[[torch.Tensor], torch.Tensor]


def noised() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that adds the trace of noise to latents, one condition of a clip after the other."""
    generator = torch.Generator().manual_seed(_SEED)

    def mix(latents: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        return (1 - NOISE_LEVEL) * latents + NOISE_LEVEL * noise

    return mix


def keyframes_of(request: GenerationRequest) -> list[torch.Tensor]:
    """Return the images of a resolved request, the one to start from first, [height, width, 3], uint8, of the clip's
    size. The first of them is stretched to it, and one after it cropped."""
    assert request.height is not None
    assert request.width is not None
    found = [
        torch.from_numpy(read_image(path, request.height, request.width)) for path in image_paths(request, "image_path")
    ]
    for path in image_paths(request, "last_image_path"):
        read = _cropped if found else read_image
        found.append(torch.as_tensor(read(path, request.height, request.width)))
    return found


def _cropped(path: str, height: int, width: int) -> torch.Tensor:
    """Read an image scaled by Lanczos' filter to cover a size, and its middle of that size."""
    import numpy
    from PIL import Image

    picture = open_picture(path)
    scale = max(width / picture.width, height / picture.height)
    columns, rows = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    left, top = (columns - width) // 2, (rows - height) // 2
    whole = picture.resize((columns, rows), Image.Resampling.LANCZOS)
    return torch.from_numpy(numpy.array(whole.crop((left, top, left + width, top + height)), dtype=numpy.uint8))


class KeyframeConditioner(ImageConditioner):
    """Conditioner of an image to start from, one to end with, or both. load_encoder: gives the function that encodes
    them, and its description, when the first request needs it."""

    def __init__(self, geometry: MiniMaxH3Geometry, load_encoder: Callable[[], tuple[EncodeImage, str]]) -> None:
        self._geometry = geometry
        self._load_encoder = load_encoder
        self._encoder: tuple[EncodeImage, str] | None = None

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return () if self._encoder is None else (LibraryAttention("vae encoder", "diffusers", self._encoder[1]),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:
        """Return the condition; without an image to start from, its latents have no frame. The trace of noise is the
        same for every clip from an image."""
        if self._encoder is None:
            self._encoder = self._load_encoder()
        encode, _ = self._encoder
        latents = list(map(noised(), [encode(pixels) for pixels in keyframes_of(request)]))
        if request.image_path is None:
            first, further = latents[0][:, :, :0], tuple(latents)
        else:
            first, *rest = latents
            further = tuple(rest)
        last = self._geometry.video_shape(size)[1] - 1
        return ImageCondition(first, further=further, places=((last, 1.0),) * len(further))
