"""Frames and sound of one clip: decoded chunk after chunk, and handed over to be written meanwhile."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.decoders.frame_interpolation import FrameInterpolator
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.media import Audio, ClipHeader
from diffusion_runtime.media.audio import has_sound, read_long_sound, read_sound
from diffusion_runtime.media.file_writer import FrameSink
from diffusion_runtime.memory.transfers import CopyToHost, begin_copy_to_host
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.rules.batch_settings import BatchSettings

# Samples per second of a sound that comes from a file.
_FILE_SOUND_RATE = 48000
# Frames of a longer video lie in a file without a name, in pages that the system may write and drop.
MAX_FRAME_BYTES = 4 * 2**30


def decode_clip(
    decoder: LatentDecoder,
    latents: torch.Tensor,
    settings: BatchSettings,
    recipe: Mapping[str, Any],
    open_sink: Callable[[ClipHeader], FrameSink] | None,
    recorder: AttentionRecorder,
    size: ClipSize | None = None,
    interpolator: FrameInterpolator | None = None,
) -> tuple[torch.Tensor, Audio | None]:
    """Decode one sample. Return its frames, uint8 on the CPU, [frames, height, width, 3], and its sound.

    latents: clean, [1, *sample_shape]. size: of the clip that they are of, None for the settings'. open_sink: as of
    decode_frames. interpolator: makes the frames in between that the request asks for.

    Raises DiffusionRuntimeError for frames that are not numbers.
    """
    geometry = settings.sampling.geometry
    parts = geometry.parts(latents, settings.size if size is None else size)
    # A file of a clip with sound begins with the sound, which is not there yet.
    sink = open_sink if parts.audio is None else None
    stream = without_first(decoder.recording(recorder).stream(parts.video), geometry.num_frames_before)
    stream = interpolated(stream, settings, interpolator)
    frames = decode_frames(stream, written_rate(settings), recipe, sink)
    # Afterwards: a decoder may find that its kernels are not to be used here.
    recorder.record_library("vae", decoder.library, decoder.implementation, decoder.chosen)
    return frames, _sound(decoder, parts.audio, settings, recorder)


def _sound(
    decoder: LatentDecoder, latents: torch.Tensor | None, settings: BatchSettings, recorder: AttentionRecorder
) -> Audio | None:
    """Return the sound of one sample, [1, channels, length, bins], or the file's that the video was made for; note
    audio latents that the decoder cannot decode."""
    path = settings.shared.audio_path
    if path is not None:
        recorder.note(f"the sound is that of {path}")
        return read_sound(path, "audio_path", settings.size.num_frames / settings.size.fps, _FILE_SOUND_RATE)
    if latents is None:
        return None
    sound = decoder.decode_audio(latents)
    if sound is None:
        recorder.note("the model made sound as well, which this decoder does not decode")
    return sound


def has_source_sound(settings: BatchSettings) -> bool:
    """Return whether the file would have the sound of the frames that are restored, by the head of their file."""
    restoration = settings.sampling.restoration
    if restoration is None:
        return False
    source = restoration.source(settings.shared)
    is_there = source.fps is not None and has_sound(source.path, source.field)
    return is_there and abs(settings.frame_rate - (source.fps or 0.0)) <= 1e-3


def source_sound(settings: BatchSettings, recorder: AttentionRecorder) -> Audio | None:
    """Return the sound of the frames that are restored; None for a file without, and in models that restore none."""
    restoration, request = settings.sampling.restoration, settings.shared
    if restoration is None:
        return None
    source = restoration.source(request)
    if source.fps is None or not has_sound(source.path, source.field):
        return None
    start, seconds = (request.video_first_frame or 0) / source.fps, settings.size.num_frames / source.fps
    if abs(settings.frame_rate - source.fps) > 1e-3:
        recorder.note(
            f"the sound is left out: the video has {source.fps:.4g} frames per second, and what is made "
            f"{settings.frame_rate:.4g}"
        )
        return None
    recorder.note(f"the sound is that of {source.path}")
    return read_long_sound(source.path, source.field, start, seconds, _FILE_SOUND_RATE)


def decode_frames(
    stream: FrameStream,
    fps: float,
    recipe: Mapping[str, Any],
    open_sink: Callable[[ClipHeader], FrameSink] | None = None,
) -> torch.Tensor:
    """Decode the frames of one sample, uint8 on the CPU, [frames, height, width, 3].

    fps, recipe: for the header. open_sink: returns what takes each chunk as soon as it is decoded, or None.
    Raises DiffusionRuntimeError for frames that are not numbers, which would be black.
    """
    frames, position, take = torch.empty(0), 0, None
    for pixels in _pixels_of(stream):
        if position == 0:
            is_whole = len(pixels) == stream.num_frames
            frames = pixels if is_whole else _room_for((stream.num_frames, *pixels.shape[1:]))
            if open_sink is not None:
                height, width = pixels.shape[1:3]
                take = open_sink(ClipHeader(stream.num_frames, height, width, fps, recipe))
        # The part of all frames that a sink may keep; a single chunk is it already.
        part = frames[position : position + len(pixels)]
        if frames is not pixels:
            part.copy_(pixels)
        if take is not None:
            take(part.numpy())
        position += len(pixels)
    return frames


def _pixels_of(stream: FrameStream) -> Iterator[torch.Tensor]:
    """Yield the chunks of a stream as pixels on the CPU. Where copies run beside kernels, each is handed over once the
    next one is on its way: the device decodes on meanwhile."""
    position, begun = 0, None
    for chunk in stream.chunks:
        following = _Pixels.of(chunk[0], position)
        position += chunk.shape[1]
        # A clip of float32 frames, which the next one needs room beside.
        del chunk
        if begun is not None:
            yield begun.finish()
        begun = following
        if begun.copy.wait is None:
            yield begun.finish()
            begun = None
    if begun is not None:
        yield begun.finish()


def _room_for(shape: tuple[int, ...]) -> torch.Tensor:
    """Return an empty uint8 tensor; a large one in a file that is gone with it."""
    if math.prod(shape) <= MAX_FRAME_BYTES:
        return torch.empty(shape, dtype=torch.uint8)
    with tempfile.TemporaryFile(prefix="diffusion_runtime_frames_") as file:
        return torch.from_numpy(numpy.memmap(file, dtype=numpy.uint8, mode="w+", shape=shape))


def without_first(stream: FrameStream, num_frames: int) -> FrameStream:
    """Leave out the first num_frames of a stream, which are decoded all the same."""

    def chunks() -> Iterator[torch.Tensor]:
        left_out = 0
        for chunk in stream.chunks:
            skipped = min(num_frames - left_out, chunk.shape[1])
            left_out += skipped
            if skipped < chunk.shape[1]:
                yield chunk[:, skipped:]

    return FrameStream(stream.num_frames - num_frames, chunks()) if num_frames else stream


def written_rate(settings: BatchSettings) -> float:
    """Return the frames per second of the file, those in between included."""
    return settings.frame_rate * (settings.shared.interpolate or 1)


def interpolated(stream: FrameStream, settings: BatchSettings, interpolator: FrameInterpolator | None) -> FrameStream:
    """Return a stream with the frames in between that its request asks for; the stream where it asks for none.

    Frames of the stream stay as they are. The last one is there as often as each has followers, so that the clip is as
    long as its sound. A pair is held at a time, whatever chunks the frames come in.
    """
    multiple = settings.shared.interpolate or 1
    if interpolator is None or multiple == 1 or stream.num_frames == 1:
        return stream

    def pairs() -> Iterator[torch.Tensor]:
        position, before, last = 0, None, torch.empty(0)
        for chunk in stream.chunks:
            pixels = to_pixels(chunk[0], position)
            position += len(pixels)
            for frame in pixels:
                this = interpolator.prepare(frame)
                made = [frame[None]]
                if before is not None:
                    made.insert(0, interpolator.between(before, this, multiple - 1, frame))
                yield torch.cat(made)[None]
                before, last = this, frame
        yield last.expand(1, multiple - 1, *last.shape)

    return FrameStream(stream.num_frames * multiple, pairs())


@dataclass(frozen=True)
class _Pixels:
    """Frames on their way to the CPU as uint8. position: of the first one in the clip. copy: of the pixels, and of
    whether any of the frames is not a number; of pixels alone where they were made as such."""

    position: int
    copy: CopyToHost

    @classmethod
    def of(cls, frames: torch.Tensor, position: int) -> _Pixels:
        """Begin with frames in [0, 1], or with pixels, which stay as they are."""
        if frames.dtype == torch.uint8:
            return cls(position, CopyToHost((frames,)))
        # Before they are copied: torch would copy float32 and convert it on the CPU.
        pixels = (frames * 255).round_().clamp_(0, 255).to(torch.uint8)
        return cls(position, begin_copy_to_host(pixels, frames.isnan().any()))

    def finish(self) -> torch.Tensor:
        """Return the pixels. Raises DiffusionRuntimeError for frames that are not numbers."""
        if self.copy.wait is not None:
            self.copy.wait()
        pixels, *is_damaged = self.copy.values
        if any(map(bool, is_damaged)):
            raise DiffusionRuntimeError(
                f"the decoded frames from {self.position} on are not numbers (NaN): the decoder overflowed, or its "
                "weights are damaged. Use dtype bfloat16 or float32, or copy the model again"
            )
        return pixels


def to_pixels(frames: torch.Tensor, position: int) -> torch.Tensor:
    """Convert frames in [0, 1] to uint8 on the CPU; pixels stay as they are. position: of the first one in the clip.
    Raises DiffusionRuntimeError for frames that are not numbers."""
    return _Pixels.of(frames, position).finish()
