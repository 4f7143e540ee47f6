"""Reference images: inputs of a model for editing in addition to the prompt, as latents of the images' own sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.decoders.image_decoder import AUTOENCODER, read_normalisation
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.decoders.video_decoder import read_statistics
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import inspect_picture, read_image
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths

_FIELD = "image_path"
# Height and width in pixels.
Size: TypeAlias = tuple[int, int]
# [1, 3, height, width] in [-1, 1] -> normalised latents [1, channels, 1, height, width], float32.
Encode: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


_MULTIPLE = 32


def _whole(size: Size) -> Size:
    return size


def scaled_to(area: int, size: Size) -> Size:
    """Return the height and width nearest to `area` pixels of an image's ratio, multiples of 32."""
    ratio = size[1] / size[0]
    width = math.sqrt(area * ratio)
    rows, columns = (round(side / _MULTIPLE) * _MULTIPLE for side in (width / ratio, width))
    return rows, columns


def _any_size(_: Size) -> str | None:
    return None


@dataclass(frozen=True)
class ReferenceImages:
    """Rules for the images of a model for editing.

    most: how many. scaled: image size -> size of the picture made of it; cropped: size of the picture -> that of its
    middle, which the autoencoder encodes, or of a canvas around it, which its reflection fills. refusal: why an image
    of some size cannot be used, None where it can. sized_by: index of the encoded picture whose size is the output's
    where a request sets none, 0 for the first one and -1 for the last, as in diffusers; None where it has a size of its
    own. usual: how many images a benchmark has. are_cached: whether they are computed once per request, and not at
    every step. alone: the rules for an image that is the only one of its request; None for these.
    """

    most: int
    scaled: Callable[[Size], Size]
    cropped: Callable[[Size], Size] = _whole
    refusal: Callable[[Size], str | None] = _any_size
    sized_by: int | None = None
    usual: int = 1
    are_cached: bool = False
    alone: ReferenceImages | None = None

    def among(self, num_images: int) -> ReferenceImages:
        """Return the rules for the images of a request with so many."""
        return self.alone if num_images == 1 and self.alone is not None else self

    def encoded_size(self, size: Size) -> Size:
        """Return the size that is encoded of an image of this size."""
        return self.cropped(self.scaled(size))

    def check(self, path: str) -> Size:
        """The size of an image. Raises RequestError for a file that is no image, for a size that the model does not
        take, and for sides so unequal that nothing of the image would be left."""
        width, height = inspect_picture(path, _FIELD).size
        refusal = self.refusal((height, width))
        if refusal is None and min(self.encoded_size((height, width))) < 1:
            refusal = "too narrow; crop it"
        if refusal is not None:
            raise RequestError(f"{_FIELD}: {path} is {width} x {height} (width x height): {refusal}")
        return height, width

    def default_size(self, paths: Sequence[str]) -> dict[str, int]:
        """Return request values that follow from the images. Raises what `check` raises."""
        rules = self.among(len(paths))
        sizes = [rules.encoded_size(rules.check(path)) for path in paths]
        if not sizes or self.sized_by is None:
            return {}
        return dict(zip(("height", "width"), sizes[self.sized_by], strict=True))

    def remarks(self, paths: Sequence[str], height: int, width: int) -> list[str]:
        """Return what an output of this size has in addition to an image, as sentences. Raises what `check` raises."""
        rules, remarks = self.among(len(paths)), []
        for path in paths:
            rows, columns = rules.scaled(rules.check(path))
            if (
                (rows, columns) != (height, width) == rules.cropped((rows, columns))
                and rows <= height
                and columns <= width
            ):
                remarks.append(
                    f"{_FIELD}: {path}, {columns} x {rows} (width x height), is the middle of the output's {width} x "
                    f"{height}, whose edges are made of its reflection; crop the output for the image's own size"
                )
        return remarks

    def pixels(self, path: str) -> torch.Tensor:
        """Return an image's pixels to encode, [1, 3, height, width] in [-1, 1]. Raises what `check` raises."""
        scaled = self.scaled(self.check(path))
        rows, columns = self.cropped(scaled)
        whole = read_image(path, *scaled)
        missing = [max(0, wanted - there) for wanted, there in zip((rows, columns), scaled, strict=True)]
        if any(missing):
            whole = numpy.pad(whole, [*((each // 2, each - each // 2) for each in missing), (0, 0)], mode="reflect")
        top, left = (whole.shape[0] - rows) // 2, (whole.shape[1] - columns) // 2
        return as_pixels(torch.from_numpy(whole[top : top + rows, left : left + columns]))


def as_pixels(image: torch.Tensor) -> torch.Tensor:
    """Convert an image [height, width, 3], uint8, to an autoencoder's input, [1, 3, height, width] in [-1, 1]."""
    return image.float().div(127.5).sub(1.0).permute(2, 0, 1)[None]


class ReferenceConditioner(ImageConditioner):
    """Conditioner of the latents of reference images. library, implementation: of the encoder, for the report."""

    def __init__(self, images: ReferenceImages, encode: Encode, library: str, implementation: str) -> None:
        self._images = images
        self._encode = encode
        self._library = library
        self._implementation = implementation

    @property
    def libraries(self) -> tuple[LibraryAttention, ...]:
        return (LibraryAttention("vae encoder", self._library, self._implementation),)

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:  # noqa: ARG002
        paths = image_paths(request, _FIELD)
        images = self._images.among(len(paths))
        latents = [self._encode(images.pixels(path)) for path in paths]
        return ImageCondition(latents[0], further=tuple(latents[1:]))


def encode_with(autoencoder: Any, normalised: Callable[[torch.Tensor], torch.Tensor], *, is_video: bool) -> Encode:
    """Return the mode of an autoencoder of diffusers, normalised in float32. is_video: whether it takes frames."""

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        weight = next(autoencoder.parameters())
        given = pixels.to(weight.device, weight.dtype)
        with torch.inference_mode():
            mode = autoencoder.encode(given[:, :, None] if is_video else given).latent_dist.mode()
        return normalised(mode.float() if is_video else mode.float()[:, :, None])

    return encode


def load_image_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> tuple[Encode, str]:
    """Load the encoder of an AutoencoderKL in a diffusers folder's `vae`, and its name for the report. Raises
    ModelLoadError."""
    scale, shift = read_normalisation(folder)
    autoencoder = AUTOENCODER.load(folder, device, dtype, left_out=("decoder", "post_quant_conv"))
    encode = encode_with(autoencoder, lambda mode: (mode - shift) * scale, is_video=False)
    return encode, f"{type(autoencoder).__name__}'s encoder"


def load_encoder(
    autoencoder: DiffusersComponent, folder: AnyFolder, device: torch.device, dtype: torch.dtype
) -> tuple[Encode, str]:
    """Load the encoder of a diffusers folder's `vae`, and its name for the report. Raises ModelLoadError."""
    module = autoencoder.load(folder, device, dtype, left_out=("decoder", "post_quant_conv"))
    # The class counts its decoder's layers before it encodes.
    module.decoder = torch.nn.Identity()
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in read_statistics(folder))
    encode = encode_with(module, lambda mode: (mode - mean) / std, is_video=True)
    return encode, f"{type(module).__name__}'s encoder"


def of_pictures(
    load: Callable[[AnyFolder, torch.device, torch.dtype], tuple[Encode, str]],
) -> Callable[[AnyFolder, torch.device, torch.dtype], LatentEncoder]:
    """Return Decoding.load_encoder of a family that makes images. load: the encoder and its name for the report."""

    def load_latent_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
        encode, name = load(folder, device, dtype)
        libraries = (LibraryAttention("vae encoder", "diffusers", name),)
        return LatentEncoder(lambda frames: encode(frames[:, :, 0]), lambda: libraries)

    return load_latent_encoder
