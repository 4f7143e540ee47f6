"""The file of a stream that a failure ended: what of it can be played, for the error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from diffusion_runtime.parallel.failure import RankFailure


def kept_frames(num_frames: int, path: Path) -> str:
    """Return a phrase for the number of frames that a file kept."""
    return f"the {num_frames} frames made so far are in {path}" if num_frames else f"no frame of {path} can be played"


def with_kept_frames(failure: RankFailure, path: Path) -> RankFailure:
    """Return the failure with what a player finds in the file, unless its message speaks of the file."""
    from diffusion_runtime.media.ffmpeg import num_frames_in

    # Of another machine, where rank 0 is.
    if str(path) in failure.message or not path.is_file():
        return failure
    first, *rest = failure.message.split("\n")
    # Before the last output of a process.
    message = "\n".join([f"{first.removesuffix(':')}; {kept_frames(num_frames_in(path), path)}", *rest])
    return dataclasses.replace(failure, message=message)
