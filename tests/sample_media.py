"""Generated media for tests that need no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from diffusion_runtime.media import GeneratedMedia

RECIPE = {
    "request": {"prompt": "a 'röter' Kreis; = # \\ \"日本\"\nsecond line", "seed": 7},
    "runtime": {"dtype": "float32"},
}


@dataclass(frozen=True)
class Report:
    rows: tuple[Any, ...] = ()
    num_calls: int = 3

    def to_dict(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls, "rows": []}


def make_media(num_frames: int = 9, height: int = 48, width: int = 64, **changes: Any) -> GeneratedMedia:
    """A colour gradient that moves to the right."""
    y, x = numpy.mgrid[:height, :width]
    frames = [numpy.stack([x * 2 + 8 * t, y * 3, 120 + 0 * x], axis=-1).clip(0, 255) for t in range(num_frames)]
    values = {"frames": numpy.stack(frames).astype(numpy.uint8), "fps": 8, "recipe": RECIPE}
    return GeneratedMedia(**{**values, "attention_report": Report(), "timings": {"denoise": 1.5}, **changes})
