"""Operators on the meta device whose shapes are computed here.

torch computes many of them by references in Python, for which it imports its compiler and sympy: 1.4 of the 5.3 s of
`explain` for a model of 14 B parameters. In a memory plan, which every start on a GPU makes, one operator is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def run_on_meta(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """`func(*args, **keywords)`, for a TorchDispatchMode."""
    made = _made(func, args, keywords)
    return func(*args, **keywords) if made is None else made


class MetaOperators(TorchDispatchMode):
    """Context manager: operators on the meta device run without torch's references."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler at the first operator, 1.4 of the 5.3 s of `explain`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run_on_meta(func, args, {} if kwargs is None else kwargs)


def _made(func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the result of an operator on the meta device, or None for operators unknown here."""
    if func in _RANGES:
        return _range(*args, **keywords)
    if func is _aten.addmm.out and keywords["out"].is_meta:
        return cast(torch.Tensor, keywords["out"])
    first = args[0][0] if func is _aten.cat.default else args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_meta:
        return None
    if func in _IN_PLACE:
        return first
    shape_of = _SHAPES.get(func)
    shape = None if shape_of is None else shape_of(*args)
    return None if shape is None else torch.empty(shape, dtype=first.dtype, device="meta")


def _concatenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> list[int] | None:
    first = tensors[0]
    if any(each.dtype != first.dtype or each.dim() != first.dim() for each in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return shape


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: torch.Tensor | None,
    strides: Sequence[int],
    paddings: Sequence[int],
    dilations: Sequence[int],
    is_transposed: bool,
    *_: object,
) -> list[int] | None:
    if is_transposed or x.dim() != weight.dim():
        return None
    axes = zip(x.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True)
    sizes = [(size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1 for size, taps, stride, pad, dilation in axes]
    return [x.shape[0], weight.shape[0], *sizes]


def _vector_norm(
    x: torch.Tensor, _order: float = 2.0, dims: Sequence[int] | None = None, keeps_dims: bool = False
) -> list[int] | None:
    if dims is None or not keeps_dims:
        return None
    reduced = {dim % x.dim() for dim in dims}
    return [1 if axis in reduced else size for axis, size in enumerate(x.shape)]


def _elementwise(x: torch.Tensor, *others: object) -> list[int] | None:
    """Return the broadcast shape of an operation on real numbers, or None."""
    tensors = [x, *(other for other in others if isinstance(other, torch.Tensor))]
    if not x.is_floating_point() or any(each.dtype != x.dtype for each in tensors):
        return None
    if any(isinstance(other, complex) for other in others):
        return None
    axes = itertools.zip_longest(*(reversed(each.shape) for each in tensors), fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in axes][::-1]


def _padded(x: torch.Tensor, pads: Sequence[int], *_: object) -> list[int]:
    shape = list(x.shape)
    for axis in range(len(pads) // 2):
        shape[-1 - axis] += pads[2 * axis] + pads[2 * axis + 1]
    return shape


def _linear(_: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> list[int]:
    return [rows.shape[0], weight.shape[1]]


def _range(
    *bounds: float, device: torch.device | None = None, dtype: torch.dtype | None = None, **_: object
) -> torch.Tensor | None:
    if device is None or device.type != "meta":
        return None
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    is_whole = all(isinstance(bound, int) for bound in bounds)
    dtype = dtype or (torch.int64 if is_whole else torch.get_default_dtype())
    return torch.empty(max(0, math.ceil((end - start) / step)), dtype=dtype, device=device)


_aten = torch.ops.aten
_SHAPES: Mapping[Any, Callable[..., list[int] | None]] = {
    _aten.cat.default: _concatenated,
    _aten.convolution.default: _convolved,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.constant_pad_nd.default: _padded,
    _aten.addmm.default: _linear,
    # A feed-forward layer in 16 bits: linear layer and GELU in one.
    _aten._addmm_activation.default: _linear,
    _aten.mm.default: lambda a, b: [a.shape[0], b.shape[1]],
    _aten.bmm.default: lambda a, b: [*a.shape[:2], b.shape[2]],
    _aten._safe_softmax.default: lambda x, *_: list(x.shape),
    **dict.fromkeys(
        [
            _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor,
            _aten.clamp.default, _aten.clamp_min.default, _aten.silu.default, _aten.gelu.default, _aten.exp.default,
            _aten.sin.default, _aten.cos.default, _aten.neg.default, _aten.empty_like.default,
        ],
        _elementwise,
    ),
}  # fmt: skip


_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_IN_PLACE = (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor, _aten.copy_.default)
