"""Image preprocessing for vision models: scaling, cropping and normalisation by preprocessor_config.json.

transformers' own preprocessing needs torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.untrusted.json_text import read_json_file


@dataclass(frozen=True)
class PicturePreparation:
    """Preprocessing of pixels for a vision model.

    height, width: of the result; resample: Pillow's number of the filter; mean, std: by colour, of values in [0, 1].
    shortest_side: length that the shortest side is scaled to before the middle is cut out; None to scale to height x
    width directly.
    """

    height: int
    width: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shortest_side: int | None = None

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """Return [1, 3, height, width], float32. image: [height, width, 3], uint8."""
        import numpy
        from PIL import Image

        picture = Image.fromarray(image.cpu().numpy()).resize(
            self._scaled_size(image.shape[1], image.shape[0]), Image.Resampling(self.resample)
        )
        left, top = (picture.width - self.width) // 2, (picture.height - self.height) // 2
        picture = picture.crop((left, top, left + self.width, top + self.height))
        scaled = torch.from_numpy(numpy.array(picture)).float().div(255)
        return scaled.sub(torch.tensor(self.mean)).div(torch.tensor(self.std)).permute(2, 0, 1)[None]

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height before the middle is cut out."""
        side = self.shortest_side
        if side is None:
            return self.width, self.height
        return (side, side * height // width) if width <= height else (side * width // height, side)


def read_preparation(path: Path) -> PicturePreparation:
    """Read a preprocessor_config.json. Raises ModelLoadError that names the file and the key."""
    values: Any = read_json_file(path, error=ModelLoadError, advice="the model folder is incomplete")
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {shown(values)}")
    check_all_steps(path, values)
    height, width, shortest_side = _read_sizes(path, values)
    resample = values.get("resample", 3)
    if type(resample) is not int or not 0 <= resample <= 5:
        raise ModelLoadError(f"{path}: key 'resample': expected the number of a filter, 0 to 5, got {shown(resample)}")
    mean, std = (read_three_numbers(path, key, values.get(key)) for key in ("image_mean", "image_std"))
    return PicturePreparation(height, width, resample, mean, std, shortest_side)


def check_all_steps(path: Path, values: Mapping[str, Any]) -> None:
    """Check that a file leaves no step out. Raises ModelLoadError."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(key, True) is not True:
            raise ModelLoadError(
                f"{path}: key {shown(key)}: expected true, got {shown(values[key])}; this is not supported"
            )


def _read_sizes(path: Path, values: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Read height, width and shortest_side."""
    size = values.get("size")
    if not values.get("do_center_crop", False):
        return (*_height_and_width(path, "size", size), None)
    shortest_side = size.get("shortest_edge") if isinstance(size, dict) else size
    crop = values.get("crop_size")
    # Format of CLIP's files from 2021.
    crop = {"height": crop, "width": crop} if type(crop) is int else crop
    height, width = _height_and_width(path, "crop_size", crop)
    if not isinstance(shortest_side, int) or shortest_side < max(height, width):
        raise ModelLoadError(
            f"{path}: key 'size': expected a shortest_edge of {max(height, width)} pixels or more, got {shown(size)}"
        )
    return height, width, shortest_side


def _height_and_width(path: Path, key: str, size: object) -> tuple[int, int]:
    height, width = (size.get("height"), size.get("width")) if isinstance(size, dict) else (None, None)
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        raise ModelLoadError(f"{path}: key {shown(key)}: expected height and width in pixels, got {shown(size)}")
    return height, width


def read_three_numbers(path: Path, key: str, value: object) -> tuple[float, ...]:
    """Read the numbers of three colours. Raises ModelLoadError."""
    given: Sequence[object] = value if isinstance(value, list) else ()
    numbers = [float(v) for v in given if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(given) != 3 or len(numbers) != 3:
        raise ModelLoadError(f"{path}: key {shown(key)}: expected three numbers, got {shown(value)}")
    return tuple(numbers)
