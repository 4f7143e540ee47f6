"""The scenes of the `emoji` world as panoramas that have no seam: a clip shows a window of half their width.

Drawn once per process at twice the resolution, from gradients, hills, discs and the font's own trees and houses.
Positions are shares of the panorama: u from left to right, v from top to bottom; lengths are shares of its height.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.emoji.attributes import SCENE_NAMES, TIME_NAMES
from scripts.emoji.atlas import GLYPHS, read_atlas

HEIGHT = 256
WIDTH = 2 * HEIGHT
_FINE = 2
Colour = tuple[float, float, float]

SKIES: dict[str, tuple[tuple[float, Colour], ...]] = {
    "day": ((0.0, (0.25, 0.58, 0.95)), (0.55, (0.62, 0.85, 1.0)), (1.0, (0.88, 0.96, 1.0))),
    "sunset": (
        (0.0, (0.33, 0.24, 0.56)),
        (0.35, (0.78, 0.38, 0.55)),
        (0.6, (1.0, 0.58, 0.38)),
        (1.0, (1.0, 0.86, 0.52)),
    ),
    "night": ((0.0, (0.02, 0.04, 0.15)), (0.6, (0.08, 0.13, 0.34)), (1.0, (0.16, 0.24, 0.46))),
}
TINTS: dict[str, Colour] = {"day": (1.0, 1.0, 1.0), "sunset": (0.94, 0.70, 0.62), "night": (0.30, 0.36, 0.62)}


class Canvas:
    """An RGB picture [3, height, width] that wraps at its sides."""

    def __init__(self) -> None:
        self.height, self.width = HEIGHT * _FINE, WIDTH * _FINE
        self.pixels = torch.zeros(3, self.height, self.width)
        self.u = ((torch.arange(self.width) + 0.5) / self.width)[None, :]
        self.v = ((torch.arange(self.height) + 0.5) / self.height)[:, None]

    def fill(self, colour: Colour | Tensor, alpha: Tensor) -> None:
        """Lay a colour over the picture; alpha [height, width] or broadcast, 0 to 1."""
        paint = colour if isinstance(colour, Tensor) else torch.tensor(colour)[:, None, None]
        self.pixels = self.pixels + alpha.expand(self.height, self.width)[None] * (paint - self.pixels)

    def gradient(self, stops: Sequence[tuple[float, Colour]], top: float, bottom: float) -> Tensor:
        """Colours [3, height, 1] that change from v = top to v = bottom."""
        place = ((self.v - top) / (bottom - top)).clamp(0, 1)
        colours = torch.tensor(stops[0][1])[:, None, None].expand(3, self.height, 1)
        for (low, _), (high, colour) in pairwise(stops):
            share = ((place - low) / (high - low)).clamp(0, 1)[None]
            colours = colours + share * (torch.tensor(colour)[:, None, None] - colours)
        return colours

    def _around(self, u: float, v: float, reach: float, flat: float) -> tuple[slice, Tensor, Tensor]:
        """Rows and columns within `reach` of a point, and their distance from it in heights [rows, columns]."""
        half = math.ceil(reach * self.height) + 2
        left, top = round(u * self.width), round(v * self.height)
        tall = math.ceil(half * flat) + 2
        rows = slice(max(0, top - tall), max(0, min(self.height, top + tall)))
        columns = torch.arange(left - half, left + half)
        across = (columns + 0.5) / self.height - u * (self.width / self.height)
        down = (self.v[rows] - v) / flat
        return rows, columns % self.width, torch.sqrt(across[None] ** 2 + down**2)

    def _lay(self, rows: slice, columns: Tensor, colour: Colour, alpha: Tensor) -> None:
        under = self.pixels[:, rows][:, :, columns]
        self.pixels[:, rows, columns] = under + alpha[None] * (torch.tensor(colour)[:, None, None] - under)

    def disc(self, u: float, v: float, radius: float, colour: Colour, alpha: float = 1.0, flat: float = 1.0) -> None:
        """A disc with a soft pixel at its rim; `flat` below 1 makes it lie down."""
        rows, columns, distance = self._around(u, v, radius, flat)
        self._lay(rows, columns, colour, alpha * ((radius - distance) * self.height + 0.5).clamp(0, 1))

    def glow(self, u: float, v: float, radius: float, colour: Colour, alpha: float) -> None:
        """Light that fades outwards."""
        rows, columns, distance = self._around(u, v, min(2.5 * radius, 0.99), 1.0)
        fading = torch.exp(-((distance / radius) ** 2)) * (1 - (distance / 0.98)).clamp(0, 1).sqrt()
        self._lay(rows, columns, colour, alpha * fading)

    def hills(self, base: float, waves: Sequence[tuple[int, float, float]], colour: Colour | Tensor) -> Tensor:
        """Ground below a curve: waves of (whole cycles, height, phase). Returns the curve v [1, width]."""
        curve = base + sum(h * torch.sin(2 * math.pi * (k * self.u + phase)) for k, h, phase in waves)
        self.fill(colour, ((self.v - curve) * self.height + 0.5).clamp(0, 1))
        return torch.as_tensor(curve)

    def paste(self, glyph: str, u: float, bottom: float, height: float, tint: Colour, *, mirror: bool = False) -> None:
        """A picture of the atlas, standing on v = bottom."""
        side = round(height * self.height)
        picture = read_atlas()[GLYPHS.index(glyph)]
        picture = F.interpolate(picture[None], size=(side, side), mode="bilinear", antialias=True, align_corners=False)
        picture = picture[0].flip(-1) if mirror else picture[0]
        left, top = round(u * self.width - side / 2), round(bottom * self.height - side)
        columns = torch.arange(left, left + side) % self.width
        first, last = max(0, -top), min(side, self.height - top)
        part = picture[:, first:last]
        under = self.pixels[:, top + first : top + last][:, :, columns]
        over = part[:3] * torch.tensor(tint)[:, None, None] + (1 - part[3:]) * under
        self.pixels[:, top + first : top + last, columns] = over

    def shrunk(self) -> Tensor:
        """[3, HEIGHT, WIDTH]."""
        return F.avg_pool2d(self.pixels[None], _FINE)[0].clamp(0, 1)


def tinted(colour: Colour, time: str) -> Colour:
    """A colour in the light of a time of day."""
    red, green, blue = (part * light for part, light in zip(colour, TINTS[time], strict=True))
    return (red, green, blue)


def draw_sky(canvas: Canvas, time: str, horizon: float) -> None:
    """Gradient, sun or moon with their glow, stars, clouds."""
    canvas.fill(canvas.gradient(SKIES[time], 0.0, horizon), torch.ones(1))
    if time == "day":
        for u in (0.2, 0.7):
            canvas.glow(u, 0.16, 0.22, (1.0, 0.97, 0.8), 0.55)
            canvas.disc(u, 0.16, 0.075, (1.0, 0.95, 0.62))
    elif time == "sunset":
        for u in (0.25, 0.75):
            canvas.glow(u, horizon - 0.04, 0.32, (1.0, 0.88, 0.5), 0.75)
            canvas.disc(u, horizon - 0.04, 0.12, (1.0, 0.93, 0.62))
    else:
        draw_stars(canvas, 5, 70, horizon * 0.92)
        for u in (0.3, 0.8):
            canvas.glow(u, 0.18, 0.2, (0.62, 0.72, 1.0), 0.45)
            canvas.disc(u, 0.18, 0.075, (0.97, 0.96, 0.86))
            for across, down, radius in ((-0.012, -0.02, 0.016), (0.014, 0.018, 0.02), (-0.016, 0.03, 0.011)):
                canvas.disc(u + across, 0.18 + down, radius, (0.86, 0.85, 0.76))


def draw_stars(canvas: Canvas, seed: int, count: int, bottom: float) -> None:
    """Small white discs of three sizes."""
    random = Random(seed)
    for index in range(count):
        u, v = random.random(), 0.02 + (bottom - 0.02) * random.random()
        radius = (0.005, 0.007, 0.010)[index % 3]
        canvas.disc(u, v, radius, (1.0, 1.0, 0.92), 0.95)


def draw_cloud(canvas: Canvas, u: float, v: float, size: float, colour: Colour, alpha: float = 0.95) -> None:
    """Five puffs on a flat base."""
    top = max(0, round((v - 1.1 * size) * canvas.height))
    bottom = min(canvas.height, round((v + 1.1 * size) * canvas.height))
    before = canvas.pixels[:, top:bottom].clone()
    shade = (colour[0] * 0.9, colour[1] * 0.92, colour[2] * 0.97)
    puffs = ((-0.8, 0.05, 0.42), (-0.32, -0.18, 0.56), (0.24, -0.28, 0.64), (0.75, -0.02, 0.48), (0.0, 0.1, 0.5))
    for across, down, radius in puffs:
        canvas.disc(u + across * size / 2, v + (down + 0.06) * size, radius * size, shade)
    for across, down, radius in puffs:
        canvas.disc(u + across * size / 2, v + down * size, radius * size * 0.93, colour)
    keep = ((v + 0.4 * size - canvas.v[top:bottom]) * canvas.height + 0.5).clamp(0, 1) * alpha
    canvas.pixels[:, top:bottom] = before + keep[None] * (canvas.pixels[:, top:bottom] - before)


CLOUDS: dict[str, Colour] = {"day": (1.0, 1.0, 1.0), "sunset": (1.0, 0.74, 0.62), "night": (0.24, 0.3, 0.5)}


def draw_clouds(canvas: Canvas, time: str, places: Sequence[tuple[float, float, float]]) -> None:
    """Clouds of (u, v, size) in the light of a time of day."""
    for u, v, size in places:
        draw_cloud(canvas, u, v, size, CLOUDS[time])


FEW_CLOUDS = ((0.05, 0.2, 0.09), (0.44, 0.12, 0.11), (0.58, 0.3, 0.08), (0.92, 0.27, 0.1))


def draw_grass(canvas: Canvas, time: str) -> None:
    """Three rolling hills, a few trees, flowers."""
    draw_sky(canvas, time, 0.62)
    draw_clouds(canvas, time, FEW_CLOUDS)
    canvas.hills(0.6, ((2, 0.045, 0.1), (5, 0.012, 0.3)), tinted((0.42, 0.72, 0.45), time))
    for u, height in ((0.08, 0.13), (0.15, 0.1), (0.4, 0.11), (0.56, 0.14), (0.86, 0.12)):
        canvas.paste("🌳", u, 0.655, height, TINTS[time])
    canvas.hills(0.66, ((1, 0.03, 0.6), (3, 0.014, 0.2)), tinted((0.46, 0.78, 0.33), time))
    near = canvas.gradient(
        ((0.0, tinted((0.48, 0.82, 0.30), time)), (1.0, tinted((0.30, 0.64, 0.20), time))), 0.74, 1.0
    )
    canvas.hills(0.76, ((2, 0.016, 0.4), (3, 0.01, 0.0)), near)
    random = Random(3)
    for _ in range(22):
        v = random.uniform(0.8, 0.99)
        canvas.paste("🌼", random.random(), v, 0.03 + 0.03 * (v - 0.8) / 0.2, TINTS[time])


def draw_sea(canvas: Canvas, time: str) -> None:
    """Water with crests that grow towards the viewer, and islands on the horizon."""
    horizon = 0.5
    draw_sky(canvas, time, horizon)
    draw_clouds(canvas, time, FEW_CLOUDS)
    for u, mirror in ((0.12, False), (0.62, True)):
        canvas.paste("🏝", u, horizon + 0.02, 0.14, TINTS[time], mirror=mirror)
    water = canvas.gradient(
        ((0.0, tinted((0.32, 0.74, 0.9), time)), (0.5, tinted((0.13, 0.52, 0.83), time)),
         (1.0, tinted((0.05, 0.34, 0.68), time))), horizon, 1.0,
    )  # fmt: skip
    canvas.fill(water, ((canvas.v - horizon) * canvas.height + 0.5).clamp(0, 1))
    light = {"day": (0.85, 0.97, 1.0), "sunset": (1.0, 0.8, 0.55), "night": (0.55, 0.66, 0.95)}[time]
    for row in range(6):
        depth = (row + 0.6) / 6
        v, cycles = horizon + 0.05 + 0.43 * depth**1.3, 14 - 2 * row
        crest = v + (0.006 + 0.016 * depth) * torch.abs(torch.sin(math.pi * (cycles * canvas.u + 0.37 * row)))
        thickness = 0.004 + 0.006 * depth
        band = (thickness / 2 - (canvas.v - crest).abs()) * canvas.height + 0.5
        canvas.fill(light, band.clamp(0, 1) * 0.6)


def draw_snow(canvas: Canvas, time: str) -> None:
    """White hills, firs, and snow in the air."""
    draw_sky(canvas, time, 0.6)
    if time == "day":
        canvas.fill((0.85, 0.92, 0.98), torch.full((1,), 0.35))
    canvas.hills(0.52, ((3, 0.05, 0.0), (4, 0.04, 0.4)), tinted((0.72, 0.80, 0.92), time))
    for index, u in enumerate((0.04, 0.1, 0.19, 0.33, 0.38, 0.52, 0.61, 0.67, 0.81, 0.9, 0.95)):
        canvas.paste("🌲", u, 0.67, 0.15 + 0.05 * ((index * 5) % 3), tinted((0.85, 0.95, 1.0), time))
    canvas.hills(0.65, ((2, 0.02, 0.3), (1, 0.015, 0.1)), tinted((0.90, 0.94, 1.0), time))
    near = canvas.gradient(((0.0, tinted((0.98, 0.99, 1.0), time)), (1.0, tinted((0.80, 0.88, 0.98), time))), 0.74, 1.0)
    canvas.hills(0.75, ((1, 0.02, 0.8), (3, 0.01, 0.2)), near)
    random = Random(11)
    for index in range(48):
        canvas.disc(random.random(), random.uniform(0.02, 0.72), (0.007, 0.01, 0.013)[index % 3], (1.0, 1.0, 1.0), 0.9)


def draw_street(canvas: Canvas, time: str) -> None:
    """Houses in a row, a pavement, and a road with a dashed line."""
    draw_sky(canvas, time, 0.62)
    draw_clouds(canvas, time, FEW_CLOUDS[:3])
    row = ("🏢", "🏠", "🏬", "🏨", "🌳", "🏫", "🏢", "🏠", "🌳", "🏬")
    heights = {"🏢": 0.36, "🏠": 0.24, "🏬": 0.34, "🏨": 0.33, "🏫": 0.3, "🌳": 0.24}
    light = {"day": (1.0, 1.0, 1.0), "sunset": (1.0, 0.8, 0.7), "night": (0.46, 0.5, 0.72)}[time]
    for index, glyph in enumerate(row):
        canvas.paste(glyph, (index + 0.5) / len(row), 0.66, heights[glyph], light)
    canvas.fill(tinted((0.74, 0.73, 0.70), time), ((canvas.v - 0.65) * canvas.height + 0.5).clamp(0, 1))
    canvas.fill(tinted((0.60, 0.59, 0.57), time), ((canvas.v - 0.705) * canvas.height + 0.5).clamp(0, 1))
    canvas.fill(tinted((0.36, 0.37, 0.41), time), ((canvas.v - 0.72) * canvas.height + 0.5).clamp(0, 1))
    dash = (0.25 - ((canvas.u * 10) % 1.0 - 0.5).abs()) * canvas.width / 10
    line = (0.009 - (canvas.v - 0.86).abs()) * canvas.height
    canvas.fill(tinted((0.98, 0.93, 0.72), time), (dash + 0.5).clamp(0, 1) * (line + 0.5).clamp(0, 1))


def draw_desert(canvas: Canvas, time: str) -> None:
    """Dunes and cacti."""
    draw_sky(canvas, time, 0.62)
    canvas.hills(0.58, ((2, 0.05, 0.55), (3, 0.02, 0.2)), tinted((0.90, 0.70, 0.44), time))
    for u, height in ((0.07, 0.13), (0.36, 0.16), (0.55, 0.12), (0.83, 0.15)):
        canvas.paste("🌵", u, 0.67, height, TINTS[time])
    canvas.hills(0.65, ((1, 0.03, 0.2), (4, 0.012, 0.7)), tinted((0.95, 0.78, 0.50), time))
    near = canvas.gradient(((0.0, tinted((1.0, 0.86, 0.58), time)), (1.0, tinted((0.90, 0.68, 0.40), time))), 0.72, 1.0)
    canvas.hills(0.75, ((2, 0.02, 0.9), (1, 0.015, 0.0)), near)
    for row, v in enumerate((0.83, 0.91)):
        ripple = v + 0.012 * torch.sin(2 * math.pi * (3 * canvas.u + 0.3 * row))
        band = (0.006 - (canvas.v - ripple).abs()) * canvas.height + 0.5
        canvas.fill(tinted((0.84, 0.62, 0.36), time), band.clamp(0, 1) * 0.5)


def draw_forest(canvas: Canvas, time: str) -> None:
    """Two rows of trees and a path."""
    draw_sky(canvas, time, 0.6)
    far = tinted((0.62, 0.78, 0.70), time)
    canvas.hills(0.5, ((4, 0.03, 0.0), (7, 0.02, 0.3)), tinted((0.20, 0.45, 0.30), time))
    for index in range(14):
        canvas.paste("🌲", (index + 0.3) / 14, 0.66, 0.30 + 0.04 * ((index * 7) % 3), far)
    for index in range(9):
        glyph = "🌳" if index % 2 else "🌲"
        canvas.paste(glyph, (index + 0.8) / 9, 0.72, 0.40 + 0.05 * ((index * 5) % 3), TINTS[time])
    near = canvas.gradient(
        ((0.0, tinted((0.34, 0.56, 0.26), time)), (1.0, tinted((0.20, 0.40, 0.18), time))), 0.68, 1.0
    )
    canvas.hills(0.69, ((2, 0.012, 0.1), (5, 0.006, 0.0)), near)
    path = 0.85 + 0.02 * torch.sin(2 * math.pi * (2 * canvas.u + 0.2))
    band = (0.05 - (canvas.v - path).abs()) * canvas.height + 0.5
    canvas.fill(tinted((0.72, 0.58, 0.40), time), band.clamp(0, 1))


def draw_open_sky(canvas: Canvas, time: str) -> None:
    """Clouds everywhere, a bank of them below."""
    draw_sky(canvas, time, 0.95)
    draw_clouds(
        canvas, time,
        ((0.03, 0.3, 0.1), (0.15, 0.56, 0.12), (0.34, 0.24, 0.11), (0.47, 0.5, 0.1), (0.6, 0.34, 0.12),
         (0.73, 0.6, 0.11), (0.9, 0.44, 0.12)),
    )  # fmt: skip
    for index in range(10):
        draw_cloud(canvas, (index + 0.2) / 10, 0.93 + 0.02 * (index % 3), 0.16, CLOUDS[time])


def draw_space(canvas: Canvas, time: str) -> None:  # noqa: ARG001 (one light only)
    """Violet nebulae, stars, two large planets."""
    base = canvas.gradient(((0.0, (0.05, 0.02, 0.14)), (1.0, (0.16, 0.05, 0.28))), 0.0, 1.0)
    canvas.fill(base, torch.ones(1))
    for u, v, radius, colour in (
        (0.15, 0.3, 0.35, (0.45, 0.16, 0.58)), (0.5, 0.7, 0.4, (0.20, 0.20, 0.62)),
        (0.8, 0.25, 0.35, (0.55, 0.15, 0.45)),
    ):  # fmt: skip
        canvas.glow(u, v, radius, colour, 0.6)
    draw_stars(canvas, 8, 90, 1.0)
    for u, v, radius, colour, dark in (
        (0.2, 1.12, 0.36, (0.95, 0.55, 0.35), (0.75, 0.36, 0.26)),
        (0.7, 0.14, 0.11, (0.45, 0.75, 0.85), (0.28, 0.5, 0.7)),
        (0.75, 1.16, 0.36, (0.55, 0.8, 0.62), (0.35, 0.58, 0.5)),
    ):  # fmt: skip
        canvas.disc(u, v, radius, dark)
        canvas.disc(u - radius * 0.06, v - radius * 0.06, radius * 0.9, colour)
        canvas.disc(u - radius * 0.2, v - radius * 0.5, radius * 0.14, dark)
        canvas.disc(u + radius * 0.14, v - radius * 0.62, radius * 0.09, dark)


PAINTERS: dict[str, Callable[[Canvas, str], None]] = {
    "grass": draw_grass,
    "sea": draw_sea,
    "snow": draw_snow,
    "street": draw_street,
    "desert": draw_desert,
    "forest": draw_forest,
    "sky": draw_open_sky,
    "space": draw_space,
}


@cache
def _drawn() -> Tensor:
    """[scenes * times, 3, HEIGHT, WIDTH] on the CPU."""
    drawn: list[Tensor] = []
    for scene in SCENE_NAMES:
        for index, time in enumerate(TIME_NAMES):
            if scene == "space" and index:
                drawn.append(drawn[-1])
                continue
            canvas = Canvas()
            PAINTERS[scene](canvas, time)
            drawn.append(canvas.shrunk())
    return torch.stack(drawn)


@cache
def panoramas(height: int, device: str) -> Tensor:
    """[scenes, times, 3, height, 2 * height], 0 to 1; `space` looks the same at every time."""
    pictures = _drawn()
    if height != HEIGHT:
        size = (height, 2 * height)
        pictures = F.interpolate(pictures, size=size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
    return pictures.unflatten(0, (len(SCENE_NAMES), len(TIME_NAMES))).to(device)
