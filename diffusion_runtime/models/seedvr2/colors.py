"""Colours of what is made, brought to those of the video that it is made from.

The model shifts colours a little, and differently from piece to piece. Frames here are float32, [frames, 3, height,
width], in [-1, 1]; `made` and `given` are of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

# Of the decomposition: the radius doubles from one to the next.
_LEVELS = 5
# Share of the lightness that stays as it was made; colours are those of the video.
_KEPT_LIGHTNESS = 0.8
# sRGB's primaries and white point D65 (IEC 61966-2-1), and CIE L*a*b*.
_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
_FROM_XYZ = (
    (3.2404542, -1.5371385, -0.4985314),
    (-0.9692660, 1.8760108, 0.0415560),
    (0.0556434, -0.2040259, 1.0572252),
)
_WHITE = (0.95047, 1.0, 1.08883)
_BEND, _SLOPE = 6.0 / 29.0, (29.0 / 3.0) ** 3

Correct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_wavelets(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return the details of what was made on the coarse colours of what was given (StableSR, arXiv:2305.07015)."""
    return (made - _coarse(made) + _coarse(given)).clamp_(-1.0, 1.0)


def by_lab(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return `by_wavelets` whose values of a* and b* have the distribution of those given, and of whose lightness a
    fifth has it, in CIE L*a*b*."""
    own, other = (_to_lab(each) for each in (by_wavelets(made, given), given))
    matched = [_with_distribution(own[:, axis], other[:, axis]) for axis in range(3)]
    matched[0] = own[:, 0] * _KEPT_LIGHTNESS + matched[0] * (1 - _KEPT_LIGHTNESS)
    return _from_lab(torch.stack(matched, dim=1))


def by_statistics(made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return what was made with the mean and deviation of each frame's colours as given (AdaIN, arXiv:1703.06868)."""
    (std, mean), (of_given, mean_given) = (
        ((each.var(dim=(2, 3), keepdim=True) + 1e-5).sqrt(), each.mean(dim=(2, 3), keepdim=True))
        for each in (made, given)
    )
    return ((made - mean) / std * of_given + mean_given).clamp_(-1.0, 1.0)


CORRECTIONS: Mapping[str, Correct] = {
    "lab": by_lab,
    "wavelet": by_wavelets,
    "adain": by_statistics,
    "none": lambda made, _: made,
}


def _coarse(frames: torch.Tensor) -> torch.Tensor:
    """Return frames without their details: blurred by a kernel of 3 x 3 pixels that are 1, 2, 4, 8 and 16 apart."""
    line = torch.tensor([0.25, 0.5, 0.25], dtype=frames.dtype, device=frames.device)
    kernel = torch.outer(line, line).expand(3, 1, 3, 3)
    # Small pictures: no farther than an eighth of them.
    most = max(1, min(frames.shape[-2:]) // 8)
    for level in range(_LEVELS):
        radius = min(2**level, most)
        padded = F.pad(frames, (radius,) * 4, mode="replicate")
        frames = F.conv2d(padded, kernel, groups=3, dilation=radius)
    return frames


def _to_lab(frames: torch.Tensor) -> torch.Tensor:
    rgb = frames.add(1.0).mul_(0.5).clamp_(0.0, 1.0)
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = _mixed(linear, _TO_XYZ) / _column(_WHITE, frames)
    bent = torch.where(xyz > _BEND**3, xyz ** (1.0 / 3.0), (xyz * _SLOPE + 16.0) / 116.0)
    x, y, z = bent.unbind(1)
    return torch.stack([116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)], dim=1)


def _from_lab(lab: torch.Tensor) -> torch.Tensor:
    lightness, a, b = lab.unbind(1)
    y = (lightness + 16.0) / 116.0
    bent = torch.stack([a / 500.0 + y, y, y - b / 200.0], dim=1)
    xyz = torch.where(bent > _BEND, bent**3, (bent * 116.0 - 16.0) / _SLOPE) * _column(_WHITE, lab)
    linear = _mixed(xyz, _FROM_XYZ)
    rgb = torch.where(linear > 0.0031308, linear.clamp(min=0.0) ** (1.0 / 2.4) * 1.055 - 0.055, linear * 12.92)
    return rgb.clamp_(0.0, 1.0).mul_(2.0).sub_(1.0)


def _mixed(colours: torch.Tensor, matrix: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    weights = torch.tensor(matrix, dtype=colours.dtype, device=colours.device)
    return torch.einsum("ij,fjhw->fihw", weights, colours)


def _column(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)


def _with_distribution(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return `values` with the number of the same rank among `others` in place of each."""
    order = values.flatten().argsort(stable=True)
    out = torch.empty_like(values).flatten()
    out[order] = others.flatten().sort().values
    return out.view(values.shape)
