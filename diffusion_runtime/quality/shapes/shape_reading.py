"""Classifies a region as one of the five shapes: soft overlap (IoU) with each shape's silhouette, at equal area and
centroid."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import SHAPE_NAMES
from diffusion_runtime.quality.shapes.segmentation import CELL_SIZE, WORK_SIZE, Region, Segmentation
from diffusion_runtime.quality.shapes.signed_distance import coverage

MIN_OVERLAP = 0.80
"""Mean overlap (intersection over union of soft masks) below which a region is no shape at all."""
MIN_LEAD = 0.03
"""The best shape must lead the second by this much overlap, or the reading is unclear."""
MAX_FRAMES = 8
"""Frames looked at, evenly spaced over the clip."""


@lru_cache(maxsize=1)
def _silhouettes() -> tuple[tuple[float, float], ...]:
    """Area at radius 1 and the centroid's offset below the centre, in radii, of every shape: measured on a grid."""
    axis = (torch.arange(600, dtype=torch.float32) + 0.5) / 200 - 1.5
    results = []
    for index in range(len(SHAPE_NAMES)):
        mask = coverage(torch.tensor(index), axis[None, :], axis[:, None], torch.tensor(1.0), 1 / 200)
        results.append((float(mask.sum()) / 200**2, float((mask * axis[:, None]).sum() / mask.sum())))
    return tuple(results)


def shape_overlaps(segmentation: Segmentation, track: list[Region]) -> Tensor:
    """Mean overlap of a track's regions with each of SHAPE_NAMES: [5] float32 on the CPU, 0 to 1."""
    count = min(MAX_FRAMES, len(track))
    chosen = [track[round(step * (len(track) - 1) / max(count - 1, 1))] for step in range(count)]
    masks = torch.stack([_soft_mask(segmentation, region) for region in chosen])
    pixel = 2.0 / WORK_SIZE
    axis = (torch.arange(WORK_SIZE, device=masks.device, dtype=torch.float32) + 0.5) * pixel - 1.0
    area = masks.sum(dim=(1, 2)) * pixel**2
    weight = masks.sum(dim=(1, 2)).clamp(min=1e-6)
    centroid_x = (masks * axis[None, None, :]).sum(dim=(1, 2)) / weight
    centroid_y = (masks * axis[None, :, None]).sum(dim=(1, 2)) / weight
    overlaps = []
    for index, (unit_area, drop) in enumerate(_silhouettes()):
        radius = torch.sqrt(area / unit_area)
        ideal = coverage(
            torch.tensor(index, device=masks.device),
            axis[None, None, :] - centroid_x[:, None, None],
            axis[None, :, None] - (centroid_y - drop * radius)[:, None, None],
            radius[:, None, None],
            pixel,
        )
        union = torch.maximum(masks, ideal).sum(dim=(1, 2)).clamp(min=1e-6)
        overlaps.append((torch.minimum(masks, ideal).sum(dim=(1, 2)) / union).mean())
    return torch.stack(overlaps).cpu()


def read_shape(segmentation: Segmentation, track: list[Region]) -> str | None:
    """Read the shape of a track, or None where no silhouette fits well or two fit alike."""
    overlaps = shape_overlaps(segmentation, track)
    best, second = torch.sort(overlaps, descending=True).values[:2].tolist()
    if best < MIN_OVERLAP or best - second < MIN_LEAD:
        return None
    return SHAPE_NAMES[int(overlaps.argmax())]


def _soft_mask(segmentation: Segmentation, region: Region) -> Tensor:
    """[128, 128] coverage of one region: its cells, one cell around them, nothing of any other region."""
    own = (segmentation.labels[region.frame, region.plane] == region.label).float()
    near = F.max_pool2d(own[None, None], 3, stride=1, padding=1)
    near = F.interpolate(near, scale_factor=WORK_SIZE // CELL_SIZE, mode="nearest")[0, 0]
    same_colour = segmentation.colour[region.frame] == region.colour
    return segmentation.coverage[region.frame] * near * same_colour
