"""Transfers of weights to a device: on their own stream in parallel with kernels (CUDA), or in turn with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

# (target on the device, source in the machine's memory), bytes or numbers.
Copies: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]

# Its functions have no annotations.
_cuda: Any = torch.cuda


@dataclass(frozen=True)
class CopyToHost:
    """Tensors on their way to the machine's memory. values: those in it. wait: returns when they are written; None
    where they are already."""

    values: tuple[torch.Tensor, ...]
    wait: Callable[[], object] | None = None


def pinned_if_possible(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor in pinned memory; in other memory where the system gives no more of it. Copies are slower
    then, and the same."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def begin_copy_to_host(*tensors: torch.Tensor) -> CopyToHost:
    """Begin a copy behind everything computed so far. On a CUDA device it runs while more is computed, into pinned
    memory where the system gives it; elsewhere it is over when this returns."""
    if any(tensor.device.type != "cuda" for tensor in tensors):
        return CopyToHost(tuple(tensor.cpu() for tensor in tensors))
    values = tuple(
        pinned_if_possible(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True) for tensor in tensors
    )
    event = _cuda.Event()
    event.record(_cuda.current_stream(tensors[0].device))
    return CopyToHost(values, event.synchronize)


class Transfers:
    """Copies that are finished when the call returns: of a device without a second stream, and of a CPU in tests.

    Events are what `mark` and `copy` return; they belong to the one who made them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device, for the stream that computes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        """Return an event behind everything computed so far."""
        return None

    def copy(self, copies: Copies, after: Any) -> Any:
        """Begin copies behind the event `after`; the event behind them."""
        del after
        for target, source in copies:
            target.copy_(source)
        return None

    def wait(self, copied: Any) -> None:
        """Make later computations wait for the event."""

    def finish(self, copied: Any) -> None:
        """Return when the copies before the event are done, and their sources may be written again."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Bytes in the machine's memory to copy from, pinned where the system allows it."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Return when everything so far is done."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin memory of the process; why it was refused, None where it was not."""
        del address, num_bytes
        return f"{self.device.type} has no pinned memory here"

    def unregister(self, address: int) -> None:
        """Undo `register`."""


class CudaTransfers(Transfers):
    """On a copy stream. Events order it with the computing stream, so that no memory is given to the allocator's
    bookkeeping of streams (record_stream), which would hold it back for an unknown time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = _cuda.Stream(device)

    def mark(self) -> Any:
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        return event

    def copy(self, copies: Copies, after: Any) -> Any:
        with _cuda.stream(self._stream):
            self._stream.wait_event(after)
            for target, source in copies:
                # Converted on the device: in one step torch would convert on the CPU, and copy from unpinned memory.
                there = source if source.dtype == target.dtype else source.to(self.device, non_blocking=True)
                target.copy_(there, non_blocking=True)
            copied = _cuda.Event()
            copied.record(self._stream)
        return copied

    def wait(self, copied: Any) -> None:
        _cuda.current_stream(self.device).wait_event(copied)

    def finish(self, copied: Any) -> None:
        copied.synchronize()

    def staging(self, num_bytes: int) -> torch.Tensor:
        return pinned_if_possible((num_bytes,), torch.uint8)

    def synchronize(self) -> None:
        _cuda.current_stream(self.device).synchronize()

    def register(self, address: int, num_bytes: int) -> str | None:
        with _cuda.device(self.device):
            status = int(_cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            if status == 0:
                return None
            # The failure is also kept as the last error, and the next launch would raise it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return f"cudaHostRegister of {num_bytes} bytes failed with error {status}"

    def unregister(self, address: int) -> None:
        # No copy may still read it; a device that failed has no copies any more.
        with contextlib.suppress(RuntimeError):
            _cuda.synchronize(self.device)
        _cuda.cudart().cudaHostUnregister(address)


def transfers_of(device: torch.device) -> Transfers:
    """Return the transfers of weights to a device."""
    return CudaTransfers(device) if device.type == "cuda" else Transfers(device)
