"""--lora-path and --lora-scale, each given once a file, as values of RuntimeConfig.lora."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusion_runtime.errors import UsageError


def pair_loras(paths: Sequence[str], scales: Sequence[float]) -> list[dict[str, Any]] | None:
    """Each file with the scale that was given in its place, 1 without one; None when there is no file.

    Raises UsageError for more scales than files.
    """
    if len(scales) > len(paths):
        raise UsageError(
            f"--lora-scale is given {len(scales)} times for {len(paths)} --lora-path; give one a file, in their order"
        )
    padded = [*scales, *[1.0] * (len(paths) - len(scales))]
    return [{"path": path, "scale": scale} for path, scale in zip(paths, padded, strict=True)] or None
