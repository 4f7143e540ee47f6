"""Spatial parallel: row-sharded execution of a third-party VAE with halo exchange; the result equals that of the whole
image.

Every operation with a receptive field gets the rows it needs: padded convolutions the halo rows of the neighbouring
bands, attention the keys and values of all bands. Everything else is per pixel. Each pixel is computed from the same
numbers as without sharding, so there are no seams to blend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.halo import gather_bands, with_neighbour_rows


class SpatialParallel(TorchFunctionMode):
    """While this is entered, `pad`, `conv2d` and attention include the rows beyond the edges of this process's band.

    For networks whose rows are the last dimension but one, whose convolutions have stride 1 and zero padding and whose
    attention is over all pixels of a frame, row by row. group: the processes, by band, from the top.
    """

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.pad and args[0].dim() == 5 and len(args[1]) >= 4 and tuple(args[1][2:4]) != (0, 0):
            return self._pad(args[0], list(args[1]))
        if func is torch.conv2d and _padding_of_rows(args) > 0:
            return self._convolve(args)
        if func is F.scaled_dot_product_attention:
            q, k, v = args
            return func(q, gather_bands(k, 2, self._group), gather_bands(v, 2, self._group), **kwargs)
        return func(*args, **kwargs)

    def _pad(self, x: torch.Tensor, padding: list[int]) -> torch.Tensor:
        """F.pad with zeros: in the order of `padding`, columns, rows, frames."""
        above, below = padding[2:4]
        assert above == below, padding
        padded: torch.Tensor = F.pad(with_neighbour_rows(x, above, self._group), [*padding[:2], 0, 0, *padding[4:]])
        return padded

    def _convolve(self, args: tuple[Any, ...]) -> torch.Tensor:
        x, weight, bias, stride, padding, *rest = args
        rows, columns = padding
        assert tuple(stride) == (1, 1), stride
        out: torch.Tensor = torch.conv2d(
            with_neighbour_rows(x, rows, self._group), weight, bias, stride, (0, columns), *rest
        )
        return out


def _padding_of_rows(args: tuple[Any, ...]) -> int:
    """Return the row padding (rows, columns) of nn.Conv2d's arguments for conv2d, of which it is the fifth."""
    return int(args[4][0]) if len(args) > 4 and not isinstance(args[4], str) else 0
