"""GeneratedMedia: the frames of one generation and everything that is known about them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy

from diffusion_runtime.errors import OutputError
from diffusion_runtime.media.encode import encode
from diffusion_runtime.media.formats import check_format, format_of
from diffusion_runtime.media.publish import publish_pair, temporary_file
from diffusion_runtime.media.sidecar import (
    MAX_EMBEDDED_CHARACTERS,
    RECIPE_SCHEMA,
    SIDECAR_SCHEMA,
    finite_seconds,
    to_json,
)


class AttentionReportLike(Protocol):
    """What media needs of an AttentionReport, which lives in a higher row."""

    @property
    def rows(self) -> Sequence[Any]: ...

    @property
    def num_calls(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class GeneratedMedia:
    """A video, or an image when there is one frame.

    frames: uint8 RGB [num_frames, height, width, 3]; fps: frames a second of the written video.
    recipe: plain values that repeat the generation: `request` (every GenerationRequest field, filled), `runtime`
        (RuntimeConfig fields) and whatever else is worth keeping; `schema` is added when it is missing.
    attention_report: what attention ran. timings: seconds by stage.

    Raises OutputError when the frames have another shape or type.
    """

    frames: numpy.ndarray
    fps: int
    recipe: Mapping[str, Any]
    attention_report: AttentionReportLike
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.frames.shape
        if self.frames.dtype != numpy.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise OutputError(
                f"frames: expected uint8 [num_frames, height, width, 3], got {self.frames.dtype} {list(shape)}"
            )
        if type(self.fps) is not int or self.fps < 1:
            raise OutputError(f"fps: expected a whole number of 1 or more, got {self.fps!r}")
        object.__setattr__(self, "recipe", {"schema": RECIPE_SCHEMA, **self.recipe})

    @property
    def num_frames(self) -> int:
        return int(self.frames.shape[0])

    def save(self, path: str | Path, *, overwrite: bool = True) -> Path:
        """Write the file and its sidecar `NAME.json`; the extension picks the format. Returns the file's path.

        With `overwrite=False` a taken name gets a number (`out-2.mp4`). Both files appear complete or not at all.
        Raises ConfigError for an extension that is unknown or holds one image only, OutputError when writing fails.
        """
        target = Path(path)
        file_format = check_format(format_of(target), self.num_frames)
        recipe = to_json(self.recipe)
        started = time.perf_counter()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary_file(target.parent) as media_file, temporary_file(target.parent) as sidecar_file:
                embedded = recipe if len(recipe) <= MAX_EMBEDDED_CHARACTERS else None
                encode(file_format, self.frames, self.fps, embedded, media_file)
                sidecar = self._sidecar(file_format, time.perf_counter() - started)
                sidecar_file.write_text(to_json(sidecar, indent=2) + "\n", encoding="ascii")
                return publish_pair(media_file, sidecar_file, target, overwrite=overwrite)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write {target}: {reason}; nothing was left behind") from error

    def _sidecar(self, file_format: str, write_seconds: float) -> dict[str, Any]:
        num_frames, height, width, _ = self.frames.shape
        return {
            "schema": SIDECAR_SCHEMA,
            "file": {
                "format": file_format,
                "num_frames": num_frames,
                "height": height,
                "width": width,
                "fps": self.fps,
            },
            "recipe": dict(self.recipe),
            "attention_report": self.attention_report.to_dict(),
            "timings": finite_seconds({**self.timings, "write": write_seconds}),
        }
