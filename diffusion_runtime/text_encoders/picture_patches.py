"""Pictures as rows of patches, for vision models that take any size (Qwen2-VL, arXiv:2409.12191).

transformers' own preprocessing needs torchvision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.text_encoders.image_preparation import check_all_steps, read_three_numbers
from diffusion_runtime.untrusted.json_text import read_json_file

_MAX_PATCH = 1024


@dataclass(frozen=True)
class PicturePatches:
    """A picture as patches. patches: [rows x columns, numbers of a patch], float32. grid: (frames, rows, columns) of
    patches. merge: how many a side become one token."""

    patches: torch.Tensor
    grid: tuple[int, int, int]
    merge: int

    @property
    def merged(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.grid[1] // self.merge, self.grid[2] // self.merge

    @property
    def num_tokens(self) -> int:
        return math.prod(self.merged)


@dataclass(frozen=True)
class PatchPreparation:
    """Preprocessing of pixels. patch: pixels a side; frames: of a patch, a picture's repeated; merge: patches
    a side of a token. min_pixels, max_pixels: of the resulting picture. mean, std: by colour, of values in [0, 1]."""

    patch: int
    frames: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: torch.Tensor) -> PicturePatches:
        """Return an image's patches, scaled to whole tokens by a bicubic filter. image: [height, width, 3], uint8."""
        (patches,) = self.prepare_clip(image[None])
        return patches

    def prepare_clip(self, clip: torch.Tensor) -> list[PicturePatches]:
        """Return the patches of the frames that a token stands for, one group after the other; the last frame is
        repeated to whole groups. clip: [frames, height, width, 3], uint8."""
        num_frames, (height, width) = len(clip), self.whole_tokens(*clip.shape[:3])
        pixels = torch.stack([self._pixels(frame, height, width) for frame in clip])
        pixels = torch.cat([pixels, pixels[-1:].expand(-num_frames % self.frames, -1, -1, -1)])
        rows, columns, side = height // self.patch, width // self.patch, self.merge
        tokens = pixels.reshape(-1, self.frames, 3, rows // side, side, self.patch, columns // side, side, self.patch)
        # The patches of a token are consecutive; in each, colour before frame before row.
        ordered = tokens.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(len(tokens), rows * columns, -1)
        return [PicturePatches(each, (1, rows, columns), side) for each in ordered]

    def _pixels(self, frame: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Return a frame of another size, normalised, [3, height, width]."""
        import numpy
        from PIL import Image

        picture = Image.fromarray(frame.cpu().numpy()).resize((width, height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(numpy.array(picture)).float().div(255)
        return pixels.sub(torch.tensor(self.mean)).div(torch.tensor(self.std)).permute(2, 0, 1)

    def whole_tokens(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the nearest size of whole tokens, between the smallest and the largest number of pixels, which of
        several frames are those of all together."""
        # To whole groups, an odd half to the even one.
        num_counted = 1 if num_frames == 1 else round(num_frames / self.frames) * self.frames
        side, area = self.patch * self.merge, num_frames * height * width
        rows, columns = round(height / side), round(width / side)
        pixels = num_counted * rows * columns * side * side
        if pixels > self.max_pixels:
            shrink = math.sqrt(area / self.max_pixels)
            rows, columns = (max(1, math.floor(size / shrink / side)) for size in (height, width))
        elif pixels < self.min_pixels:
            growth = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(size * growth / side) for size in (height, width))
        return rows * side, columns * side


def read_patch_preparation(path: Path, part: str | None = None) -> PatchPreparation:
    """Read a preprocessor_config.json, or the part of a json file of that name. Raises ModelLoadError that names the
    file and the key."""
    values: Any = read_json_file(path, error=ModelLoadError, advice="the model folder is incomplete")
    if part is not None and isinstance(values, dict):
        values = values.get(part)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {shown(values)}")
    check_all_steps(path, values)
    if values.get("resample", 3) != 3:
        raise ModelLoadError(f"{path}: key 'resample': expected 3 (bicubic), got {shown(values['resample'])}")
    size = values.get("size")
    size = size if isinstance(size, dict) else {}

    def number(key: str, found: object, most: int) -> int:
        if type(found) is not int or not 1 <= found <= most:
            raise ModelLoadError(f"{path}: key {shown(key)}: expected a whole number, 1 to {most}, got {shown(found)}")
        return found

    patch, frames, merge = (
        number(key, values.get(key, usual), _MAX_PATCH)
        for key, usual in (("patch_size", 14), ("temporal_patch_size", 2), ("merge_size", 2))
    )
    fewest, most = (
        number(key, values.get(key, size.get(side)), 2**31)
        for key, side in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    mean, std = (read_three_numbers(path, key, values.get(key)) for key in ("image_mean", "image_std"))
    return PatchPreparation(patch, frames, merge, fewest, most, mean, std)
