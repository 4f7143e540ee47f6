"""Peak memory of a computation, counted: the bytes of all tensors that are alive at once, on any device.

On the meta device nothing is computed and nothing allocated, so that a model of any size is measured in a second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from diffusion_runtime.memory.meta_operators import run_on_meta


class LiveBytes(TorchDispatchMode):
    """Inside the block, counts the storages that operators make on one device. live: bytes alive now; peak: the most at
    once. copies_layout: whether convolutions of 16-bit numbers hold input, weight and output once more, as cuDNN does:
    its kernels for tensor cores read channels last, and turn what lies otherwise in their workspace.

    What a kernel needs within itself besides is not seen, nor what an allocator rounds up.
    """

    def __init__(self, device: torch.device, *, copies_layout: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._copies_layout = copies_layout
        self.live: int = 0
        self.peak: int = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler at the first operator, 1.4 of the 5.3 s of `explain`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # What is passed in and was made outside is no part of the count.
        for given in (each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)):
            self._known.add(given.untyped_storage())
        result = run_on_meta(func, args, kwargs)
        for made in (each for each in tree_iter(result) if isinstance(each, torch.Tensor)):
            if made.device.type != self._device.type:
                continue
            self._count(made.untyped_storage())
        if self._copies_layout and func is torch.ops.aten.convolution.default:
            self.peak = max(self.peak, self.live + _turned_bytes(args[0], args[1], result))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        num_bytes = storage.nbytes()
        self._known.add(storage)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.live -= num_bytes


def _turned_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of channels-last copies of 16-bit tensors; 0 for other sizes, and for those that are so."""
    if tensors[0].itemsize != 2 or tensors[0].stride(1) == 1:
        return 0
    return sum(tensor.nbytes for tensor in tensors)


class AttentionInOnePass(TorchFunctionMode):
    """Attention as a kernel computes it: an output like the queries, and no matrix of scores."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **({} if kwargs is None else kwargs))


def kept_bytes(compute: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that the result of `compute` keeps alive on a device."""
    with torch.no_grad(), AttentionInOnePass(), LiveBytes(device) as live:
        result = compute()
        kept = int(live.live)
        del result
    return kept


def peak_bytes(compute: Callable[[], object], device: torch.device, *, copies_layout: bool = False) -> int:
    """Return the most bytes that `compute` has alive on a device at once, its result included, without what existed
    before. Attention counts its output alone. copies_layout: as in LiveBytes."""
    with torch.no_grad(), AttentionInOnePass(), LiveBytes(device, copies_layout=copies_layout) as live:
        result = compute()
        del result
    return int(live.peak)
