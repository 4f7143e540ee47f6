"""Streams in the engine: a causal model's video and its forks, chunk after chunk, with prompts that come on the way."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.serving.engine_channel import Channel
from diffusion_runtime.serving.pictures import encoded

if TYPE_CHECKING:
    from diffusion_runtime.media import GeneratedMedia
    from diffusion_runtime.streaming.segment_stream import AnyStream
    from diffusion_runtime.streaming.stream_rate import StreamedFrames


class Streams:
    """The streams of one job and its forks, each of which is a job. publish: writes what a work has become; fail: tells
    why it came to nothing."""

    def __init__(
        self,
        channel: Channel,
        publish: Callable[[Mapping[str, Any], GeneratedMedia], None],
        fail: Callable[[Mapping[str, Any], Exception], None],
    ) -> None:
        self._channel = channel
        self._publish = publish
        self._fail = fail
        self._open: dict[str, tuple[Mapping[str, Any], AnyStream]] = {}

    def run(self, work: Mapping[str, Any], stream: AnyStream) -> None:
        """Make all chunks of a stream and of those that are forked from it, in turn, until none is left."""
        self._open[work["job"]] = (work, stream)
        try:
            while self._open:
                for job in tuple(self._open):
                    self._take_commands()
                    self._advance(job)
        finally:
            for _, left in self._open.values():
                left.close()
            while not self._channel.commands.empty():
                self._channel.commands.get()

    def _advance(self, job: str) -> None:
        """Make the next chunk of one stream, or its file behind the last one."""
        work, stream = self._open[job]
        if job in self._channel.cancelled:
            self._close(job)
            self._channel.send("cancelled", job=job)
            return
        try:
            chunk = next(stream, None)
            if chunk is None:
                self._publish(work, stream.media())
                self._close(job)
                return
        except Exception as error:
            self._close(job)
            self._fail(work, error)
            return
        self._send(job, stream, chunk)

    def _send(self, job: str, stream: AnyStream, chunk: StreamedFrames) -> None:
        frames = [base64.b64encode(encoded(frame, "JPEG")).decode() for frame in chunk.frames]
        values = {"first_frame": chunk.first_frame, "prompt": chunk.prompt, "fps": stream.fps}
        self._channel.send("frames", job=job, seconds=chunk.seconds, frames=frames, **values)
        whole = stream.num_frames_of_video or stream.num_frames
        self._channel.send("progress", jobs=[job], stage="stream", step=stream.num_frames, num_steps=whole)

    def _close(self, job: str) -> None:
        self._open.pop(job)[1].close()

    def _take_commands(self) -> None:
        while not self._channel.commands.empty():
            message = self._channel.commands.get()
            _, stream = self._open.get(message["job"], (None, None))
            if message["type"] == "prompt" and stream is not None:
                # One without words was refused when it was sent.
                with contextlib.suppress(DiffusionRuntimeError):
                    stream.prompt(message["prompt"])
            elif message["type"] == "fork":
                self._fork(message["work"], stream, message["prompt"], message["seed"])

    def _fork(self, work: Mapping[str, Any], stream: AnyStream | None, prompt: str | None, seed: int | None) -> None:
        try:
            if stream is None:
                raise DiffusionRuntimeError("fork: the stream is over")
            self._open[work["job"]] = (work, stream.fork(prompt, seed=seed))
        except DiffusionRuntimeError as error:
            self._fail(work, error)
