"""Host arena: weights in one piece of memory, pinned (page-locked) so that copies run in parallel with kernels."""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.memory.machine_memory import free_in_machine
from diffusion_runtime.memory.weight_unit import WeightUnit, aligned

# Pinned pages cannot be swapped: what the machine keeps besides.
_LEFT_FREE = 2 * 10**9

_logger = logging.getLogger("diffusion_runtime")


class HostArena:
    """Room for the tensors of one part. num_bytes: of all of them, each `aligned`.

    Anonymous memory of its own and not torch's: torch rounds pinned memory up to a power of two, and keeps it. Raises
    MemoryError where there is not as much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        try:
            self._map = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE))
        except OSError as error:
            raise MemoryError(f"{size_text(num_bytes)} of the machine's memory: {error.strerror}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Advice alone: pinning 4 KiB pages takes several times as long.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._unpin: weakref.finalize[[int], HostArena] | None = None

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor in the arena, after those before it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        begin, self._used = self._used, self._used + aligned(num_bytes)
        assert self._used <= self.num_bytes, "the arena was made for fewer tensors"
        return self.bytes[begin : begin + num_bytes].view(dtype).view(shape)

    def take_pages(self) -> None:
        """Write all pages once, by all cores, for a part that one thread fills: the system gives pages when they are
        first written, and one thread takes them at 1 GB a second."""
        self.bytes.zero_()

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Return the offset in bytes of a tensor made by `empty`."""
        return tensor.data_ptr() - self.bytes.data_ptr()

    def unit(self, tensors: Sequence[torch.Tensor]) -> WeightUnit:
        """Tensors made by `empty` that come to the device together."""
        return WeightUnit(self, tensors)

    def pin(self, register: Callable[[int, int], str | None], unregister: Callable[[int], object]) -> None:
        """Lock its pages, once they are written. register: of (address, bytes), why the system refused, None where it
        did not; unregister: undoes it, at the latest when the arena is gone or the process ends.

        Where pinning fails the arena stays as it is, with a line in the log: copies are slower then.
        """
        free = free_in_machine()
        refusal = None
        # The pages are there already: what is locked cannot be reclaimed for others.
        if free is not None and free < _LEFT_FREE:
            refusal = f"the machine has {size_text(free)} left"
        refusal = refusal or register(self.bytes.data_ptr(), self.num_bytes)
        if refusal is not None:
            _logger.warning(
                "offload: %s of weights are not pinned, and copies to the device take longer: %s",
                size_text(self.num_bytes),
                refusal,
            )
            return
        self._unpin = weakref.finalize(self, unregister, self.bytes.data_ptr())

    def close(self) -> None:
        """Unlock its pages. Its tensors stay readable."""
        if self._unpin is not None:
            self._unpin()
