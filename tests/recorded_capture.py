"""A stand-in for CUDA graphs on the CPU: the operators of a run, recorded and executed again on the same tensors.

As a graph does, it repeats what was computed and nothing that Python decided: numbers are those of the capture, and a
tensor that was made elsewhere in the meantime is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class FixedTime:
    """A time that a test decides."""

    host_seconds: float
    device: float

    def device_seconds(self) -> float:
        return self.device


@dataclass
class RecordedCapture:
    """host_share: host time over device time of the passes that are timed. calls: what was asked of it, in order.
    failure: raised by the next capture."""

    host_share: float = 1.0
    calls: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def timed(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, FixedTime]:
        self.calls.append("timed")
        return run(), FixedTime(self.host_share * 0.01, 0.01)

    def warm_up(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.calls.append("warm up")
        return run().clone()

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.calls.append("capture")
        if self.failure is not None:
            raise self.failure
        with _Recording() as recording:
            result = run()

        def replay() -> torch.Tensor:
            self.calls.append("replay")
            recording.repeat()
            return result

        return replay

    def pool_bytes(self) -> int:
        return 1000


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._operators.append((function, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        pending: list[Any] = []
        for function, args, kwargs, result in self._operators:
            if function.namespace != "c10d":
                _wait_for(pending)
            again = function(*args, **kwargs)
            pending += [leaf for leaf in tree_leaves(again) if isinstance(leaf, torch.ScriptObject)]
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # A view, or what an operator wrote into, is where it was.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        _wait_for(pending)


def _wait_for(works: list[Any]) -> None:
    """For exchanges with other processes. Not one by one: a send waits for its receiver."""
    for work in works:
        torch.distributed.Work.unbox(work).wait()
    works.clear()
