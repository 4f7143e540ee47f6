"""Frames of one clip: decoded chunk after chunk, and handed to whoever writes them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from diffusion_runtime.decoders.interface import FrameStream
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.media import ClipHeader
from diffusion_runtime.media.file_writer import OpenSink


def decode_frames(
    stream: FrameStream, request_index: int, fps: int, recipe: Mapping[str, Any], open_sink: OpenSink | None
) -> torch.Tensor:
    """The frames of one sample, uint8 on the CPU, [frames, height, width, 3].

    fps, recipe: for the header. open_sink: gets each chunk as soon as it is decoded; None for nobody. Raises
    DiffusionRuntimeError for frames that are not numbers, which would be black.
    """
    frames, position, take = torch.empty(0), 0, None
    for chunk in stream.chunks:
        pixels = to_pixels(chunk[0], position)
        if position == 0:
            is_whole = len(pixels) == stream.num_frames
            frames = pixels if is_whole else pixels.new_empty(stream.num_frames, *pixels.shape[1:])
            if open_sink is not None:
                height, width = pixels.shape[1:3]
                take = open_sink(request_index, ClipHeader(stream.num_frames, height, width, fps, recipe))
        # The part of all frames that a sink may keep; a single chunk is it already.
        part = frames[position : position + len(pixels)]
        if frames is not pixels:
            part.copy_(pixels)
        if take is not None:
            take(part.numpy())
        position += len(pixels)
    return frames


def without_first(stream: FrameStream, num_frames: int) -> FrameStream:
    """The frames of a stream behind the first num_frames, which are decoded all the same."""

    def chunks() -> Iterator[torch.Tensor]:
        left_out = 0
        for chunk in stream.chunks:
            skipped = min(num_frames - left_out, chunk.shape[1])
            left_out += skipped
            if skipped < chunk.shape[1]:
                yield chunk[:, skipped:]

    return FrameStream(stream.num_frames - num_frames, chunks()) if num_frames else stream


def to_pixels(frames: torch.Tensor, position: int) -> torch.Tensor:
    """Frames in [0, 1] as uint8 on the CPU. position: of the first one in the clip. Raises DiffusionRuntimeError for
    frames that are not numbers."""
    if bool(frames.isnan().any()):
        raise DiffusionRuntimeError(
            f"the decoded frames from {position} on are not numbers (NaN): the decoder overflowed, or its weights are "
            "damaged. Use dtype bfloat16 or float32, or copy the model again"
        )
    # In two steps: in one, torch copies float32 and converts it on the CPU.
    return (frames * 255).round_().clamp_(0, 255).to(torch.uint8).cpu()
