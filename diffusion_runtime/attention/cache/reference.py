"""Reference frames: a clip whose keys and values are computed once, and attended to frame by frame."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceFrames:
    """A forward pass with a reference clip. Its keys and values are in the cache of the request, of the heads that a
    process computes.

    is_written: the pass is that of the reference, which leaves them there and attends to itself alone; False for a pass
    that reads them. num_before: frames of a reading pass's grid before the one that attends to the reference's first.
    """

    is_written: bool
    num_before: int = 0
