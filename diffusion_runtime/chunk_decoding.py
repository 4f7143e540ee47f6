"""Decoding beside denoising: the latents of a chunk become frames on a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy
import torch


@dataclass(frozen=True, eq=False)
class DecodedChunk:
    """frames: uint8 RGB [frames, height, width, 3]; seconds: that they took."""

    frames: numpy.ndarray
    seconds: float


class DecodingThread:
    """Decodes one chunk after the other, in the order in which they come, on one thread and on CUDA on one stream.

    decode: latents to frames on the CPU; all calls are made on the thread, since what the decoder's convolutions keep
    belongs to its stream. guard: around every call.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor, int], numpy.ndarray],
        device: torch.device,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._decode = decode
        self._guard = guard
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, latents: torch.Tensor, first_frame: int) -> Future[DecodedChunk]:
        """Begin with the latents as they are once the work that is queued on the current stream is done. What decoding
        raises, the future raises."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(latents.device))
        return self._executor.submit(self._run, latents, first_frame, ready)

    def close(self) -> None:
        """Wait for the chunk that is being decoded; one that waits is dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, latents: torch.Tensor, first_frame: int, ready: torch.cuda.Event | None) -> DecodedChunk:
        started = time.perf_counter()
        with self._guard(), torch.cuda.stream(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
                # Their memory is the other stream's, which may not take it again before.
                latents.record_stream(self._stream)
            frames = self._decode(latents, first_frame)
        return DecodedChunk(frames, time.perf_counter() - started)
