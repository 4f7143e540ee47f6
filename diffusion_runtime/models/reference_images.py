"""Reference images: what a model for editing reads beside the prompt, as latents of the images' own sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from diffusion_runtime.attention_report import LibraryAttention
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import open_picture, read_image
from diffusion_runtime.models.geometry import ClipSize
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.request import GenerationRequest, image_paths

_FIELD = "image_path"
# Height and width in pixels.
Size: TypeAlias = tuple[int, int]
# [1, 3, height, width] in [-1, 1] -> normalised latents [1, channels, 1, height, width], float32.
Encode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ReferenceImages:
    """How a model for editing takes its images.

    most: how many. scaled: of an image's size, the size of the picture that the autoencoder encodes. sets_size: whether
    what is made has the size of an encoded picture where a request says none; the last one's, as in diffusers.
    """

    most: int
    scaled: Callable[[Size], Size]
    sets_size: bool = False

    def scaled_sizes(self, paths: Sequence[str]) -> list[Size]:
        """Of the encoded pictures. Raises RequestError for a file that is no image, and for sides so unequal that
        nothing of the image would be left."""
        sizes = []
        for path in paths:
            width, height = open_picture(path, _FIELD).size
            sizes.append(self.scaled((height, width)))
            if min(sizes[-1]) < 1:
                raise RequestError(f"{_FIELD}: {path} is {width} x {height} (width x height): too narrow; crop it")
        return sizes

    def default_size(self, paths: Sequence[str]) -> dict[str, int]:
        """Request values that follow from the images. Raises what scaled_sizes raises."""
        sizes = self.scaled_sizes(paths)
        return dict(zip(("height", "width"), sizes[-1], strict=True)) if sizes and self.sets_size else {}


class ReferenceConditioner(ImageConditioner):
    """The latents of reference images. library, implementation: what encodes, for the report."""

    def __init__(self, images: ReferenceImages, encode: Encode, library: str, implementation: str) -> None:
        self._images = images
        self._encode = encode
        self._library = library
        self._implementation = implementation

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        """See ImageConditioner.libraries."""
        return (LibraryAttention("vae encoder", self._library, self._implementation),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:  # noqa: ARG002
        """See ImageConditioner.condition."""
        paths = image_paths(request, _FIELD)
        latents = [
            self._encode(_pixels(path, scaled))
            for path, scaled in zip(paths, self._images.scaled_sizes(paths), strict=True)
        ]
        return ImageCondition(latents[0], further=tuple(latents[1:]))


def _pixels(path: str, size: Size) -> torch.Tensor:
    """[1, 3, height, width] in [-1, 1]."""
    return torch.from_numpy(read_image(path, *size)).float().div(127.5).sub(1.0).permute(2, 0, 1)[None]


def encode_with(autoencoder: Any, normalised: Callable[[torch.Tensor], torch.Tensor], *, is_video: bool) -> Encode:
    """The mode of an autoencoder of diffusers, normalised in float32. is_video: whether it takes frames."""

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        weight = next(autoencoder.parameters())
        given = pixels.to(weight.device, weight.dtype)
        with torch.inference_mode():
            mode = autoencoder.encode(given[:, :, None] if is_video else given).latent_dist.mode()
        return normalised(mode.float() if is_video else mode.float()[:, :, None])

    return encode
