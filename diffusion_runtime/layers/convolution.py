"""oneDNN fast paths for third-party conv3d and channel norms on a CPU, equal to float32 rounding.

For small inputs (channels x frames x height below 20481, one sample) torch uses its native conv3d, which copies every
window out first (im2col); oneDNN needs a third to a tenth of the time. torch's vector norm over the channels reads
memory with a stride, at 30 times the time of a product and a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class OneDnnConvolutions(TorchFunctionMode):
    """While this is entered, calls of conv3d and of normalize over channels take the faster path where there is one.

    For float32 on a CPU, without gradients; every other call is left as it is.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv3d and not kwargs and _is_quicker(args[0]) and _HAS_ONEDNN:
            return _convolve(*args)
        if func is F.normalize and kwargs == _OVER_CHANNELS and len(args) == 1 and _is_quicker(args[0]):
            return _normalize_channels(args[0])
        return func(*args, **(kwargs or {}))


# How torch dispatches F.normalize(x, dim=1): with every default written out.
_OVER_CHANNELS: Mapping[str, Any] = {"p": 2.0, "dim": 1, "eps": 1e-12, "out": None}

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _is_quicker(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 5 and not torch.is_grad_enabled()


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] | str = (0, 0, 0),
    dilation: tuple[int, ...] = (1, 1, 1),
    groups: int = 1,
) -> torch.Tensor:
    """torch.conv3d with its arguments in their order, as nn.Conv3d gives them."""
    if isinstance(padding, str):
        return torch.conv3d(x, weight, bias, stride, padding, dilation, groups)
    out: torch.Tensor = torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
    return out


def _normalize_channels(x: torch.Tensor) -> torch.Tensor:
    """x / max(length of x over dimension 1, 1e-12), as F.normalize(x, dim=1)."""
    length: torch.Tensor = torch.linalg.vecdot(x, x, dim=1).sqrt_().clamp_min_(1e-12)
    return x / length[:, None]
