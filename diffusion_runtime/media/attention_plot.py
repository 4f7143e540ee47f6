"""Attention plot: the density of attention by layer and step as a heat map, and one block-sparse plan, as a PNG.

Drawn with Pillow, which is always there, of what the attention report holds (`density`, `plan`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.media.publish import published

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont
    from PIL.Image import Image

# From few pairs to all of them (ColorBrewer Blues, as the page of `explain`), and of steps without a call.
_SCALE = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
_NO_CALL = (225, 225, 225)
_INK, _FAINT, _PAPER = (25, 25, 25), (110, 110, 110), (255, 255, 255)
_MARGIN, _LEFT, _TITLE, _TEXT = 20, 76, 17, 13
# A map is at least this wide, so that its title fits, and its cells are at least large enough to be told apart.
_MIN_WIDTH, _MAX_WIDTH, _MAX_HEIGHT = 640, 1000, 640
_PLAN_SIDE = 460
_MAX_MAPS = 3


def save_attention_plot(report: Mapping[str, Any], path: str | Path, subtitle: str = "") -> Path:
    """Draw AttentionReport.to_dict() of a generation that counted density; returns the path.

    The file appears complete or not at all. Raises OutputError where it cannot be written.
    """
    target = Path(path)
    with published(target) as unfinished:
        draw_attention_plot(report, subtitle).save(unfinished, format="PNG")
    return target


def draw_attention_plot(report: Mapping[str, Any], subtitle: str = "") -> Image:
    """Draw the picture, RGB: a map per role that is anywhere sparse, the first role's where none is, and the plan."""
    from PIL import Image, ImageDraw

    maps = _maps(report)
    panels = [_HeatMap(role, rows) for role, rows in maps[:_MAX_MAPS]]
    lines = [subtitle, *_remarks(report, maps)]
    plan = report.get("plan")
    width = max([_MIN_WIDTH, *(panel.width for panel in panels)]) + _LEFT + 2 * _MARGIN
    head = [_Words(line, _TEXT, _FAINT) for line in lines if line]
    heights = [panel.height for panel in panels]
    total = _MARGIN + 28 + 20 * sum(len(words.wrapped(width - 2 * _MARGIN)) for words in head) + sum(heights) + 10
    total += _plan_height(plan)
    picture = Image.new("RGB", (width, total), _PAPER)
    draw = ImageDraw.Draw(picture)
    y = _MARGIN
    draw.text((_MARGIN, y), "Attention density: share of the query-key pairs that is computed", _INK, _font(_TITLE))
    y += 28
    for words in head:
        for line in words.wrapped(width - 2 * _MARGIN):
            draw.text((_MARGIN, y), line, words.ink, _font(words.size))
            y += 20
    for panel in panels:
        panel.draw(draw, y)
        y += panel.height
    if plan is not None:
        _draw_plan(picture, draw, plan, y)
    return picture


def _maps(report: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """(role, its layers): the roles that are sparse at some step, else the first one."""
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for row in report.get("density", ()):
        by_role.setdefault(row["role"], []).append(row)
    sparse = [(role, rows) for role, rows in by_role.items() if not _is_dense(rows)]
    # `self` first, where nothing is sparse.
    return sparse or sorted(by_role.items(), key=lambda item: item[0] != "self")[:1]


def _is_dense(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(share in (None, 1.0) for row in rows for share in row["steps"])


def _remarks(report: Mapping[str, Any], maps: Sequence[tuple[str, Any]]) -> Iterator[str]:
    rows = report.get("density", ())
    if not rows:
        yield "No call was counted: the library that ran the attention does not say which pairs it keeps."
        return
    backends = dict.fromkeys(f"{row['role']}: {row['backend']}" for row in report.get("rows", ()))
    yield "; ".join(backends)
    roles = dict.fromkeys(row["role"] for row in rows)
    if _is_dense(rows):
        yield f"Every call was dense (density 1.00), of every role ({', '.join(roles)}): there is no plan to show."
    elif others := [role for role in roles if role not in dict(maps)]:
        yield f"Dense at every step: {', '.join(others)}."
    if len(maps) > _MAX_MAPS:
        yield f"Not shown: {', '.join(role for role, _ in maps[_MAX_MAPS:])}."


class _Words:
    """A text and how it is set."""

    def __init__(self, text: str, size: int, ink: tuple[int, int, int]) -> None:
        self.text, self.size, self.ink = text, size, ink

    def wrapped(self, width: int) -> list[str]:
        """Wrap text into lines of at most `width` pixels; longer words are kept whole."""
        lines = [""]
        for word in self.text.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and _font(self.size).getlength(longer) > width:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


class _HeatMap:
    """Layers from top to bottom, steps from left to right."""

    def __init__(self, role: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.role, self.rows = role, rows
        self.num_steps = max((len(row["steps"]) for row in rows), default=1) or 1
        self.cell_width = max(6, min(56, _MAX_WIDTH // self.num_steps, max(24, _MIN_WIDTH // self.num_steps)))
        self.cell_height = max(8, min(24, _MAX_HEIGHT // max(1, len(rows))))
        self.width = self.cell_width * self.num_steps
        self.height = 34 + self.cell_height * len(rows) + 44 + 46

    def draw(self, draw: ImageDraw.ImageDraw, top: int) -> None:
        counted = [share for row in self.rows for share in row["steps"] if share is not None]
        mean = sum(counted) / max(1, len(counted))
        title = f"Role {self.role}: mean density {mean:.2f} over {len(self.rows)} layers and {self.num_steps} steps"
        draw.text((_MARGIN, top + 8), title, _INK, _font(_TITLE - 2))
        left, y = _MARGIN + _LEFT, top + 34
        for row in self.rows:
            for step in range(self.num_steps):
                share = row["steps"][step] if step < len(row["steps"]) else None
                self._cell(draw, left + step * self.cell_width, y, share)
            y += self.cell_height
        bottom = y
        _ticks_down(draw, left, top + 34, self.cell_height, [row["layer"] for row in self.rows], "layer")
        _ticks_across(draw, left, bottom, self.cell_width, range(self.num_steps), "denoising step (from 0)")
        self._colour_bar(draw, left, bottom + 52, has_gaps=any(None in row["steps"] for row in self.rows))

    def _cell(self, draw: ImageDraw.ImageDraw, x: int, y: int, share: float | None) -> None:
        box = (x, y, x + self.cell_width - 1, y + self.cell_height - 1)
        draw.rectangle(box, _NO_CALL if share is None else _colour(share), outline=_PAPER)
        if share is None:
            draw.line((box[0], box[3], box[2], box[1]), _FAINT)
        elif self.cell_width >= 34 and self.cell_height >= 16:
            ink = _PAPER if share > 0.55 else _INK
            middle = (x + self.cell_width / 2, y + self.cell_height / 2)
            draw.text(middle, f"{share:.2f}", ink, _font(12), anchor="mm")

    @staticmethod
    def _colour_bar(draw: ImageDraw.ImageDraw, x: int, y: int, *, has_gaps: bool) -> None:
        draw.text((x, y + 7), "0", _INK, _font(_TEXT), anchor="lm")
        for offset in range(200):
            draw.line((x + 14 + offset, y, x + 14 + offset, y + 14), _colour(offset / 199))
        draw.rectangle((x + 14, y, x + 213, y + 14), outline=_FAINT)
        draw.text((x + 222, y + 7), "1 (dense)", _INK, _font(_TEXT), anchor="lm")
        if has_gaps:
            draw.rectangle((x + 310, y, x + 330, y + 14), _NO_CALL, outline=_FAINT)
            draw.line((x + 310, y + 14, x + 330, y), _FAINT)
            draw.text((x + 338, y + 7), "no call: the step was reused, or left out", _INK, _font(_TEXT), anchor="lm")


def _plan_height(plan: Mapping[str, Any] | None) -> int:
    return 0 if plan is None else 68 + _plan_scale(plan) * len(plan["cells"]) + 64


def _plan_scale(plan: Mapping[str, Any]) -> int:
    """Pixels per cell."""
    return max(2, _PLAN_SIDE // max(len(plan["cells"]), len(plan["cells"][0])))


def _draw_plan(picture: Image, draw: ImageDraw.ImageDraw, plan: Mapping[str, Any], top: int) -> None:
    """Draw one cell per pair of blocks, or per several of them."""
    from PIL import Image

    cells, scale = plan["cells"], _plan_scale(plan)
    queries, keys = plan["num_query_blocks"], plan["num_key_blocks"]
    title = f"Plan of {plan['method']}, role {plan['role']}, layer {plan['layer']}, step {plan['step']}, head "
    draw.text((_MARGIN, top + 8), f"{title}{plan['head']}: which key blocks each query block keeps", _INK, _font(15))
    how = f"{queries} query blocks and {keys} key blocks of the grid; density of the call {plan['density']:.2f}"
    draw.text((_MARGIN, top + 32), how, _FAINT, _font(_TEXT))
    left, y = _MARGIN + _LEFT, top + 58
    image = Image.new("RGB", (len(cells[0]), len(cells)))
    image.putdata([_colour(int(digit) / 9) for row in cells for digit in row])
    width, height = len(cells[0]) * scale, len(cells) * scale
    picture.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, y))
    draw.rectangle((left - 1, y - 1, left + width, y + height), outline=_FAINT)
    _ticks_down(draw, left, y, height / queries, range(queries), "query block")
    _ticks_across(draw, left, y + height, width / keys, range(keys), f"key block, in the order of {plan['method']}")


def _ticks_across(
    draw: ImageDraw.ImageDraw, left: int, y: int, width: float, numbers: Sequence[int], name: str
) -> None:
    """Numbers below columns of `width` pixels, as many as have room, and the axis's name."""
    for index in range(0, len(numbers), _stride(width, 34)):
        draw.text((left + (index + 0.5) * width, y + 4), str(numbers[index]), _INK, _font(12), anchor="ma")
    draw.text((left + len(numbers) * width / 2, y + 22), name, _INK, _font(_TEXT), anchor="ma")


def _ticks_down(
    draw: ImageDraw.ImageDraw, left: int, top: int, height: float, numbers: Sequence[int], name: str
) -> None:
    for index in range(0, len(numbers), _stride(height, 16)):
        draw.text((left - 8, top + (index + 0.5) * height), str(numbers[index]), _INK, _font(12), anchor="rm")
    # Upright, above the numbers: turned text is hard to read.
    first, _, rest = name.partition(" ")
    middle = top + len(numbers) * height / 2
    for offset, word in enumerate(filter(None, (first, rest))):
        draw.text((_MARGIN, middle + 16 * offset - 8), word, _INK, _font(_TEXT), anchor="lm")


def _stride(size: float, room: int) -> int:
    """Return the interval at which numbers are labelled: 1, 2, 5, 10, ..."""
    steps = (factor * 10**power for power in range(6) for factor in (1, 2, 5))
    return next((step for step in steps if step * size >= room), 10**6)


def _colour(share: float) -> tuple[int, int, int]:
    """Between the colours of the scale, linearly."""
    at = min(1.0, max(0.0, share)) * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    return tuple(round(a + (b - a) * (at - low)) for a, b in zip(_SCALE[low], _SCALE[low + 1], strict=True))  # type: ignore[return-value]


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    # The font inside Pillow: no file of the system is looked for.
    found = ImageFont.load_default(size)
    assert isinstance(found, ImageFont.FreeTypeFont), "Pillow is built with FreeType in every wheel"
    return found
