"""Generated images for benchmarks of models that start from one: a gradient of the size of what is made, and a mask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.generation.interface import GenerationRules

_FIELDS = ("image_path", "last_image_path", "mask_path")
# Size of an image whose size is not given.
_SIDE = 1024


def sample_images(
    rules: GenerationRules, values: Mapping[str, Any], preset: str | None, folder: Path
) -> dict[str, str]:
    """Return the paths of the images that a model does not do without, or is made for, by their request field. values,
    preset: of the request, for the size. folder: where they are written."""
    chosen = {**rules.defaults, **rules.presets.get(preset or "", {}), **values}
    height, width = (chosen.get(name) or _SIDE for name in ("height", "width"))
    paths = {}
    for field in wanted_images(rules):
        path = folder / f"{field}.png"
        _write(path, height, width, is_mask=field == "mask_path")
        paths[field] = str(path)
    return paths


def wanted_images(rules: GenerationRules) -> tuple[str, ...]:
    """Return the request fields of those images."""
    return tuple(field for field in _FIELDS if field in rules.wanted_images)


def _write(path: Path, height: int, width: int, *, is_mask: bool) -> None:
    from PIL import Image

    rows, columns = numpy.mgrid[0:height, 0:width]
    if is_mask:
        inside = (abs(2 * rows - height) < height / 2) & (abs(2 * columns - width) < width / 2)
        pixels = numpy.where(inside, 255, 0)
    else:
        pixels = numpy.stack([255 * rows / height, 255 * columns / width, 255 - 255 * rows / height], axis=-1)
    Image.fromarray(pixels.astype(numpy.uint8)).save(path)
