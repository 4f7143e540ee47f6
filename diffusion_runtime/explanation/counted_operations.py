"""CountedOperations: the floating-point operations of the products that run within a block."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusion_runtime.memory.meta_operators import MetaOperators, run_on_meta


def _product(left: Any, right: Any) -> int:
    """Count the operations of [.., m, k] times [.., k, n]."""
    return 2 * int(left.numel()) * int(right.shape[-1])


def _convolution(args: Sequence[Any], out: Any) -> int:
    """Count the operations of a convolution: every output number (input number, if transposed) meets one filter, its
    weights after the first axis."""
    inputs, weight, is_transposed = args[0], args[1], bool(args[6])
    return 2 * int((inputs if is_transposed else out).numel()) * int(weight[0].numel())


# By operator, from its arguments and its result.
_COUNTS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    torch.ops.aten.mm: lambda args, _: _product(args[0], args[1]),
    torch.ops.aten.bmm: lambda args, _: _product(args[0], args[1]),
    torch.ops.aten._scaled_mm: lambda args, _: _product(args[0], args[1]),
    torch.ops.aten.addmm: lambda args, _: _product(args[1], args[2]),
    torch.ops.aten.addmm_: lambda args, _: _product(args[1], args[2]),
    torch.ops.aten.baddbmm: lambda args, _: _product(args[1], args[2]),
    torch.ops.aten._addmm_activation: lambda args, _: _product(args[1], args[2]),
    torch.ops.aten.convolution: _convolution,
}
# oneDNN's linear layer, [.., in] and [out, in], where torch is built with it.
with contextlib.suppress(AttributeError):
    _COUNTS[torch.ops.mkldnn._linear_pointwise] = lambda args, _: 2 * int(args[0].numel()) * int(args[1].shape[0])


class CountedOperations(MetaOperators):  # type: ignore[no-untyped-call]
    """counts: by the operator's name (`mm`, `convolution`), a multiplication and an addition as two. torch's
    FlopCounterMode counts the same and imports torch's compiler and Triton, a tenth of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        result = run_on_meta(func, args, kwargs)
        packet = func.overloadpacket
        if packet in _COUNTS:
            self.counts[packet.__name__] += _COUNTS[packet](args, result)
        return result
