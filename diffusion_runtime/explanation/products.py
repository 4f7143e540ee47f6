"""Products: which operators of a forward pass count as linear layers and convolutions, and how many operations of it
torch leaves uncounted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

# What torch counts and is no attention, which is counted apart, whatever computes it.
PRODUCTS = (
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm", "convolution", "_addmm_activation", "_linear_pointwise"
)  # fmt: skip

# Operations of a call, given the shapes of its tensors.
Formula = Callable[..., int]


def own_formulas() -> Mapping[Any, Formula]:
    """Return formulas by operator for the products in our layers that torch has none for: sums in place, a GELU in the
    epilogue, and oneDNN's products if torch is built with them."""
    formulas: dict[Any, Formula] = dict.fromkeys(
        (torch.ops.aten.addmm_, torch.ops.aten._addmm_activation), _addmm_operations
    )
    with contextlib.suppress(AttributeError):
        formulas[torch.ops.mkldnn._linear_pointwise] = _linear_operations
    return formulas


def _addmm_operations(_: object, left: torch.Size, right: torch.Size, *__: object, **___: object) -> int:
    return 2 * math.prod(left) * right[1]


def _linear_operations(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(x) * weight[0]
