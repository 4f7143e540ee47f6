"""Classifies the background of a clip by the structure of its lightness where no object is, over all frames
together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.segmentation import CELL_SIZE, WORK_SIZE, Segmentation

MAX_PLAIN_CONTRAST = 0.09
"""Lightness range (5th to 95th percentile) up to which a background is plain; patterns start at 0.2."""
MAX_CHROMA = 0.12
"""Mean chroma above which the area behind the objects is no background of this data set."""
_MAX_FRAMES = 8
_OBJECT_COVERAGE = 0.2


def read_background(segmentation: Segmentation) -> str | None:
    """Return one of BACKGROUND_NAMES, or None if the structure is unclear."""
    lightness, seen, chroma = _still_picture(segmentation)
    if chroma > MAX_CHROMA or float(seen.float().mean()) < 0.3:
        return None
    values = lightness[seen]
    low, high = (float(torch.quantile(values, share)) for share in (0.05, 0.95))
    if high - low < MAX_PLAIN_CONTRAST:
        return "plain"
    middle = (low + high) / 2
    mask = seen.float()
    centred = (lightness - middle) * mask
    variance = float(((lightness - values.mean()) ** 2 * mask).sum())
    by_axis = {axis: _explained_by_profile(lightness, mask, axis, variance) for axis in (0, 1)}
    axis = max(by_axis, key=lambda key: by_axis[key][0])
    explained, profile, weight = by_axis[axis]
    if explained >= 0.7:
        straight = _linear_share(profile, weight)
        if straight >= 0.9:
            return "gradient"
        two_level = _two_level_share(profile, weight)
        return "stripes" if straight < 0.6 and two_level >= 0.8 and _crossings(profile, middle) >= 2 else None
    product = _explained_by_product(centred, mask)
    return "checker" if product >= 0.6 and explained <= 0.35 else None


def _still_picture(segmentation: Segmentation) -> tuple[Tensor, Tensor, float]:
    """Median lightness over frames [64, 64] where no object is, where that was ever seen, and the mean chroma there."""
    count = segmentation.frames.shape[0]
    step = max(1, count // _MAX_FRAMES)
    frames = F.avg_pool2d(segmentation.frames[::step], WORK_SIZE // CELL_SIZE)
    touched = F.avg_pool2d(segmentation.coverage[::step, None], WORK_SIZE // CELL_SIZE) > _OBJECT_COVERAGE
    near = F.max_pool2d(touched.float(), 3, stride=1, padding=1)[:, 0] > 0
    lightness = frames.mean(dim=1).masked_fill(near, float("nan"))
    median = torch.nanmedian(lightness, dim=0).values
    seen = ~torch.isnan(median)
    chroma = torch.linalg.vector_norm(frames - frames.mean(dim=1, keepdim=True), dim=1)[~near]
    return torch.nan_to_num(median), seen, float(chroma.mean()) if chroma.numel() else 1.0


def _explained_by_profile(lightness: Tensor, mask: Tensor, axis: int, variance: float) -> tuple[float, Tensor, Tensor]:
    """Share of the variance that a function of one axis explains; that profile [64] and its weights [64]."""
    weight = mask.sum(dim=1 - axis)
    profile = (lightness * mask).sum(dim=1 - axis) / weight.clamp(min=1)
    rest = (lightness - profile.unsqueeze(1 - axis)) ** 2 * mask
    return 1 - float(rest.sum()) / max(variance, 1e-9), profile, weight


def _linear_share(profile: Tensor, weight: Tensor) -> float:
    """Share of a profile's variance that a straight line explains."""
    position = torch.arange(len(profile), device=profile.device, dtype=torch.float32)
    total = weight.sum().clamp(min=1)
    centre_x, centre_y = (position * weight).sum() / total, (profile * weight).sum() / total
    along, value = position - centre_x, profile - centre_y
    covariance = (along * value * weight).sum()
    spread = (along**2 * weight).sum() * (value**2 * weight).sum()
    return float(covariance**2 / spread.clamp(min=1e-9))


def _two_level_share(profile: Tensor, weight: Tensor) -> float:
    """Share of a profile's variance that its two levels (above and below the middle) explain."""
    upper = profile > (profile[weight > 0].min() + profile[weight > 0].max()) / 2
    total = weight.sum().clamp(min=1)
    mean = (profile * weight).sum() / total
    rest = torch.zeros((), device=profile.device)
    for side in (upper, ~upper):
        level = (profile * weight * side).sum() / (weight * side).sum().clamp(min=1)
        rest = rest + ((profile - level) ** 2 * weight * side).sum()
    return 1 - float(rest / ((profile - mean) ** 2 * weight).sum().clamp(min=1e-9))


def _crossings(profile: Tensor, middle: float) -> int:
    """Return how often a profile passes its middle."""
    above = profile > middle
    return int((above[1:] != above[:-1]).sum())


def _explained_by_product(centred: Tensor, mask: Tensor) -> float:
    """Share of the energy of a masked picture that one product f(y) g(x) explains (alternating least squares)."""
    signs = torch.sign(centred)
    start = int(mask.sum(dim=1).argmax())
    column = signs[start]
    row = torch.zeros_like(column)
    for _ in range(12):
        row = (centred * column).sum(dim=1) / (mask * column**2).sum(dim=1).clamp(min=1e-6)
        column = (centred * row[:, None]).sum(dim=0) / (mask * row[:, None] ** 2).sum(dim=0).clamp(min=1e-6)
    rest = ((centred - row[:, None] * column) ** 2 * mask).sum()
    return 1 - float(rest / (centred**2).sum().clamp(min=1e-9))
