"""Frames and sound of one clip: decoded chunk after chunk, and handed over to be written meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.media import Audio, ClipHeader
from diffusion_runtime.media.audio import read_sound
from diffusion_runtime.media.file_writer import FrameSink
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.rules.batch_settings import BatchSettings

# Samples per second of a sound that comes from a file.
_FILE_SOUND_RATE = 48000


def decode_clip(
    decoder: LatentDecoder,
    latents: torch.Tensor,
    settings: BatchSettings,
    recipe: Mapping[str, Any],
    open_sink: Callable[[ClipHeader], FrameSink] | None,
    recorder: AttentionRecorder,
) -> tuple[torch.Tensor, Audio | None]:
    """Decode one sample. Return its frames, uint8 on the CPU, [frames, height, width, 3], and its sound.

    latents: clean, [1, *sample_shape]. open_sink: as of decode_frames. Raises DiffusionRuntimeError for frames that are
    not numbers.
    """
    geometry = settings.sampling.geometry
    parts = geometry.parts(latents, settings.size)
    # A file of a clip with sound begins with the sound, which is not there yet.
    sink = open_sink if parts.audio is None else None
    stream = without_first(decoder.stream(parts.video), geometry.num_frames_before)
    frames = decode_frames(stream, settings.size.fps, recipe, sink)
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


def decode_frames(
    stream: FrameStream,
    fps: int,
    recipe: Mapping[str, Any],
    open_sink: Callable[[ClipHeader], FrameSink] | None = None,
) -> torch.Tensor:
    """Decode the frames of one sample, uint8 on the CPU, [frames, height, width, 3].

    fps, recipe: for the header. open_sink: returns what takes each chunk as soon as it is decoded, or None.
    Raises DiffusionRuntimeError for frames that are not numbers, which would be black.
    """
    frames, position, take = torch.empty(0), 0, None
    for chunk in stream.chunks:
        pixels = to_pixels(chunk[0], position)
        if position == 0:
            is_whole = len(pixels) == stream.num_frames
            frames = pixels if is_whole else pixels.new_empty(stream.num_frames, *pixels.shape[1:])
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


def to_pixels(frames: torch.Tensor, position: int) -> torch.Tensor:
    """Convert frames in [0, 1] to uint8 on the CPU. position: of the first one in the clip. Raises
    DiffusionRuntimeError for frames that are not numbers."""
    if bool(frames.isnan().any()):
        raise DiffusionRuntimeError(
            f"the decoded frames from {position} on are not numbers (NaN): the decoder overflowed, or its weights are "
            "damaged. Use dtype bfloat16 or float32, or copy the model again"
        )
    # In two steps: in one, torch copies float32 and converts it on the CPU.
    return (frames * 255).round_().clamp_(0, 255).to(torch.uint8).cpu()
