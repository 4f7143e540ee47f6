"""The time that a model's attention layers take, by hooks that are there while a generation is timed.

A call counts from its inputs (q, k, v, projected, normalised and rotated) to its output: what a sparse method plans,
the exchange between processes, the kernel. Projections do not count. On a CPU it is the processor's clock; on a device
its own, by events in the stream, which do not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from diffusion_runtime.models.interface import DiffusionTransformer


class AttentionClock:
    """Times of the calls of one device, added up by `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []
        self._depth = 0
        self._start: Any = None

    @property
    def num_calls(self) -> int:
        """The calls that ended."""
        return len(self._marks)

    def seconds(self) -> float:
        """Return the seconds of all calls that ended. Waits for the device."""
        if self._device.type == "cpu":
            return float(sum(stop - start for start, stop in self._marks))
        torch.accelerator.synchronize(self._device)
        return float(sum(start.elapsed_time(stop) for start, stop in self._marks)) / 1000

    def begin(self) -> None:
        """Begin a call; one inside another counts once, with the outer one."""
        if self._depth == 0:
            self._start = self._now()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._marks.append((self._start, self._now()))

    def abandon(self) -> None:
        """Forget calls that an exception left open."""
        self._depth = 0

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        # In the current stream.
        event.record()
        return event


@contextmanager
def timed_layers(transformer: DiffusionTransformer, device: torch.device) -> Iterator[AttentionClock]:
    """Context manager: time the calls of the transformer's attention layers."""
    clock = AttentionClock(device)
    with ExitStack() as stack:
        stack.callback(clock.abandon)
        for layer in transformer.attention_layers():
            _hook(stack, layer, clock.begin, clock.end)
        yield clock


def _hook(stack: ExitStack, module: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
    def before(*_: object) -> None:
        # torch.compile traces hooks; the operator that stands for attention in its graph calls them when it runs.
        if not torch.compiler.is_compiling():
            begin()

    def after(*_: object) -> None:
        if not torch.compiler.is_compiling():
            end()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after).remove)
