"""How much a thing in a frame looks like its picture: the picture drawn at that place, compared pixel by pixel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.tensor_rows import TensorRows
from scripts.emoji.atlas import SPRITE
from scripts.emoji.render import NUM_LEVELS, picture_levels

WIDENED = 1.35
"""Side of the window over that of the detected box."""
COARSE, FINE = (0.1, 0.05, 0.025), (0.02, 0.01, 0.005, 0.0025)
"""Steps of centre, half width and half height, over the longer half side; all of them together reach 0.2."""
OUTSIDE = 9
"""Pixels by which a picture, found roughly, is widened (4 on each side): beyond it are the surroundings."""
STRUCTURE = 13
"""Side in pixels of the squares whose structure is compared."""
SEARCHED = 64
"""Pixels a side that a search looks at, or up to twice as many."""
CLEAR = 0.01
"""Alpha below which the surroundings show."""
AT_ONCE = 16


@dataclass(frozen=True)
class Likeness(TensorRows):
    """Figures of M detections: all of them are higher where the thing is more like its picture."""

    structure: Tensor
    """[M], mean structural similarity (Wang et al., 2004) of the pixels that the picture covers: 1 is the picture."""
    psnr: Tensor
    """[M] dB, of the same pixels, at most 60."""
    sharpness: Tensor
    """[M], gradient energy along the outline over that of the drawn picture: 1 is as sharp, less is blurred."""


def _fill(colour: Tensor, known: Tensor) -> Tensor:
    """Colours [M, 3, S, S] where `known` [M, 1, S, S] is 0: from ever coarser means of the known ones."""
    if colour.shape[-1] % 2:
        return (colour * known).sum(dim=(2, 3), keepdim=True) / known.sum(dim=(2, 3), keepdim=True).clamp(min=1e-6)
    share = F.avg_pool2d(known, 2)
    coarse = _fill(F.avg_pool2d(colour * known, 2) / share.clamp(min=1e-6), (share * 4).clamp(max=1))
    wide = F.interpolate(coarse, size=colour.shape[-2:], mode="bilinear", align_corners=False)
    return torch.lerp(wide, colour, known)


def _draw(pictures: Tensor, poses: Tensor, axis: Tensor) -> Tensor:
    """Pictures [M, 4, P, P] at poses [M, K, 4] (centre, half width and half height in pixels): [M, K, 4, S, S]."""
    x, y, wide, high = (poses[..., None, None, part] for part in range(4))
    across, down = (axis - x) / wide, (axis[:, None] - y) / high
    grid = torch.stack([across.expand(-1, -1, len(axis), -1), down.expand(-1, -1, -1, len(axis))], dim=-1)
    drawn = F.grid_sample(pictures, grid.flatten(1, 2), padding_mode="zeros", align_corners=False)
    return torch.unflatten(drawn, 2, grid.shape[1:3]).transpose(1, 2)


def _search(
    pictures: Tensor, poses: Tensor, window: Tensor, behind: Tensor, region: Tensor, steps: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Walk to the poses [M, 4] of least squared error [M] over the region, centre and size in turn."""
    every = max(1, window.shape[-1] // SEARCHED)
    window, behind, region = (each[..., ::every, ::every][:, None] for each in (window, behind, region))
    size = window.shape[-1]
    axis = torch.arange(size, device=window.device) * float(every) + 0.5
    near = torch.cartesian_prod(*[torch.tensor([0.0, -1.0, 1.0], device=window.device)] * 2)
    moves = [F.pad(near, (0, 2)), F.pad(near, (2, 0))]
    longest = poses[:, 2:].abs().amax(dim=1)[:, None, None]
    rows = torch.arange(len(poses), device=window.device)
    error = torch.empty_like(poses[:, 0])
    # The half width of a mirrored picture is negative.
    sign = poses[:, None, 2:].sign()
    for step in steps:
        for move in moves:
            tried = poses[:, None] + step * longest * move
            tried[..., 2:] = sign * (sign * tried[..., 2:]).clamp(min=1.0)
            drawn = _draw(pictures, tried, axis)
            errors = (drawn[:, :, :3] + (1 - drawn[:, :, 3:]) * behind - window).square() * region
            error, best = errors.sum(dim=(2, 3, 4)).min(dim=1)
            poses = tried[rows, best]
    return poses, error


def _gradient(pictures: Tensor) -> Tensor:
    """Squared differences of neighbours [M, 1, S, S]."""
    across = F.pad(pictures.diff(dim=-1), (0, 1)).square()
    return (across + F.pad(pictures.diff(dim=-2), (0, 0, 0, 1)).square()).sum(dim=1, keepdim=True)


def _structure(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity [M, 3, S, S] of the squares about each pixel."""
    together = torch.cat([one, other, one * one, other * other, one * other])
    means = F.avg_pool2d(together, STRUCTURE, 1, STRUCTURE // 2, count_include_pad=False)
    first, second, first_square, second_square, product = means.chunk(5)
    light = (2 * first * second + 1e-4) / (first**2 + second**2 + 1e-4)
    spread = first_square - first**2 + second_square - second**2
    similar: Tensor = light * (2 * (product - first * second) + 9e-4) / (spread + 9e-4)
    return similar


def _compare(window: Tensor, inside: Tensor, pictures: Tensor, box: Tensor) -> Tensor:
    """Find pictures [M, 4, P, P] in windows [M, 3, S, S] near boxes [M, 4] in pixels, where `inside` is the frame: the
    figures [3, M]."""
    axis = torch.arange(window.shape[-1], device=window.device) + 0.5
    across, down = ((axis - box[:, part, None]).abs() < box[:, part + 2, None] for part in range(2))
    behind = _fill(window, inside * ~(across[:, None, None] & down[:, None, :, None]))
    turned = box * torch.tensor([1.0, 1.0, -1.0, 1.0], device=box.device)
    found, other = (_search(pictures, pose, window, behind, inside, COARSE) for pose in (box, turned))
    pose = torch.where((found[1] <= other[1])[:, None], found[0], other[0])
    near = F.max_pool2d(_draw(pictures, pose[:, None], axis)[:, 0, 3:], OUTSIDE, 1, OUTSIDE // 2) > CLEAR
    behind = _fill(window, inside * ~near)
    pose, _ = _search(pictures, pose, window, behind, inside * near, FINE)
    picture = _draw(pictures, pose[:, None], axis)[:, 0]
    alpha = picture[:, 3:]
    drawn = picture[:, :3] + (1 - alpha) * torch.where(alpha < CLEAR, window, behind)
    body = (alpha > 0.5).float()
    edge = F.max_pool2d(body, 5, 1, 2) * inside * (1 + F.max_pool2d(-body, 5, 1, 2))

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return (values * where).mean(dim=(1, 2, 3)) / where.mean(dim=(1, 2, 3)).clamp(min=1e-6)

    structure = mean(_structure(window, drawn), body * inside)
    psnr = -10 * (mean((window - drawn).square(), body * inside) + 1e-6).log10()
    sharpness = mean(_gradient(window), edge) / mean(_gradient(drawn), edge).clamp(min=1e-6)
    return torch.stack([structure, psnr, sharpness])


@torch.no_grad()
def likeness(frames: Tensor, frame: Tensor, box: Tensor, thing: Tensor) -> Likeness:
    """Compare detections with the pictures of their things, drawn where they fit best near the box.

    frames: uint8 [N, H, H, 3]. Of M detections: frame [M] is the index of its frame, box [M, 4] centre, half width and
    half height in half-sides, thing [M] the index of its thing. All on one device.
    """
    height = frames.shape[1]
    centre, half = (box[:, :2] + 1) * height / 2, box[:, 2:] * height / 2
    order = half.amax(dim=1).argsort()
    found = box.new_zeros(3, len(box))
    for start in range(0, len(box), AT_ONCE):
        rows = order[start : start + AT_ONCE]
        longest = half[rows].amax(dim=1)
        size = math.ceil(2 * WIDENED * float(longest.max()) / 32) * 32
        first = (centre[rows] - size / 2).round().long()
        place = first[:, :, None] + torch.arange(size, device=box.device)
        inside = ((place >= 0) & (place < height)).float()
        x, y = place.clamp(0, height - 1).unbind(dim=1)
        window = frames[frame[rows, None, None], y[:, :, None], x[:, None]].permute(0, 3, 1, 2).float() / 255
        level = (SPRITE / (2 * longest).clamp(min=1)).log2().floor().clamp(0, NUM_LEVELS - 1).long()
        pictures = picture_levels(str(box.device))[level, thing[rows]]
        pose = torch.cat([centre[rows] - first, half[rows]], dim=1)
        found[:, rows] = _compare(window, (inside[:, 1, :, None] * inside[:, 0, None])[:, None], pictures, pose)
    return Likeness(*found)
