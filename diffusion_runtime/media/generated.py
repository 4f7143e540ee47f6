"""GeneratedMedia: the frames of one generation with recipe, attention report and timings."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.errors import ConfigError, OutputError, shown
from diffusion_runtime.media.audio import Audio, write_wav
from diffusion_runtime.media.content_credentials import Signer, check_signable
from diffusion_runtime.media.encode import FrameChunks, encode
from diffusion_runtime.media.file_writer import ClipHeader, FileWriter
from diffusion_runtime.media.formats import FORMATS_WITH_SOUND, SOUND_FORMATS, check_format, check_writable, format_of
from diffusion_runtime.media.publish import (
    cannot_write,
    publish_pair,
    remove_abandoned_files,
    temporary_file,
    uninterrupted,
)
from diffusion_runtime.media.reading import has_sound_beside, read_own_sidecar
from diffusion_runtime.media.sidecar import (
    RECIPE_SCHEMA,
    embedded_recipe,
    sidecar_of,
    to_json,
)
from diffusion_runtime.report.attention_report import AttentionReport

logger = logging.getLogger("diffusion_runtime")


@dataclass(frozen=True, eq=False)
class GeneratedMedia:
    """A video, or an image when there is one frame.

    frames: uint8 RGB [num_frames, height, width, 3]; fps: frames per second of the written video.
    recipe: plain values that repeat the generation: `request` (every GenerationRequest field, filled), `runtime`
        (RuntimeConfig fields) and further values; `schema` is added when it is missing.
    attention_report: which attention ran. timings: seconds by stage: text, denoise, decode; import and read before the
        first generation after a load; compile (a part of the others) where something was compiled for it; move (a part
        of text and denoise) where parts are offloaded; `save` adds write. peak_memory: the most bytes that the process
        had so far, by place (`device`, `machine`). audio: the sound, of models that generate it.

    Raises OutputError when the frames have another shape or type.
    """

    frames: numpy.ndarray
    fps: float
    recipe: Mapping[str, Any]
    attention_report: AttentionReport
    timings: Mapping[str, float] = field(default_factory=dict)
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    audio: Audio | None = None

    def __post_init__(self) -> None:
        shape = self.frames.shape
        if self.frames.dtype != numpy.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise OutputError(
                f"frames: expected uint8 [num_frames, height, width, 3], got {self.frames.dtype} {list(shape)}"
            )
        if type(self.fps) not in (int, float) or not 0.01 <= self.fps <= 10_000:
            raise OutputError(f"fps: expected a number from 0.01 to 10,000, got {self.fps!r}")
        object.__setattr__(self, "recipe", {"schema": RECIPE_SCHEMA, **self.recipe})

    @property
    def num_frames(self) -> int:
        return int(self.frames.shape[0])

    @property
    def header(self) -> ClipHeader:
        """Header of the clip, as known before its first frame."""
        num_frames, height, width = self.frames.shape[:3]
        return ClipHeader(num_frames, height, width, self.fps, self.recipe)

    def save(
        self,
        path: str | Path,
        *,
        overwrite: bool = True,
        on_published: Callable[[Path], None] | None = None,
        writer: FileWriter | None = None,
        signer: Signer | None = None,
    ) -> Path:
        """Write the file and its sidecar `NAME.json`; the extension selects the format. Returns the file's path.

        Sound goes into an mp4; with another format it is `NAME.wav`, which the sidecar and a line of the log name. With
        `NAME.wav` as the path the sound alone is written. With `overwrite=False` a taken name gets a number
        (`out-2.mp4`); else the .wav of the file that is overwritten is replaced with it. The files appear complete or
        not at all; partial files of processes that no longer run are removed from the folder. on_published: called with
        the path before an interruption can come between. writer: has written this clip for this folder and format, with
        the same bytes, while it was decoded; with another clip, or none, everything is written now. signer: adds a C2PA
        manifest to the file, and to a .wav beside it.

        Raises ConfigError for an extension that is unknown or cannot hold what was generated, or a manifest,
        MissingPackageError for an mp4 where there is no ffmpeg, OutputError when writing fails.
        """
        target = Path(path)
        file_format = check_format(format_of(target), self.num_frames, has_sound=self.audio is not None, fps=self.fps)
        check_writable(file_format, self.num_frames)
        if signer is not None:
            check_signable(file_format)
        started = time.perf_counter()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned_files(target.parent)
            with (
                temporary_file(target.parent) as sidecar_file,
                self._media_file(file_format, target.parent, writer) as (unsigned_file, unsigned_sound),
                self._signed(signer, unsigned_file, file_format) as media_file,
                self._signed(signer, unsigned_sound, "wav") as sound_file,
            ):
                assert media_file is not None
                sidecar = self._sidecar(file_format, time.perf_counter() - started)
                sidecar_file.write_text(to_json(sidecar, indent=2) + "\n", encoding="ascii")
                left = _sound_of(target) if overwrite and sound_file is None else None
                with uninterrupted():
                    path = publish_pair(media_file, sidecar_file, target, overwrite=overwrite, sound=sound_file)
                    if on_published is not None:
                        on_published(path)
                if left is not None:
                    left.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(target, error) from error
        if sound_file is not None:
            logger.warning("%s cannot carry sound; it is in %s", path, path.with_suffix(".wav"))
        return path

    def to_bytes(self, file_format: str) -> bytes:
        """Return the file that `save` would write in one of media.FORMATS, its recipe inside; there is no sidecar.

        Raises ConfigError for a format that is unknown or cannot hold what was made, a sound included,
        MissingPackageError for an mp4 where there is no ffmpeg, and OutputError when writing fails: encoders need room
        for the file in the system's temporary folder.
        """
        chosen = check_format(file_format, self.num_frames, has_sound=self.audio is not None, fps=self.fps)
        if self.audio is not None and chosen not in (*FORMATS_WITH_SOUND, *SOUND_FORMATS):
            carriers = ", ".join(dict.fromkeys((*FORMATS_WITH_SOUND, *SOUND_FORMATS)))
            raise ConfigError(f"format: {chosen} cannot carry the sound of this video; use one of {carriers}")
        check_writable(chosen, self.num_frames)
        embedded = embedded_recipe(self.recipe)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="diffusion-runtime-") as folder,
                temporary_file(Path(folder)) as media_file,
                self._written(chosen, embedded, media_file),
            ):
                return media_file.read_bytes()
        except OSError as error:
            raise OutputError(f"cannot write {chosen} to memory: {error.strerror or error}") from error

    def __repr__(self) -> str:
        """Return one line: pixels and recipe are in the fields."""
        request = self.recipe.get("request") or {}
        made = f"{self.num_frames} frames at {self.fps:.5g} per second, " if self.num_frames > 1 else ""
        height, width = self.frames.shape[1:3]
        of = "".join(f", {name} {shown(request[name])}" for name in ("prompt", "seed") if request.get(name) is not None)
        return f"<GeneratedMedia: {made}{width} x {height}{of}>"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the video inline up to 12 MB, else its first frame."""
        from diffusion_runtime.media.notebook import media_html

        return media_html(self)

    @contextlib.contextmanager
    def _media_file(
        self, file_format: str, folder: Path, writer: FileWriter | None
    ) -> Iterator[tuple[Path, Path | None]]:
        """Temporary files with everything in them: the media file, and the sound as in _written."""
        if writer is not None and self.audio is None and writer.has_written(self.header, file_format, folder):
            yield writer.finish(), None
            return
        with (
            temporary_file(folder) as media_file,
            self._written(file_format, embedded_recipe(self.recipe), media_file) as sound_file,
        ):
            yield media_file, sound_file

    @contextlib.contextmanager
    def _signed(self, signer: Signer | None, file: Path | None, file_format: str) -> Iterator[Path | None]:
        """Yield a temporary file that holds `file` with a manifest, or the file itself without a signer."""
        if signer is None or file is None:
            yield file
            return
        with temporary_file(file.parent) as signed_file:
            signer.sign(file, signed_file, file_format, self.recipe)
            yield signed_file

    @contextlib.contextmanager
    def _written(self, file_format: str, recipe: str | None, media_file: Path) -> Iterator[Path | None]:
        """Write the media file; yields a temporary file with the sound where the format does not carry it."""
        if self.audio is not None and file_format in SOUND_FORMATS:
            write_wav(self.audio, media_file)
            yield None
        elif self.audio is None or file_format in FORMATS_WITH_SOUND:
            encode(file_format, FrameChunks.of(self.frames), self.fps, recipe, media_file, self.audio)
            yield None
        else:
            encode(file_format, FrameChunks.of(self.frames), self.fps, recipe, media_file)
            with temporary_file(media_file.parent) as sound_file:
                write_wav(self.audio, sound_file)
                yield sound_file

    @staticmethod
    def _describe_audio(file_format: str, audio: Audio) -> dict[str, Any]:
        """is_beside: whether it is in a .wav of the same name instead of the file itself."""
        return {**audio.describe(), "is_beside": file_format not in (*FORMATS_WITH_SOUND, *SOUND_FORMATS)}

    def _sidecar(self, file_format: str, write_seconds: float) -> dict[str, Any]:
        num_frames, height, width, _ = self.frames.shape
        return sidecar_of(
            file={
                "format": file_format,
                "num_frames": num_frames,
                "height": height,
                "width": width,
                "fps": self.fps,
                **({} if self.audio is None else {"audio": self._describe_audio(file_format, self.audio)}),
            },
            recipe=self.recipe,
            attention_report=self.attention_report.to_dict(),
            timings={**self.timings, "write": write_seconds},
            peak_memory=self.peak_memory,
        )


def _sound_of(target: Path) -> Path | None:
    """Return the .wav that was written with the file `target`, by its sidecar; any other .wav is not ours."""
    if format_of(target) in SOUND_FORMATS:
        return None
    try:
        sidecar = read_own_sidecar(target)
    except OutputError:
        return None
    return target.with_suffix(".wav") if sidecar is not None and has_sound_beside(sidecar) else None
