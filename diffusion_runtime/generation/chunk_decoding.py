"""Decoding in parallel with denoising: the latents of a chunk become frames on a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy
import torch

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DecodedChunk:
    """frames: uint8 RGB [frames, height, width, 3]; seconds: that they took."""

    frames: numpy.ndarray
    seconds: float


class DecodingThread:
    """Decodes one chunk after the other, in the order in which they come, on one thread and on CUDA on one stream, to
    which what the decoder's convolutions keep belongs. guard: around every call."""

    def __init__(self, device: torch.device, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._guard = guard
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(
        self, decode: Callable[[torch.Tensor, int], numpy.ndarray], latents: torch.Tensor, first_frame: int
    ) -> Future[DecodedChunk]:
        """Begin with the latents as they are once the work that is queued on the current stream is done. decode: from
        latents to frames on the CPU. What decoding raises, the future raises."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(latents.device))
        return self._executor.submit(self._run, decode, latents, first_frame, ready)

    def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the decoding thread after the chunks submitted so far: it may read convolution state."""
        return self._executor.submit(self._guarded, function).result()

    def close(self) -> None:
        """Wait for the chunk that is being decoded; one that waits is dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _guarded(self, function: Callable[[], T]) -> T:
        with self._guard(), torch.cuda.stream(self._stream):
            return function()

    def _run(
        self,
        decode: Callable[[torch.Tensor, int], numpy.ndarray],
        latents: torch.Tensor,
        first_frame: int,
        ready: torch.cuda.Event | None,
    ) -> DecodedChunk:
        started = time.perf_counter()
        with self._guard(), torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
                # Their memory is the other stream's, which may not take it again before.
                latents.record_stream(self._stream)
            frames = decode(latents, first_frame)
        return DecodedChunk(frames, time.perf_counter() - started)
