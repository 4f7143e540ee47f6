"""SigLIP image encoder (Zhai et al., arXiv:2303.15343): an image as tokens that stand beside those of a text.

The model is transformers'. The picture is preprocessed here: transformers' own preprocessing needs torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.text_encoders.loading import check_model_type, load_encoder
from diffusion_runtime.untrusted.json_text import read_json_file

if TYPE_CHECKING:
    from transformers import SiglipVisionModel


@dataclass(frozen=True)
class PicturePreparation:
    """Preprocessing of pixels for a vision model.

    height, width: of the scaled picture; resample: Pillow's number of the filter; mean, std: by colour, of values in
    [0, 1].
    """

    height: int
    width: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """image: [height, width, 3], uint8. Returns [1, 3, height, width], float32."""
        import numpy
        from PIL import Image

        picture = Image.fromarray(image.cpu().numpy()).resize(
            (self.width, self.height), Image.Resampling(self.resample)
        )
        scaled = torch.from_numpy(numpy.array(picture)).float().div(255)
        return scaled.sub(torch.tensor(self.mean)).div(torch.tensor(self.std)).permute(2, 0, 1)[None]


class SiglipImageEncoder:
    """`image_encoder/` and `feature_extractor/` of a diffusers folder."""

    library = "transformers"

    def __init__(self, model: SiglipVisionModel, preparation: PicturePreparation) -> None:
        self.model = model
        self.preparation = preparation
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """image: [height, width, 3], uint8, of any size. Returns [1, tokens, dim]."""
        pixels = self.preparation.prepare(image).to(self.model.device, self.model.dtype)
        tokens: torch.Tensor = self.model(pixels).last_hidden_state
        return tokens


def load_siglip(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SiglipImageEncoder:
    """The image encoder of a model folder, from safetensors and json and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "image_encoder", ("siglip_vision_model",))
    preparation = read_preparation(folder / "feature_extractor" / "preprocessor_config.json")
    # Imported late: transformers takes seconds.
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    return SiglipImageEncoder(load_encoder(folder / "image_encoder", SiglipVisionModel, device, dtype), preparation)


def read_preparation(path: Path) -> PicturePreparation:
    """The contents of a preprocessor_config.json. Raises ModelLoadError that names the file and the key."""
    values: Any = read_json_file(path, error=ModelLoadError, advice="the model folder is incomplete")
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {shown(values)}")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(key, True) is not True:
            raise ModelLoadError(
                f"{path}: key {shown(key)}: expected true, got {shown(values[key])}; this is not supported"
            )
    size = values.get("size")
    height, width = (size.get("height"), size.get("width")) if isinstance(size, dict) else (None, None)
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise ModelLoadError(f"{path}: key 'size': expected height and width in pixels, got {shown(size)}")
    resample = values.get("resample", 3)
    if type(resample) is not int or not 0 <= resample <= 5:
        raise ModelLoadError(f"{path}: key 'resample': expected the number of a filter, 0 to 5, got {shown(resample)}")
    mean, std = (_three_numbers(path, key, values.get(key)) for key in ("image_mean", "image_std"))
    return PicturePreparation(height, width, resample, mean, std)


def _three_numbers(path: Path, key: str, value: object) -> tuple[float, ...]:
    given: Sequence[object] = value if isinstance(value, list) else ()
    numbers = [float(v) for v in given if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(given) != 3 or len(numbers) != 3:
        raise ModelLoadError(f"{path}: key {shown(key)}: expected three numbers, got {shown(value)}")
    return tuple(numbers)
