"""The pictures of the `emoji` world, cut once from Noto Color Emoji into one PNG; reading it needs no font.

python -m scripts.emoji.atlas /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf     # writes sprites.png beside this
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffusion_runtime.quality.emoji.things import THINGS

SPRITE = 112
"""Side of a picture in pixels; its longer side fills it but for a margin of two."""
STRIKE = 109
"""The only size of the font's bitmaps, in points: 136 x 128 pixels."""
COLUMNS = 16
PATH = Path(__file__).with_name("sprites.png")
SCENERY: tuple[str, ...] = ("🌲", "🌳", "🌴", "🌵", "🏠", "🏢", "🏬", "🏫", "🏨", "🏝", "🌼")
"""What scenes are decorated with; none of it is a thing."""
GLYPHS: tuple[str, ...] = (*(thing.glyph for thing in THINGS), *SCENERY)


def draw_glyph(font: ImageFont.FreeTypeFont, glyph: str) -> Image.Image:
    """One picture, RGBA, SPRITE x SPRITE, centred."""
    canvas = Image.new("RGBA", (200, 200), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((20, 20), glyph, font=font, embedded_color=True)
    box = canvas.getbbox()
    if box is None:
        raise ValueError(f"the font has no picture of {glyph!r}")
    cut = canvas.crop(box)
    scale = (SPRITE - 4) / max(cut.size)
    # Premultiplied, so that the colour of clear pixels does not bleed into the edge.
    wide = np.asarray(cut).astype(np.float32) / 255
    wide[..., :3] *= wide[..., 3:]
    size = (max(1, round(cut.width * scale)), max(1, round(cut.height * scale)))
    planes = [Image.fromarray(wide[..., plane]).resize(size, Image.Resampling.LANCZOS) for plane in range(4)]
    small = np.clip(np.stack([np.asarray(plane) for plane in planes], axis=-1), 0, 1)
    small[..., :3] = np.where(small[..., 3:] > 1e-3, small[..., :3] / np.maximum(small[..., 3:], 1e-3), 0)
    picture = Image.new("RGBA", (SPRITE, SPRITE), (0, 0, 0, 0))
    cell = Image.fromarray((np.clip(small, 0, 1) * 255).round().astype(np.uint8))
    picture.paste(cell, ((SPRITE - size[0]) // 2, (SPRITE - size[1]) // 2))
    return picture


def write_atlas(font_path: Path, path: Path) -> None:
    """Draw every glyph into a grid of COLUMNS columns."""
    font = ImageFont.truetype(str(font_path), STRIKE)
    rows = -(-len(GLYPHS) // COLUMNS)
    atlas = Image.new("RGBA", (COLUMNS * SPRITE, rows * SPRITE), (0, 0, 0, 0))
    for index, glyph in enumerate(GLYPHS):
        atlas.paste(draw_glyph(font, glyph), (index % COLUMNS * SPRITE, index // COLUMNS * SPRITE))
    atlas.save(path, optimize=True)


@cache
def read_atlas() -> Tensor:
    """Pictures [len(GLYPHS), 4, SPRITE, SPRITE] float32, 0 to 1, colours multiplied by the coverage."""
    pixels = torch.from_numpy(np.array(Image.open(PATH).convert("RGBA"))).float() / 255
    cells = pixels.unflatten(0, (-1, SPRITE)).unflatten(2, (-1, SPRITE)).permute(0, 2, 4, 1, 3).flatten(0, 1)
    cells = cells[: len(GLYPHS)].contiguous()
    cells[:, :3] *= cells[:, 3:]
    return cells


if __name__ == "__main__":
    write_atlas(Path(sys.argv[1]), PATH)
    print(f"{PATH}: {PATH.stat().st_size / 1e6:.2f} MB, {len(GLYPHS)} pictures")
