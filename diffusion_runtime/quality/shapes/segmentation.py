"""Segments frames into coloured regions: which pixels belong to an object, of which colour, and which regions are
connected.

Palette colours are far from grey and background tones are close to it, so a pixel's chroma (its colour less its mean)
is enough: its direction gives the colour, its length the share of the pixel that the object covers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import COLOURS

WORK_SIZE = 128
"""Side in pixels at which frames are read; larger ones are averaged down, smaller ones interpolated up."""
CELL_SIZE = 64
"""Side in cells at which connected regions are found: two work pixels per cell."""
MIN_REGION_CELLS = 14
"""Smaller regions are specks: 0.34 % of the frame, a sixth of the smallest object ever drawn."""
MAX_COLOURS = 4
"""Largest number of colours per clip; a clip with more has extra objects anyway."""
_MIN_COSINE = 0.86
_MIN_COVERAGE = 0.5


@dataclass(frozen=True)
class Region:
    """One connected region of one colour in one frame."""

    frame: int
    colour: int
    """Index into COLOUR_NAMES."""
    cells: int
    """Area in cells of the 64 x 64 grid."""
    x: float
    y: float
    """Centroid, half-sides: -1 to 1."""
    plane: int
    """Which of the clip's colour planes holds it."""
    label: int
    """Its label there."""


@dataclass(frozen=True)
class Segmentation:
    """The segmentation of one clip of `frames` frames."""

    frames: Tensor
    """[frames, 3, 128, 128] float32, 0 to 1."""
    coverage: Tensor
    """[frames, 128, 128] float32, 0 to 1: share of the pixel that is of a palette colour, whichever it is."""
    colour: Tensor
    """[frames, 128, 128] int64: the palette colour nearest in hue."""
    plane_colours: tuple[int, ...]
    """The palette colours present, one per plane."""
    labels: Tensor
    """[frames, planes, 64, 64] int64: 0 outside, else the label of the connected region."""
    regions: tuple[Region, ...]
    """Every region that is no speck, in order of frames."""


def to_work_size(frames: Tensor) -> Tensor:
    """uint8 [frames, height, width, 3] -> float32 [frames, 3, 128, 128], 0 to 1."""
    floats = frames.permute(0, 3, 1, 2).float() / 255.0
    if floats.shape[-1] == WORK_SIZE and floats.shape[-2] == WORK_SIZE:
        return floats
    larger = floats.shape[-1] >= WORK_SIZE and floats.shape[-2] >= WORK_SIZE
    if larger:
        return F.interpolate(floats, size=(WORK_SIZE, WORK_SIZE), mode="area")
    return F.interpolate(floats, size=(WORK_SIZE, WORK_SIZE), mode="bilinear", align_corners=False)


def segment(frames: Tensor) -> Segmentation:
    """Segment one clip: uint8 [frames, height, width, 3], on any device."""
    return segment_frames(frames).clip(slice(None))


@dataclass(frozen=True)
class SegmentedFrames:
    """Frames segmented one by one: what every clip that is cut of them has in common."""

    frames: Tensor
    """[frames, 3, 128, 128], as are coverage and colour those of a Segmentation."""
    coverage: Tensor
    colour: Tensor
    areas: Tensor
    """[frames, colours] int64: cells of each palette colour."""
    labels: Tensor
    """[frames, colours, 64, 64] int16: as in a Segmentation; 0 for a colour that no frame shows enough of."""

    def clip(self, which: slice) -> Segmentation:
        """Return the segmentation of some of the frames, as if they were all that there is."""
        areas = self.areas[which].amax(dim=0)
        order = torch.argsort(areas, descending=True)[:MAX_COLOURS].tolist()
        present = tuple(index for index in order if int(areas[index]) >= MIN_REGION_CELLS)
        labels = self.labels[which][:, list(present)].long()
        return Segmentation(
            self.frames[which], self.coverage[which], self.colour[which], present, labels, _regions(labels, present)
        )


def segment_frames(frames: Tensor, at_once: int = 64) -> SegmentedFrames:
    """Segment every frame of a stream: uint8 [frames, height, width, 3], `at_once` frames at a time."""
    parts = [_segment_part(part) for part in torch.split(frames, at_once)]
    if len(parts) == 1:
        return parts[0]
    columns = ("frames", "coverage", "colour", "areas", "labels")
    return SegmentedFrames(*(torch.cat([getattr(part, name) for part in parts]) for name in columns))


def _segment_part(frames: Tensor) -> SegmentedFrames:
    images = to_work_size(frames)
    palette = torch.tensor(list(COLOURS.values()), device=images.device, dtype=torch.float32) / 255.0
    palette_chroma = palette - palette.mean(dim=1, keepdim=True)
    strength = torch.linalg.vector_norm(palette_chroma, dim=1)
    chroma = images - images.mean(dim=1, keepdim=True)
    along = torch.einsum("fchw,kc->fkhw", chroma, palette_chroma / strength[:, None])
    best, colour = along.max(dim=1)
    length = torch.linalg.vector_norm(chroma, dim=1).clamp(min=1e-6)
    covered = (best / strength[colour]).clamp(0.0, 1.0)
    object_pixels = torch.where(best / length > _MIN_COSINE, covered, torch.zeros_like(covered))
    planes = torch.stack([object_pixels * (colour == index) for index in range(len(COLOURS))], dim=1)
    cells = F.avg_pool2d(planes, WORK_SIZE // CELL_SIZE) > _MIN_COVERAGE
    areas = cells.sum(dim=(2, 3))
    shown = torch.nonzero(areas.amax(dim=0) >= MIN_REGION_CELLS).flatten()
    labels = torch.zeros(cells.shape, dtype=torch.int16, device=cells.device)
    labels[:, shown] = _connected(cells[:, shown]).to(torch.int16)
    return SegmentedFrames(images, covered, colour, areas, labels)


def _connected(mask: Tensor) -> Tensor:
    """Label 4-connected regions of a bool mask [frames, planes, n, n]: 0 outside, equal positive numbers inside one."""
    size = mask.shape[-1]
    start = torch.arange(1, size * size + 1, device=mask.device, dtype=torch.float32).view(1, 1, size, size)
    labels = start * mask
    if labels.numel() == 0:
        return labels.long()
    while True:
        before = labels
        for _ in range(8):
            across = F.max_pool2d(labels, (1, 3), stride=1, padding=(0, 1))
            down = F.max_pool2d(labels, (3, 1), stride=1, padding=(1, 0))
            labels = torch.maximum(across, down) * mask
        if torch.equal(before, labels):
            return labels.long()


def _regions(labels: Tensor, present: tuple[int, ...]) -> tuple[Region, ...]:
    num_frames, num_planes, size, _ = labels.shape
    if num_planes == 0:
        return ()
    offset = torch.arange(num_frames * num_planes, device=labels.device).view(num_frames, num_planes, 1, 1)
    keys = (labels + offset * (size * size + 1))[labels > 0]
    unique, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    rows = torch.arange(size, device=labels.device, dtype=torch.float32)
    grid_x = ((rows + 0.5) * 2 / size - 1)[None, :].expand(size, size)
    grid_y = ((rows + 0.5) * 2 / size - 1)[:, None].expand(size, size)
    inside = labels > 0
    sums = [
        torch.zeros(len(unique), device=labels.device).index_add_(0, inverse, grid.expand_as(labels)[inside])
        for grid in (grid_x, grid_y)
    ]
    regions = []
    columns = (unique.tolist(), counts.tolist(), (sums[0] / counts).tolist(), (sums[1] / counts).tolist())
    for key, cells, x, y in zip(*columns, strict=True):
        if cells < MIN_REGION_CELLS:
            continue
        image, label = divmod(int(key), size * size + 1)
        frame, plane = divmod(image, num_planes)
        regions.append(Region(frame, present[plane], int(cells), x, y, plane, label))
    return tuple(regions)
