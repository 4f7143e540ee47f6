"""The network of the judge: where things are in one frame, which they are, and which scene is behind them.

It is trained apart from the generator, on rendered frames (scripts/train_embedded/train_judge.py), in the manner of
Zhou et al., "Objects as points" (arXiv:1904.07850): a map of centres, and at each centre the thing and its extent.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_runtime.quality.emoji.attributes import SCENE_NAMES, TIME_NAMES
from diffusion_runtime.quality.emoji.things import THING_NAMES
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile

FRAME = 128
"""Side in pixels that frames are brought to."""
CELLS = FRAME // 4
"""Cells a side of the maps."""
MAX_DETECTIONS = 4


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return x + changed


@dataclass(frozen=True)
class Maps:
    """Maps that the network computes of N frames."""

    centre: Tensor
    """[N, CELLS, CELLS], logit of a thing's centre in the cell."""
    thing: Tensor
    """[N, things, CELLS, CELLS], logits."""
    box: Tensor
    """[N, 4, CELLS, CELLS]: offset (x, y) from the middle of the cell in cells, log of half width and height in
    half-sides."""
    scene: Tensor
    """[N, scenes], logits."""
    time: Tensor
    """[N, times], logits."""


class Detector(nn.Module):
    """Frames [N, 3, FRAME, FRAME] in -1 to 1 to Maps."""

    def __init__(self, widths: tuple[int, int, int] = (48, 96, 160)) -> None:
        super().__init__()
        fine, middle, coarse = widths
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(32, fine, 3, stride=2, padding=1)
        )
        self.fine = nn.Sequential(_Residual(fine), _Residual(fine))
        self.to_middle = nn.Conv2d(fine, middle, 3, stride=2, padding=1)
        self.middle = nn.Sequential(_Residual(middle), _Residual(middle))
        self.to_coarse = nn.Conv2d(middle, coarse, 3, stride=2, padding=1)
        self.coarse = nn.Sequential(_Residual(coarse), _Residual(coarse))
        self.from_coarse, self.join_middle = nn.Conv2d(coarse, middle, 1), _Residual(middle)
        self.from_middle, self.from_fine = nn.Conv2d(middle, middle, 1), nn.Conv2d(fine, middle, 1)
        self.join_fine = nn.Sequential(_Residual(middle), nn.GroupNorm(8, middle), nn.SiLU())
        self.place = nn.Conv2d(middle, 5, 1)
        self.thing = nn.Sequential(nn.Conv2d(middle, 128, 3, padding=1), nn.SiLU(), nn.Conv2d(128, len(THING_NAMES), 1))
        self.whole = nn.Linear(2 * coarse, len(SCENE_NAMES) + len(TIME_NAMES))
        nn.init.constant_(self.place.bias, -3.0)  # type: ignore[arg-type]

    def forward(self, frames: Tensor) -> Maps:
        fine = self.fine(self.stem(frames))
        middle = self.middle(self.to_middle(fine))
        coarse = self.coarse(self.to_coarse(middle))
        middle = self.join_middle(middle + F.interpolate(self.from_coarse(coarse), scale_factor=2.0))
        joined = self.join_fine(self.from_fine(fine) + F.interpolate(self.from_middle(middle), scale_factor=2.0))
        place = self.place(joined)
        whole = self.whole(torch.cat([coarse.mean(dim=(2, 3)), coarse.amax(dim=(2, 3))], dim=1))
        scene, time = whole.split([len(SCENE_NAMES), len(TIME_NAMES)], dim=1)
        return Maps(place[:, 0], self.thing(joined), place[:, 1:], scene, time)


@dataclass(frozen=True)
class Detections:
    """The MAX_DETECTIONS likeliest things of N frames, the likeliest first."""

    score: Tensor
    """[N, D], 0 to 1; 0 where a likelier one stands at the same place."""
    box: Tensor
    """[N, D, 4]: centre (x, y), half width, half height; half-sides."""
    thing: Tensor
    """[N, D, things], logits."""


def prepare(frames: Tensor) -> Tensor:
    """uint8 [N, H, W, 3] to [N, 3, FRAME, FRAME] in -1 to 1."""
    x = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
    return x if x.shape[-2:] == (FRAME, FRAME) else F.interpolate(x, size=(FRAME, FRAME), mode="area")


def detect(maps: Maps) -> Detections:
    """Peaks of the map of centres, without those within another's inner half."""
    centre = maps.centre.float().sigmoid()
    peak = F.max_pool2d(centre[:, None], 3, stride=1, padding=1)[:, 0] == centre
    score, index = (centre * peak).flatten(1).topk(MAX_DETECTIONS, dim=1)
    box = maps.box.float().flatten(2).gather(2, index[:, None].expand(-1, 4, -1)).transpose(1, 2)
    thing = maps.thing.float().flatten(2).transpose(1, 2)
    thing = thing.gather(1, index[..., None].expand(-1, -1, thing.shape[2]))
    cell = torch.stack([index % CELLS, index // CELLS], dim=-1)
    position = (cell + 0.5 + box[..., :2]) * (2.0 / CELLS) - 1.0
    half = box[..., 2:].clamp(-4, 1).exp()
    kept = torch.ones_like(score, dtype=torch.bool)
    for one in range(1, MAX_DETECTIONS):
        for other in range(one):
            near = (position[:, one] - position[:, other]).abs() < 0.6 * half[:, other].amax(dim=-1, keepdim=True)
            kept[:, one] &= ~(near.all(dim=-1) & kept[:, other])
    return Detections(score * kept, torch.cat([position, half], dim=-1), thing)


def load_detector(path: Path, device: str) -> Detector:
    """Return a trained detector in float32, of a safetensors file in 8 bits or not. Raises ModelLoadError."""
    detector = Detector()
    with closing(SafetensorsFile(path)) as file:
        rows = stored_rows([file])
        detector.load_state_dict({name: several[0].numbers(torch.float32).float() for name, several in rows.items()})
    return detector.to(device).eval().requires_grad_(False)
