"""Residuals of a stack of blocks: what the blocks between two places add to the streams."""

from __future__ import annotations

import torch

from diffusion_runtime.core.block_stack import Streams


def entered(streams: Streams) -> Streams:
    """Return a copy of the streams, which blocks overwrite."""
    return tuple(stream.clone() for stream in streams)


def minus(streams: Streams, entering: Streams) -> Streams:
    """entering: as many streams, or those that were joined since."""
    if len(entering) > len(streams):
        entering = (torch.cat(entering, dim=1),)
    return tuple(a - b for a, b in zip(streams, entering, strict=True))


def plus(streams: Streams, residual: Streams) -> Streams:
    """Return the streams with a residual of `minus`, joined where its blocks joined them."""
    if len(streams) > len(residual):
        streams = (torch.cat(streams, dim=1),)
    return tuple(a + b for a, b in zip(streams, residual, strict=True))
