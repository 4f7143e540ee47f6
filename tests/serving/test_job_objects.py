"""Frames and rate that a job says of its file: frames in between are counted, before the file is there and after."""

from __future__ import annotations

from typing import Any

from tables import table

from diffusion_runtime.serving.job_objects import _frames_of_file

REQUEST = {"num_frames": 5, "fps": 12}
DOUBLED = {**REQUEST, "interpolate": 2}


@table(
    "request_values, part, expected",
    [
        (REQUEST, None, (5, 12)),
        (DOUBLED, None, (10, 24)),
        (DOUBLED, {"num_frames": 10, "fps": 24}, (10, 24)),
        ({"num_frames": 1, "fps": None}, None, (1, None)),
    ],
)
def test_frames_of_the_file(
    request_values: dict[str, Any], part: dict[str, Any] | None, expected: tuple[int, float | None]
) -> None:
    assert _frames_of_file(request_values, part) == expected
