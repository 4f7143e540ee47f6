"""Parallel reads of weight files: chunks by several threads, straight into place, or through pinned memory to a GPU.

A file that is read and not mapped costs no page faults, its pages do not count as memory of the process, and what is
cut off while it is read is an error instead of a signal that ends the process (SIGBUS). Several processes of a machine
share what the system keeps of a file, so that a disk is read once.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.memory.transfers import Transfers, transfers_of

# A multiple of every dtype's size. A disk in a network takes about a millisecond to answer: several chunks hide that.
CHUNK_BYTES = 8 * 2**20
# Copying out of the system's cache, one thread has 5 to 10 GB/s; more than eight have no more on the disks measured.
MAX_THREADS = 8
# The sizes that are read at once by the caller: handing it to a thread costs as much.
_INLINE_BYTES = 2**20

# Waits until what was begun is in place.
Finish: TypeAlias = Callable[[], None]
# A pinned buffer, None for one that was not needed yet, and the event behind the last copy out of it.
_Buffer: TypeAlias = tuple[torch.Tensor | None, Any]


class _Count:
    """A count of bytes that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, number: int) -> None:
        with self._lock:
            self.total += number


_READ = _Count()


def num_bytes_read() -> int:
    """Bytes of weight files that this process has read so far, pages of mapped files not counted."""
    return _READ.total


@dataclass(frozen=True)
class StoredBytes:
    """Numbers of a file as they are stored there: num_bytes from offset on. descriptor: of the open file."""

    path: Path
    descriptor: int
    offset: int
    num_bytes: int
    dtype: torch.dtype

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill `target`, uint8 on the CPU, from byte `start` on. Raises ModelLoadError."""
        numbers: Any = target.numpy()
        view, place = memoryview(numbers), self.offset + start
        try:
            # All of it is on its way at once; by itself the system asks for 128 KiB after 128 KiB.
            self.expect(start, len(view))
            while view:
                count = os.preadv(self.descriptor, [view], place)
                if count == 0:
                    raise ModelLoadError(f"{self.path} was cut off while it was read; copy or download it again")
                view, place = view[count:], place + count
                _READ.add(count)
        except OSError as error:
            raise ModelLoadError(
                f"{self.path} cannot be read any more: {error.strerror or error}; is its disk or share still there?"
            ) from error

    def expect(self, start: int = 0, num_bytes: int | None = None) -> None:
        """Tell the system that bytes are read next. Raises OSError."""
        if hasattr(os, "posix_fadvise"):
            length = self.num_bytes if num_bytes is None else num_bytes
            os.posix_fadvise(self.descriptor, self.offset + start, length, os.POSIX_FADV_WILLNEED)


class ParallelReads:
    """Reads that run in the background of their caller. Close it: it has threads, and pinned memory for a GPU.

    transfers: how chunks come to any target, None for the way of its device.
    """

    def __init__(self, transfers: Transfers | None = None) -> None:
        self._transfers = transfers
        self._always_transfers = transfers is not None
        self._pool: ThreadPoolExecutor | None = None
        self._buffers: queue.SimpleQueue[_Buffer] | None = None

    def can_fill(self, target: torch.Tensor) -> bool:
        """Return whether `into` takes this target: contiguous, on the CPU or a CUDA device."""
        return target.is_contiguous() and (target.device.type in ("cpu", "cuda") or self._always_transfers)

    def into(self, stored: StoredBytes, target: torch.Tensor) -> Finish:
        """Begin to fill a tensor of as many numbers, converted to its dtype. Do not touch it before the result is
        called, which raises what StoredBytes.read raises."""
        flat, itemsize = target.view(-1), stored.dtype.itemsize
        assert flat.numel() * itemsize == stored.num_bytes, "the target has another number of numbers"
        on_device = target.device.type != "cpu" or self._always_transfers
        if stored.num_bytes <= _INLINE_BYTES:
            _read_here(stored, 0, flat)
            return lambda: None
        transfers, after = None, None
        if on_device:
            transfers = self._transfers_to(target.device)
            after = transfers.mark()
        chunks: list[Future[Any]] = []
        pool = self._threads()
        for start in range(0, stored.num_bytes, CHUNK_BYTES):
            part = flat[start // itemsize : (start + CHUNK_BYTES) // itemsize]
            job = (
                functools.partial(_read_here, stored, start, part)
                if transfers is None
                else functools.partial(self._read_to_device, transfers, after, stored, start, part)
            )
            chunks.append(pool.submit(job))

        def finish() -> None:
            for chunk in chunks:
                copied = chunk.result()
                if transfers is not None:
                    transfers.wait(copied)

        return finish

    def close(self) -> None:
        """Wait for the chunks that are being read, and drop the others."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        while self._buffers is not None and not self._buffers.empty():
            _, copied = self._buffers.get()
            if copied is not None and self._transfers is not None:
                self._transfers.finish(copied)
        self._buffers = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="read-weights")
        return self._pool

    def _transfers_to(self, device: torch.device) -> Transfers:
        if self._transfers is None:
            self._transfers = transfers_of(device)
        if self._buffers is None:
            self._buffers = queue.SimpleQueue()
            # Two for each thread: one is copied while the other is filled.
            for _ in range(2 * MAX_THREADS):
                self._buffers.put((None, None))
        return self._transfers

    def _read_to_device(
        self, transfers: Transfers, after: Any, stored: StoredBytes, start: int, part: torch.Tensor
    ) -> Any:
        """The event behind the copy of a chunk."""
        assert self._buffers is not None
        buffer, copied = self._buffers.get()
        try:
            if copied is not None:
                transfers.finish(copied)
                copied = None
            if buffer is None:
                buffer = transfers.staging(CHUNK_BYTES)
            num_bytes = part.numel() * stored.dtype.itemsize
            stored.read(start, buffer[:num_bytes])
            copied = transfers.copy([(part, buffer[:num_bytes].view(stored.dtype))], after)
        finally:
            self._buffers.put((buffer, copied))
        return copied


def _read_here(stored: StoredBytes, start: int, part: torch.Tensor) -> None:
    """Fill a part of a target on any device, on the CPU without a copy."""
    if not part.numel():
        return
    if stored.dtype == part.dtype and part.device.type == "cpu":
        stored.read(start, part.view(torch.uint8))
        return
    numbers = torch.empty(part.numel(), dtype=stored.dtype)
    stored.read(start, numbers.view(torch.uint8))
    with torch.no_grad():
        part.copy_(numbers)
